//! The quantized all-gather: byte for byte what one device makes of the joined tensor.

use crate::{Group, f32s, noise, ranks, tensor};
use fp8_dist::{Error, quantized_all_gather};
use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, Fp8Tensor, Operand, REST, Scale, ScalePolicy, ScaleRule, Slot,
    TransposePolicy, UNSET, ops,
};
use proptest::prelude::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Calibrated,
    FirstStep { keep: bool },
    Current { power_2_scales: bool },
    Reduced,
}

const MODES: [Mode; 6] = [
    Mode::Calibrated,
    Mode::FirstStep { keep: true },
    Mode::FirstStep { keep: false },
    Mode::Current { power_2_scales: false },
    Mode::Current { power_2_scales: true },
    Mode::Reduced,
];

/// A slot's cells and rule, as one rank or one device has them.
struct State {
    mode: Mode,
    encoding: Encoding,
    rule: ScaleRule,
    scale: Cell,
    amax: Cell,
    counters: Counters,
}

impl State {
    fn new(mode: Mode, encoding: Encoding) -> Self {
        let fp8_max = encoding.max();
        let rule = match mode {
            Mode::Current { power_2_scales } => ScaleRule::Current { fp8_max, epsilon: 0.0, power_2_scales },
            _ => ScaleRule::Delayed { fp8_max, margin: 1, policy: ScalePolicy::Exact },
        };
        let scale = Cell::new(if mode == Mode::Calibrated { 37.25 } else { UNSET }, &Device::cpu()).unwrap();
        Self {
            mode,
            encoding,
            rule,
            scale,
            amax: Cell::new(REST, &Device::cpu()).unwrap(),
            counters: Counters::new(&Device::cpu()).unwrap(),
        }
    }

    fn slot(&self) -> Slot<'_> {
        let rule = &self.rule;
        let scale = match self.mode {
            Mode::Calibrated => Scale::Cell { cell: &self.scale, first: rule, keep: true },
            Mode::FirstStep { keep } => Scale::Cell { cell: &self.scale, first: rule, keep },
            Mode::Current { .. } => Scale::FromTensor(rule),
            Mode::Reduced => Scale::FromAmax { amax: 12.5, rule },
        };
        Slot {
            encoding: self.encoding,
            scale,
            amax: Some(&self.amax),
            counters: Some(&self.counters),
            columnwise: true,
        }
    }

    fn counts(&self) -> [u64; 4] {
        let counts = self.counters.read().unwrap();
        [counts.saturated, counts.underflowed, counts.elements, counts.nan]
    }
}

fn fp8(operand: &Operand) -> &Fp8Tensor {
    operand.as_fp8().unwrap()
}

fn expect_equal(gathered: &Fp8Tensor, expected: &Fp8Tensor, case: &str) {
    assert_eq!((gathered.shape(), gathered.encoding()), (expected.shape(), expected.encoding()), "{case}");
    let scale_inv = |x: &Fp8Tensor| x.scale_inv().item().unwrap().to_bits();
    assert_eq!(scale_inv(gathered), scale_inv(expected), "{case}");
    let bytes = |x: &Fp8Tensor| {
        [x.rowwise(), x.columnwise()]
            .map(|codes| codes.map(|codes| (*codes.shape(), codes.to_vec::<u8>().unwrap())))
    };
    assert_eq!(bytes(gathered), bytes(expected), "{case}");
}

/// Rows of each rank, in order; the whole is `[rows, cols]`.
fn check(
    mode: Mode,
    encoding: Encoding,
    dtype: DType,
    device: &Device,
    rows: &[usize],
    cols: usize,
    x: &[f32],
) {
    let case = format!("{mode:?} {encoding} {dtype} rows {rows:?} cols {cols}");
    let total: usize = rows.iter().sum();
    let alone = State::new(mode, encoding);
    let expected = ops::quantize(&tensor(x, &[total, cols], dtype, device), &alone.slot()).unwrap();
    let results = ranks(rows.len(), |group| {
        let rank = group.rank();
        let start = rows[..rank].iter().sum::<usize>() * cols;
        let shard = tensor(&x[start..start + rows[rank] * cols], &[rows[rank], cols], dtype, device);
        let state = State::new(mode, encoding);
        let whole = quantized_all_gather(&*group, "x", &shard, &state.slot()).unwrap();
        expect_equal(fp8(&whole), fp8(&expected), &case);
        let own = if shard.numel() == 0 { REST } else { ops::amax(&shard).unwrap().item().unwrap() };
        assert_eq!(state.amax.read().unwrap(), own, "{case}: each rank records the amax of its own shard");
        assert_eq!(state.scale.read().unwrap().to_bits(), alone.scale.read().unwrap().to_bits(), "{case}");
        state.counts()
    });
    let counts = results.iter().fold([0; 4], |sum, counts| [0, 1, 2, 3].map(|i| sum[i] + counts[i]));
    assert_eq!(counts, alone.counts(), "{case}");
}

