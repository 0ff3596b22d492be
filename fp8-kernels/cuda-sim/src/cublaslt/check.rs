//! Checks whether the library accepts a product.

use super::types::{Layout, Operation, ScaleMode, Type};
use crate::code::{Code, Outcome};
use crate::device::Arch;
use crate::settings::Settings;

/// Epilogues: the plain one, and a bias of one value a row of D.
const DEFAULT: u32 = 1;
const BIAS: u32 = 4;

/// A product that was found to be allowed: D, `m` by `n`, from `k` products each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// A, B, C, D.
    pub(super) types: [Type; 4],
    pub(super) bias: Option<Type>,
}

/// Refuses what cublasLtMatmul's documentation refuses, pointers aside.
pub(super) fn check(settings: &Settings, operation: &Operation, layouts: [&Layout; 4]) -> Outcome<Shape> {
    let arch = settings.arch;
    for layout in layouts {
        // cublasLtMatrixLayoutCreate: the leading dimension is at least the number of rows; a matrix of no elements has
        // none that a kernel could read.
        let fits = u64::try_from(layout.ld).is_ok_and(|ld| ld >= layout.rows);
        if !fits || layout.rows == 0 || layout.cols == 0 {
            return Err(Code::BLAS_INVALID_VALUE);
        }
    }
    let [a, b, c, d] = layouts;
    let flip = |layout: &Layout, flipped: bool| {
        if flipped { (layout.cols, layout.rows) } else { (layout.rows, layout.cols) }
    };
    let ((m, k), (kb, n)) = (flip(a, operation.transposed[0]), flip(b, operation.transposed[1]));
    if k != kb || (d.rows, d.cols) != (m, n) || (c.rows, c.cols) != (m, n) {
        return Err(Code::BLAS_INVALID_VALUE);
    }
    let mut types = [Type::F32; 4];
    for (kind, layout) in types.iter_mut().zip(layouts) {
        *kind = Type::from_number(layout.kind)?;
    }
    expect_types(types)?;
    let [ta, tb, _, td] = types;
    if ta.is_fp8() || tb.is_fp8() {
        expect_fp8(arch, operation, layouts)?;
    }
    if ta == Type::E2m1 {
        expect_fp4(operation, layouts, types)?;
    }
    // CUBLASLT_MATMUL_DESC_D_SCALE_POINTER and AMAX_D_POINTER: for an output in FP8 alone.
    if !td.is_fp8() && (operation.scales[3] != 0 || operation.amax_d != 0) {
        return Err(Code::BLAS_NOT_SUPPORTED);
    }
    if operation.modes != [ScaleMode::Scalar; 2] || ta == Type::E2m1 {
        expect_scale_modes(arch, operation, types)?;
    }
    let bias = match operation.epilogue {
        DEFAULT => None,
        // NVIDIA/CUDALibrarySamples issue 303: no kernel that adds a bias to a product of FP4 operands, on some GPUs.
        BIAS if ta == Type::E2m1 && !settings.fp4_bias => return Err(Code::BLAS_NOT_SUPPORTED),
        BIAS => Some(bias_type(operation, types)?),
        _ => return Err(Code::BLAS_NOT_SUPPORTED),
    };
    let size = |count: u64| usize::try_from(count).map_err(|_| Code::BLAS_INVALID_VALUE);
    Ok(Shape { m: size(m)?, n: size(n)?, k: size(k)?, types, bias })
}

/// The table of types of cublasLtMatmul for CUBLAS_COMPUTE_32F. For FP8 inputs: "A and B … one of them may be E5M2", not
/// both; C in bf16 or f16 where D is in FP8. For FP4 inputs only the outputs that NVFP4 is known to have are simulated: bf16 and f32.
fn expect_types([a, b, c, d]: [Type; 4]) -> Outcome {
    use Type::{Bf16, E2m1, E4m3, E5m2, F16, F32};
    let is_listed = match (a, b) {
        (E4m3, E4m3) | (E4m3, E5m2) | (E5m2, E4m3) => {
            (c == d && !d.is_fp8()) || (d == E4m3 && matches!(c, Bf16 | F16)) || {
                // D in E5M2: one input in E5M2.
                d == E5m2 && matches!(c, Bf16 | F16) && (a, b) != (E4m3, E4m3)
            }
        }
        (E2m1, E2m1) => c == d && matches!(d, Bf16 | F32),
        (Bf16, Bf16) => c == d && matches!(d, Bf16 | F32),
        (F16, F16) => c == d && matches!(d, F16 | F32),
        (F32, F32) => c == d && d == F32,
        _ => false,
    };
    if is_listed { Ok(()) } else { Err(Code::BLAS_NOT_SUPPORTED) }
}

