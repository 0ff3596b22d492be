//! The quantized all-gather with a scale for each row or block: the bytes that one device makes of the joined tensor, and how many
//! bytes move.

use crate::{Group, noise, ranks, tensor};
use fp8_dist::{ProcessGroup, ReduceOp, quantized_all_gather};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::fp8_format::slice::{BlockScaling, MxRounding};
use fp8_kernels::{
    Arena, BlockRule, Cell, DType, Device, Encoding, Fp8Tensor, REST, Scale, Slot, Tensor, TransposePolicy,
    ops,
};
use fp8_recipe::{AmaxGroup, Recipe, Result as RecipeResult};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

fn f32_scales(blocks: Blocks) -> BlockRule {
    BlockRule::F32(BlockScaling::new(blocks))
}

pub(crate) fn rules() -> [BlockRule; 6] {
    let powers = BlockScaling { power_2_scales: true, ..BlockScaling::new(Blocks::Row) };
    [
        f32_scales(Blocks::Row),
        f32_scales(Blocks::B1x128),
        f32_scales(Blocks::B128x128),
        BlockRule::Mx(MxRounding::Ceil),
        BlockRule::Mx(MxRounding::Floor),
        BlockRule::RowsThenTensor(powers),
    ]
}

/// A group that counts the bytes of the shards it gathers.
#[derive(Debug)]
struct Counted {
    inner: Group,
    bytes: AtomicUsize,
}

impl AmaxGroup for Counted {
    fn id(&self) -> &str {
        self.inner.id()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> RecipeResult<()> {
        self.inner.agree_on_names(key, names)
    }

    fn all_reduce_max(&self, key: &str, arena: &Arena) -> RecipeResult<()> {
        self.inner.all_reduce_max(key, arena)
    }

    fn poison(&self, reason: &str) {
        self.inner.poison(reason);
    }
}

impl ProcessGroup for Counted {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn all_reduce(&self, what: &str, x: &Tensor, op: ReduceOp) -> fp8_dist::Result<Tensor> {
        self.inner.all_reduce(what, x, op)
    }

    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> fp8_dist::Result<()> {
        self.inner.all_reduce_in_place(what, x, op)
    }

    fn all_gather(&self, what: &str, x: &Tensor) -> fp8_dist::Result<Tensor> {
        self.bytes.fetch_add(x.numel() * x.dtype().size(), Relaxed);
        self.inner.all_gather(what, x)
    }

    fn all_to_all(&self, what: &str, x: &Tensor, counts: &[usize]) -> fp8_dist::Result<(Tensor, Vec<usize>)> {
        self.inner.all_to_all(what, x, counts)
    }

    fn send(&self, what: &str, x: &Tensor, to: usize) -> fp8_dist::Result<()> {
        self.inner.send(what, x, to)
    }

    fn recv(&self, what: &str, x: &mut Tensor, from: usize) -> fp8_dist::Result<()> {
        self.inner.recv(what, x, from)
    }

    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> fp8_dist::Result<Tensor> {
        self.inner.reduce_scatter(what, x, op)
    }

    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> fp8_dist::Result<Tensor> {
        self.inner.broadcast(what, x, root)
    }

    fn split(
        &self,
        id: &str,
        color: Option<usize>,
        key: usize,
    ) -> fp8_dist::Result<Option<Arc<dyn ProcessGroup>>> {
        self.inner.split(id, color, key)
    }

    fn subgroup(&self, id: &str, ranks: &[usize]) -> fp8_dist::Result<Option<Arc<dyn ProcessGroup>>> {
        self.inner.subgroup(id, ranks)
    }

