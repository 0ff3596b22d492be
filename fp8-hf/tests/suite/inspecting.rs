//! Compares the numbers of `inspect` with sums that are computed the plain way.

use crate::folders::{change, copy, golden, quantize, tensors, write};
use fp8_hf::{Folder, Monitor, Scheme, Weights, inspect, inspect_weights};
use serde_json::json;

#[test]
fn numbers_are_those_of_plain_sums() {
    let place = tempfile::tempdir().unwrap();
    let original = Folder::open(&golden().join("llama_mha")).unwrap();
    for scheme in Scheme::ALL {
        let out = place.path().join(scheme.name());
        quantize(&golden().join("llama_mha"), &out, scheme);
        let fp8 = Folder::open(&out).unwrap();
        let found = inspect(&fp8, Some(&original), &Monitor::default()).unwrap();
        let (mut all_signal, mut all_noise) = (0.0, 0.0);
        let mut sqnrs = Vec::new();
        for tensor in &found.tensors {
            let (x, y) = (original.values(&tensor.name).unwrap(), fp8.values(&tensor.name).unwrap());
            let signal: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            let noise: f64 = x.iter().zip(&y).map(|(&x, &y)| (f64::from(x) - f64::from(y)).powi(2)).sum();
            let sqnr = tensor.sqnr.unwrap();
            sqnrs.push(sqnr);
            assert_eq!(tensor.amax.unwrap(), y.iter().fold(0f32, |amax, y| amax.max(y.abs())));
            if tensor.granularity.is_none() {
                assert!(sqnr.is_infinite() && tensor.underflowed.is_none(), "{tensor:?}");
                continue;
            }
            assert!((sqnr - 10.0 * (signal / noise).log10()).abs() < 1e-9, "{tensor:?}");
            let lost = x.iter().zip(&y).filter(|&(&x, &y)| x != 0.0 && y == 0.0).count();
            assert_eq!(tensor.underflowed, Some(lost as f64 / x.len() as f64), "{tensor:?}");
            assert_eq!(tensor.saturated, Some(0.0), "{tensor:?}");
            (all_signal, all_noise) = (all_signal + signal, all_noise + noise);
        }
        assert!(sqnrs.is_sorted(), "worst first: {sqnrs:?}");
        assert!((found.sqnr.unwrap() - 10.0 * (all_signal / all_noise).log10()).abs() < 1e-9);
        // Without an original: the largest codes, and zeros.
        let alone = inspect(&fp8, None, &Monitor::default()).unwrap();
        for tensor in alone.tensors.iter().filter(|tensor| tensor.granularity.is_some()) {
            let codes = fp8.codes(&tensor.name, 0..tensor.shape[0]).unwrap().codes;
            let is_fp4 = tensor.dtype == fp8_hf::Dtype::F4;
            let halves = |&code: &u8| if is_fp4 { vec![code & 0xF, code >> 4] } else { vec![code] };
            let codes: Vec<u8> = codes.iter().flat_map(halves).collect();
            let (mask, largest) = if is_fp4 { (0x7, 0x7) } else { (0x7F, 0x7E) };
            let share = |wanted: u8| {
                codes.iter().filter(|&&code| code & mask == wanted).count() as f64 / codes.len() as f64
            };
            assert_eq!((tensor.saturated, tensor.underflowed), (Some(share(largest)), Some(share(0))));
            assert!(tensor.sqnr.is_none());
        }
        let plain =
            inspect_weights(&Weights::open(&out.join("model.safetensors")).unwrap(), &Monitor::default())
                .unwrap();
        assert_eq!(plain.bytes, found.bytes);
        assert!(plain.tensors.len() > found.tensors.len(), "scales are tensors of their own");
    }
}

#[test]
fn nothing_that_differs_is_called_exact() {
    let place = tempfile::tempdir().unwrap();
    let [zero, new] = ["zero", "new"].map(|name| place.path().join(name));
    copy(&golden().join("llama_gqa_tied"), &zero);
    copy(&golden().join("llama_gqa_tied"), &new);
    let [norm, other] = ["model.norm.weight", "model.layers.0.input_layernorm.weight"];
    let mut all = tensors(&zero);
    all.get_mut(norm).unwrap().2.fill(0);
    write(&zero.join("model.safetensors"), &all);
    let mut all = tensors(&new);
    all.get_mut(other).unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    write(&new.join("model.safetensors"), &all);
    let [zero, new] = [zero, new].map(|path| Folder::open(&path).unwrap());
    let found = inspect(&new, Some(&zero), &Monitor::default()).unwrap();
    let worst: Vec<(&str, f64)> =
        found.tensors[..2].iter().map(|tensor| (tensor.name.as_str(), tensor.sqnr.unwrap())).collect();
    assert!(worst.iter().any(|&(name, sqnr)| name == other && sqnr.is_nan()), "{worst:?}");
    assert!(worst.contains(&(norm, f64::NEG_INFINITY)), "{worst:?}");
    assert!(found.tensors[2..].iter().all(|tensor| tensor.sqnr == Some(f64::INFINITY)));
}

