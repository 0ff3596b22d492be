//! A matrix product as cuBLASLt is asked for it: extents, layouts and types, and the addresses of one call.

use super::cublaslt::Type;
use crate::DType;

/// The alignment in bytes that the library assumes of matrices unless a smaller one is given.
pub(super) const ALIGNMENT: u64 = 256;
/// `cublasLtReductionScheme_t`: sums of split products are added up in f32, in the workspace; or in place, which is in the
/// output's type, where that is f32.
const REDUCTIONS_IN_F32: u64 = 2;
const REDUCTIONS_IN_PLACE: u64 = 1;

/// The arrangement of an FP8 or FP4 operand's factors: `cublasLtMatmulMatrixScale_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum FactorLayout {
    /// One f32.
    Tensor = 0,
    /// E4M3 for 16 values of k of an FP4 operand, in tiles of 128 rows by 4 blocks.
    Vec16 = 1,
    /// E8M0 for 32 values of k, in tiles of 128 rows by 4 blocks.
    Vec32 = 2,
    /// An f32 for each row.
    Outer = 3,
    /// An f32 for 128 values of k: `[blocks of k, rows]`.
    Vec128 = 4,
    /// An f32 for 128 rows of 128 values of k, row by row, rows filled up to a multiple of four.
    Tile128 = 5,
}

impl FactorLayout {
    /// The type of the factors of a `[rows, k]` operand, and how many there are with their padding.
    pub(crate) fn size(self, rows: usize, k: usize) -> (DType, usize) {
        match self {
            Self::Tensor => (DType::F32, 1),
            Self::Vec16 => (DType::U8, rows.next_multiple_of(128) * k.div_ceil(16).next_multiple_of(4)),
            Self::Vec32 => (DType::U8, rows.next_multiple_of(128) * k.div_ceil(32).next_multiple_of(4)),
            Self::Outer => (DType::F32, rows),
            Self::Vec128 => (DType::F32, k.div_ceil(128) * rows),
            Self::Tile128 => (DType::F32, rows.div_ceil(128) * k.div_ceil(128).next_multiple_of(4)),
        }
    }

    /// Returns the byte of a factor of 1, or `None` where factors are f32.
    pub(super) const fn one(self) -> Option<u8> {
        match self {
            Self::Vec16 => Some(0x38),
            Self::Vec32 => Some(127),
            Self::Tensor | Self::Outer | Self::Vec128 | Self::Tile128 => None,
        }
    }

    /// Returns the name of the layout in a file of results. It is empty for one factor.
    const fn name(self) -> &'static str {
        match self {
            Self::Tensor => "",
            Self::Vec16 => " vec16",
            Self::Vec32 => " vec32",
            Self::Outer => " outer",
            Self::Vec128 => " vec128",
            Self::Tile128 => " tile128",
        }
    }
}

/// A kind of product: what a plan is made for. Row-major. Whether it replaces `y` or adds to it is no part of it: the same kernels do
/// both, so that a recorded step finds the plans of eager ones, whichever of the two those did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    /// `y` is `[m, n]`.
    pub(crate) m: usize,
    pub(crate) n: usize,
    /// The number of products in a sum.
    pub(crate) k: usize,
    /// Stored as `[k, m]`, not `[m, k]`.
    pub(crate) left_transposed: bool,
    /// Stored as `[n, k]`, not `[k, n]`.
    pub(crate) right_transposed: bool,
    pub(crate) left: Type,
    pub(crate) right: Type,
    /// The layouts of the left operand's factors and of the right one's.
    pub(crate) factors: [FactorLayout; 2],
    pub(crate) out: Type,
    /// Added to each row, in this type.
    pub(crate) bias: Option<Type>,
    /// `y = … + C`, where C is another matrix of the output's type and extents.
    pub(crate) addend: bool,
    /// Fewer bits in sums.
    pub(crate) fast: bool,
    /// The sums are multiplied by an f32 on the device.
    pub(crate) device_alpha: bool,
}

/// Addresses of one call, 0 for what the product does not have, and whether it adds to its output.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Places {
    pub(crate) left: u64,
    pub(crate) right: u64,
    pub(crate) out: u64,
    pub(crate) addend: u64,
    pub(crate) bias: u64,
    /// Factors of FP8 and FP4 operands.
    pub(crate) left_scale: u64,
    pub(crate) right_scale: u64,
    /// The scale of an FP8 output, and where its amax goes.
    pub(crate) out_scale: u64,
    pub(crate) out_amax: u64,
    /// The f32 that the sums are multiplied by, for products with [`device_alpha`](Product::device_alpha).
    pub(crate) alpha: u64,
    /// `y += …`, for products without an addend.
    pub(crate) accumulate: bool,
}

impl Places {
    /// The largest power of two up to [`ALIGNMENT`] that divides the addresses of all matrices and of the bias.
    pub(super) fn alignment(&self) -> u64 {
        let all = self.left | self.right | self.out | self.addend | self.bias | ALIGNMENT;
        1 << all.trailing_zeros()
    }
}

