//! Gathers in NVFP4: the bytes that one device makes of the joined tensor, random numbers included, and how many bytes move.

use crate::gather_blocks::{Layouts, layouts};
use crate::{noise, ranks, tensor};
use fp8_dist::{Error, SharedScales, gather_codes, quantized_all_gather};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::ops::DropoutKey;
use fp8_kernels::{
    Cell, DType, Device, DropoutDraw, Encoding, Fp8Tensor, Nvfp4Rule, REST, Scale, Slot, StochasticRounding,
    TransposePolicy, ops,
};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    blocks: Blocks,
    hadamard: bool,
    stochastic: bool,
    columnwise: bool,
    dtype: DType,
    /// The rows of each rank.
    rows: Vec<usize>,
    cols: usize,
}

impl Case {
    fn rule<'a>(&self, draw: &'a DropoutDraw) -> Nvfp4Rule<'a> {
        let random = self.stochastic.then(|| StochasticRounding::new(draw));
        Nvfp4Rule { blocks: self.blocks, hadamard: self.hadamard, random, ..Nvfp4Rule::default() }
    }

    fn slot<'a>(&self, draw: &'a DropoutDraw) -> Slot<'a> {
        let scale = Scale::Nvfp4(self.rule(draw));
        Slot { scale, columnwise: self.columnwise, ..Slot::off(Encoding::E2M1) }
    }

    /// Whether codes of all shards are those of the whole.
    fn joins(&self) -> bool {
        let is_plain = !self.columnwise && !self.stochastic && self.blocks == Blocks::B1x16;
        let mut others = self.rows.iter().rev().skip(1);
        self.rows.iter().all(|rows| *rows > 0) && (is_plain || others.all(|rows| rows.is_multiple_of(16)))
    }
}