    fn barrier(&self) -> fp8_dist::Result<()> {
        self.inner.barrier()
    }
}

/// The bytes of each layout: shape, codes and factors.
pub(crate) type Layouts = [Option<(Vec<usize>, Vec<u8>, Vec<u8>)>; 2];

pub(crate) fn layouts(x: &Fp8Tensor) -> Layouts {
    let factors = |t: &Tensor| match t.dtype() {
        DType::U8 => t.to_vec::<u8>().unwrap(),
        _ => t.to_vec::<f32>().unwrap().into_iter().flat_map(f32::to_le_bytes).collect(),
    };
    let layout = |codes: &Tensor, scale_inv: &Tensor| {
        (codes.shape().to_vec(), codes.to_vec::<u8>().unwrap(), factors(scale_inv))
    };
    let rowwise = x.rowwise().map(|codes| layout(codes, x.scale_inv()));
    let columnwise = x.columnwise().zip(x.columnwise_scale_inv());
    [rowwise, columnwise.map(|(codes, scale_inv)| layout(codes, scale_inv))]
}

struct Case<'a> {
    rule: BlockRule,
    columnwise: bool,
    dtype: DType,
    /// The rows of each rank.
    rows: &'a [usize],
    cols: usize,
}

/// Compares with one device, and returns the bytes that the ranks put in, all together.
fn check(case: &Case<'_>, x: &[f32]) -> usize {
    let Case { rule, columnwise, dtype, rows, cols } = *case;
    let text = format!("{rule:?} {dtype} columnwise {columnwise} rows {rows:?} cols {cols}");
    let device = Device::cpu().with_transpose_policy(TransposePolicy::WithCast);
    let slot = Slot { scale: Scale::Blocks(rule), columnwise, ..Slot::off(Encoding::E4M3) };
    let total: usize = rows.iter().sum();
    let expected = ops::quantize(&tensor(x, &[total, cols], dtype, &device), &slot).unwrap();
    let expected = expected.as_fp8().unwrap();
    let bytes = ranks(rows.len(), |group| {
        let rank = group.rank();
        let start = rows[..rank].iter().sum::<usize>() * cols;
        let shard = tensor(&x[start..start + rows[rank] * cols], &[rows[rank], cols], dtype, &device);
        let group = Counted { inner: group, bytes: AtomicUsize::new(0) };
        let amax = Cell::new(REST, &device).unwrap();
        let whole = quantized_all_gather(&group, "x", &shard, &Slot { amax: Some(&amax), ..slot }).unwrap();
        let whole = whole.as_fp8().unwrap();
        assert_eq!(whole.matrix(), [total, cols], "{text}");
        assert_eq!(whole.columnwise_blocks(), expected.columnwise_blocks(), "{text}");
        assert!(layouts(whole) == layouts(expected), "{text}");
        let own = if shard.numel() == 0 { REST } else { ops::amax(&shard).unwrap().item().unwrap() };
        assert_eq!(amax.read().unwrap(), own, "{text}: each rank records the amax of its own shard");
        group.bytes.load(Relaxed)
    });
    bytes.into_iter().sum()
}

/// Noise with rows and columns of very different sizes, and values that are not finite.
fn values(rows: usize, cols: usize, seed: u64) -> Vec<f32> {
    let mut x = noise(rows * cols, seed);
    for (index, x) in x.iter_mut().enumerate() {
        *x *= f32::powi(2.0, ((index / cols % 7) * 3) as i32 - (index % cols % 5) as i32);
    }
    if let [first, second, .., last] = &mut x[..] {
        (*first, *second, *last) = (f32::NAN, -0.0, f32::INFINITY);
    }
    x
}

#[test]
fn the_bytes_of_one_device() {
    let cols = 140; // a whole block of 128 and a part of one
    for rule in rules() {
        for columnwise in [false, true] {
            for dtype in [DType::F32, DType::BF16] {
                for rows in [&[1, 0, 6][..], &[32, 64, 7], &[128, 256, 3], &[129, 3], &[0, 0]] {
                    let x = values(rows.iter().sum(), cols, 3);
                    check(&Case { rule, columnwise, dtype, rows, cols }, &x);
                }
            }
        }
    }
}

