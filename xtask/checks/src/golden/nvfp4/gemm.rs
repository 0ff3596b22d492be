//! The three products of a Linear.
//!
//! With bound = Σ |a · b| over the quantized values, the recorded one, a result may be off the f64 value by 8 · 2⁻²⁴ · bound on the CPU and
//! by 2⁻¹¹ · bound on a GPU, whose tensor cores add with fewer bits.

use std::collections::BTreeMap;

use fp8_kernels::ops::DropoutKey;
use fp8_kernels::{
    DType, Device, DropoutDraw, Encoding, Nvfp4Rule, Operand, Scale, Slot, StochasticRounding, Tensor, ops,
};
use serde::Deserialize;

use super::quantize::{blocks, number};
use crate::golden::blocks::file::{Check, File};
use crate::golden::blocks::gemm::compare;
use crate::golden::tally::Tally;

/// One recipe.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    recipe: String,
    /// The blocks of `w`; the others have 1x16.
    weight: String,
    hadamard: bool,
    /// Seeds and offsets of both copies of `dy`, by "dy row" and "dy col"; absent: to nearest.
    random: Option<BTreeMap<String, [String; 2]>>,
}

pub(super) fn check(file: &File<'_>, name: &str, device: &Device, tally: &mut Tally) -> Check {
    let input = |tensor| file.matrix(tensor).and_then(|matrix| matrix.tensor(device));
    let inputs = [input("x")?, input("w")?, input("dy")?];
    let is_cpu = device.is_same(&Device::cpu());
    let tolerance = if is_cpu { 8.0 * 2_f64.powi(-24) } else { 2_f64.powi(-11) };
    for case in file.cases::<Case>()? {
        let products = case.products(&inputs, device);
        for (product, index) in [("y", 0), ("dx", 1), ("dw", 2)] {
            let key = format!("{}.{product}", case.recipe);
            let result =
                products.clone().and_then(|products| compare(file, &key, &products[index], tolerance));
            tally.record(&format!("nvfp4/{name} {} {product}", case.recipe), result);
        }
    }
    Ok(())
}

impl Case {
    /// The draw of dy's rowwise copy. That of the columnwise copy is the next mask: the file must have recorded it.
    fn draw(&self) -> Check<Option<DropoutDraw>> {
        let Some(random) = &self.random else { return Ok(None) };
        let key = |copy: &str| -> Check<DropoutKey> {
            let [seed, offset] = random.get(copy).ok_or_else(|| format!("random has no {copy}"))?;
            Ok(DropoutKey { seed: number(seed)?, offset: number(offset)? })
        };
        let (row, col) = (DropoutDraw::from(key("dy row")?), key("dy col")?);
        let next = row.mask(1).read().map_err(|error| error.to_string())?;
        if next != col {
            return Err(format!(
                "the offsets of dy's copies are not those of neighboring masks: {next:?}, {col:?}"
            ));
        }
        Ok(Some(row))
    }

    /// y = x · wᵀ, dx = dy · w, dw = dyᵀ · x.
    fn products(&self, [x, w, dy]: &[Tensor; 3], device: &Device) -> Check<[Tensor; 3]> {
        let error = |error: fp8_kernels::Error| error.to_string();
        let quantized = |x: &Tensor, rule: Nvfp4Rule<'_>| -> Check<Operand> {
            let slot = Slot { scale: Scale::Nvfp4(rule), columnwise: true, ..Slot::off(Encoding::E2M1) };
            ops::quantize(x, &slot).map_err(error)
        };
        let draw = self.draw()?;
        let random = draw.as_ref().map(StochasticRounding::new);
        let activation = Nvfp4Rule { hadamard: self.hadamard, ..Nvfp4Rule::default() };
        let x = quantized(x, activation)?;
        let w = quantized(w, Nvfp4Rule { blocks: blocks(&self.weight)?, ..Nvfp4Rule::default() })?;
        let dy = quantized(dy, Nvfp4Rule { random, ..activation })?;
        let mut dw = Tensor::zeros(w.shape().matrix(), DType::F32, device).map_err(error)?;
        ops::wgrad(&dy, &x.for_backward(), &mut dw, "dw", ops::Accumulation::Split).map_err(error)?;
        let y = ops::fprop(&x, &w, None, DType::F32, ops::Accumulation::Split).map_err(error)?;
        let dx = ops::dgrad(&dy, &w.for_backward(), DType::F32, ops::Accumulation::Split).map_err(error)?;
        Ok([y, dx, dw])
    }
}
