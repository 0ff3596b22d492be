//! The kernels chosen for matrix products, as a value that is saved and sent.

use std::fmt;
use std::str::FromStr;

/// The number of 64-bit words that describe a kernel of cuBLASLt.
pub(crate) const WORDS: usize = 8;

/// The kernel chosen for one product.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Choice {
    /// The GPU's name.
    pub(crate) gpu: String,
    /// The version of cuBLASLt.
    pub(crate) cublaslt: usize,
    /// The product's extents, layouts and types.
    pub(crate) product: String,
    /// The kernel, in words that only the library reads.
    pub(crate) algo: [u64; WORDS],
    pub(crate) microseconds: f32,
}

impl Choice {
    /// Returns whether both are for the same product on the same GPU and library.
    pub(crate) fn is_for_the_same(&self, other: &Self) -> bool {
        (&*self.gpu, self.cublaslt, &*self.product) == (&*other.gpu, other.cublaslt, &*other.product)
    }
}

/// The kernels that [tuning](crate::GemmTuning) chose for matrix products on a GPU.
///
/// Kernels that compute the same product add in different orders, so a run that is to repeat another one bit by bit needs the
/// same choices. [`Device::tuned_products`](crate::Device::tuned_products) returns those of a device, and
/// [`Device::use_tuned_products`](crate::Device::use_tuned_products) takes them. A choice is only used for the GPU and the
/// version of cuBLASLt for which it was made.
///
/// It is text, with a line for each product:
///
/// ```
/// use fp8_kernels::{Device, TunedProducts};
/// let line = "NVIDIA H100\t130100\t64x64x64 nt e4m3 e4m3 bf16\t1 2 3 4 5 6 7 8\t9.5\n";
/// let tuned: TunedProducts = line.parse()?;
/// assert_eq!((tuned.len(), tuned.to_string()), (1, line.to_owned()));
/// assert_eq!(Device::cpu().use_tuned_products(&tuned)?, 0); // no choice is for this device
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TunedProducts(pub(crate) Vec<Choice>);

impl TunedProducts {
    /// Returns the number of products.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no choice.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for TunedProducts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Choice { gpu, cublaslt, product, algo, microseconds } in &self.0 {
            let gpu = gpu.replace(['\t', '\n', '\r'], " ");
            write!(f, "{gpu}\t{cublaslt}\t{product}\t")?;
            for (i, word) in algo.iter().enumerate() {
                write!(f, "{}{word:x}", if i == 0 { "" } else { " " })?;
            }
            writeln!(f, "\t{microseconds}")?;
        }
        Ok(())
    }
}

/// A line of a text that is not a choice of a kernel.
///
/// ```
/// let error = "NVIDIA H100\t130100".parse::<fp8_kernels::TunedProducts>().unwrap_err();
/// assert_eq!(error.line(), 1);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "tuned products, line {line}: expected GPU, version of cuBLASLt, product, {WORDS} hexadecimal words and microseconds, \
     separated by tabs"
)]
pub struct TunedProductsError {
    line: usize,
}

impl TunedProductsError {
    /// Returns the line's number, from 1.
    pub fn line(&self) -> usize {
        self.line
    }
}

impl FromStr for TunedProducts {
    type Err = TunedProductsError;

    /// Reads what [`to_string`](ToString::to_string) writes.
    ///
    /// # Errors
    /// A line of another form.
    fn from_str(text: &str) -> Result<Self, TunedProductsError> {
        let choices = text.lines().enumerate();
        let choice =
            |(index, line): (usize, &str)| choice(line).ok_or(TunedProductsError { line: index + 1 });
        choices.map(choice).collect::<Result<_, _>>().map(Self)
    }
}

fn choice(line: &str) -> Option<Choice> {
    let [gpu, cublaslt, product, words, microseconds] =
        line.split('\t').collect::<Vec<_>>().try_into().ok()?;
    let algo: Option<Vec<u64>> = words.split(' ').map(|word| u64::from_str_radix(word, 16).ok()).collect();
    Some(Choice {
        gpu: gpu.to_owned(),
        cublaslt: cublaslt.parse().ok()?,
        product: product.to_owned(),
        algo: algo?.try_into().ok()?,
        microseconds: microseconds.parse().ok().filter(|time: &f32| time.is_finite())?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(gpu: &str) -> Choice {
        let product = "16x16x32 nt E4M3 E4M3 bf16 fast".to_owned();
        Choice {
            gpu: gpu.to_owned(),
            cublaslt: 130_100,
            product,
            algo: [u64::MAX; WORDS],
            microseconds: 2.25,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let tuned = TunedProducts(vec![one("H100"), Choice { algo: [0; WORDS], ..one("H 200 · x") }]);
        assert_eq!(tuned.to_string().parse(), Ok(tuned));
        assert_eq!("".parse(), Ok(TunedProducts::default()));
        let odd = TunedProducts(vec![one("a\tb\nc")]);
        assert_eq!(odd.to_string().parse::<TunedProducts>().unwrap().0[0].gpu, "a b c");
    }

    #[test]
    fn other_lines_are_errors_with_their_number() {
        let good = TunedProducts(vec![one("H100")]).to_string();
        let wrong = [
            "",
            "H100",
            "H100\t1\tp\t1 2 3 4 5 6 7\t1",
            "H100\t1\tp\t1 2 3 4 5 6 7 8 9\t1",
            "H100\t1\tp\t1 2 3 4 5 6 7 x\t1",
            "H100\t-1\tp\t1 2 3 4 5 6 7 8\t1",
            "H100\t1\tp\t1 2 3 4 5 6 7 8\tNaN",
            "H100\t1\tp\t1 2 3 4 5 6 7 8\t1\t2",
        ];
        for line in wrong {
            let error = format!("{good}{line}\n").parse::<TunedProducts>().unwrap_err();
            assert_eq!(
                error.to_string(),
                "tuned products, line 2: expected GPU, version of cuBLASLt, product, 8 hexadecimal words and \
                 microseconds, separated by tabs",
                "{line}"
            );
        }
    }
}
