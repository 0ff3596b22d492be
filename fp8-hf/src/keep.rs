//! Quantized weights that a model keeps as the codes and factors of the files.

use super::config::WeightScales;
use super::folder::Folder;
use super::parameter_source::ParameterSource;
use crate::{Error, Result};
use fp8_kernels::fp8_format::{Blocks, E4M3, TensorScale};
use fp8_kernels::{Device, Encoding, Fp8Tensor, Shape, Tensor};
use fp8_nn::{Gpt, Parameter};
use fp8_recipe::{
    BlockScaling, CurrentScaling, Format, Nvfp4, QParams, QParamsByRole, Recipe, WeightQuantizer,
};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The side of the blocks that a GEMM multiplies.
const BLOCK: usize = 128;

/// Selects what [`Folder::load`] does with weights in FP8 or NVFP4. The example of [`Folder::recipe`] keeps them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fp8Weights {
    /// Their values become parameters in high precision. Default.
    #[default]
    Dequantize,
    /// Parameters hold the codes of the files and their factors, one byte a weight in FP8 and 4.5 bits in NVFP4, as
    /// [`quantize_weights`](fp8_nn::quantize_weights) stores them. In high precision they are dequantized for each use, so results
    /// are those of [`Dequantize`](Self::Dequantize). [`Folder::recipe`] is the recipe whose GEMMs read the codes.
    ///
    /// A parameter that holds several tensors, such as q, k and v, has one granularity. If their scales differ, all weights of
    /// the model get a factor for each row. If their blocks of 128 × 128 do not fit together, because a number of rows is no multiple
    /// of 128, all weights get a factor for each 128 elements of a row. Both repeat the factors of the files, so that values are
    /// the same. A parameter with a tensor that is not FP8 is dequantized, and so are blocks whose width is no multiple of 128, and a
    /// parameter in NVFP4 of several tensors that have different factors of the whole:
    /// [`Parameter::fp8`] is `None` then, and `tracing` reports it. The weights are frozen.
    Keep,
}

/// The elements of a weight that share a factor, in a model that keeps its codes. `None` is the whole tensor.
pub(super) type Form = Option<Blocks>;

impl Folder {
    /// Returns the form of all weights of a model that keeps the codes; an error says why none can be kept.
    pub(super) fn form(&self) -> Result<Result<Form, String>> {
        let Some(quantization) = &self.config.quantization else {
            return Ok(Err("the model is not quantized".into()));
        };
        match quantization.weights {
            WeightScales::Channel => Ok(Ok(Some(Blocks::Row))),
            WeightScales::TensorGroup => Ok(Ok(Some(Blocks::B1x16))),
            WeightScales::Block([BLOCK, BLOCK]) if self.do_blocks_fit()? => Ok(Ok(Some(Blocks::B128x128))),
            WeightScales::Block([_, width]) if width.is_multiple_of(BLOCK) => Ok(Ok(Some(Blocks::B1x128))),
            WeightScales::Block([rows, cols]) => Ok(Err(format!(
                "blocks of {rows} × {cols} are not supported in GEMMs: expected a width of 128 or a multiple"
            ))),
            WeightScales::Tensor => {
                for source in self.config.parameters() {
                    let mut scales = Vec::new();
                    for tensor in &source.tensors {
                        if let Some(own) = self.quantized.get(self.stored(tensor)) {
                            scales.extend(self.scales(&own.weight)?);
                        }
                    }
                    if scales.iter().any(|&scale| scale != scales[0]) {
                        return Ok(Ok(Some(Blocks::Row)));
                    }
                }
                Ok(Ok(None))
            }
        }
    }