/// The bytes of each layout, and the tensor's factors of each.
fn bytes(x: &Fp8Tensor) -> (Layouts, [Option<Vec<u32>>; 2]) {
    let bits = |factors: &fp8_kernels::Tensor| -> Vec<u32> {
        factors.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    (layouts(x), [x.tensor_scale().map(bits), x.columnwise_tensor_scale().map(bits)])
}

/// Compares gathers of values and of codes with one device.
fn check(case: &Case, x: &[f32]) {
    let device = Device::cpu().with_transpose_policy(TransposePolicy::WithCast);
    let draw = DropoutDraw::from(DropoutKey { seed: 3, offset: 1 << 40 });
    let (cols, total) = (case.cols, case.rows.iter().sum::<usize>());
    let whole = tensor(x, &[total, cols], case.dtype, &device);
    let whole = ops::quantize(&whole, &case.slot(&draw)).unwrap();
    let expected = bytes(whole.as_fp8().unwrap());
    ranks(case.rows.len(), |group| {
        let (rank, rows) = (group.rank(), case.rows[group.rank()]);
        let start: usize = case.rows[..rank].iter().sum();
        let shard = tensor(&x[start * cols..(start + rows) * cols], &[rows, cols], case.dtype, &device);
        let amax = Cell::new(REST, &device).unwrap();
        let slot = Slot { amax: Some(&amax), ..case.slot(&draw) };
        let found = quantized_all_gather(&*group, "x", &shard, &slot).unwrap();
        assert!(bytes(found.as_fp8().unwrap()) == expected, "{case:?}");
        let recorded = match (case.joins(), rows) {
            (true, _) => ops::amax(&tensor(x, &[total, cols], case.dtype, &device)).unwrap().item().unwrap(),
            (false, 0) => REST,
            (false, _) => ops::amax(&shard).unwrap().item().unwrap(),
        };
        assert_eq!(amax.read().unwrap(), recorded, "{case:?}");
        if !case.joins() {
            return;
        }
        // By an operation of the caller, with the amaxes of the whole and this shard's place in it.
        let place = |random| StochasticRounding { origin: [start, 0], whole: Some([total, cols]), ..random };
        let rule = case.rule(&draw);
        let rule = Nvfp4Rule { random: rule.random.map(place), ..rule };
        let slot = Slot { scale: Scale::Nvfp4(rule), ..case.slot(&draw) };
        let quantize = |slot: &Slot<'_>| Ok::<_, Error>((ops::quantize(&shard, slot)?, ()));
        let (part, ()) =
            SharedScales::default().quantize(&*group, "y", &slot, &device, false, quantize).unwrap();
        let part = part.as_fp8().unwrap();
        assert!(bytes(&gather_codes(&*group, "y", part).unwrap()) == expected, "{case:?}");
        let alone = gather_codes(&*group, "z", &part.for_backward()).unwrap();
        assert!(
            bytes(&alone) == bytes(&whole.as_fp8().unwrap().for_backward()),
            "{case:?}: columnwise alone"
        );
    });
}

/// Noise with rows of very different sizes, each rank's amax another one.
fn values(rows: usize, cols: usize, seed: u64) -> Vec<f32> {
    let mut x = noise(rows * cols, seed);
    for (index, x) in x.iter_mut().enumerate() {
        *x *= f32::powi(2.0, (index / cols.max(1) % 7) as i32 - (index % 5) as i32);
    }
    x
}

fn cases() -> impl Strategy<Value = Case> {
    let rows = prop_oneof![
        prop::collection::vec((1usize..5).prop_map(|n| 16 * n), 2..4),
        prop::collection::vec(0usize..50, 2..4),
        ((1usize..4), (0usize..3), (1usize..40)).prop_map(|(a, b, c)| vec![16 * a, 16 * b, c]),
    ];
    let dtypes = prop_oneof![Just(DType::F32), Just(DType::BF16), Just(DType::F16)];
    (any::<[bool; 4]>(), dtypes, rows, 1usize..70).prop_map(|(flags, dtype, rows, cols)| {
        let [is_tiled, hadamard, stochastic, columnwise] = flags;
        let blocks = if is_tiled { Blocks::B16x16 } else { Blocks::B1x16 };
        let (hadamard, stochastic) = (hadamard && !is_tiled, stochastic && !is_tiled);
        Case { blocks, hadamard, stochastic, columnwise, dtype, rows, cols }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn the_bytes_of_one_device(case in cases(), seed in 0u64..1000) {
        check(&case, &values(case.rows.iter().sum(), case.cols, seed));
    }
}

/// Gradients as the recipe rounds them, of two and three ranks whose rows are whole blocks or not; with NaN and infinity, too.
#[test]
fn gradients_have_the_bytes_and_the_random_numbers_of_one_device() {
    for rows in [&[32, 32][..], &[16, 16, 16], &[24, 24], &[20, 20, 20], &[48, 16, 5]] {
        for dtype in [DType::F32, DType::BF16] {
            for stochastic in [false, true] {
                let (rows, cols) = (rows.to_vec(), 40);
                let case = Case {
                    blocks: Blocks::B1x16,
                    hadamard: true,
                    stochastic,
                    columnwise: true,
                    dtype,
                    rows,
                    cols,
                };
                let mut x = values(case.rows.iter().sum(), case.cols, 5);
                check(&case, &x);
                x[3] = f32::NAN;
                check(&case, &x);
                *x.last_mut().unwrap() = f32::INFINITY;
                check(&case, &x);
            }
        }
    }
}

/// The bytes of one of two ranks with 64 rows and 64 columns in bf16.
fn sent(columnwise: bool, stochastic: bool, rows: usize) -> u64 {
    let draw = DropoutDraw::from(DropoutKey { seed: 3, offset: 0 });
    let case = Case {
        blocks: Blocks::B1x16,
        hadamard: true,
        stochastic,
        columnwise,
        dtype: DType::BF16,
        rows: vec![rows; 2],
        cols: 64,
    };
    let x = values(rows, 64, 1);
    let all = ranks(2, |group| {
        let shard = tensor(&x, &[rows, 64], DType::BF16, &Device::cpu());
        quantized_all_gather(&*group, "x", &shard, &case.slot(&draw)).unwrap();
        group.traffic().moves.bytes
    });
    all[0]
}

#[test]
fn four_and_a_half_bits_move_in_place_of_a_value() {
    // Two amaxes, the number of rows, and for each copy the factor that is compared.
    let (copy, other) = (64 * 64 * 9 / 16, 8 + 8);
    assert_eq!(sent(false, false, 64), copy + other + 4);
    assert_eq!(sent(true, true, 64), 2 * (copy + 4) + other);
    assert_eq!(sent(true, true, 40), 40 * 64 * 2 + 8);
    assert_eq!(sent(false, false, 40), 40 * 64 * 9 / 16 + other + 4);
}

fn errors(of: impl Fn(usize) -> Fp8Tensor + Sync) -> Vec<String> {
    ranks(2, |group| gather_codes(&*group, "x", &of(group.rank())).unwrap_err().to_string())
}

#[test]
fn shards_that_do_not_fit_together_are_named_on_all_ranks() {
    let quantized = |x: &[f32], rows: usize, hadamard: bool| {
        let rule = Nvfp4Rule { hadamard, ..Nvfp4Rule::default() };
        let slot = Slot { scale: Scale::Nvfp4(rule), columnwise: hadamard, ..Slot::off(Encoding::E2M1) };
        let x = tensor(x, &[rows, x.len() / rows], DType::F32, &Device::cpu());
        ops::quantize(&x, &slot).unwrap().as_fp8().unwrap().clone()
    };
    for error in errors(|rank| quantized(&[[2688.0; 32], [1344.0; 32]][rank], 2, false)) {
        assert!(error.contains("the scale is 2 on rank 1 and 1 on rank 0"), "{error}");
    }
    for error in errors(|_| quantized(&[1.0; 17 * 16], 17, true)) {
        assert!(error.contains("needs a multiple of 128 rows (MX blocks: 32, NVFP4: 16)"), "{error}");
    }
    let found = errors(|rank| {
        let x = quantized(&[1.0; 16 * 16], 16, true);
        if rank == 0 { x } else { x.without_columnwise() }
    });
    assert!(
        found.iter().all(|error| error.contains("columnwise factors for 1x16 of a Hadamard transform")),
        "{found:?}"
    );
}
