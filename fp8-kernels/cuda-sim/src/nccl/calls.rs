//! NCCL's C functions.

use core::ffi::{c_char, c_int, c_uint};
use std::cell::Cell;

use super::group::{GROUP, Group};
use super::hub::{Hello, ID_BYTES};
use super::shape::{Kind, OPS, Shape, is_reducible, size};
use crate::code::{self, Code, Outcome};
use crate::entry::entries;
use crate::ffi::{Array, Out};
use crate::report;
use crate::state::Driver;

/// NCCL 2.28.9.
const VERSION: c_int = 22_809;
/// `NCCL_CONFIG_INITIALIZER` of `nccl.h`.
const MAGIC: u32 = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: i32 = i32::MIN;
/// The oldest version with `ncclConfig_t`.
const OLDEST_CONFIG: u32 = 21_400;

/// `ncclUniqueId`, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; ID_BYTES]);

/// The start of `ncclConfig_t`, in all versions.
#[derive(Clone, Copy)]
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

thread_local! {
    /// The communicator of a blocking call that waits for other ranks.
    static FORMING: Cell<Option<u64>> = const { Cell::new(None) };
}

fn invalid<T>(outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|_| Code::NCCL_INVALID_ARGUMENT)
}

/// NCCL User Guide, "Group Calls" and ncclCommGetAsyncError: where a function returned ncclInProgress, "users must query the
/// states of the communicators until all the states become ncclSuccess before calling the next NCCL function".
fn expect_settled(driver: &mut Driver, handle: u64) -> Outcome {
    let is_in_group = GROUP.with_borrow(|group| group.communicators.contains(&handle));
    match driver.communicators.get(handle)?.state() {
        Err(Code::NCCL_IN_PROGRESS) if is_in_group => Ok(()),
        Err(Code::NCCL_IN_PROGRESS) => {
            report::print("nccl: a call on a communicator whose state is ncclInProgress");
            Err(Code::NCCL_INVALID_USAGE)
        }
        state => state,
    }
}

/// A live context is current: ncclUnhandledCudaError, "A call to a CUDA function failed".
fn expect_device(driver: &Driver) -> Outcome {
    driver
        .expect_current()
        .and_then(|()| driver.expect_healthy())
        .map_err(|_| Code::NCCL_UNHANDLED_CUDA_ERROR)
}

fn collective(driver: &mut Driver, handle: u64, shape: Shape, buffers: [u64; 2], stream: u64) -> Outcome {
    let [from, to] = buffers;
    expect_device(driver)?;
    expect_settled(driver, handle)?;
    let known = driver.communicators.get(handle)?;
    // NCCL User Guide, ncclCommFinalize: "once all NCCL operations are complete, the communicator will transition to the
    // ncclSuccess state", after which it takes no more.
    if known.is_finalized() {
        return Err(Code::NCCL_INVALID_USAGE);
    }
    let is_blocking = known.is_blocking;
    let is_in_group = GROUP.with_borrow(|group| group.depth > 0);
    driver.post(handle, shape, [from, to], stream, is_in_group)?;
    GROUP.with_borrow_mut(|group| {
        if is_in_group && !group.communicators.contains(&handle) {
            group.communicators.push(handle);
        }
    });
    match (is_in_group, is_blocking) {
        (true, _) => Ok(()),
        (false, true) => driver.enqueue_posted(handle),
        (false, false) => Err(Code::NCCL_IN_PROGRESS),
    }
}

/// A valid `ncclDataType_t`, else ncclInvalidArgument.
fn moved(kind: Kind, count: usize, dtype: c_int, argument: u32) -> Outcome<Shape> {
    let dtype = u32::try_from(dtype).ok().filter(|&dtype| size(dtype).is_some());
    let dtype = dtype.ok_or(Code::NCCL_INVALID_ARGUMENT)?;
    Ok(Shape { kind, count: count as u64, dtype, argument })
}

/// A valid type and `ncclRedOp_t`; of integers no reduction is simulated.
fn reduced(kind: Kind, count: usize, dtype: c_int, op: c_int) -> Outcome<Shape> {
    let op = u32::try_from(op).ok().filter(|&op| op < OPS).ok_or(Code::NCCL_INVALID_ARGUMENT)?;
    let shape = moved(kind, count, dtype, op)?;
    if !is_reducible(shape.dtype) {
        report::print("nccl: reductions are simulated for ncclFloat16, ncclFloat32 and ncclBfloat16 alone");
        return Err(Code::NCCL_INTERNAL_ERROR);
    }
    Ok(shape)
}

