//! The rules by which a block's amax becomes its scale, and where scales go.

use crate::arch::blocks::{F32Rule, MxRule, Rule};
use crate::arch::{self, Path};
use crate::traits::Kind;
use crate::{Blocks, E8M0, Encoding, Source};
use half::bf16;

/// The parameters for computing the f32 scales of rows and blocks by Transformer Engine's rules.
///
/// With `max` the largest finite value of the codes, in f32 arithmetic:
///
/// 1. An `amax` below `epsilon` counts as `epsilon`.
/// 2. If it is 0 or infinite, `scale = 1`.
/// 3. Otherwise `scale = max / amax`, and `scale_max` where that overflows.
/// 4. With `power_2_scales`, `scale` is rounded down to a power of two.
/// 5. `scale_inv = 1 / scale`.
///
/// ```
/// use fp8_format::slice::BlockScaling;
/// use fp8_format::{Blocks, Encoding};
///
/// let scaling = BlockScaling::new(Blocks::B1x128);
/// assert!(scaling.power_2_scales); // as in Transformer Engine's Float8BlockScaling
/// assert_eq!(scaling.scale::<f32>(3.0, Encoding::E4M3), 128.0); // from 448 / 3 = 149.3
/// let scaling = BlockScaling { power_2_scales: false, ..scaling };
/// assert_eq!(scaling.scale::<f32>(3.0, Encoding::E4M3), 448.0 / 3.0);
/// assert_eq!(scaling.scale::<f32>(0.0, Encoding::E4M3), 1.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockScaling {
    /// The shape of the blocks whose elements share a scale: `Row`, `B1x128` or `B128x128`. Default: `B1x128`.
    pub blocks: Blocks,
    /// Whether scales are rounded down to powers of two. Default: `true`. [`new`](Self::new) sets it to `false` for `Row`.
    pub power_2_scales: bool,
    /// The least amax: smaller ones count as this one. Default: 0.
    pub epsilon: f32,
    /// The scale where `max / amax` overflows. Default: `None`, which means `f32::MAX` for `Row` and the largest finite value
    /// of the source's type for blocks.
    pub scale_max: Option<f32>,
}

impl Default for BlockScaling {
    fn default() -> Self {
        Self { blocks: Blocks::B1x128, power_2_scales: true, epsilon: 0.0, scale_max: None }
    }
}

impl BlockScaling {
    /// Returns the defaults for these blocks: those of Transformer Engine's `Float8BlockScaling`, and for rows scales that are
    /// not rounded.
    #[must_use]
    pub const fn new(blocks: Blocks) -> Self {
        Self { blocks, power_2_scales: !matches!(blocks, Blocks::Row), epsilon: 0.0, scale_max: None }
    }

    /// Returns the scale of a block of elements of type `S` whose largest magnitude is `amax`. O(1). NaN counts as 0.
    #[must_use]
    pub fn scale<S: Source>(&self, amax: f32, encoding: Encoding) -> f32 {
        self.rule::<S>(encoding).scale(if amax.is_nan() { 0.0 } else { amax })
    }

    pub(super) fn rule<S: Source>(&self, encoding: Encoding) -> F32Rule {
        let scale_max = self.scale_max.unwrap_or(match S::KIND {
            _ if self.blocks == Blocks::Row => f32::MAX,
            Kind::F32 => f32::MAX,
            Kind::F16 => 65504.0,
            Kind::BF16 => bf16::MAX.to_f32(),
        });
        let mask = if self.power_2_scales { 0xFF80_0000 } else { u32::MAX };
        F32Rule { max: encoding.max(), epsilon: self.epsilon, scale_max, mask }
    }
}

/// The rule by which the E8M0 scale of an MX block is computed from its largest magnitude.
///
/// An amax of 0 gives the byte 0, infinity [`E8M0::MAX`].
///
/// ```
/// use fp8_format::slice::MxRounding;
/// use fp8_format::Encoding;
///
/// let amax = 500.0; // between 448, the largest code of E4M3, and 512
/// assert_eq!(MxRounding::Ceil.scale(amax, Encoding::E4M3).to_f32(), 2.0); // codes up to 250
/// assert_eq!(MxRounding::Floor.scale(amax, Encoding::E4M3).to_f32(), 1.0); // 500 saturates to 448
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MxRounding {
    /// `amax · (1 / max)` rounded up to a power of two, with `max` the largest finite code; an f32 product. No element
    /// saturates. torchao calls it RCEIL; Transformer Engine has no other rule. The default.
    #[default]
    Ceil,
    /// 2^(⌊log₂ amax⌋ − emax), with emax the exponent of the largest code: 8 in E4M3, 15 in E5M2, 2 in E2M1. Elements above
    /// 1.75 · 2^⌊log₂ amax⌋ saturate. This is the rule of the OCP MX specification, section 6.3.
    Floor,
}

