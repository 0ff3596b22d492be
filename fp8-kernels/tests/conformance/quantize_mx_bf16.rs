//! `quantize` with scales of MX blocks for bf16 matrices that consist of whole tiles, without counters: the kernels for those.

use super::case::{Outcome, cases};
use super::whole_blocks::{self, rules_of};
use fp8_format::Blocks;
use fp8_kernels::{Device, Encoding};

cases![
    several_tiles: Formats,
    special_values: Formats,
    needles: Formats,
    sums: Formats,
];

const BLOCKS: &[Blocks] = &[Blocks::Mx32];

fn several_tiles(device: &Device, encoding: Encoding) -> Outcome {
    whole_blocks::several_tiles(device, encoding, &rules_of(BLOCKS))
}

fn special_values(device: &Device, encoding: Encoding) -> Outcome {
    whole_blocks::special_values(device, encoding, &rules_of(BLOCKS))
}

fn needles(device: &Device, encoding: Encoding) -> Outcome {
    whole_blocks::needles(device, encoding, &rules_of(BLOCKS))
}

fn sums(device: &Device, encoding: Encoding) -> Outcome {
    whole_blocks::sums(device, encoding, &rules_of(BLOCKS))
}
