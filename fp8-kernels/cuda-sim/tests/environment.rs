//! Settings from the environment, each in a process of its own.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(clippy::print_stdout, reason = "what the child process answers with")]

mod rig;

use std::process::{Command, Output};

use cudarc::driver::{CudaContext, result, sys};
use rig::{code, control, status};

/// Runs `child` below in a new process with these variables.
fn start(variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env("FP8_SIM_TEST_CHILD", "1");
    command.envs(variables.iter().copied()).output().unwrap()
}

/// Says what the device is like; a test of its own only where it is asked to be one.
#[test]
fn child() {
    if std::env::var_os("FP8_SIM_TEST_CHILD").is_none() {
        return;
    }
    let control = control();
    assert_eq!(code(result::device::get_count()), 3, "nothing works before cuInit");
    match CudaContext::new(0) {
        Ok(context) => {
            let [first, second] = [(); 2].map(|()| {
                // SAFETY: left behind on purpose; the report at the end of the process lists it.
                code(unsafe { result::malloc_sync(48) })
            });
            println!(
                "{} of {} bytes, seed {}",
                context.name().unwrap(),
                context.total_mem().unwrap(),
                control.get("seed").unwrap()
            );
            println!("allocations {first} {second}");
            let mut version = 0;
            // SAFETY: the integer lives through the call.
            assert_eq!(status(unsafe { sys::cuDriverGetVersion(&mut version) }), 0);
            println!("driver {version}");
            std::mem::forget(context);
        }
        Err(error) => println!("refused with {}", error.0 as u32),
    }
}

fn texts(output: &Output) -> (String, String) {
    assert!(output.status.success(), "{output:?}");
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn variables_shape_the_device() {
    let set = [
        ("FP8_SIM_ARCH", "sm_120"),
        ("FP8_SIM_DRIVER", "12040"),
        ("FP8_SIM_MEMORY", "65536"),
        ("FP8_SIM_SEED", "5"),
        ("FP8_SIM_FAIL", "cuMemAlloc_v2:2:2"),
        ("FP8_SIM_LEAKS", "1"),
    ];
    let (out, err) = texts(&start(&set));
    assert!(out.contains("PTX interpreter (sm_120) of 65536 bytes, seed 5"), "{out}");
    assert!(out.contains("allocations 0 2"), "{out}");
    assert!(out.contains("driver 12040"), "{out}");
    assert!(
        err.contains("live at exit") && err.contains("48 bytes: allocation 1 (cuMemAlloc, 48 bytes)"),
        "{err}"
    );
}

#[test]
fn a_value_that_cannot_be_read_fails_the_start_and_is_named() {
    for (name, value) in [
        ("FP8_SIM_ARCH", "hopper"),
        ("FP8_SIM_DRIVER", "12.4"),
        ("FP8_SIM_DRIVER", "12004"),
        ("FP8_SIM_DRIVER", "124"),
        ("FP8_SIM_MEMORY", "2GiB"),
        ("FP8_SIM_SEED", "-1"),
        ("FP8_SIM_EAGER", "yes"),
        ("FP8_SIM_RACES", "2"),
        ("FP8_SIM_FAIL", "cuNothing:1:1"),
    ] {
        let (out, err) = texts(&start(&[(name, value)]));
        assert!(out.contains("refused with 999"), "{name}: {out}");
        assert_eq!(err.matches(name).count(), 1, "{name} once: {err}");
    }
}
