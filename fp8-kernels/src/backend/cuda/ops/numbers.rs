//! The numbers by which kernels know types, as `prelude/types.cuh` reads them.

use crate::{DType, Encoding};

/// The number of an element type.
pub(super) const fn dtype_number(dtype: DType) -> i32 {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        DType::F32 | DType::I32 | DType::U8 => 0,
    }
}

/// The number of a format.
pub(super) const fn format_number(encoding: Encoding) -> i32 {
    match encoding {
        Encoding::E4M3 => 0,
        Encoding::E5M2 => 1,
        Encoding::E2M1 => 2,
    }
}