impl Product {
    /// `[m, k] · [k, n], E4M3 × E4M3 → bf16, fast`.
    pub(super) fn describe(&self) -> String {
        let Self { m, n, k, left, right, factors, out, addend, fast, device_alpha, .. } = self;
        let [left_factors, right_factors] = factors.map(FactorLayout::name);
        let bias = self.bias.map_or_else(String::new, |bias| format!(", {} bias", bias.name()));
        let (left, right, out) = (left.name(), right.name(), out.name());
        let addend = if *addend { ", addend" } else { "" };
        let fast = if *fast { ", fast" } else { "" };
        let alpha = if *device_alpha { ", alpha on the device" } else { "" };
        format!(
            "[{m}, {k}] · [{k}, {n}], {left}{left_factors} × {right}{right_factors} → {out}{addend}{bias}{fast}{alpha}"
        )
    }

    /// Returns the name of the product in a file of results. It contains everything that decides which kernels there are.
    pub(super) fn name(&self) -> String {
        let Self { m, n, k, left_transposed, right_transposed, left, right, .. } = self;
        let Self { factors, out, bias, addend, fast, device_alpha, .. } = self;
        let [left_factors, right_factors] = factors.map(FactorLayout::name);
        let sign = |transposed: &bool| if *transposed { "t" } else { "n" };
        let flag = |on: &bool, name: &'static str| if *on { name } else { "" };
        format!(
            "{m}x{n}x{k} {}{} {}{left_factors} {}{right_factors} {}{}{}{}{}",
            sign(left_transposed),
            sign(right_transposed),
            left.name(),
            right.name(),
            out.name(),
            bias.map_or_else(String::new, |bias| format!(" bias {}", bias.name())),
            flag(addend, " addend"),
            flag(fast, " fast"),
            flag(device_alpha, " alpha"),
        )
    }

    /// Whether the operands have factors.
    pub(super) fn has_factors(&self) -> bool {
        self.left.has_factors()
    }

    /// Returns the ways to add up split products that round no partial sum.
    pub(super) fn reductions(&self) -> u64 {
        REDUCTIONS_IN_F32 | if self.out == Type::F32 { REDUCTIONS_IN_PLACE } else { 0 }
    }

    /// An FP8 output's C, which is never read, must be of a wider type: the bias's.
    pub(super) fn c_type(&self) -> Type {
        if self.out.is_fp8() { self.bias.unwrap_or(Type::Bf16) } else { self.out }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_for_the_alignment_of_all_matrices_and_the_bias() {
        let aligned = Places { left: 0x1000, right: 0x2100, out: 0x300, ..Places::default() };
        assert_eq!(aligned.alignment(), 256);
        // One f32 each: where they are makes no difference.
        let factors =
            Places { left_scale: 4, right_scale: 8, out_scale: 12, out_amax: 20, alpha: 28, ..aligned };
        assert_eq!(factors.alignment(), 256);
        assert_eq!(Places { bias: 0x4010, ..aligned }.alignment(), 16);
        assert_eq!(Places { addend: 0x4020, ..aligned }.alignment(), 32);
        assert_eq!(Places { left: 0x1002, ..aligned }.alignment(), 2);
        assert_eq!(Places { out: 0x1001, ..aligned }.alignment(), 1);
    }

    #[test]
    fn factors_of_sixteen_values_fill_tiles() {
        let size = |rows, k| FactorLayout::Vec16.size(rows, k);
        assert_eq!(size(1, 16), (DType::U8, 512));
        assert_eq!(size(128, 64), (DType::U8, 512));
        assert_eq!(size(129, 65), (DType::U8, 2048));
        assert_eq!((FactorLayout::Vec16 as i32, Type::E2m1.number()), (1, 33));
        // Two codes a byte.
        assert_eq!([0, 1, 2, 33].map(|count| Type::E2m1.bytes(count)), [0, 1, 1, 17]);
        assert_eq!([Type::F32, Type::Bf16, Type::F16, Type::E5m2].map(|kind| kind.bytes(3)), [12, 6, 6, 3]);
    }

    #[test]
    fn an_alpha_on_the_device_is_part_of_a_products_name() {
        let product = Product {
            m: 8,
            n: 16,
            k: 32,
            left_transposed: false,
            right_transposed: true,
            left: Type::E2m1,
            right: Type::E2m1,
            factors: [FactorLayout::Vec16; 2],
            out: Type::Bf16,
            bias: None,
            addend: false,
            fast: false,
            device_alpha: true,
        };
        assert_eq!(product.name(), "8x16x32 nt E2M1 vec16 E2M1 vec16 bf16 alpha");
        assert_eq!(
            product.describe(),
            "[8, 32] · [32, 16], E2M1 vec16 × E2M1 vec16 → bf16, alpha on the device"
        );
        let on_host = Product { device_alpha: false, ..product };
        assert_eq!(on_host.name(), "8x16x32 nt E2M1 vec16 E2M1 vec16 bf16");
        assert!(product.has_factors() && product.c_type() == Type::Bf16);
    }
}
