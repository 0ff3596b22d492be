//! Small products of f32 operands that are in the first caches: the micro-kernel reads them as they are.

use super::available::Pairs;
use super::lanes::{Job, Lanes};
use super::path::CpuPath;
use super::tile::{self, Left, Right, Rows, Sums};
use crate::Result;

/// A matrix whose element (i, p) is `data[i · row + p · step]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strided<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row: usize,
    pub(crate) step: usize,
}

/// A product `a[m, k] · b[k, n]` on the calling thread.
#[derive(Debug)]
pub(crate) struct Unpacked<'a> {
    /// m, n, k.
    pub(crate) dims: [usize; 3],
    pub(crate) a: Strided<'a>,
    /// Row-major, with rows of n values or more.
    pub(crate) b: &'a [f32],
    pub(crate) b_stride: usize,
    /// Row-major, with rows of n values or more.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
    /// Whether sums start from what `out` holds.
    pub(crate) accumulate: bool,
}

/// Computes the product with the bits of [`matmul`](super::matmul).
///
/// # Errors
/// An `FP8_CPU_PATH` that this CPU does not have.
pub(crate) fn product(product: Unpacked<'_>) -> Result<()> {
    let [m, n, k] = product.dims;
    if m == 0 || n == 0 {
        return Ok(());
    }
    // Not reachable from the operations, which check shapes; it keeps the loads and stores below sound on their own.
    let last = |rows: usize, stride: usize, cols: usize, step: usize| {
        let (row, col) = ((rows - 1).checked_mul(stride), (cols - 1).checked_mul(step));
        row.zip(col).and_then(|(row, col)| row.checked_add(col))
    };
    let fits = |last: Option<usize>, len: usize| last.is_some_and(|last| last < len);
    let Strided { data, row, step } = product.a;
    assert!(fits(last(m, product.out_stride, n, 1), product.out.len()));
    assert!(k == 0 || fits(last(m, row, k, step), data.len()));
    assert!(k == 0 || fits(last(k, product.b_stride, n, 1), product.b.len()));
    CpuPath::current()?.vectors(Pairs::Never).run(product)
}

/// Rows of `b` whose last columns are copied at a time.
const STEPS: usize = 64;
/// Most values of a vector.
const WIDEST: usize = 16;
/// Most rows of a tile.
const HIGHEST: usize = 12;

impl Job for Unpacked<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Result<()> {
        let Self { dims: [m, n, k], a, b, b_stride, out, out_stride, accumulate } = self;
        let a = Left { words: a.data.as_ptr().cast(), row: a.row, step: a.step };
        let out = out.as_mut_ptr();
        let row_of =
            |a: Left, i: usize, p: usize| Left { words: a.words.wrapping_add(i * a.row + p * a.step), ..a };
        let mut j = 0;
        while n - j >= L::WIDTH {
            let vectors = if n - j >= 2 * L::WIDTH { 2 } else { 1 };
            let b = Right { words: b[j.min(b.len())..].as_ptr().cast(), step: b_stride };
            let mut i = 0;
            while i < m {
                let rows = tile::height::<L>(m - i);
                let out = Rows { first: out.wrapping_add(i * out_stride + j), stride: out_stride };
                let sums = Sums { initial: accumulate.then_some(out), out, canonical: true };
                // SAFETY: rows i … i + rows and columns j … j + vectors · WIDTH are in the matrices, whose last elements are in their
                // slices; `out` is borrowed uniquely. Without steps neither `a` nor `b` is read.
                unsafe { tile::tile(lanes, [rows, vectors], k, row_of(a, i, 0), b, sums) };
                i += rows;
            }
            j += vectors * L::WIDTH;
        }
        if j == n {
            return Ok(());
        }
        // The last columns, which are no whole vector: copied next to zeros.
        let (count, mut p) = (n - j, 0);
        let mut panel = [0.0; STEPS * WIDEST];
        let mut tile = [0.0; HIGHEST * WIDEST];
        loop {
            let steps = STEPS.min(k - p);
            for (step, row) in panel.chunks_exact_mut(L::WIDTH).take(steps).enumerate() {
                row[..count].copy_from_slice(&b[(p + step) * b_stride + j..][..count]);
            }
            let b = Right { words: panel.as_ptr().cast(), step: L::WIDTH };
            let starts_from_zero = p == 0 && !accumulate;
            let mut i = 0;
            while i < m {
                let rows = tile::height::<L>(m - i);
                for (row, tile) in tile.chunks_exact_mut(L::WIDTH).take(rows).enumerate() {
                    let out = out.wrapping_add((i + row) * out_stride + j);
                    for (column, value) in tile[..count].iter_mut().enumerate() {
                        // SAFETY: column j + column < n of row i + row < m of `out`.
                        *value = if starts_from_zero { 0.0 } else { unsafe { *out.wrapping_add(column) } };
                    }
                }
                let local = Rows { first: tile.as_mut_ptr(), stride: L::WIDTH };
                let sums = Sums { initial: Some(local), out: local, canonical: true };
                // SAFETY: `a` has these rows and steps; the panel has `steps` rows of one vector, and `tile` room for the tile.
                unsafe { tile::tile(lanes, [rows, 1], steps, row_of(a, i, p), b, sums) };
                for (row, tile) in tile.chunks_exact(L::WIDTH).take(rows).enumerate() {
                    let out = out.wrapping_add((i + row) * out_stride + j);
                    for (column, value) in tile[..count].iter().enumerate() {
                        // SAFETY: as for the other direction.
                        unsafe { *out.wrapping_add(column) = *value };
                    }
                }
                i += rows;
            }
            p += steps;
            if p == k {
                return Ok(());
            }
        }
    }
}

