//! The matrix product of the CPU: `out[m, n] = epilogue(Σₖ a[m, k] · b[n, k])`, with the same bits on every CPU.
//!
//! Each element of the result is one f32 sum. It starts at 0, or at what `out` holds, and takes the products in the order of k,
//! each by one fused multiply-add. Nothing else decides the bits: not the instructions, the sizes of blocks, the layout of the
//! operands or the number of threads. A NaN is always `f32::NAN`. A product of no k adds nothing: it leaves an output that it
//! accumulates into as it is.
//!
//! In NVFP4 the products of each block of 16 values of k are summed by themselves, which is exact, and the blocks are added in their order.
//! Such products are computed as [`integers`], unless they have few rows.
//!
//! Operands are f32, bf16, f16, FP8 codes or packed codes of 4 bits, contiguous along k or along the other dimension. Blocks of them are decoded while
//! they are *packed* into the order in which the micro-kernel reads them; no operand is transposed or decoded as a whole.
//! Every product of two FP8 values is exact in f32, and every FP8 value is exact in bf16. So `vdpbf16ps` computes the same sums as
//! f32 arithmetic on a CPU where the instruction rounds as two multiply-adds, and on some at twice its speed ([`probe`]). It flushes subnormal
//! numbers, but none occur: products are multiples of 2⁻²⁵, and so are their sums, unless they start from what the output holds.
//! Such sums are computed without it ([`takes_pairs`]).
//!
//! | file | contents |
//! |---|---|
//! | [`lanes`], `avx512`, `avx2`, `neon` | vector operations: in plain Rust, and with each set of instructions |
//! | [`path`] | which of them the CPU has |
//! | [`tile`] | the micro-kernel: one tile of sums in registers |
//! | [`pack`] | blocks of the operands in the order of the micro-kernel |
//! | [`integers`] | blocks of codes of NVFP4, and their micro-kernel |
//! | [`task`] | the loops over blocks and tiles of one thread's part |
//! | [`narrow`] | products of few rows, whose second operand is not packed |
//! | [`form`] | how FP8 codes and bf16 values are read in such products |
//! | [`unpacked`] | small products of f32 operands as they are |
//! | [`epilogue`] | factors, addend, bias, rounding, accumulation |

mod available;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod decoding;
mod epilogue;
mod form;
mod integers;
mod lanes;
#[cfg(test)]
mod models;
mod narrow;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pair_rounding;
mod path;
#[cfg(target_arch = "x86_64")]
mod probe;
mod run;
mod task;
#[cfg(test)]
mod tests;
mod tile;
mod unpacked;
mod vectors;

pub(crate) use epilogue::{Addend, Epilogue, Factors, Out};
pub(crate) use pack::{Elements, Matrix, Packed};
pub use path::CpuPath;
pub(crate) use unpacked::{Strided, Unpacked, product, transpose};

use crate::Result;
use available::Pairs;
use task::{Blocks, Parts, Task};
use vectors::Vectors;

/// Computes the product on all threads of the current pool.
///
/// `a` is `[m, k]` and `b` is `[n, k]`, whatever their layouts; `out` is `[m, n]`, row-major.
///
/// # Errors
/// Memory that cannot be allocated, for `op`; an `FP8_CPU_PATH` that this CPU does not have.
pub(crate) fn matmul(
    op: &'static str,
    dims: [usize; 3],
    a: Matrix<'_>,
    b: Matrix<'_>,
    epilogue: &Epilogue<'_>,
    out: Out<'_>,
) -> Result<()> {
    let is_narrow = dims[0] <= narrow::MOST_ROWS && b.is_along_k();
    let pairs = match (takes_pairs(a, b, epilogue), is_narrow && !b.is_packed()) {
        (false, _) => Pairs::Never,
        (true, false) => Pairs::IfFaster,
        (true, true) => Pairs::Always,
    };
    let vectors = CpuPath::current()?.vectors(pairs);
    let threads = rayon::current_num_threads();
    let parts = if is_narrow { Parts::of_few_rows(dims, threads) } else { Parts::new(dims, threads) };
    matmul_on(vectors, op, dims, a, b, epilogue, out, parts, Blocks::new(vectors))
}

/// Computes the product on the calling thread: for tests.
///
/// # Errors
/// Those of [`matmul`].
#[cfg(test)]
pub(crate) fn matmul_serial(
    op: &'static str,
    dims: [usize; 3],
    a: Matrix<'_>,
    b: Matrix<'_>,
    epilogue: &Epilogue<'_>,
    out: Out<'_>,
) -> Result<()> {
    let pairs = if takes_pairs(a, b, epilogue) { Pairs::Always } else { Pairs::Never };
    let vectors = CpuPath::current()?.vectors(pairs);
    matmul_on(vectors, op, dims, a, b, epilogue, out, Parts::ONE, Blocks::new(vectors))
}

/// Returns whether pairs of bf16 values give the bits of f32 arithmetic: all operands are codes, and no sum starts from an output,
/// which may be subnormal.
fn takes_pairs(a: Matrix<'_>, b: Matrix<'_>, epilogue: &Epilogue<'_>) -> bool {
    a.has_codes() && b.has_codes() && !epilogue.starts_from_output()
}

#[expect(clippy::too_many_arguments, reason = "what callers decide, and what tests vary")]
fn matmul_on(
    vectors: Vectors,
    op: &'static str,
    [m, n, k]: [usize; 3],
    a: Matrix<'_>,
    b: Matrix<'_>,
    epilogue: &Epilogue<'_>,
    out: Out<'_>,
    parts: Parts,
    blocks: Blocks,
) -> Result<()> {
    let adds_nothing = k == 0 && epilogue.accumulate && epilogue.bias.is_none();
    if m == 0 || n == 0 || adds_nothing {
        return Ok(());
    }
    debug_assert!(!vectors.has_pairs() || takes_pairs(a, b, epilogue));
    let task = Task::new(op, [m, n, k], a, b, epilogue, &out, blocks);
    debug_assert_eq!(task.packed().is_some(), epilogue.segment().is_some());
    parts.for_each([m, n], |rows, cols| task.run(vectors, rows, cols))
}
