//! Stands in for Transformer Engine's core library where there is neither a GPU nor that library: the functions that the
//! GPU bundle measures, by loops over the CPU's memory, with checks of types and shapes such as the library makes.
//!
//! A check that fails ends the process and says why, as an uncaught C++ exception does. `FP8_STAND_IN_FAILS` names a
//! function whose checks fail, `FP8_STAND_IN_WRONG` one that computes something else.

#![allow(clippy::too_many_arguments, reason = "the library's functions have as many")]

mod casts;
mod norms;
mod tensors;
mod training;

use std::ffi::c_void;
use std::io::Write;
use std::{env, process};

type Stream = *mut c_void;

fn fail(message: &str) -> ! {
    let exception = "terminate called after throwing an instance of 'std::runtime_error'";
    let _ = writeln!(std::io::stderr(), "{exception}\n  what():  {message}");
    process::abort()
}

fn check(is_right: bool, message: &str) {
    if !is_right {
        fail(message);
    }
}

/// Ends the process if `FP8_STAND_IN_FAILS` names this function. Every function calls it first.
fn enter(function: &str) {
    check(env::var("FP8_STAND_IN_FAILS").as_deref() != Ok(function), &format!("{function} was told to fail"));
}

fn is_to_be_wrong(function: &str) -> bool {
    env::var("FP8_STAND_IN_WRONG").as_deref() == Ok(function)
}

/// Returns the values that a function computed, or others if `FP8_STAND_IN_WRONG` names the function.
fn result(function: &str, mut values: Vec<f32>) -> Vec<f32> {
    if is_to_be_wrong(function) {
        values.iter_mut().for_each(|value| *value = 1.0 - *value);
    }
    values
}
