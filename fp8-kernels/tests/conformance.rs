//! One suite over all backends: a table of cases times a table of backends.
//!
//! A backend that is absent is ignored with its reason, and counted. `cargo test --test conformance -- cpu::norm` runs
//! the cases of one operation on one backend.

#[path = "conformance/mod.rs"]
mod cases;
mod oracle;

use fp8_kernels::{Device, Result};
use libtest_mimic::{Arguments, Trial};

struct Backend {
    name: &'static str,
    open: fn() -> Result<Device>,
}

const BACKENDS: [Backend; 2] =
    [Backend { name: "cpu", open: || Ok(Device::cpu()) }, Backend { name: "cuda", open: || Device::cuda(0) }];

fn main() {
    let args = Arguments::from_args();
    let mut trials = Vec::new();
    for backend in &BACKENDS {
        let device = (backend.open)();
        for case in cases::ALL.iter().copied().flatten() {
            let name = format!("{}::{}", backend.name, case.path());
            trials.push(match &device {
                Ok(device) => {
                    let (device, run) = (device.clone(), case.run);
                    Trial::test(name, move || run(&device))
                }
                Err(reason) => Trial::test(format!("{name} ({reason})"), || Ok(())).with_ignored_flag(true),
            });
        }
    }
    libtest_mimic::run(&args, trials).exit();
}