    /// Returns whether each tensor that is followed by another one in its parameter ends with a block of 128 rows.
    fn do_blocks_fit(&self) -> Result<bool> {
        for source in self.config.parameters().iter().filter(|source| self.is_all_quantized(source)) {
            let (_, followed) = source.tensors.split_last().unwrap_or((&source.parameter, &[]));
            for tensor in followed {
                if !self.info(self.stored(tensor))?.matrix()[0].is_multiple_of(BLOCK) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Returns why a parameter cannot be kept as codes, or `None` if it can in a model of the form [`form`](Self::form).
    pub(super) fn why_dequantized(&self, source: &ParameterSource) -> Result<Option<&'static str>> {
        if !self.is_all_quantized(source) {
            return Ok(Some("some of its tensors are not quantized"));
        }
        if source.is_transposed {
            return Ok(Some("it is stored as in × out"));
        }
        let mut factors = None;
        for tensor in &source.tensors {
            let name = self.stored(tensor);
            if !matches!(self.info(name)?.dtype, Dtype::F8_E4M3 | Dtype::F4) {
                return Ok(Some("its codes are not E4M3"));
            }
            let packed = self.quantized.get(name).and_then(|scales| scales.packed.as_ref());
            let own = packed.map(|packed| self.tensor_scale(packed)).transpose()?;
            if *factors.get_or_insert(own) != own {
                return Ok(Some("its tensors have different factors of the whole"));
            }
        }
        Ok(None)
    }

    /// Returns whether every tensor of a parameter is an FP8 weight.
    pub(super) fn is_all_quantized(&self, source: &ParameterSource) -> bool {
        source.tensors.iter().all(|tensor| self.is_quantized(self.stored(tensor)))
    }
}

/// Returns a recipe whose weights have this form.
pub(super) fn recipe_of(form: Form) -> Recipe {
    recipe_with(form, QParams::default())
}

/// Returns a recipe whose weights have this form, and whose inputs have scales that `input` describes.
pub(super) fn recipe_with(form: Form, input: QParams) -> Recipe {
    let quant = QParamsByRole { input, ..Default::default() };
    match form {
        Some(Blocks::B1x16) => Nvfp4 { disable_2d_quantization: true, ..Default::default() }.into(),
        None => CurrentScaling { fp8_format: Format::E4M3, quant, ..Default::default() }.into(),
        Some(Blocks::Row) => CurrentScaling { quant, ..CurrentScaling::rowwise() }.into(),
        Some(blocks) => {
            let w_block_scaling_dim = if blocks == Blocks::B1x128 { 1 } else { 2 };
            BlockScaling { quant, w_block_scaling_dim, ..Default::default() }.into()
        }
    }
}

/// Stores FP8 weights of a folder in the parameters of a model.
pub(super) struct Keeper<'a> {
    folder: &'a Folder,
    form: Form,
    quantizers: BTreeMap<Arc<str>, WeightQuantizer>,
}

impl<'a> Keeper<'a> {
    /// Returns `None` if no weight can be kept.
    pub(super) fn new(folder: &'a Folder, model: &Gpt) -> Result<Option<Self>> {
        match folder.form()? {
            Ok(form) => {
                let quantizers = recipe_of(form).weight_quantizers(model)?;
                Ok(Some(Self { folder, form, quantizers }))
            }
            Err(why) => {
                tracing::warn!(folder = %folder.path().display(), why, "no weights are kept in FP8");
                Ok(None)
            }
        }
    }

    /// Stores the codes in a frozen parameter, or codes of 0 if they are not to be read; returns false if the parameter has to be
    /// dequantized.
    pub(super) fn store(
        &self,
        parameter: &mut Parameter,
        source: &ParameterSource,
        reads: bool,
    ) -> Result<bool> {
        let is_quantized = |tensor: &String| self.folder.is_quantized(self.folder.stored(tensor));
        if !source.tensors.iter().any(is_quantized) {
            return Ok(false);
        }
        let slot = parameter.weight_slot().map(|slot| slot.name().clone());
        let quantizer = slot.and_then(|slot| self.quantizers.get(&slot));
        if let Some(why) = self.folder.why_dequantized(source)? {
            return Ok(dequantized(parameter, why));
        }
        let Some(quantizer) = quantizer else {
            return Ok(dequantized(parameter, "the recipe does not quantize it"));
        };
        let (shape, device) = (*parameter.shape(), parameter.device().clone());
        let [rows, cols] = shape.matrix();
        if self.form == Some(Blocks::B1x16) {
            parameter.store_codes(self.packed(source, shape, &device, reads)?, quantizer)?;
            return Ok(true);
        }
        let (codes, factors) = match reads {
            true => self.read(source, [rows, cols])?,
            false => {
                let factors = self.form.map_or(1, |blocks| blocks.grid(rows, cols).iter().product());
                (vec![0; rows * cols], vec![1.0; factors])
            }
        };
        let codes = Tensor::from_vec(codes, shape, &device)?;
        let codes = match self.form {
            None => {
                let factor = Tensor::from_vec(factors, [], &device)?;
                Fp8Tensor::from_codes(codes, shape, Encoding::E4M3, factor)?
            }
            Some(blocks) => {
                let factors = Tensor::from_vec(factors, blocks.grid(rows, cols), &device)?;
                Fp8Tensor::from_blocks(codes, shape, Encoding::E4M3, blocks, factors)?
            }
        };
        parameter.store_codes(codes, quantizer)?;
        Ok(true)
    }