/// cublasLtMatmul, "To use FP8 kernels, the following set of requirements must be satisfied": "All matrix dimensions must
/// meet the optimal requirements listed in Tensor Core Usage (i.e. pointers and matrix dimension must support 16-byte
/// alignment)"; "A must be transposed and B non-transposed (The "TN" format)" on compute capability 8.9, 9.0 and 12.0;
/// "The compute type must be CUBLAS_COMPUTE_32F"; "The scale type must be CUDA_R_32F".
fn expect_fp8(arch: Arch, operation: &Operation, layouts: [&Layout; 4]) -> Outcome {
    let any_layout = matches!(arch.number(), 100..120 | 130..);
    if !any_layout && operation.transposed != [true, false] {
        return Err(Code::BLAS_NOT_SUPPORTED);
    }
    for layout in layouts {
        if !layout.rows.is_multiple_of(16) || !layout.cols.is_multiple_of(16) || layout.ld % 16 != 0 {
            return Err(Code::BLAS_NOT_SUPPORTED);
        }
    }
    Ok(())
}

/// cublasLtMatmul for FP4, as for FP8 but for the layout, which is "TN" on every GPU. "Tensor Core Usage" says what 16 bytes mean for
/// packed codes: rows of A and B, of k codes, and columns of C and D, of m elements, begin at multiples of 16 bytes. So k is a multiple
/// of 32, and so are the leading dimensions of A and B; those of C and D have whole 16 bytes. m is a multiple of 8, of f32, too: what
/// bf16 needs. No row and no column has n elements, so n is free.
fn expect_fp4(operation: &Operation, [a, b, c, d]: [&Layout; 4], [_, _, tc, td]: [Type; 4]) -> Outcome {
    if operation.transposed != [true, false] {
        return Err(Code::BLAS_NOT_SUPPORTED);
    }
    let inputs = [a, b].iter().all(|layout| layout.rows.is_multiple_of(32) && layout.ld % 32 == 0);
    let outputs = [(c, tc), (d, td)].iter().all(|(layout, kind)| {
        let elements = 128 / kind.bits() as i64;
        layout.rows.is_multiple_of(8) && layout.ld % elements == 0
    });
    if inputs && outputs { Ok(()) } else { Err(Code::BLAS_NOT_SUPPORTED) }
}

/// cuBLAS documentation, "1D and 2D Block Scaling" and cublasLtMatmulMatrixScale_t: OUTER_VEC_32F and the modes of 128 on compute
/// capability 9.0, VEC32_UE8M0 and VEC16_UE4M3 from 10.0 on; pairs of outer vectors, of MX blocks, and of 1D blocks with 1D or 2D ones,
/// but not two 2D ones. VEC16_UE4M3 is for two FP4 operands, which have no other mode. Outputs are not FP8. The sums of blocks are not made with fast accumulation. Only operands whose blocks are along memory
/// ("TN") are simulated.
fn expect_scale_modes(arch: Arch, operation: &Operation, [a, b, _, d]: [Type; 4]) -> Outcome {
    use ScaleMode::{Outer, Tile128, Vec16, Vec32, Vec128};
    let has_modes = match operation.modes {
        [Outer, Outer] => arch.number() == 90,
        [Vec128, Vec128 | Tile128] | [Tile128, Vec128] => arch.number() == 90 && !operation.fast,
        [Vec16, Vec16] | [Vec32, Vec32] => arch.number() >= 100 && !operation.fast,
        _ => false,
    };
    let has_types = match operation.modes {
        [Vec16, _] => a == Type::E2m1 && b == Type::E2m1,
        _ => a.is_fp8() && b.is_fp8() && !d.is_fp8(),
    };
    if has_modes && has_types && operation.transposed == [true, false] {
        Ok(())
    } else {
        Err(Code::BLAS_NOT_SUPPORTED)
    }
}

/// CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE and the tables of types: bf16 for outputs in bf16, f32 and FP8 of FP8 and FP4 inputs, f16
/// for f16 of FP8 inputs; else the type of D.
fn bias_type(operation: &Operation, [a, _, c, d]: [Type; 4]) -> Outcome<Type> {
    let wanted = match d {
        Type::F32 if a.has_factors() => Type::Bf16,
        Type::E4m3 | Type::E5m2 => c,
        d => d,
    };
    match operation.bias_type.map(Type::from_number).transpose()? {
        Some(given) if given != wanted => Err(Code::BLAS_NOT_SUPPORTED),
        _ => Ok(wanted),
    }
}