/// One end of a message.
fn message(
    driver: &mut Driver,
    kind: Kind,
    count: usize,
    dtype: c_int,
    peer: c_int,
    handle: u64,
) -> Outcome<Shape> {
    let ranks = driver.communicators.get(handle)?.ranks;
    let peer = u32::try_from(peer).ok().filter(|&peer| (peer as usize) < ranks);
    moved(kind, count, dtype, peer.ok_or(Code::NCCL_INVALID_ARGUMENT)?)
}

/// The `blocking` of a configuration: a null pointer is the default.
fn read_config(config: Array<Config>) -> Outcome<bool> {
    if config.is_null() {
        return Ok(true);
    }
    let taken = invalid(config.take(1))?;
    let Some(config) = taken.first() else { return Err(Code::NCCL_INVALID_ARGUMENT) };
    // NCCL User Guide, ncclConfig_t: it "must be initialized" by NCCL_CONFIG_INITIALIZER; NCCL checks the magic number, and
    // that blocking is 0 or 1: ncclInvalidArgument.
    if config.magic != MAGIC || config.version < OLDEST_CONFIG || config.size < size_of::<Config>() {
        report::print("ncclCommInitRankConfig: a configuration that was not initialized");
        return Err(Code::NCCL_INVALID_ARGUMENT);
    }
    match config.blocking {
        UNDEFINED | 1 => Ok(true),
        0 => Ok(false),
        _ => Err(Code::NCCL_INVALID_ARGUMENT),
    }
}

