//! The kernel files: their text, and the PTX that was made of it for machines without the compiler.

use super::KernelFile;

/// The text in front of every kernel file.
const PRELUDE: &str = concat!(
    include_str!("prelude/types.cuh"),
    include_str!("prelude/float16.cuh"),
    include_str!("prelude/elements.cuh"),
    include_str!("prelude/fp8.cuh"),
    include_str!("prelude/math.cuh"),
    include_str!("prelude/reductions.cuh"),
    include_str!("prelude/scale.cuh"),
    include_str!("prelude/codes.cuh"),
    include_str!("prelude/tiles.cuh"),
    include_str!("prelude/streams.cuh"),
    include_str!("prelude/fault.cuh"),
    include_str!("prelude/sums.cuh"),
    include_str!("prelude/row_tiles.cuh"),
    include_str!("prelude/pairs.cuh"),
    include_str!("prelude/column_sums.cuh"),
);

/// Headers that a kernel file may begin with: lines `#include "name"`, which the text itself replaces.
const HEADERS: [(&str, &str); 23] = [
    ("activation.cuh", include_str!("activation.cuh")),
    ("activation_tiles.cuh", include_str!("activation_tiles.cuh")),
    ("adamw.cuh", include_str!("adamw.cuh")),
    ("blocks.cuh", include_str!("blocks.cuh")),
    ("exp_near.cuh", include_str!("exp_near.cuh")),
    ("norm.cuh", include_str!("norm.cuh")),
    ("nvfp4.cuh", include_str!("nvfp4.cuh")),
    ("attention.cuh", include_str!("attention/attention.cuh")),
    ("dropout.cuh", include_str!("dropout.cuh")),
    ("philox.cuh", include_str!("philox.cuh")),
    ("quantize_many.cuh", include_str!("quantize_many.cuh")),
    ("tile_elements.cuh", include_str!("tile_elements.cuh")),
    ("whole_blocks.cuh", include_str!("whole_blocks.cuh")),
    ("whole_tiles.cuh", include_str!("whole_tiles.cuh")),
    ("attention_dropout.cuh", include_str!("attention/attention_dropout.cuh")),
    ("attention_forward_loop.cuh", include_str!("attention/attention_forward_loop.cuh")),
    ("attention_backward_loop.cuh", include_str!("attention/attention_backward_loop.cuh")),
    ("attention_forward.cuh", include_str!("attention/attention_forward.cuh")),
    ("attention_rows.cuh", include_str!("attention/attention_rows.cuh")),
    ("attention_plain.cuh", include_str!("attention/attention_plain.cuh")),
    ("attention_backward.cuh", include_str!("attention/attention_backward.cuh")),
    ("attention_fp8.cuh", include_str!("attention/attention_fp8.cuh")),
    ("attention_fp8_backward.cuh", include_str!("attention/attention_fp8_backward.cuh")),
];

/// `sources!["folder/": (Variant, "stem")]`: one program per kernel file.
macro_rules! sources {
    ($($folder:literal: $(($variant:ident, $stem:literal)),*);* $(;)?) => {
        /// A kernel file, named after its operation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(super) enum Source {
            $($(#[doc = concat!("`", $stem, ".cu`")] $variant),*),*
        }

        impl Source {
            /// The file's name without its ending.
            const fn name(self) -> &'static str {
                match self { $($(Self::$variant => $stem),*),* }
            }

            const fn text(self) -> &'static str {
                match self { $($(Self::$variant => include_str!(concat!($folder, $stem, ".cu"))),*),* }
            }

            /// PTX of this very text for sm_89, which every later GPU's driver compiles on loading.
            const fn ptx(self) -> &'static str {
                match self { $($(Self::$variant => include_str!(concat!("../../../../ptx/", $stem, ".ptx"))),*),* }
            }
        }
    };
}

sources![
    "":
    (Accumulate, "accumulate"),
    (Activation, "activation"),
    (ActivationBlocks, "activation_blocks"),
    (ActivationGeglu, "activation_geglu"),
    (ActivationGelu, "activation_gelu"),
    (ActivationSwiglu, "activation_swiglu"),
    (AdamW, "adamw"),
    (Amax, "amax"),
    (Cast, "cast"),
    (Cells, "cells"),
    (CompareCalls, "compare_calls"),
    (CrossEntropy, "cross_entropy"),
    (Dropout, "dropout"),
    (Elementwise, "elementwise"),
    (Embedding, "embedding"),
    (Gemm, "gemm"),
    (GradNorm, "grad_norm"),
    (KvCache, "kv_cache"),
    (LossScale, "loss_scale"),
    (Norm, "norm"),
    (NormBackward, "norm_backward"),
    (NormRows, "norm_rows"),
    (Nvfp4, "nvfp4"),
    (Optimizer, "optimizer"),
    (Permute, "permute"),
    (Quantize, "quantize"),
    (QuantizeBlocks, "quantize_blocks"),
    (QuantizeBlocksBf16, "quantize_blocks_bf16"),
    (QuantizeMany, "quantize_many"),
    (QuantizeManyBf16, "quantize_many_bf16"),
    (QuantizeMxBf16, "quantize_mx_bf16"),
    (QuantizeRowsBf16, "quantize_rows_bf16"),
    (QuantizeTiles, "quantize_tiles"),
    (QuantizeTilesBf16, "quantize_tiles_bf16"),
    (Reduce, "reduce"),
    (Rope, "rope"),
    (Sample, "sample"),
    (Softmax, "softmax"),
    (Split, "split"),
    (Transpose, "transpose"),
    (UpdateScales, "update_scales");
    "attention/":
    (Attention, "attention"),
    (AttentionBackwardKv, "attention_backward_kv"),
    (AttentionBackwardQ, "attention_backward_q"),
    (AttentionDropout, "attention_dropout"),
    (AttentionDropoutBackwardKv, "attention_dropout_backward_kv"),
    (AttentionDropoutBackwardQ, "attention_dropout_backward_q"),
    (AttentionDropoutPlain, "attention_dropout_plain"),
    (AttentionFp8, "attention_fp8"),
    (AttentionFp8BackwardKv, "attention_fp8_backward_kv"),
    (AttentionFp8BackwardQ, "attention_fp8_backward_q"),
    (AttentionLibrary, "attention_library"),
    (AttentionPlain, "attention_plain"),
    (AttentionRows, "attention_rows");
];

impl KernelFile for Source {
    fn stem(&self) -> &'static str {
        self.name()
    }

    fn snapshot(&self) -> &'static str {
        self.ptx()
    }

    fn program(&self) -> String {
        let (mut program, mut text, mut line) = (format!("{PRELUDE}\n"), self.text(), 1);
        while let Some((header, rest)) = included(text) {
            let (name, header) = header;
            program += &format!("#line 1 \"{name}\"\n{header}\n");
            (text, line) = (rest, line + 1);
        }
        format!("{program}#line {line} \"{}.cu\"\n{text}", self.stem())
    }
}

/// The header that a text's first line asks for, and the text behind that line.
fn included(text: &str) -> Option<(&'static (&'static str, &'static str), &str)> {
    let (name, rest) = text.strip_prefix("#include \"")?.split_once("\"\n")?;
    HEADERS.iter().find(|(header, _)| *header == name).map(|header| (header, rest))
}
