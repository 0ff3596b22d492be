//! Launches of norms on a simulated GPU.
#![cfg(feature = "cuda")]

mod cuda;

use cuda::Rig;
use fp8_kernels::ops::{Norm, NormOptions};
use fp8_kernels::{Cell, DType, Encoding, ScalePolicy, ScaleRule, Slot, Tensor, TransposePolicy, ops};

const LAUNCH: &str = "cuLaunchKernel";

/// Statistics, values, codes and amax are one launch, however many rows there are, and the transpose is another.
#[test]
fn a_norm_is_one_launch_and_its_transpose_another() {
    let rig = Rig::new();
    {
        let device = rig.open().with_transpose_policy(TransposePolicy::WithCast);
        let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
        let cell = Cell::new(1.0, &device).unwrap();
        for dtype in [DType::BF16, DType::F32] {
            for (normalization, shape) in [(Norm::LayerNorm, [600, 64]), (Norm::RmsNorm, [5, 4096])] {
                let x = Tensor::full(1.0, shape, dtype, &device).unwrap();
                let gamma = Tensor::full(1.0, [shape[1]], DType::F32, &device).unwrap();
                let beta = (normalization == Norm::LayerNorm).then_some(&gamma);
                let options = NormOptions { normalization, ..NormOptions::default() };
                for columnwise in [false, true] {
                    let slot = Slot { columnwise, ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
                    let before = rig.calls(LAUNCH);
                    let (y, _) = ops::norm(&x, &gamma, beta, &options, &slot).unwrap();
                    assert_eq!(
                        rig.calls(LAUNCH) - before,
                        1 + u64::from(columnwise),
                        "{normalization} {dtype}"
                    );
                    assert_eq!(y.as_fp8().unwrap().columnwise().is_some(), columnwise);
                }
            }
        }
    }
    rig.finish();
}