entries! {
    Nothing fn ncclGetVersion(version: Out<c_int>) |_| {
        invalid(version.set(VERSION))
    }

    Nothing fn ncclGetUniqueId(id: Out<UniqueId>) |driver| {
        let place = invalid(id.checked())?;
        let id = driver.communicators.new_id()?;
        invalid(place.set(UniqueId(id)))
    }

    Nothing fn ncclCommInitRankConfig(
        handle: Out<u64>, ranks: c_int, id: UniqueId, rank: c_int, config: Array<Config>,
    ) |driver| {
        let handle = invalid(handle.checked())?;
        // NCCL User Guide, ncclCommInitRank: "Each rank is associated to a CUDA device, which has to be set before calling".
        expect_device(driver)?;
        let is_blocking = read_config(config)?;
        // "rank must be between 0 and nranks-1": ncclInvalidArgument.
        let (Ok(rank), Ok(ranks)) = (usize::try_from(rank), usize::try_from(ranks)) else {
            return Err(Code::NCCL_INVALID_ARGUMENT);
        };
        if rank >= ranks {
            return Err(Code::NCCL_INVALID_ARGUMENT);
        }
        // A machine is known by NCCL_HOSTID where that is set (NCCL User Guide, "Environment Variables"). Here it may be
        // set by several processes of one machine, which then count as machines.
        let host = std::env::var("NCCL_HOSTID").unwrap_or_else(|_| "this machine".to_owned());
        let gpu = (!driver.settings.nccl_shared).then_some(host);
        // A blocking call may come here again.
        let made = match FORMING.take() {
            Some(made) => made,
            None => {
                let made = driver.new_communicator(&id.0, &Hello { rank, ranks, gpu }, is_blocking)?;
                invalid(handle.set(made))?;
                made
            }
        };
        match driver.communicators.get(made)?.state() {
            _ if !is_blocking => Err(Code::NCCL_IN_PROGRESS),
            Err(Code::NCCL_IN_PROGRESS) => {
                FORMING.set(Some(made));
                Err(Code::STALLED)
            }
            Err(code) => {
                driver.communicators.remove(made, true)?;
                invalid(handle.set(0))?;
                Err(code)
            }
            Ok(()) => Ok(()),
        }
    }

    // NCCL User Guide, ncclCommGetAsyncError: "Queries the progress and potential errors of asynchronous NCCL operations."
    Nothing fn ncclCommGetAsyncError(handle: u64, state: Out<c_int>) |driver| {
        let place = invalid(state.checked())?;
        let found = driver.communicators.get(handle)?.state();
        if found == Err(Code::NCCL_IN_PROGRESS) {
            driver.enqueue_posted(handle)?;
        }
        invalid(place.set(found.err().map_or(0, |code| code.0)))
    }

    // NCCL User Guide, ncclCommFinalize: "the communicator is marked as ncclInProgress […] until all operations are
    // complete".
    Nothing fn ncclCommFinalize(handle: u64) |driver| {
        expect_settled(driver, handle)?;
        let known = driver.communicators.get(handle)?;
        known.finalize();
        match known.state() {
            Err(Code::NCCL_IN_PROGRESS) if known.is_blocking => Err(Code::STALLED),
            state => state,
        }
    }

    // NCCL User Guide, ncclCommDestroy: "ncclCommDestroy only frees the local resources" of a communicator that was
    // finalized, and else finalizes it first.
    Nothing fn ncclCommDestroy(handle: u64) |driver| {
        driver.enqueue_posted(handle)?;
        let known = driver.communicators.get(handle)?;
        known.finalize();
        if known.state() == Err(Code::NCCL_IN_PROGRESS) {
            return Err(Code::STALLED);
        }
        driver.communicators.remove(handle, false)
    }

    // NCCL User Guide, ncclCommAbort: "frees resources that are allocated to a communicator object comm and aborts any
    // uncompleted operations before destroying the communicator".
    Nothing fn ncclCommAbort(handle: u64) |driver| {
        driver.communicators.remove(handle, true)
    }

    Nothing fn ncclAllReduce(
        from: u64, to: u64, count: usize, dtype: c_int, op: c_int, handle: u64, stream: u64,
    ) |driver| {
        collective(driver, handle, reduced(Kind::AllReduce, count, dtype, op)?, [from, to], stream)
    }

    Nothing fn ncclReduceScatter(
        from: u64, to: u64, count: usize, dtype: c_int, op: c_int, handle: u64, stream: u64,
    ) |driver| {
        collective(driver, handle, reduced(Kind::ReduceScatter, count, dtype, op)?, [from, to], stream)
    }

    Nothing fn ncclAllGather(from: u64, to: u64, count: usize, dtype: c_int, handle: u64, stream: u64) |driver| {
        collective(driver, handle, moved(Kind::AllGather, count, dtype, 0)?, [from, to], stream)
    }

    // The root must be a rank: ncclInvalidArgument.
    Nothing fn ncclBroadcast(
        from: u64, to: u64, count: usize, dtype: c_int, root: c_int, handle: u64, stream: u64,
    ) |driver| {
        let ranks = driver.communicators.get(handle)?.ranks;
        let root = u32::try_from(root).ok().filter(|&root| (root as usize) < ranks);
        let root = root.ok_or(Code::NCCL_INVALID_ARGUMENT)?;
        collective(driver, handle, moved(Kind::Broadcast, count, dtype, root)?, [from, to], stream)
    }

    // The peer must be a rank: ncclInvalidArgument.
    Nothing fn ncclSend(from: u64, count: usize, dtype: c_int, peer: c_int, handle: u64, stream: u64) |driver| {
        let shape = message(driver, Kind::Send, count, dtype, peer, handle)?;
        collective(driver, handle, shape, [from, 0], stream)
    }

    Nothing fn ncclRecv(to: u64, count: usize, dtype: c_int, peer: c_int, handle: u64, stream: u64) |driver| {
        let shape = message(driver, Kind::Receive, count, dtype, peer, handle)?;
        collective(driver, handle, shape, [0, to], stream)
    }

    Nothing fn ncclGroupStart() |_| {
        GROUP.with_borrow_mut(|group| group.depth += 1);
        Ok(())
    }

    // NCCL User Guide, ncclGroupEnd: "Returns when all operations since ncclGroupStart have been processed", or
    // ncclInProgress where a communicator does not block. An end without a start is ncclInvalidUsage.
    Nothing fn ncclGroupEnd() |driver| {
        let ended = GROUP.with_borrow_mut(|group| {
            group.depth = group.depth.checked_sub(1)?;
            Some(if group.depth == 0 { std::mem::take(group) } else { Group::default() })
        });
        let Group { communicators, failed, .. } = ended.ok_or(Code::NCCL_INVALID_USAGE)?;
        let mut outcome = Ok(());
        for handle in communicators {
            let known = driver.communicators.get(handle)?;
            known.end_group(failed.is_none());
            if known.is_blocking {
                driver.enqueue_posted(handle)?;
            } else {
                outcome = Err(Code::NCCL_IN_PROGRESS);
            }
        }
        failed.map_or(outcome, Err)
    }
}

/// The text of a status. Not framed as the others are: it answers with a pointer and touches no state.
#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(status: c_int) -> *const c_char {
    code::nccl_text(status).as_ptr()
}

/// The last error in words: here always those of the report on standard error.
#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_handle: u64) -> *const c_char {
    c"see the report of the simulated device".as_ptr()
}