impl MxRounding {
    /// Returns the scale of a block whose largest magnitude is `amax`. O(1). NaN counts as 0.
    #[must_use]
    pub fn scale(self, amax: f32, encoding: Encoding) -> E8M0 {
        self.rule(encoding).scale(if amax.is_nan() { 0.0 } else { amax })
    }

    pub(super) fn rule(self, encoding: Encoding) -> MxRule {
        match (self, encoding) {
            (Self::Ceil, _) => MxRule::Ceil { factor: 1.0 / encoding.max() },
            (Self::Floor, Encoding::E4M3) => MxRule::Floor { emax: 8 },
            (Self::Floor, Encoding::E5M2) => MxRule::Floor { emax: 15 },
            (Self::Floor, Encoding::E2M1) => MxRule::Floor { emax: 2 },
        }
    }
}

/// The number of scales that are computed together.
pub(super) const GROUP: usize = 64;

/// The destination of the scales and amaxes of one direction.
pub(super) struct Scales<'a> {
    pub(super) factors: Factors<'a>,
    pub(super) amax: Option<&'a mut [f32]>,
}

pub(super) enum Factors<'a> {
    F32 { rule: F32Rule, scale_inv: &'a mut [f32], scale: Option<&'a mut [f32]> },
    Mx { rule: MxRule, scales: &'a mut [E8M0] },
}

impl Scales<'_> {
    /// Computes the scales of blocks and stores them from `first` on, `step` apart. `factors` receives what the blocks'
    /// elements are multiplied by.
    pub(super) fn set(&mut self, path: Path, [first, step]: [usize; 2], amaxes: &[f32], factors: &mut [f32]) {
        for (group, (amaxes, factors)) in amaxes.chunks(GROUP).zip(factors.chunks_mut(GROUP)).enumerate() {
            let first = first + group * GROUP * step;
            match &mut self.factors {
                Factors::F32 { rule, scale_inv, scale } => {
                    let mut inverses = [0.0; GROUP];
                    let inverses = &mut inverses[..amaxes.len()];
                    arch::scales(path, rule, amaxes, factors, inverses);
                    scatter(inverses, scale_inv, [first, step]);
                    if let Some(scale) = scale {
                        scatter(factors, scale, [first, step]);
                    }
                }
                Factors::Mx { rule, scales } => {
                    let mut bytes = [E8M0::ONE; GROUP];
                    let bytes = &mut bytes[..amaxes.len()];
                    arch::mx_scales(path, *rule, amaxes, factors, bytes);
                    scatter(bytes, scales, [first, step]);
                }
            }
            if let Some(amax) = &mut self.amax {
                scatter(amaxes, amax, [first, step]);
            }
        }
    }

    /// Stores the scales of `count` blocks without elements.
    pub(super) fn set_empty(&mut self, path: Path, count: usize) {
        for first in (0..count).step_by(GROUP) {
            let here = GROUP.min(count - first);
            self.set(path, [first, 1], &[0.0; GROUP][..here], &mut [0.0; GROUP][..here]);
        }
    }

    /// Returns the rule by which amaxes become scales.
    pub(super) fn rule(&self) -> Rule {
        match &self.factors {
            Factors::F32 { rule, .. } => Rule::F32(*rule),
            Factors::Mx { rule, .. } => Rule::Mx(*rule),
        }
    }
}

#[cfg(feature = "rayon")]
impl<'a> Scales<'a> {
    /// The first `count` scales, and the others.
    pub(super) fn split(self, count: usize) -> (Self, Self) {
        fn split<T>(all: Option<&mut [T]>, at: usize) -> (Option<&mut [T]>, Option<&mut [T]>) {
            all.map(|all| all.split_at_mut(at)).unzip()
        }
        let (low, high) = match self.factors {
            Factors::F32 { rule, scale_inv, scale } => {
                let (low, high) = scale_inv.split_at_mut(count);
                let (low_scale, high_scale) = split(scale, count);
                (
                    Factors::F32 { rule, scale_inv: low, scale: low_scale },
                    Factors::F32 { rule, scale_inv: high, scale: high_scale },
                )
            }
            Factors::Mx { rule, scales } => {
                let (low, high) = scales.split_at_mut(count);
                (Factors::Mx { rule, scales: low }, Factors::Mx { rule, scales: high })
            }
        };
        let (low_amax, high_amax) = split(self.amax, count);
        (Self { factors: low, amax: low_amax }, Self { factors: high, amax: high_amax })
    }
}

/// Stores elements from `first` on, `step` apart.
fn scatter<T: Copy>(src: &[T], dst: &mut [T], [first, step]: [usize; 2]) {
    if step == 1 {
        dst[first..first + src.len()].copy_from_slice(src);
    } else {
        for (x, place) in src.iter().zip(dst[first..].iter_mut().step_by(step)) {
            *place = *x;
        }
    }
}
