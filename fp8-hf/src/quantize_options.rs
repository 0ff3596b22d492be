//! The options of quantization.

use super::scheme::Scheme;
use std::collections::BTreeMap;

/// Options of [`quantize`](crate::quantize()), whose example uses them.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizeOptions {
    /// The format. Default: [`Scheme::Channel`].
    pub scheme: Scheme,
    /// Layers that stay as they are, beside `lm_head`: names such as `model.layers.0.mlp.down_proj`, in which `*` stands for
    /// any text. A pattern without `*` also matches a part of the name between dots, as `down_proj` and `layers.0` do.
    /// vLLM refuses a folder in which only some of q, k and v, or one of gate and up, are quantized: [`Scheme::Vllm`] and those of
    /// NVFP4 refuse such patterns, and with other schemes [`Quantized::split_groups`](crate::Quantized::split_groups) lists the groups. Default: none.
    pub ignore: Vec<String>,
    /// Whether [`Scheme::Block128`] takes matrices whose sides are no multiples of 128. This library reads them, and so does
    /// compressed-tensors in its own format; transformers refuses or misreads them. And whether those of NVFP4 take matrices whose columns are
    /// no multiple of 16. Default: false.
    pub allow_ragged: bool,
    /// For static quantization of inputs with [`Scheme::Tensor`] and [`Scheme::Vllm`]: amax / 448 of the input of each quantized
    /// layer, by its name (`model.layers.0.mlp.down_proj`). An empty map leaves inputs dynamic. [`Scheme::Nvfp4`] needs them, and
    /// writes 2688 / amax. Default: none.
    pub input_scales: BTreeMap<String, f32>,
    /// The number of threads; `None` is as many as the caller's rayon pool has: one for each core, unless the program limits
    /// it. Default: None.
    pub threads: Option<usize>,
}

impl Default for QuantizeOptions {
    fn default() -> Self {
        Self {
            scheme: Scheme::Channel,
            ignore: Vec::new(),
            allow_ragged: false,
            input_scales: BTreeMap::new(),
            threads: None,
        }
    }
}