    /// Reads a parameter in NVFP4, or makes one of codes of 0.
    fn packed(
        &self,
        source: &ParameterSource,
        shape: Shape,
        device: &Device,
        reads: bool,
    ) -> Result<Fp8Tensor> {
        let [rows, cols] = shape.matrix();
        let grid = Blocks::B1x16.grid(rows, cols);
        let bytes = rows * cols.div_ceil(2);
        let (mut codes, mut groups) = (buffer(bytes)?, buffer(grid.iter().product())?);
        let mut factors = TensorScale::from_encode(1.0);
        for tensor in source.tensors.iter().filter(|_| reads) {
            let scales = self.folder.quantized.get(self.folder.stored(tensor));
            let Some((scales, packed)) = scales.and_then(|scales| Some((scales, scales.packed.as_ref()?)))
            else {
                continue;
            };
            let all = 0..packed.info.shape[0];
            codes.extend(self.folder.packed_rows(packed, &all)?);
            groups.extend(self.folder.group_scales(&scales.weight, &all)?.into_iter().map(E4M3::to_bits));
            factors = self.folder.tensor_scale(packed)?;
        }
        // Codes that are not read are 0.
        codes.resize(bytes, 0);
        groups.resize(grid.iter().product(), 0);
        let codes = Tensor::from_vec(codes, [rows, cols.div_ceil(2)], device)?;
        let groups = Tensor::from_vec(groups, grid, device)?;
        Ok(Fp8Tensor::from_nvfp4(codes, shape, Blocks::B1x16, groups, factors)?)
    }

    /// Reads the codes of all tensors of a parameter, and the factors in the form of the model.
    fn read(&self, source: &ParameterSource, [rows, cols]: [usize; 2]) -> Result<(Vec<u8>, Vec<f32>)> {
        let (mut codes, mut factors) = (buffer(rows * cols)?, Vec::new());
        for tensor in &source.tensors {
            let name = self.folder.stored(tensor);
            let [height, _] = self.folder.info(name)?.matrix();
            let weight = self.folder.codes(name, 0..height)?;
            codes.extend(weight.codes);
            match (self.form, weight.granularity, weight.scales.as_slice()) {
                (Some(Blocks::Row), WeightScales::Tensor, &[scale]) => {
                    factors.extend(std::iter::repeat_n(scale, height));
                }
                (Some(Blocks::B1x128), WeightScales::Block([down, width]), scales) => {
                    let across = cols.div_ceil(width);
                    for row in 0..height {
                        let own = scales.iter().skip(row / down * across).take(across);
                        let each = own.flat_map(|&scale| std::iter::repeat_n(scale, width / BLOCK));
                        factors.extend(each.take(cols.div_ceil(BLOCK)));
                    }
                }
                (Some(_), _, scales) => factors.extend_from_slice(scales),
                // All tensors have the same scale.
                (None, _, scales) => factors = scales.to_vec(),
            }
        }
        Ok((codes, factors))
    }
}

/// Returns an empty buffer with room for so many bytes.
fn buffer(bytes: usize) -> Result<Vec<u8>> {
    let mut buffer = Vec::new();
    let full = |_| fp8_kernels::Error::HostAllocation { op: "load", bytes };
    buffer.try_reserve_exact(bytes).map_err(full)?;
    Ok(buffer)
}

fn dequantized(parameter: &Parameter, why: &'static str) -> bool {
    tracing::warn!(parameter = %parameter.name(), why, "quantized weight is dequantized");
    false
}

/// Returns an error for a model that is to be trained, or whose layers are cut: codes and factors are those of whole weights.
pub(super) fn expect_keepable(path: &str, trainable: bool, is_cut: bool) -> Result<()> {
    let refused = |value: &str, remedy: &str| {
        let (part, value, remedy) = (path.to_owned(), value.to_owned(), remedy.to_owned());
        Err(Error::Option { part, option: "fp8", value, remedy })
    };
    if trainable {
        return refused(
            "Keep with trainable",
            "an optimizer needs values that are finer than codes: use Fp8Weights::Dequantize, and AdamW::quantize_weights to store \
             weights in FP8 while they are trained",
        );
    }
    if is_cut {
        return refused(
            "Keep with tensor_parallel",
            "the codes of a file are those of whole weights: use Fp8Weights::Dequantize",
        );
    }
    Ok(())
}
