//! Families of operations, one function each: what it draws, what it calls, how results are compared.

mod drawn;
mod layers;
mod nvfp4;
mod pointwise;
mod products;
mod ranks;
mod recorded;
mod rows;
mod scopes;
mod slots;
mod tensors;
mod tokens;
mod updates;

use super::case::Case;
use super::draw::Draw;

/// A family of operations.
pub(super) struct Family {
    pub(super) name: &'static str,
    /// The frequency with which it is drawn, relative to the other families.
    weight: usize,
    /// `None` once a call was refused: what follows needs its result.
    pub(super) attack: fn(&mut Case<'_>) -> Option<()>,
}

const fn family(name: &'static str, weight: usize, attack: fn(&mut Case<'_>) -> Option<()>) -> Family {
    Family { name, weight, attack }
}

pub(super) const FAMILIES: &[Family] = &[
    family("tensors", 6, tensors::tensors),
    family("changes in place", 4, tensors::changes),
    family("cells", 3, tensors::cells),
    family("devices", 1, tensors::devices),
    family("fp8 tensors", 5, tensors::fp8_tensors),
    family("cast", 3, pointwise::cast),
    family("elementwise", 5, pointwise::elementwise),
    family("accumulate", 2, pointwise::accumulate),
    family("dropout", 2, pointwise::dropout),
    family("activation", 6, pointwise::activation),
    family("transpose", 2, pointwise::transpose),
    family("split", 3, pointwise::split),
    family("rope", 3, pointwise::rope),
    family("gemm", 6, products::gemm),
    family("gemm_fp8", 6, products::gemm_fp8),
    family("linear", 4, products::linear),
    family("reduce", 4, rows::reduce),
    family("grad_norm", 2, rows::grad_norm),
    family("norm", 6, rows::norm),
    family("softmax", 4, rows::softmax),
    family("attention", 5, rows::attention),
    family("attention_fp8", 3, products::attention_fp8),
    family("cross_entropy", 4, rows::cross_entropy),
    family("embedding", 4, rows::embedding),
    family("kv_cache", 2, tokens::kv_cache),
    family("sample", 3, tokens::sample),
    family("quantize", 7, slots::quantize),
    family("quantize_many", 3, slots::quantize_many),
    family("quantize to NVFP4", 4, nvfp4::quantize),
    family("NVFP4 tensors", 3, nvfp4::tensors),
    family("products in NVFP4", 4, nvfp4::products),
    family("update_scales", 4, slots::update_scales),
    family("compare_calls", 2, ranks::compare_calls),
    family("scale_from_amax", 2, ranks::scale_from_amax),
    family("quantizer", 3, slots::quantizer),
    family("adamw", 5, updates::adamw),
    family("recipes", 3, scopes::recipes),
    family("scopes", 4, scopes::scopes),
    family("layers", 4, layers::layers),
    family("models", 1, layers::models),
    family("recorded steps", 1, recorded::steps),
];

/// The family of a case, drawn.
pub(super) fn pick(draw: &mut Draw) -> &'static Family {
    let total: usize = FAMILIES.iter().map(|family| family.weight).sum();
    let mut at = draw.below(total);
    for family in FAMILIES {
        match at.checked_sub(family.weight) {
            Some(left) => at = left,
            None => return family,
        }
    }
    &FAMILIES[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_is_drawn() {
        let mut draw = Draw::new(1, 1, 1);
        let mut names: Vec<&str> = (0..5000).map(|_| pick(&mut draw).name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), FAMILIES.len());
        assert!(names.len() >= 20);
    }
}
