//! Any bytes from a stranger, at a rank 0 that waits for its ranks and at a rank that looks for its rank 0.
#![no_main]

use fp8_dist::fuzzing::{call, hello, visit};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    hello(bytes);
    // The greeting in front lets the rest be heard.
    let greeting = |rank: &[u8]| [b"fp8-dist", &7u32.to_le_bytes()[..], rank, &[5; 32]].concat();
    visit(bytes);
    visit(&[greeting(&[0; 8]), bytes.to_vec()].concat());
    call(bytes);
    call(&[greeting(&[]), bytes.to_vec()].concat());
});