/// Copies `[rows, cols]` to `[cols, rows]`: `to[j · to_stride + i] = from[i · from_stride + j]`.
///
/// # Errors
/// An `FP8_CPU_PATH` that this CPU does not have.
pub(crate) fn transpose(
    [rows, cols]: [usize; 2],
    from: &[f32],
    from_stride: usize,
    to: &mut [f32],
    to_stride: usize,
) -> Result<()> {
    struct Transpose<'a>([usize; 2], &'a [f32], usize, &'a mut [f32], usize);
    impl Job for Transpose<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Result<()> {
            let Self([rows, cols], from, from_stride, to, to_stride) = self;
            for i in (0..rows).step_by(L::WIDTH) {
                for j in (0..cols).step_by(L::WIDTH) {
                    let (from, to) = (&from[i * from_stride + j..], &mut to[j * to_stride + i..]);
                    let (height, width) = (L::WIDTH.min(rows - i), L::WIDTH.min(cols - j));
                    if (height, width) == (L::WIDTH, L::WIDTH) {
                        let last = L::WIDTH - 1;
                        assert!(last * from_stride + last < from.len() && last * to_stride + last < to.len());
                        let (from, to) = (from.as_ptr().cast(), to.as_mut_ptr().cast());
                        // SAFETY: the last words of the block are in the slices, as was just checked, so all are.
                        unsafe { lanes.transpose(from, from_stride, to, to_stride) };
                        continue;
                    }
                    for i in 0..height {
                        for j in 0..width {
                            to[j * to_stride + i] = from[i * from_stride + j];
                        }
                    }
                }
            }
            Ok(())
        }
    }
    CpuPath::current()?.vectors(Pairs::Never).run(Transpose([rows, cols], from, from_stride, to, to_stride))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Floats;
    use crate::backend::cpu::matmul::{Elements, Epilogue, Matrix, Out, matmul_serial};

    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| draw()).collect()
    }

    /// All shapes, operands either way, against the packed product.
    #[test]
    fn the_bits_are_those_of_the_packed_product() {
        let sizes = [1, 2, 7, 12, 15, 16, 17, 24, 31, 33, 48, 64, 67, 70];
        for (m, n, k) in sizes.iter().flat_map(|&m| sizes.iter().flat_map(move |&n| sizes.map(|k| (m, n, k))))
        {
            let (mut a, mut b, c) = (values(m * k, 1), values(k * n, 2), values(m * n, 3));
            a[m * k / 2] = [f32::NAN, f32::INFINITY, 1e-42, 0.5][k % 4];
            b[k * n / 3] = [0.0, f32::NEG_INFINITY, -1e-40][n % 3];
            let transposed: Vec<f32> = (0..m * k).map(|at| a[at % m * k + at / m]).collect();
            let elements = |data| Elements::Floats(Floats::F32(data));
            for accumulate in [false, true] {
                let mut want = c.clone();
                let epilogue = Epilogue { accumulate, ..Epilogue::default() };
                let (left, right) = (Matrix::along_k(elements(&a), k), Matrix::across_k(elements(&b), n));
                matmul_serial("test", [m, n, k], left, right, &epilogue, Out::f32(&mut want)).unwrap();
                for a in
                    [Strided { data: &a, row: k, step: 1 }, Strided { data: &transposed, row: 1, step: m }]
                {
                    let mut got = c.clone();
                    let (b, out) = (&b, &mut got);
                    product(Unpacked { dims: [m, n, k], a, b, b_stride: n, out, out_stride: n, accumulate })
                        .unwrap();
                    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&got), bits(&want), "{m} {n} {k} {accumulate}");
                }
            }
        }
    }

    #[test]
    fn a_transpose_moves_every_element_and_writes_no_other() {
        for (rows, cols) in (1..40).flat_map(|rows| (1..40).map(move |cols| (rows, cols))) {
            let (from_stride, to_stride) = (cols + rows % 3, rows + cols % 4);
            let from = values(rows * from_stride, 1);
            let mut to = vec![7.0; cols * to_stride];
            transpose([rows, cols], &from, from_stride, &mut to, to_stride).unwrap();
            for (at, value) in to.into_iter().enumerate() {
                let (j, i) = (at / to_stride, at % to_stride);
                let want = if i < rows { from[i * from_stride + j] } else { 7.0 };
                assert_eq!(value, want, "{rows} {cols}: {j}, {i}");
            }
        }
    }

    #[test]
    fn a_product_beyond_its_slices_is_not_computed() {
        let (data, far) = ([1.0; 4], usize::MAX / 2);
        for (dims, row, b_stride, out_stride) in [
            ([2, 1, 4], 1, 1, 1),
            ([1, 4, 2], 1, 1, 1),
            ([3, 2, 1], 1, 1, 2),
            ([5, 1, 1], far, 1, 0),
            ([1, 1, 5], 0, far, 0),
        ] {
            let computed = std::panic::catch_unwind(|| {
                let a = Strided { data: &data, row, step: 1 };
                let out = &mut [0.0; 4];
                product(Unpacked { dims, a, b: &data, b_stride, out, out_stride, accumulate: false })
            });
            assert!(computed.is_err(), "{dims:?}");
        }
    }
}
