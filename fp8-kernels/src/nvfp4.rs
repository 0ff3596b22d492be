//! The rule of NVFP4: which blocks, which copies, and how codes are rounded.

use crate::fp8_tensor::Sharing;
use crate::{DType, Device, DropoutDraw, Error, Result, Shape, Tensor};
use fp8_format::Blocks;

/// The quantization of one tensor to NVFP4: 4-bit codes, a scale in E4M3 for each block of 16, and a factor of the whole tensor.
///
/// The columnwise copy of 1 × 16 blocks is quantized from the source along the other dimension; that of 16 × 16 blocks is the
/// transpose. The codec is that of [`quantize_nvfp4`](fp8_format::slice::quantize_nvfp4).
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Nvfp4Rule, Scale, Slot, Tensor, ops};
/// let slot = Slot { scale: Scale::Nvfp4(Nvfp4Rule::default()), ..Slot::off(Encoding::E2M1) };
/// let x = Tensor::from_vec(vec![10.5f32, 1.75, -1.0, 0.0], [1, 4], &Device::cpu())?;
/// let x4 = ops::quantize(&x, &slot)?;
/// assert_eq!(x4.dequantize(DType::F32)?.to_vec::<f32>()?, [10.5, 1.75, -0.875, 0.0]); // codes 6, 1, -0.5 and 0
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Nvfp4Rule<'a> {
    /// The elements that share a scale: [`Blocks::B1x16`] or [`Blocks::B16x16`]. Default: `B1x16`.
    pub blocks: Blocks,
    /// Whether each 16 rows of the columnwise copy are mixed by a Hadamard transform. Such a copy is multiplied with such a copy
    /// alone. It needs 1 × 16 blocks. Default: false.
    pub hadamard: bool,
    /// The amaxes of the whole tensor of which this is a part, f32 `[2]`: of the rowwise and of the columnwise copy, as
    /// [`ops::nvfp4_amax`](crate::ops::nvfp4_amax) returns them. `None`: the tensor's own, which costs a second read. Default: `None`.
    pub amax: Option<&'a Tensor>,
    /// The random numbers of codes that are rounded stochastically, which needs 1 × 16 blocks. `None`: to nearest. Default: `None`.
    pub random: Option<StochasticRounding<'a>>,
}

impl Default for Nvfp4Rule<'_> {
    fn default() -> Self {
        Self { blocks: Blocks::B1x16, hadamard: false, amax: None, random: None }
    }
}

/// The random numbers of stochastic rounding, and the place of the tensor in the whole whose elements they are numbered by.
///
/// A block of 16 elements takes one counter of Philox: see [`BlockRandom`](fp8_format::philox::BlockRandom). The rowwise copy draws from
/// `draw`, the columnwise one from the next mask, `draw.mask(1)`.
///
/// ```
/// use fp8_kernels::ops::DropoutKey;
/// use fp8_kernels::{DropoutDraw, Nvfp4Rule, StochasticRounding, Device, Encoding, Scale, Slot, Tensor, ops};
/// let draw = DropoutDraw::from(DropoutKey { seed: 1, offset: 0 });
/// let (whole, cpu) = ([64, 32], Device::cpu());
/// let dy = Tensor::from_vec((0..64 * 32).map(|i| (i as f32).sin()).collect(), whole, &cpu)?;
/// let amax = ops::nvfp4_amax(&dy, false)?;
/// let codes = |dy: &Tensor, origin| {
///     let random = Some(StochasticRounding { draw: &draw, origin, whole: Some(whole) });
///     let rule = Nvfp4Rule { amax: Some(&amax), random, ..Nvfp4Rule::default() };
///     let slot = Slot { scale: Scale::Nvfp4(rule), ..Slot::off(Encoding::E2M1) };
///     ops::quantize(dy, &slot)?.as_fp8().map_or(Ok(vec![]), |dy| dy.codes())
/// };
/// // The last rows by themselves have the codes that they have in the whole.
/// let last = ops::rows(&dy, 48..64)?;
/// assert_eq!(codes(&last, [48, 0])?, codes(&dy, [0, 0])?[48 * 16..]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct StochasticRounding<'a> {
    /// The draw.
    pub draw: &'a DropoutDraw,
    /// The row and column of the whole tensor at which this one begins. Multiples of 16.
    pub origin: [usize; 2],
    /// The rows and columns of the whole tensor. `None`: this is the whole.
    pub whole: Option<[usize; 2]>,
}

impl<'a> StochasticRounding<'a> {
    /// Creates the random numbers of a whole tensor.
    pub const fn new(draw: &'a DropoutDraw) -> Self {
        Self { draw, origin: [0; 2], whole: None }
    }

    /// The counters of a copy of a `[rows, cols]` matrix: that of its first block, behind the draw's, and how many a row has.
    pub(crate) fn counters(&self, matrix: [usize; 2], columnwise: bool) -> [u64; 2] {
        let turned = |[row, col]: [usize; 2]| if columnwise { [col, row] } else { [row, col] };
        let ([row, col], [_, cols]) = (turned(self.origin), turned(self.whole.unwrap_or(matrix)));
        let step = cols.div_ceil(16) as u64;
        [(row as u64).wrapping_mul(step).wrapping_add((col / 16) as u64), step]
    }
}

impl Nvfp4Rule<'_> {
    /// Checks what a caller can get wrong.
    pub(crate) fn check(&self, op: &'static str, device: &Device) -> Result<()> {
        let wrong = |option, value: String, remedy: &str| {
            Err(Error::Option { op, option, value, remedy: remedy.to_owned() })
        };
        let blocks = self.blocks;
        if !blocks.is_fp4() {
            return wrong("blocks", blocks.to_string(), "NVFP4 has Blocks::B1x16 or Blocks::B16x16");
        }
        if self.hadamard && blocks != Blocks::B1x16 {
            return wrong("blocks", blocks.to_string(), "a Hadamard transform needs Blocks::B1x16");
        }
        if let Some(amax) = self.amax {
            amax.expect_dtype(op, "amax", DType::F32)?;
            device.expect_same(op, amax.device())?;
            let (lhs, rhs) = (*amax.shape(), Shape::from([2]));
            if lhs != rhs {
                let remedy = "expected the amaxes of the rowwise and of the columnwise copy";
                return Err(Error::Shapes { op, what: "amax", lhs, rhs, remedy });
            }
        }
        let Some(random) = self.random else { return Ok(()) };
        if blocks != Blocks::B1x16 {
            return wrong("blocks", blocks.to_string(), "stochastic rounding needs Blocks::B1x16");
        }
        if let Some(&at) = random.origin.iter().find(|&&at| !at.is_multiple_of(16)) {
            return wrong("origin", at.to_string(), "a part begins at a multiple of 16 rows and columns");
        }
        random.draw.check(op, device)
    }

    /// Returns how the elements of the rowwise and of the columnwise codes share factors.
    pub(crate) const fn sharing(&self) -> [Sharing; 2] {
        let blocks = self.blocks;
        [Sharing::Nvfp4 { blocks, hadamard: false }, Sharing::Nvfp4 { blocks, hadamard: self.hadamard }]
    }
}
