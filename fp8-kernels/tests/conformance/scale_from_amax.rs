use super::case::{Outcome, cases};
use super::compare::{refused, same};
use super::data::specials;
use fp8_kernels::{
    CustomPolicy, DType, Device, Encoding, REST, Scale, ScalePolicy, ScaleRule, Slot, Tensor, ops,
};
use std::sync::Arc;

cases![rules_of_the_host, quantizes_like_the_amax_itself, refuses];

fn rules() -> Vec<ScaleRule> {
    let delayed = |margin, policy| ScaleRule::Delayed { fp8_max: 448.0, margin, policy };
    let current = |epsilon, power_2_scales| ScaleRule::Current { fp8_max: 57344.0, epsilon, power_2_scales };
    let function = Arc::new(|amax: f32, old: f32, fp8_max: f32| old + fp8_max + amax.min(4.0));
    let custom = ScalePolicy::Custom(CustomPolicy { name: "mine".into(), function });
    vec![
        delayed(0, ScalePolicy::Exact),
        delayed(3, ScalePolicy::PowerOfTwo),
        delayed(0, custom),
        current(0.0, false),
        current(0.5, true),
    ]
}

/// Amaxes are at least 0, NaN, or at rest.
fn rules_of_the_host(device: &Device) -> Outcome {
    let amaxes = specials().into_iter().filter(|v| v.to_bits() >> 31 == 0 && !v.is_nan());
    for amax in amaxes.chain([3.5, 1e4, 0.3, f32::NAN]) {
        for rule in rules() {
            let scale = ops::scale_from_amax(&Tensor::scalar(amax, device)?, &rule)?;
            same(&format!("{amax} by {rule:?}"), &[scale.read()?], &[rule.scale(amax, 1.0)?], 1)?;
        }
    }
    for rule in rules() {
        let scale = ops::scale_from_amax(&Tensor::from_vec(vec![REST], [1], device)?, &rule)?;
        same(&format!("rest by {rule:?}"), &[scale.read()?], &[rule.scale(0.0, 1.0)?], 1)?;
    }
    Ok(())
}

fn quantizes_like_the_amax_itself(device: &Device) -> Outcome {
    let x = Tensor::from_vec(vec![0.3f32, -7.0, 2.5, 0.0], [2, 2], device)?;
    let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let off = Slot::off(Encoding::E4M3);
    let own = ops::quantize(&x, &Slot { scale: Scale::FromTensor(&rule), ..off })?;
    let cell = ops::scale_from_amax(&ops::amax(&x)?, &rule)?;
    let given = ops::quantize(&x, &Slot::fixed(Encoding::E4M3, &cell, &rule))?;
    let [own, given] = [own, given].map(|x| x.dequantize(DType::F32).and_then(|x| x.to_vec::<f32>()));
    same("values", &given?, &own?, 2)
}

fn refuses(device: &Device) -> Outcome {
    let rule = &rules()[0];
    let two = Tensor::zeros([2], DType::F32, device)?;
    refused(ops::scale_from_amax(&two, rule), "scale_from_amax: shape [2]: an amax is one number")?;
    let half = Tensor::zeros([1], DType::BF16, device)?;
    refused(ops::scale_from_amax(&half, rule), "amax has dtype bf16: expected f32")
}
