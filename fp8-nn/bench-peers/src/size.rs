//! Sizes of models, and the matrix products of a training step.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// Tokens are bytes.
pub(crate) const VOCABULARY: usize = 256;

/// The size of a GPT and its batches, written `layers/hidden/heads/seq/batch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) seq: usize,
    pub(crate) batch: usize,
}

/// The size that `fp8 train` has by default, and three larger ones.
pub(crate) const SIZES: [&str; 4] = ["4/128/4/64/12", "4/256/8/256/8", "6/512/8/256/4", "12/768/12/128/2"];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<usize>, _> = text.split('/').map(str::parse).collect();
        let numbers = numbers.ok().and_then(|numbers| <[usize; 5]>::try_from(numbers).ok());
        let Some([layers, hidden, heads, seq, batch]) = numbers else {
            return Err(format!("expected layers/hidden/heads/seq/batch, such as {}", SIZES[0]));
        };
        if [layers, hidden, heads, seq, batch].contains(&0) {
            return Err("every number must be at least 1".to_owned());
        }
        if !hidden.is_multiple_of(2 * heads) {
            return Err(format!("hidden {hidden} is not an even multiple of the {heads} heads"));
        }
        Ok(Self { layers, hidden, heads, seq, batch })
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layers, hidden, heads, seq, batch } = self;
        write!(f, "{layers}/{hidden}/{heads}/{seq}/{batch}")
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The three products of a Linear with input `x[tokens, in]` and weight `w[out, in]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pass {
    /// `y = x · wᵀ`.
    Fprop,
    /// `dx = dy · w`.
    Dgrad,
    /// `dw = dyᵀ · x`.
    Wgrad,
}

impl Pass {
    /// The layout of the operands: `nt` for `a[m, k] · b[n, k]ᵀ`, `nn` for `a[m, k] · b[k, n]`, `tn` for `a[k, m]ᵀ · b[k, n]`.
    pub(crate) fn layout(self) -> &'static str {
        match self {
            Self::Fprop => "nt",
            Self::Dgrad => "nn",
            Self::Wgrad => "tn",
        }
    }
}

/// A matrix product with a result `[m, n]` of sums over `k` products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Product {
    pub(crate) pass: Pass,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl Product {
    pub(crate) fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

impl Size {
    pub(crate) fn tokens(&self) -> usize {
        self.seq * self.batch
    }

    /// The products of a step, each with its name and without repetition: those of the blocks occur once per layer.
    pub(crate) fn products(&self) -> Vec<(String, Product)> {
        let (tokens, hidden) = (self.tokens(), self.hidden);
        let linears = [
            ("qkv", 3 * hidden, hidden),
            ("proj", hidden, hidden),
            ("fc1", 4 * hidden, hidden),
            ("fc2", hidden, 4 * hidden),
            ("head", VOCABULARY, hidden),
        ];
        let mut products: Vec<(String, Product)> = Vec::new();
        for (name, outputs, inputs) in linears {
            for (pass, of, [m, n, k]) in [
                (Pass::Fprop, "fprop", [tokens, outputs, inputs]),
                (Pass::Dgrad, "dgrad", [tokens, inputs, outputs]),
                (Pass::Wgrad, "wgrad", [outputs, inputs, tokens]),
            ] {
                let product = Product { pass, m, n, k };
                match products.iter_mut().find(|(_, other)| *other == product) {
                    Some((names, _)) => *names = format!("{names}, {name} {of}"),
                    None => products.push((format!("{name} {of}"), product)),
                }
            }
        }
        products
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written_and_wrong_ones_explained() {
        for text in SIZES {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
        let expected = "expected layers/hidden/heads/seq/batch, such as 4/128/4/64/12";
        for text in ["", "4", "4/128/4/64", "4/128/4/64/12/1", "4/128/4/x/12", "4/128/4/-1/12"] {
            assert_eq!(text.parse::<Size>(), Err(expected.to_owned()), "{text:?}");
        }
        assert_eq!("4/128/0/64/12".parse::<Size>(), Err("every number must be at least 1".to_owned()));
        let odd = "hidden 36 is not an even multiple of the 4 heads".to_owned();
        assert_eq!("4/36/4/64/12".parse::<Size>(), Err(odd));
    }

    #[test]
    fn a_step_multiplies_what_its_layers_multiply() {
        let size: Size = "2/32/4/16/3".parse().unwrap();
        let products = size.products();
        assert_eq!(products.len(), 15);
        let find = |name: &str| products.iter().find(|(other, _)| other == name).unwrap().1;
        assert_eq!(find("fc1 fprop"), Product { pass: Pass::Fprop, m: 48, n: 128, k: 32 });
        assert_eq!(find("fc1 dgrad"), Product { pass: Pass::Dgrad, m: 48, n: 32, k: 128 });
        assert_eq!(find("qkv wgrad"), Product { pass: Pass::Wgrad, m: 96, n: 32, k: 48 });
        // Each pass of a Linear does as much.
        let flops: f64 = products.iter().map(|(_, product)| product.flops()).sum();
        assert_eq!(flops, 3.0 * 2.0 * 48.0 * (32.0 * 32.0 * 12.0 + 32.0 * 256.0));
    }

    #[test]
    fn equal_products_are_measured_once() {
        // fc1 and the head are [256, 64] here.
        let products = "1/64/2/8/1".parse::<Size>().unwrap().products();
        assert!(products.iter().any(|(name, _)| name == "fc1 fprop, head fprop"), "{products:?}");
        assert_eq!(products.len(), 12);
    }
}
