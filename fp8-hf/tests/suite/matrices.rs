//! Matrices with every kind of value, byte for byte against compressed-tensors' own functions.

use crate::folders::{Raw, Sizes, full, golden, llama, quantize, read, tensors, write};
use fp8_hf::{Config, Scheme};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const NAME: &str = "model.layers.0.mlp.gate_proj";

/// Writes a model whose gate is this matrix; everything else is zero.
fn model(path: &Path, x: &Raw) {
    let (rows, cols) = (x.1[0], x.1[1]);
    let config: Config = llama(&Sizes { hidden: cols, intermediate: rows, layers: 1, head_dim: 2 });
    let zeros = |spec: fp8_hf::TensorSpec| {
        let bytes = vec![0; spec.shape.iter().product::<usize>() * 4];
        (spec.name, ("F32".to_owned(), spec.shape.to_vec(), bytes))
    };
    let mut all: BTreeMap<String, Raw> = config.tensors().into_iter().map(zeros).collect();
    all.insert(format!("{NAME}.weight"), x.clone());
    fs::create_dir(path).unwrap();
    fs::write(path.join("config.json"), config.json()).unwrap();
    write(&path.join("model.safetensors"), &all);
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Compares codes and scales under one scheme; returns the number of codes.
fn compare(case: &str, x: &Raw, scheme: Scheme, codes: &Raw, scales: &Raw) -> usize {
    let place = tempfile::tempdir().unwrap();
    model(&place.path().join("model"), x);
    quantize(&place.path().join("model"), &place.path().join("out"), scheme);
    let ours = tensors(&place.path().join("out"));
    let is_block = scheme == Scheme::Block128;
    let end = if is_block { "weight_scale_inv" } else { "weight_scale" };
    let (our_codes, our_scales) = (&ours[&format!("{NAME}.weight")], &ours[&format!("{NAME}.{end}")]);
    let (mut codes, mut scales) = (codes.2.clone(), floats(&scales.2));
    if is_block {
        // DeepSeek's layout keeps the sign of a quotient that is −0, and has a scale of 1 where all elements are zero.
        let [rows, cols] = [x.1[0], x.1[1]];
        let across = cols.div_ceil(128);
        let block = |index: usize| index / cols / 128 * across + index % cols / 128;
        let values = floats(&x.2);
        let is_zero: Vec<bool> = (0..scales.len())
            .map(|at| (0..rows * cols).filter(|&index| block(index) == at).all(|index| values[index] == 0.0))
            .collect();
        for (index, value) in values.iter().enumerate() {
            let quotient = value / scales[block(index)];
            if quotient.to_bits() == (-0f32).to_bits() && !is_zero[block(index)] {
                codes[index] = 0x80;
            }
        }
        scales.iter_mut().zip(is_zero).filter(|(_, is_zero)| *is_zero).for_each(|(scale, _)| *scale = 1.0);
    }
    let differ = our_codes.2.iter().zip(&codes).position(|(ours, theirs)| ours != theirs);
    assert_eq!(differ, None, "{case}, {scheme}: the first of the codes that differ");
    assert_eq!(floats(&our_scales.2), scales, "{case}, {scheme}");
    codes.len()
}

#[test]
fn every_kind_of_value_has_the_peers_code() {
    let mut files = vec![golden().join("export/matrices.safetensors")];
    files.extend(full().map(|full| full.join("export/matrices.safetensors")));
    for file in files {
        let all = read(&file);
        let mut compared = 0;
        for (name, x) in all.iter().filter(|(name, _)| name.ends_with(".x")) {
            let case = name.strip_suffix(".x").unwrap();
            for (scheme, theirs) in
                [(Scheme::Tensor, "tensor"), (Scheme::Channel, "channel"), (Scheme::Block128, "block")]
            {
                let of = |end: &str| &all[&format!("{case}.{theirs}.{end}")];
                compared += compare(case, x, scheme, of("codes"), of("scale"));
                if case == "bf16" {
                    let halves = x.2.chunks(4).flat_map(|bytes| bytes[2..].to_vec()).collect();
                    let narrow = ("BF16".to_owned(), x.1.clone(), halves);
                    compared += compare(case, &narrow, scheme, of("codes"), of("scale"));
                }
            }
        }
        assert!(compared > 30_000, "{compared}");
    }
}

#[test]
fn f16_is_quantized_as_the_same_values_in_f32() {
    let halves: Vec<u16> =
        (0..130 * 6).map(|i: u32| (i * 40_503 % 0x7C00) as u16 | ((i % 2) as u16) << 15).collect();
    let wide = halves.iter().map(|&bits| fp8_nn::prelude::f16::from_bits(bits).to_f32());
    let raw = |dtype: &str, bytes| (dtype.to_owned(), vec![6, 130], bytes);
    let narrow = raw("F16", halves.iter().flat_map(|bits| bits.to_le_bytes()).collect());
    let wide = raw("F32", wide.flat_map(f32::to_le_bytes).collect());
    for scheme in Scheme::ALL {
        let place = tempfile::tempdir().unwrap();
        let written = [&narrow, &wide].map(|x| {
            let path = place.path().join(&x.0);
            model(&path, x);
            quantize(&path, &path.with_extension("fp8"), scheme);
            let all = tensors(&path.with_extension("fp8"));
            all.into_iter().filter(|(name, _)| name.starts_with(NAME)).collect::<Vec<_>>()
        });
        assert_eq!(written[0], written[1], "{scheme}");
    }
}
