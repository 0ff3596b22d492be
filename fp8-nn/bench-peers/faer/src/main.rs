//! Matrix products by faer.
//!
//! Each line on stdin is `faer LAYOUT M N K SECONDS`: the product of `a` and `b`, `nt` for `a[m, k] · b[n, k]ᵀ`, `nn` for
//! `a[m, k] · b[k, n]` and `tn` for `a[k, m]ᵀ · b[k, n]`, repeated for so many seconds. The answer is the seconds of the
//! fastest one. `RAYON_NUM_THREADS` sets the number of threads.

use std::error::Error;
use std::io::{Write, stdin, stdout};
use std::time::Instant;

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    println!("ready faer 0.24");
    for line in stdin().lines() {
        let line = line?;
        let mut words = line.split(' ').skip(1);
        let mut word = || words.next().ok_or("expected `faer LAYOUT M N K SECONDS`");
        let layout = word()?.to_owned();
        let [m, n, k] = [word()?.parse()?, word()?.parse()?, word()?.parse()?];
        let least: f64 = word()?.parse()?;
        println!("{:e}", seconds(&layout, [m, n, k], least));
        stdout().flush()?;
    }
    Ok(())
}

/// The seconds of the fastest of as many products as `least` seconds take, after one that does not count.
fn seconds(layout: &str, [m, n, k]: [usize; 3], least: f64) -> f64 {
    let values = |len: usize| (0..len).map(|i| (i * 37 % 101) as f32 / 50.5 - 1.0).collect::<Vec<_>>();
    let (a, b, mut out) = (values(m * k), values(n * k), vec![0.0f32; m * n]);
    let a = if layout == "tn" {
        MatRef::from_row_major_slice(&a, k, m).transpose()
    } else {
        MatRef::from_row_major_slice(&a, m, k)
    };
    let b = if layout == "nt" {
        MatRef::from_row_major_slice(&b, n, k).transpose()
    } else {
        MatRef::from_row_major_slice(&b, k, n)
    };
    let mut product = || {
        let out = MatMut::from_row_major_slice_mut(&mut out, m, n);
        matmul(out, Accum::Replace, a, b, 1.0, Par::rayon(0));
    };
    product();
    let (mut fastest, start) = (f64::INFINITY, Instant::now());
    while start.elapsed().as_secs_f64() < least || fastest.is_infinite() {
        let call = Instant::now();
        product();
        fastest = fastest.min(call.elapsed().as_secs_f64());
    }
    fastest
}
