//! Matrix products by this library, as its Linears call them.

use std::hint::black_box;
use std::io::{Write as _, stdin, stdout};
use std::time::Instant;

use fp8_nn::fp8_kernels::{ScalePolicy, ScaleRule};
use fp8_nn::prelude::*;

use crate::contender::Contender;
use crate::result::Result;
use crate::size::{Pass, Product};

/// Answers each line, `CONTENDER LAYOUT M N K SECONDS`, with the seconds of the fastest of as many products as the given
/// seconds take, after one that does not count. A fastest call shows what a program can do on a machine whose host takes time away.
pub(crate) fn serve() -> Result {
    println!("ready fp8-nn {}", env!("CARGO_PKG_VERSION"));
    let mut last: Option<(String, Work)> = None;
    for line in stdin().lines() {
        let line = line?;
        let (key, least) = line.rsplit_once(' ').ok_or("expected CONTENDER LAYOUT M N K SECONDS")?;
        let least: f64 = least.parse()?;
        let mut work = match last.take() {
            Some((done, work)) if done == key => work,
            _ => Work::parse(key)?,
        };
        work.multiply()?;
        let (mut fastest, start) = (f64::INFINITY, Instant::now());
        while start.elapsed().as_secs_f64() < least || fastest.is_infinite() {
            let call = Instant::now();
            work.multiply()?;
            fastest = fastest.min(call.elapsed().as_secs_f64());
        }
        println!("{fastest:e}");
        stdout().flush()?;
        last = Some((key.to_owned(), work));
    }
    Ok(())
}

/// A product to compute again and again.
struct Work {
    product: Product,
    a: Operand,
    b: Operand,
    /// The sum that wgrad adds its product to.
    sum: Tensor,
}

impl Work {
    fn parse(key: &str) -> Result<Self> {
        let words: Vec<&str> = key.split(' ').collect();
        let &[contender, layout, m, n, k] = words.as_slice() else {
            return Err(format!("{key}: expected CONTENDER LAYOUT M N K").into());
        };
        let passes = [Pass::Fprop, Pass::Dgrad, Pass::Wgrad];
        let pass = passes.into_iter().find(|pass| pass.layout() == layout);
        let pass = pass.ok_or_else(|| format!("{key}: no such layout"))?;
        let product = Product { pass, m: m.parse()?, n: n.parse()?, k: k.parse()? };
        Self::new(contender.parse()?, product)
    }

    fn new(contender: Contender, product: Product) -> Result<Self> {
        let Product { pass, m, n, k } = product;
        let a_shape = if pass == Pass::Wgrad { [k, m] } else { [m, k] };
        let b_shape = if pass == Pass::Fprop { [n, k] } else { [k, n] };
        let (a, b) = (values(m * k, 37), values(n * k, 53));
        let cpu = Device::cpu();
        let (a, b) = (Tensor::from_vec(a, a_shape, &cpu)?, Tensor::from_vec(b, b_shape, &cpu)?);
        // Activations and weights are E4M3, gradients E5M2. Sums of wgrad are along the columns of both operands.
        let (encoding, fp8_max) =
            if pass == Pass::Fprop { (Encoding::E4M3, 448.0) } else { (Encoding::E5M2, 57344.0) };
        let operand = |x: &Tensor, encoding, fp8_max| {
            if contender != Contender::Fp8 {
                return Ok(Operand::High(x.clone()));
            }
            let rule = ScaleRule::Delayed { fp8_max, margin: 0, policy: ScalePolicy::Exact };
            let slot = Slot { scale: Scale::FromTensor(&rule), columnwise: true, ..Slot::off(encoding) };
            ops::quantize(x, &slot)
        };
        let (a, b) = (operand(&a, encoding, fp8_max)?, operand(&b, Encoding::E4M3, 448.0)?);
        let sum = if pass == Pass::Wgrad { [m, n] } else { [1, 1] };
        Ok(Self { product, a, b, sum: Tensor::zeros(sum, DType::F32, &cpu)? })
    }

    /// Computes the product. Wgrad of this library is added to `sum`, as in training.
    fn multiply(&mut self) -> Result {
        let Self { product, a, b, sum } = self;
        match product.pass {
            Pass::Fprop => drop(black_box(ops::fprop(a, b, None, DType::F32, ops::Accumulation::Fast)?)),
            Pass::Dgrad => drop(black_box(ops::dgrad(a, b, DType::F32, ops::Accumulation::Split)?)),
            Pass::Wgrad => ops::wgrad(a, b, sum, "sum", ops::Accumulation::Split)?,
        }
        Ok(())
    }
}

/// Numbers between −1 and 1.
fn values(len: usize, step: usize) -> Vec<f32> {
    (0..len).map(|i| (i * step % 101) as f32 / 50.5 - 1.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The product in f64, element by element.
    fn naive(Product { pass, m, n, k }: Product) -> Vec<f64> {
        let (a, b) = (values(m * k, 37), values(n * k, 53));
        let a_at = |i: usize, j: usize| if pass == Pass::Wgrad { a[j * m + i] } else { a[i * k + j] };
        let b_at = |i: usize, j: usize| if pass == Pass::Fprop { b[j * k + i] } else { b[i * n + j] };
        let element = |i, j| (0..k).map(|l| f64::from(a_at(i, l)) * f64::from(b_at(l, j))).sum();
        (0..m * n).map(|at| element(at / n, at % n)).collect()
    }

    #[test]
    fn contenders_compute_the_same_product_in_every_layout() {
        for pass in [Pass::Fprop, Pass::Dgrad, Pass::Wgrad] {
            let product = Product { pass, m: 10, n: 7, k: 33 };
            let expected = naive(product);
            // E4M3 rounds by 2⁻⁴ at most, E5M2 by 2⁻³, and the values are at most 1.
            for (contender, tolerance) in [(Contender::F32, 1e-5), (Contender::Fp8, 33.0 * 0.19)] {
                let mut work = Work::new(contender, product).unwrap();
                assert_eq!(work.a.is_fp8(), contender == Contender::Fp8);
                work.multiply().unwrap();
                let found = match pass {
                    Pass::Fprop => ops::fprop(&work.a, &work.b, None, DType::F32, ops::Accumulation::Fast)
                        .unwrap()
                        .to_f32_vec()
                        .unwrap(),
                    Pass::Dgrad => ops::dgrad(&work.a, &work.b, DType::F32, ops::Accumulation::Split)
                        .unwrap()
                        .to_f32_vec()
                        .unwrap(),
                    Pass::Wgrad => work.sum.to_f32_vec().unwrap(),
                };
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(&expected) {
                    assert!(
                        (f64::from(*found) - expected).abs() < tolerance,
                        "{contender} {pass:?}: {found} {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn work_is_read_from_a_line() {
        let work = Work::parse("fp8 tn 48 32 16").unwrap();
        assert_eq!(work.product, Product { pass: Pass::Wgrad, m: 48, n: 32, k: 16 });
        for wrong in ["fp8 tn 48 32", "fp8 tt 48 32 16", "fp8 tn 48 x 16", "fp9 tn 48 32 16"] {
            assert!(Work::parse(wrong).is_err(), "{wrong}");
        }
    }
}
