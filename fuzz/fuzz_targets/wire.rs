//! Any bytes from a connection between ranks: frames and requests, or an error. Nothing panics, and lengths that lie cost no memory.
#![no_main]

use fp8_dist::fuzzing::{frames, request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    frames(bytes);
    request(bytes);
});
