//! The kernel files: their text, and the PTX that was made of it for machines without the compiler.

/// The text in front of every kernel file.
const PRELUDE: &str = include_str!("kernels/prelude.cuh");

/// Headers that a kernel file may begin with: lines `#include "name"`, which the text itself replaces.
const HEADERS: [(&str, &str); 2] = [
    ("attention.cuh", include_str!("kernels/attention.cuh")),
    ("attention_backward.cuh", include_str!("kernels/attention_backward.cuh")),
];

/// `sources![(Variant, "stem")]`: one program per kernel file.
macro_rules! sources {
    ($(($variant:ident, $stem:literal)),* $(,)?) => {
        /// A kernel file, named after its operation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Source {
            $(#[doc = concat!("`", $stem, ".cu`")] $variant),*
        }

        impl Source {
            /// The file's name without its ending.
            pub(crate) const fn stem(self) -> &'static str {
                match self { $(Self::$variant => $stem),* }
            }

            const fn text(self) -> &'static str {
                match self { $(Self::$variant => include_str!(concat!("kernels/", $stem, ".cu"))),* }
            }

            /// PTX of this very text for sm_89, which every later GPU's driver compiles on loading.
            pub(crate) const fn snapshot(self) -> &'static str {
                match self { $(Self::$variant => include_str!(concat!("../../ptx/", $stem, ".ptx"))),* }
            }
        }
    };
}

sources![
    (Accumulate, "accumulate"),
    (Activation, "activation"),
    (AdamW, "adamw"),
    (Amax, "amax"),
    (Attention, "attention"),
    (AttentionBackwardKv, "attention_backward_kv"),
    (AttentionBackwardQ, "attention_backward_q"),
    (AttentionPlain, "attention_plain"),
    (Cast, "cast"),
    (Cells, "cells"),
    (CompareCalls, "compare_calls"),
    (CrossEntropy, "cross_entropy"),
    (Dropout, "dropout"),
    (Elementwise, "elementwise"),
    (Embedding, "embedding"),
    (Gemm, "gemm"),
    (GradNorm, "grad_norm"),
    (Norm, "norm"),
    (Quantize, "quantize"),
    (Reduce, "reduce"),
    (Rope, "rope"),
    (Softmax, "softmax"),
    (Split, "split"),
    (Transpose, "transpose"),
    (UpdateScales, "update_scales"),
];

/// Without fused multiply-adds of the compiler's own, so that the same expressions give the same bits everywhere.
pub(crate) const OPTIONS: [&str; 3] = ["-std=c++17", "-fmad=false", "-lineinfo"];

impl Source {
    /// What the compiler calls the program, and reports name.
    pub(crate) fn file(self) -> String {
        format!("{}.cu", self.stem())
    }

    /// The whole program.
    pub(crate) fn program(self) -> String {
        let (mut program, mut text, mut line) = (format!("{PRELUDE}\n"), self.text(), 1);
        while let Some((header, rest)) = included(text) {
            let (name, header) = header;
            program += &format!("#line 1 \"{name}\"\n{header}\n");
            (text, line) = (rest, line + 1);
        }
        format!("{program}#line {line} \"{}\"\n{text}", self.file())
    }
}

/// The header that a text's first line asks for, and the text behind that line.
fn included(text: &str) -> Option<(&'static (&'static str, &'static str), &str)> {
    let (name, rest) = text.strip_prefix("#include \"")?.split_once("\"\n")?;
    HEADERS.iter().find(|(header, _)| *header == name).map(|header| (header, rest))
}
