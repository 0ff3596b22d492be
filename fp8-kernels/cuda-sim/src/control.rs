//! The exported control functions, as a test program reaches them: `fp8_sim_set` and `fp8_sim_get`.
//!
//! | `fp8_sim_set` | value |
//! |---|---|
//! | `seed` | as `FP8_SIM_SEED`; queued work runs first, and the seed's sequence starts anew |
//! | `cublas`, `cudnn`, `eager`, `memory_limit`, `sm_count`, `nccl_shared`, `races`, `stub` | as the variables `FP8_SIM_…` |
//! | `arch` | as `FP8_SIM_ARCH`; only while no context is retained |
//! | `fail` | `name:count:code,…`: the count-th call of `name` from now on returns `code` |
//! | `clear_fail`, `reset_calls` | ignored; the latter forgets `calls`, `kernels` and `launches` |
//! | `product_times` | `5000,4000,9000;10`: nanoseconds that a product takes by each kernel of cuBLASLt, and nanoseconds that each product adds to all later ones; empty: the usual times |
//! | `snapshot` | the text of a snapshot that NVRTC shall know |
//! | `reset` | ignored; clears error and reports and forgets handles of cuBLASLt, cuDNN, NVRTC and NCCL, refused while a context has anything live |
//!
//! | `fp8_sim_get` | text |
//! |---|---|
//! | `calls` | a line `name count` for every function called |
//! | `kernels` | a line for every kernel launched |
//! | `launches` | a line `kernel count` for every kernel launched |
//! | `products` | a digit for every product that ran since `product_times` was set: the index of its kernel |
//! | `live` | a line for each allocation and pinned block, and for each kind of handle; empty if nothing lives |
//! | `reports` | the errors of the device |
//! | `error` | why the newest `fp8_sim_set` was refused |
//! | `seed` | the seed |

use core::ffi::{c_char, c_int};
use std::fmt::Write;
use std::sync::Once;

use parking_lot::Mutex;

use crate::cublaslt::{Blas, clock};
use crate::cudnn::Dnn;
use crate::ffi::{In, Out};
use crate::queue::Until;
use crate::report;
use crate::state::{self, Driver};

static REFUSAL: Mutex<String> = Mutex::new(String::new());

/// Changes one thing; 0, or 1 with the reason under `fp8_sim_get("error")`.
#[unsafe(no_mangle)]
extern "C" fn fp8_sim_set(key: In, value: In) -> c_int {
    let outcome = match (key.text(), value.text()) {
        (Ok(key), Ok(value)) => set(&mut state::driver(), &key, &value),
        _ => Err("key and value are UTF-8 texts".into()),
    };
    match outcome {
        Ok(()) => 0,
        Err(why) => {
            *REFUSAL.lock() = why;
            1
        }
    }
}

/// Stores as much of the text as `room` holds, with a NUL; answers with the room the whole text needs, 0 for an unknown key.
#[unsafe(no_mangle)]
extern "C" fn fp8_sim_get(key: In, text: Out<c_char>, room: usize) -> usize {
    let Ok(key) = key.text() else { return 0 };
    let Some(all) = get(&state::driver(), &key) else { return 0 };
    // A null or empty buffer asks for the size.
    let _ = text.set_text(&all, room);
    all.len() + 1
}

fn set(driver: &mut Driver, key: &str, value: &str) -> Result<(), String> {
    match key {
        "arch" if driver.context.is_some() => {
            return Err("arch: a context is retained: drop it first".into());
        }
        "arch" | "cublas" | "cudnn" | "memory_limit" | "sm_count" | "eager" | "nccl_shared" | "races"
        | "stub" | "fp4_bias" => driver.settings.set(key, value)?,
        "seed" => {
            drain(driver, key)?;
            driver.settings.set(key, value)?;
            driver.reseed();
        }
        "fail" => driver.calls.plan(value)?,
        "clear_fail" => driver.calls.clear_faults(),
        "reset_calls" => driver.calls.reset_counts(),
        "product_times" => clock::set(value).map_err(|why| format!("product_times: {why}"))?,
        "snapshot" => driver.compiler.give(value)?,
        "reset" => reset(driver)?,
        _ => return Err(format!("no control of the name {key}")),
    }
    Ok(())
}

fn get(driver: &Driver, key: &str) -> Option<String> {
    Some(match key {
        "calls" => driver.calls.text(),
        "kernels" => driver.calls.kernels(),
        "launches" => driver.calls.launches(),
        "products" => clock::products(),
        "live" => live(driver),
        "reports" => driver.reports.join("\n"),
        "error" => REFUSAL.lock().clone(),
        "seed" => driver.settings.seed.to_string(),
        _ => return None,
    })
}

/// Lists what is live now and what was left in released contexts.
fn live(driver: &Driver) -> String {
    let mut text: String = driver.leaked.iter().map(|line| format!("{line}\n")).collect();
    if let Some(context) = &driver.context {
        text += &context.live();
    }
    if driver.communicators.count() > 0 {
        let _ = writeln!(text, "communicators {}", driver.communicators.count());
    }
    text += &driver.blas.live();
    text += &driver.dnn.live();
    if driver.compiler.programs() > 0 {
        let _ = writeln!(text, "programs {}", driver.compiler.programs());
    }
    text
}

fn reset(driver: &mut Driver) -> Result<(), String> {
    drain(driver, "reset")?;
    let live = driver.context.as_ref().map(|context| context.live()).unwrap_or_default();
    if !live.is_empty() {
        return Err(format!("reset: still live:\n{live}"));
    }
    driver.dead = None;
    driver.reports.clear();
    driver.leaked.clear();
    driver.blas = Blas::default();
    driver.dnn = Dnn::default();
    driver.compiler.forget_programs();
    driver.communicators.forget();
    driver.reseed();
    Ok(())
}

/// Runs what is queued, so that the next order starts from nothing.
fn drain(driver: &mut Driver, key: &str) -> Result<(), String> {
    if driver.dead.is_some() || driver.context.is_none() {
        return Ok(());
    }
    driver.drive(Until::Everything).map_err(|code| format!("{key}: queued work failed with {}", code.0))
}

unsafe extern "C" {
    /// libc: registers a function for the process's normal end.
    safe fn atexit(function: extern "C" fn()) -> c_int;
}

/// Arranges for the leak report at the process's end, once.
pub(crate) fn watch_exit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // No room for another function only loses the report.
        let _ = atexit(at_exit);
    });
}

extern "C" fn at_exit() {
    let Some(driver) = state::driver_at_exit() else { return };
    if driver.settings.leaks {
        let live = live(&driver);
        if !live.is_empty() {
            report::print(&format!("live at exit:\n{live}"));
        }
    }
}