#[test]
fn bytes_of_one_device_with_an_outlier_on_the_last_rank() {
    let [rows, cols] = [12, 17];
    let mut x = noise(rows * cols, 3);
    x[rows * cols - 1] = 1e4;
    x[5] = f32::NAN;
    x[6] = -0.0;
    for policy in [TransposePolicy::WithCast, TransposePolicy::OnDemand, TransposePolicy::Never] {
        let device = Device::cpu().with_transpose_policy(policy);
        for mode in MODES {
            for encoding in [Encoding::E4M3, Encoding::E5M2] {
                for (dtype, shards) in
                    [(DType::F32, [6, 6].as_slice()), (DType::BF16, &[3; 4]), (DType::F16, &[0, 5, 0, 7])]
                {
                    check(mode, encoding, dtype, &device, shards, cols, &x);
                }
            }
        }
    }
}

#[test]
fn an_outlier_sets_every_scale() {
    let scales = ranks(4, |group| {
        let x = f32s(&[if group.rank() == 3 { 1e4 } else { 1.0 }], &[1, 1]);
        let first = State::new(Mode::FirstStep { keep: true }, Encoding::E4M3);
        let current = State::new(Mode::Current { power_2_scales: false }, Encoding::E4M3);
        let current = quantized_all_gather(&*group, "x", &x, &current.slot()).unwrap();
        quantized_all_gather(&*group, "y", &x, &first.slot()).unwrap();
        (first.scale.read().unwrap(), fp8(&current).scale_inv().item().unwrap())
    });
    assert_eq!(scales, [(-224.0 / 1e4, (448.0f32 / 1e4).recip()); 4]); // provisional; with margin 1
}

#[test]
fn amaxes_that_say_nothing() {
    for special in [0.0, f32::INFINITY] {
        for mode in MODES {
            let x = [vec![0.0; 4], vec![special; 4]].concat();
            check(mode, Encoding::E4M3, DType::F32, &Device::cpu(), &[2, 2], 2, &x);
        }
    }
    for mode in MODES {
        check(mode, Encoding::E5M2, DType::BF16, &Device::cpu(), &[0, 0], 3, &[]);
    }
}

#[test]
fn high_precision_is_gathered_as_it_is() {
    let results = ranks(2, |group| {
        let amax = Cell::new(REST, &Device::cpu()).unwrap();
        let slot = Slot { amax: Some(&amax), ..Slot::off(Encoding::E4M3) };
        let x = tensor(&[group.rank() as f32, -3.0], &[1, 2], DType::BF16, &Device::cpu());
        let whole = quantized_all_gather(&*group, "x", &x, &slot).unwrap();
        let whole = whole.as_high().unwrap();
        assert_eq!((whole.dtype(), whole.shape()), (DType::BF16, &[2, 2].into()));
        (whole.to_f32_vec().unwrap(), amax.read().unwrap())
    });
    assert_eq!(results, vec![(vec![0.0, -3.0, 1.0, -3.0], 3.0); 2]);
}

fn errors(slot_of: impl Fn(&Group, &State) -> (State, f32) + Sync) -> Vec<Error> {
    ranks(4, |group| {
        let (state, scale) = slot_of(&group, &State::new(Mode::Calibrated, Encoding::E4M3));
        state.scale.write(scale).unwrap();
        let x = f32s(&[1.0, 2.0], &[1, 2]);
        let error = quantized_all_gather(&*group, "x", &x, &state.slot()).unwrap_err();
        assert!(matches!(group.barrier(), Err(Error::Poisoned { .. })));
        error
    })
}

