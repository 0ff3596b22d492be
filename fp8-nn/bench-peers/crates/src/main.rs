//! Matrix products by the crates faer and gemm.
//!
//! Each line on stdin is `CRATE LAYOUT M N K SECONDS`: the product of `a` and `b`, `nt` for `a[m, k] · b[n, k]ᵀ`, `nn` for
//! `a[m, k] · b[k, n]` and `tn` for `a[k, m]ᵀ · b[k, n]`, repeated for so many seconds. The answer is the seconds of the
//! fastest one. `RAYON_NUM_THREADS` sets the number of threads.

use std::error::Error;
use std::io::{Write, stdin, stdout};
use std::time::Instant;

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    println!("ready faer 0.24, gemm 0.19");
    for line in stdin().lines() {
        let line = line?;
        let mut words = line.split(' ');
        let mut word = || words.next().ok_or("expected `CRATE LAYOUT M N K SECONDS`");
        let multiply = match word()? {
            "faer" => by_faer,
            "gemm" => by_gemm,
            other => return Err(format!("expected faer or gemm, found {other}").into()),
        };
        let layout = word()?.to_owned();
        let product = Product { layout, m: word()?.parse()?, n: word()?.parse()?, k: word()?.parse()? };
        let least: f64 = word()?.parse()?;
        println!("{:e}", seconds(&product, multiply, least));
        stdout().flush()?;
    }
    Ok(())
}

struct Product {
    layout: String,
    m: usize,
    n: usize,
    k: usize,
}

/// The seconds of the fastest of as many products as `least` seconds take, after one that does not count.
fn seconds(product: &Product, multiply: fn(&Product, &[f32], &[f32], &mut [f32]), least: f64) -> f64 {
    let values = |len: usize| (0..len).map(|i| (i * 37 % 101) as f32 / 50.5 - 1.0).collect::<Vec<_>>();
    let &Product { m, n, k, .. } = product;
    let (a, b, mut out) = (values(m * k), values(n * k), vec![0.0f32; m * n]);
    multiply(product, &a, &b, &mut out);
    let (mut fastest, start) = (f64::INFINITY, Instant::now());
    while start.elapsed().as_secs_f64() < least || fastest.is_infinite() {
        let call = Instant::now();
        multiply(product, &a, &b, &mut out);
        fastest = fastest.min(call.elapsed().as_secs_f64());
    }
    fastest
}

fn by_faer(product: &Product, a: &[f32], b: &[f32], out: &mut [f32]) {
    let &Product { ref layout, m, n, k } = product;
    let a = if layout == "tn" {
        MatRef::from_row_major_slice(a, k, m).transpose()
    } else {
        MatRef::from_row_major_slice(a, m, k)
    };
    let b = if layout == "nt" {
        MatRef::from_row_major_slice(b, n, k).transpose()
    } else {
        MatRef::from_row_major_slice(b, k, n)
    };
    matmul(MatMut::from_row_major_slice_mut(out, m, n), Accum::Replace, a, b, 1.0, Par::rayon(0));
}

fn by_gemm(product: &Product, a: &[f32], b: &[f32], out: &mut [f32]) {
    let &Product { ref layout, m, n, k } = product;
    assert_eq!((a.len(), b.len(), out.len()), (m * k, n * k, m * n));
    // Strides of columns and rows.
    let (a_cs, a_rs) = if layout == "tn" { (m as isize, 1) } else { (1, k as isize) };
    let (b_cs, b_rs) = if layout == "nt" { (k as isize, 1) } else { (1, n as isize) };
    let (out, out_rs) = (out.as_mut_ptr(), n as isize);
    let (a, b, threads) = (a.as_ptr(), b.as_ptr(), gemm::Parallelism::Rayon(0));
    // SAFETY: the slices have as many elements as their matrices, as was just checked, and the strides are those of dense
    // matrices; `out` is borrowed uniquely.
    unsafe {
        gemm::gemm(
            m, n, k, out, 1, out_rs, false, a, a_cs, a_rs, b, b_cs, b_rs, 0.0, 1.0, false, false, false, threads,
        );
    }
}