/// A row is longer than what is read at a time.
#[test]
fn a_long_row_is_measured_in_parts() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("row.safetensors");
    let mut codes = vec![0x38_u8; 3_000_001]; // 1.0
    codes[0] = 0;
    codes[2_500_000] = 0x7E; // 448, the largest
    codes[3_000_000] = 0x7F; // NaN
    let header = r#"{"row": {"dtype": "F8_E4M3", "shape": [1, 3000001], "data_offsets": [0, 3000001]}}"#;
    crate::folders::write_raw(&path, header, &codes);
    let found = inspect_weights(&Weights::open(&path).unwrap(), &Monitor::default()).unwrap();
    let row = &found.tensors[0];
    let share = Some(1.0 / 3_000_001.0);
    assert_eq!((row.amax, row.not_finite), (Some(448.0), 1));
    assert_eq!((row.saturated, row.underflowed), (share, share));
}

#[test]
fn another_model_is_not_the_original() {
    let place = tempfile::tempdir().unwrap();
    quantize(&golden().join("llama_mha"), &place.path().join("fp8"), Scheme::Tensor);
    let fp8 = Folder::open(&place.path().join("fp8")).unwrap();
    let other = Folder::open(&golden().join("llama_gqa_tied")).unwrap();
    let error = inspect(&fp8, Some(&other), &Monitor::default()).unwrap_err().to_string();
    assert!(
        error.contains("`model.embed_tokens.weight` has shape [96, 32]: ")
            && error.ends_with("so this is not its original"),
        "{error}"
    );
}

#[test]
fn tensors_that_only_the_original_has_are_named() {
    let place = tempfile::tempdir().unwrap();
    let (original, fp8) = (place.path().join("model"), place.path().join("fp8"));
    quantize(&golden().join("llama_mha"), &original, Scheme::Channel);
    quantize(&golden().join("llama_mha"), &fp8, Scheme::Tensor);
    let inspected = || {
        let (original, fp8) = (Folder::open(&original).unwrap(), Folder::open(&fp8).unwrap());
        inspect(&fp8, Some(&original), &Monitor::default()).unwrap()
    };
    assert!(inspected().missing.is_empty());
    change(&fp8.join("config.json"), &json!({"num_hidden_layers": 2}));
    let file = fp8.join("model.safetensors");
    let mut tensors = crate::folders::read(&file);
    tensors.retain(|name, _| !name.contains("layers.2."));
    crate::folders::write(&file, &tensors);
    let missing = inspected().missing;
    // Not the scales that belong to weights of the original.
    let weights = tensors.keys().filter(|name| name.contains("layers.0.") && !name.ends_with("_scale"));
    assert_eq!(missing, weights.map(|name| name.replace("layers.0.", "layers.2.")).collect::<Vec<_>>());
    assert_eq!(missing.len(), 9);
}

#[test]
fn clamped_values_count_as_saturated() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("fp8");
    quantize(&golden().join("llama_gqa_tied"), &out, Scheme::Tensor);
    let (file, name) = (out.join("model.safetensors"), "model.layers.0.mlp.up_proj");
    let mut tensors = crate::folders::read(&file);
    let original = Folder::open(&golden().join("llama_gqa_tied")).unwrap();
    let values = original.values(&format!("{name}.weight")).unwrap();
    // A scale that is a quarter of the right one, with the codes that belong to it.
    let amax = values.iter().fold(0f32, |amax, x| amax.max(x.abs()));
    let scale = amax / 448.0 / 4.0;
    let codes =
        values.iter().map(|x| fp8_nn::prelude::E4M3::from_f32_saturating(x / scale).to_bits()).collect();
    tensors.get_mut(&format!("{name}.weight")).unwrap().2 = codes;
    tensors.get_mut(&format!("{name}.weight_scale")).unwrap().2 = scale.to_le_bytes().to_vec();
    crate::folders::write(&file, &tensors);
    let found = inspect(&Folder::open(&out).unwrap(), Some(&original), &Monitor::default()).unwrap();
    let clamped = values.iter().filter(|x| x.abs() > 448.0 * scale).count();
    assert!(clamped > 100);
    assert_eq!(found.tensors[0].name, format!("{name}.weight"));
    assert_eq!(found.tensors[0].saturated, Some(clamped as f64 / values.len() as f64));
}