#[test]
fn scales_that_differ() {
    for (scales, found) in [
        ([2.0, 2.0, 2.5, 3.0], "the scale is 2.5 on rank 2 and 2 on rank 0"),
        ([2.0, UNSET, 2.0, 2.0], "the scale is unset on rank 1 and 2 on rank 0"),
        ([UNSET, 1.0, UNSET, UNSET], "the scale is 1 on rank 1 and unset on rank 0"),
        ([-2.0, 2.0, 2.0, -4.0], "the scale is 4 on rank 3 and 2 on rank 0"), // provisional or not
    ] {
        let cell =
            |group: &Group, _: &State| (State::new(Mode::Calibrated, Encoding::E4M3), scales[group.rank()]);
        for error in errors(cell) {
            let remedy = "shards of one tensor need one scale; commit the same scopes on all ranks, with reduce_amax and \
                          this group as amax_reduction_group";
            assert_eq!(error.to_string(), format!("quantized_all_gather `x`: {found}: {remedy}"));
        }
    }
}

#[test]
fn slots_that_differ() {
    let differ = |odd: fn() -> State| {
        errors(move |group, _| {
            let odd = if group.rank() == 2 { odd() } else { State::new(Mode::Calibrated, Encoding::E4M3) };
            let scale = odd.scale.read().unwrap();
            (odd, scale)
        })
    };
    for error in differ(|| State::new(Mode::Calibrated, Encoding::E5M2)) {
        assert!(error.to_string().contains("a scale for f32 as E5M2 by"), "{error}");
    }
    for error in differ(|| State::new(Mode::Current { power_2_scales: true }, Encoding::E4M3)) {
        assert!(error.to_string().contains("power_2_scales: true }` on rank 2"), "{error}");
    }
}

#[test]
fn shards_that_differ() {
    let errors = |dtypes: [DType; 2], cols: [usize; 2]| {
        ranks(2, |group| {
            let state = State::new(Mode::Current { power_2_scales: false }, Encoding::E4M3);
            let rank = group.rank();
            let x = tensor(&vec![1.0; cols[rank]], &[1, cols[rank]], dtypes[rank], &Device::cpu());
            quantized_all_gather(&*group, "x", &x, &state.slot()).unwrap_err().to_string()
        })
    };
    for error in errors([DType::F32, DType::BF16], [3, 3]) {
        assert!(error.contains("a scale for bf16 as E4M3"), "{error}");
    }
    for error in errors([DType::F32, DType::F32], [3, 4]) {
        assert!(
            error.contains("the shape, dimension 0 aside, is [1, 4] on rank 1 and [1, 3] on rank 0"),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_cannot_quantize_tells_the_others() {
    let results = ranks(2, |group| {
        let state = State::new(Mode::Current { power_2_scales: false }, Encoding::E4M3);
        let dtype = if group.rank() == 1 { DType::I32 } else { DType::F32 };
        let x = fp8_kernels::Tensor::zeros([1, 2], dtype, &Device::cpu()).unwrap();
        quantized_all_gather(&*group, "x", &x, &state.slot()).unwrap_err().to_string()
    });
    assert!(results[0].contains("rank 1 gave up: amax: x has dtype i32"), "{}", results[0]);
    assert!(results[1].starts_with("amax: x has dtype i32"), "{}", results[1]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    #[test]
    fn bytes_of_one_device_for_any_shards(
        rows in prop::collection::vec(0usize..5, 1..=4),
        cols in 0usize..20,
        mode in prop::sample::select(MODES.to_vec()),
        encoding in prop::sample::select(vec![Encoding::E4M3, Encoding::E5M2]),
        dtype in prop::sample::select(vec![DType::F32, DType::BF16, DType::F16]),
        seed: u64,
    ) {
        let device = Device::cpu().with_transpose_policy(TransposePolicy::WithCast);
        let mut x = noise(rows.iter().sum::<usize>() * cols, seed);
        if let Some(last) = x.last_mut() {
            *last = 1e4;
        }
        check(mode, encoding, dtype, &device, &rows, cols, &x);
    }
}
