//! `emulation` on the CPU, which multiplies scales of every kind.

use crate::fp8_tensor::Sharing;
use crate::ops::Emulation;

pub(crate) const fn emulation(_: [Sharing; 2]) -> Option<Emulation> {
    None
}
