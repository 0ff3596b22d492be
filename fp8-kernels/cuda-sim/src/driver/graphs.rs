//! Graphs: what a capture gave, made executable and launched.

use core::ffi::c_ulonglong;

use ptx_interp::splitmix64;

use crate::code::Code;
use crate::entry::entries;
use crate::ffi::Out;
use crate::state::Driver;
use crate::work::Work;

/// Tag of executable graphs' handles; graphs themselves are made by cuStreamEndCapture.
const KIND: u64 = 11;

/// A launch inside a graph has an order of its own each time, as any other.
fn reseeded(driver: &mut Driver, mut work: Work) -> Work {
    if let Work::Launch(launch) = &mut work {
        let (seed, serial) = (driver.settings.seed, driver.next_launch());
        launch.seed = if seed == 0 { 0 } else { splitmix64(&mut seed.wrapping_add(serial)) | 1 };
    }
    work
}

entries! {
    // CUDA Driver API, cuGraphInstantiate: flags are four bits; none of them is simulated.
    Context fn cuGraphInstantiateWithFlags(executable: Out<u64>, graph: u64, flags: c_ulonglong) |driver| {
        let executable = executable.checked()?;
        if flags != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let work = driver.context()?.captures.graphs.get(&graph).cloned().ok_or(Code::INVALID_VALUE)?;
        let handle = driver.handle(KIND);
        driver.context()?.captures.executables.insert(handle, work);
        executable.set(handle)
    }

    Context fn cuGraphUpload(executable: u64, stream: u64) |driver| {
        let context = driver.context()?;
        context.queue.find(stream)?;
        context.captures.executables.get(&executable).map(drop).ok_or(Code::INVALID_VALUE)
    }

    // A launch into a stream in capture would be a child graph.
    Context fn cuGraphLaunch(executable: u64, stream: u64) |driver| {
        let context = driver.context()?;
        let id = context.queue.find(stream)?;
        if context.captures.is_capturing(id) {
            return Err(Code::NOT_SUPPORTED);
        }
        let work = context.captures.executables.get(&executable).cloned().ok_or(Code::INVALID_VALUE)?;
        for work in work.iter() {
            let work = reseeded(driver, work.clone());
            driver.context()?.queue.submit(id, work);
        }
        driver.after_submit(id)
    }

    Release fn cuGraphExecDestroy(executable: u64) |driver| {
        driver.context()?.captures.executables.remove(&executable).map(drop).ok_or(Code::INVALID_VALUE)
    }

    Release fn cuGraphDestroy(graph: u64) |driver| {
        driver.context()?.captures.graphs.remove(&graph).map(drop).ok_or(Code::INVALID_VALUE)
    }
}