#[test]
fn vectors_are_quantized_as_a_whole() {
    for rule in rules() {
        let slot = Slot { scale: Scale::Blocks(rule), ..Slot::off(Encoding::E4M3) };
        let x = noise(300, 4);
        let of = |x: &[f32]| tensor(x, &[x.len()], DType::F32, &Device::cpu());
        let expected = ops::quantize(&of(&x), &slot).unwrap();
        ranks(3, |group| {
            let shard = of(&x[100 * group.rank()..100 * (group.rank() + 1)]);
            let whole = quantized_all_gather(&*group, "x", &shard, &slot).unwrap();
            assert!(layouts(whole.as_fp8().unwrap()) == layouts(expected.as_fp8().unwrap()), "{rule:?}");
        });
    }
}

/// Two shards of `rows` rows and 256 columns; the bytes of both.
fn bytes(rule: BlockRule, columnwise: bool, dtype: DType, rows: usize) -> usize {
    check(&Case { rule, columnwise, dtype, rows: &[rows; 2], cols: 256 }, &values(2 * rows, 256, 5))
}

#[test]
fn codes_and_scales_move_in_place_of_values() {
    let (elements, mx) = (2 * 128 * 256, BlockRule::Mx(MxRounding::Ceil));
    let [row, line, square] = [Blocks::Row, Blocks::B1x128, Blocks::B128x128].map(f32_scales);
    for dtype in [DType::F32, DType::BF16] {
        assert_eq!(bytes(row, false, dtype, 128), elements + 4 * 256);
        assert_eq!(bytes(line, false, dtype, 128), elements + 4 * 256 * 2);
        assert_eq!(bytes(mx, false, dtype, 128), elements + elements / 32);
        // Each rank also says whether its rows are whole blocks.
        for columnwise in [false, true] {
            assert_eq!(bytes(square, columnwise, dtype, 128), 2 * 4 + elements + 4 * 4);
            assert_eq!(bytes(square, columnwise, dtype, 64), 2 * 4 + elements / 2 * dtype.size());
        }
        // The columnwise copy of rows needs whole columns.
        assert_eq!(bytes(row, true, dtype, 128), elements * dtype.size());
    }
    assert_eq!(bytes(line, true, DType::F32, 128), 2 * 4 + 2 * (elements + 4 * elements / 128));
    assert_eq!(bytes(mx, true, DType::F32, 32), 2 * 4 + 2 * (elements / 4 + elements / 4 / 32));
    assert_eq!(bytes(mx, true, DType::F32, 33), 2 * 4 + 2 * 33 * 256 * 4);
    // Two copies of codes are more than 16-bit values.
    assert_eq!(bytes(line, true, DType::BF16, 128), elements * 2);
    assert_eq!(bytes(mx, true, DType::F16, 128), elements * 2);
}

#[test]
fn every_recipe_gathers_what_one_device_quantizes() {
    use fp8_recipe::{GemmSlots, Scaling};
    let (rows, cols) = ([128usize, 40], 48usize);
    let x = noise(rows.iter().sum::<usize>() * cols, 9);
    for name in Recipe::NAMES {
        let quantize = |group: Option<Group>, values: &[f32], rows: usize| {
            let slots = GemmSlots::new("fc");
            let mut scaling = Scaling::new(&slots, &Device::cpu()).unwrap();
            let recipe = Recipe::from_name(name).unwrap();
            let mut cx = scaling.eval(&recipe).unwrap();
            let x = tensor(values, &[rows, cols], DType::F32, &Device::cpu());
            let slot = cx.slot(&slots.input).unwrap();
            let operand = match group {
                Some(group) => quantized_all_gather(&*group, "x", &x, &slot).unwrap(),
                None => ops::quantize(&x, &slot).unwrap(),
            };
            layouts(operand.as_fp8().unwrap())
        };
        let expected = quantize(None, &x, rows.iter().sum());
        for gathered in ranks(2, |group| {
            let (start, rows) = ([0, rows[0] * cols][group.rank()], rows[group.rank()]);
            quantize(Some(group), &x[start..start + rows * cols], rows)
        }) {
            assert!(gathered == expected, "{name}");
        }
    }
}
