//! The errors of folders, tokenizers and texts.

use std::fmt;
use std::path::PathBuf;

/// Every error of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that cannot be read or written on the way.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A file or folder that is missing.
    #[error("{}: not found", .path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// A file or folder whose contents cannot be used, or a place where nothing can be written.
    #[error("{}: {problem}", .path.display())]
    File {
        /// The path.
        path: PathBuf,
        /// A description of the problem.
        problem: String,
    },
    /// A folder with scales that no GEMM multiplies.
    #[error("{}: {problem}; run the model under Recipe::off(), which quantizes no inputs", .path.display())]
    NoGemm {
        /// The folder.
        path: PathBuf,
        /// A description of the scales.
        problem: String,
    },
    /// A matrix whose sides are no multiples of a block's, with a scheme that quantizes blocks.
    #[error(
        "quantize: scheme = {scheme}: `{layer}` is {rows} × {cols}, no multiple of {multiple} ({matrices} such matrices), which \
         transformers refuses or misreads: use another scheme, ignore these layers, or set allow_ragged"
    )]
    Ragged {
        /// The scheme.
        scheme: String,
        /// The number that the sides are to be multiples of; only the columns in NVFP4.
        multiple: usize,
        /// The first such layer.
        layer: String,
        /// The rows of its weight.
        rows: usize,
        /// The columns of its weight.
        cols: usize,
        /// The number of such matrices.
        matrices: usize,
    },
    /// An option outside its range.
    #[error("{part}: {option} = {value}: {remedy}")]
    Option {
        /// The function or model whose option it is.
        part: String,
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// Advice on a correct value.
        remedy: String,
    },
    /// Another process of a training that failed.
    #[error("another process has failed at {work}, and says why")]
    Rank {
        /// The work that this process waited for.
        work: String,
    },
    /// An error of a layer, an operation, a checkpoint or a process group.
    #[error(transparent)]
    Model(#[from] fp8_nn::Error),
}

impl Error {
    /// Says behind the problem of a file what was expected, or what to do about it.
    pub(crate) fn expecting(self, expected: &str) -> Self {
        match self {
            Self::NotFound { path } => Self::File { path, problem: format!("not found: {expected}") },
            Self::File { path, problem } => Self::File { path, problem: format!("{problem}: {expected}") },
            other => other,
        }
    }
}

impl From<fp8_nn::fp8_kernels::Error> for Error {
    fn from(error: fp8_nn::fp8_kernels::Error) -> Self {
        Self::Model(error.into())
    }
}

impl From<fp8_nn::fp8_recipe::Error> for Error {
    fn from(error: fp8_nn::fp8_recipe::Error) -> Self {
        Self::Model(error.into())
    }
}

impl From<fp8_nn::fp8_dist::Error> for Error {
    fn from(error: fp8_nn::fp8_dist::Error) -> Self {
        Self::Model(error.into())
    }
}

/// Writes the same sentence as `Display`, so that `fn main() -> Result<()>` and `unwrap` print it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        for (error, text) in [
            (
                Error::Rank { work: "writing a checkpoint".into() },
                "another process has failed at writing a checkpoint, and says why",
            ),
            (
                Error::NoGemm { path: "m".into(), problem: "inputs are quantized by 64 columns".into() },
                "m: inputs are quantized by 64 columns; run the model under Recipe::off(), which quantizes no inputs",
            ),
            (
                Error::Ragged {
                    scheme: "block128".into(),
                    multiple: 128,
                    layer: "model.layers.0.mlp.up_proj".into(),
                    rows: 130,
                    cols: 64,
                    matrices: 2,
                },
                "quantize: scheme = block128: `model.layers.0.mlp.up_proj` is 130 × 64, no multiple of 128 (2 such matrices), \
                 which transformers refuses or misreads: use another scheme, ignore these layers, or set allow_ragged",
            ),
        ] {
            assert_eq!(error.to_string(), text);
        }
    }
}
