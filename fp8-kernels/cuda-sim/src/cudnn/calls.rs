//! The C functions.

use core::ffi::{c_char, c_int};
use std::collections::BTreeMap;
use std::sync::Arc;

use super::answers::Choice;
use super::attributes::{self, DESCRIPTOR, INT64};
use super::evaluate::{Bound, Evaluation};
use super::finalize::finalize;
use super::graph::{Graph, Tensor, Type};
use super::objects::{Descriptor, Made};
use super::version::version;
use crate::code::{self, Code, Outcome};
use crate::entry::entries;
use crate::ffi::{Array, Host, Out};
use crate::state::{self, Driver};
use crate::work::Work;

const LIBRARY: u64 = 10;
const OBJECT: u64 = 11;

fn refuse<T>(driver: &mut Driver, code: Code, why: impl Into<String>) -> Outcome<T> {
    driver.dnn.message = why.into();
    Err(code)
}

/// cuDNN documentation, cudnnStatus_t: CUDNN_STATUS_BAD_PARAM_NULL_POINTER.
fn given<T>(outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|_| Code::DNN_NULL_POINTER)
}

entries! {
    Nothing fn cudnnCreate(handle: Out<u64>) |driver| {
        let handle = given(handle.checked())?;
        // CUDNN_STATUS_NOT_INITIALIZED: the driver or the context failed.
        if version() == 0 || driver.context.is_none() || driver.dead.is_some() {
            return refuse(driver, Code::DNN_NOT_INITIALIZED, "no context");
        }
        let fresh = driver.handle(LIBRARY);
        driver.dnn.handles.insert(fresh, 0);
        given(handle.set(fresh))
    }

    Nothing fn cudnnDestroy(handle: u64) |driver| {
        driver.dnn.handles.remove(&handle).map(drop).ok_or(Code::DNN_BAD_PARAM)
    }

    Nothing fn cudnnSetStream(handle: u64, stream: u64) |driver| {
        let known = driver.context().is_ok_and(|context| context.queue.find(stream).is_ok());
        match driver.dnn.handles.get_mut(&handle) {
            Some(place) if known => {
                *place = stream;
                Ok(())
            }
            _ => refuse(driver, Code::DNN_BAD_PARAM, "no such handle or stream"),
        }
    }

    Nothing fn cudnnBackendCreateDescriptor(kind: c_int, descriptor: Out<u64>) |driver| {
        let descriptor = given(descriptor.checked())?;
        if !attributes::is_kind(kind) {
            return refuse(driver, Code::DNN_NOT_SUPPORTED, format!("descriptor type {kind}"));
        }
        let fresh = driver.handle(OBJECT);
        driver.dnn.descriptors.insert(fresh, Descriptor { kind, values: BTreeMap::new(), made: None });
        given(descriptor.set(fresh))
    }

    Nothing fn cudnnBackendDestroyDescriptor(descriptor: u64) |driver| {
        driver.dnn.descriptors.remove(&descriptor).map(drop).ok_or(Code::DNN_BAD_PARAM)
    }

    Nothing fn cudnnBackendSetAttribute(
        descriptor: u64, attribute: c_int, kind: c_int, count: i64, from: Host,
    ) |driver| {
        let Some(object) = driver.dnn.descriptors.get(&descriptor) else {
            return refuse(driver, Code::DNN_BAD_PARAM, "no such descriptor");
        };
        // "the descriptor pointed to by the descriptor parameter is already finalized".
        if object.made.is_some() {
            return refuse(driver, Code::DNN_BAD_PARAM, format!("attribute {attribute}: finalized before"));
        }
        let of = object.kind;
        let Some((expected, most)) = attributes::expected(of, attribute) else {
            return refuse(driver, Code::DNN_BAD_PARAM, format!("descriptor type {of} has no attribute {attribute}"));
        };
        if kind != expected {
            return refuse(driver, Code::DNN_ATTRIBUTE_TYPE, format!("attribute {attribute}: type {kind}"));
        }
        let Some(count) = usize::try_from(count).ok().filter(|_| (1..=most).contains(&count)) else {
            return refuse(driver, Code::DNN_BAD_PARAM, format!("attribute {attribute}: {count} values"));
        };
        let values = attributes::read(kind, count, from)?;
        if let Some(object) = driver.dnn.descriptors.get_mut(&descriptor) {
            object.values.insert(attribute, values);
        }
        Ok(())
    }

    Nothing fn cudnnBackendGetAttribute(
        descriptor: u64, attribute: c_int, kind: c_int, room: i64, count: Out<i64>, to: Host,
    ) |driver| {
        let count = given(count.checked())?;
        let made = driver.dnn.descriptors.get(&descriptor).map(|object| object.made.clone());
        match (made, attribute, kind) {
            (None, ..) => refuse(driver, Code::DNN_BAD_PARAM, "no such descriptor"),
            (Some(None), ..) => refuse(driver, Code::DNN_NOT_FINALIZED, format!("attribute {attribute}")),
            // EXECUTION_PLAN: WORKSPACE_SIZE.
            (Some(Some(Made::Plan { workspace, .. })), 402, INT64) if room >= 1 => {
                given(to.write(&workspace.to_ne_bytes()))?;
                given(count.set(1))
            }
            // ENGINEHEUR: RESULTS, into descriptors that the caller has made.
            (Some(Some(Made::Heuristics(graph))), 202, DESCRIPTOR) if room >= 1 => {
                let into = given(Array::<u64>::at(to).take(1))?[0];
                match driver.dnn.descriptors.get_mut(&into) {
                    Some(object) if object.kind == 3 && object.made.is_none() => {
                        object.made = Some(Made::Configuration { graph, choice: Choice::Heuristics });
                        given(count.set(1))
                    }
                    _ => refuse(driver, Code::DNN_BAD_PARAM, "results go into new engine configurations"),
                }
            }
            _ => refuse(driver, Code::DNN_BAD_PARAM, format!("attribute {attribute} of type {kind} cannot be read")),
        }
    }

    Nothing fn cudnnBackendFinalize(descriptor: u64) |driver| {
        let arch = driver.settings.arch.number();
        finalize(&mut driver.dnn, descriptor, version(), arch)
    }

    Nothing fn cudnnBackendExecute(handle: u64, plan: u64, pack: u64) |driver| {
        // CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER: an error from the device.
        driver.expect_healthy().map_err(|_| Code::DNN_EXECUTION_FAILED)?;
        let Some(stream) = driver.dnn.handles.get(&handle).copied() else {
            return refuse(driver, Code::DNN_BAD_PARAM, "no such handle");
        };
        let made = |handle: u64| driver.dnn.descriptors.get(&handle).and_then(|object| object.made.clone());
        let (Some(Made::Plan { graph, workspace }), Some(Made::Pack { ids, pointers, workspace: at })) =
            (made(plan), made(pack))
        else {
            return refuse(driver, Code::DNN_NOT_FINALIZED, "a plan and a variant pack");
        };
        let bound = bind(driver, &graph, &ids, &pointers)?;
        let context = driver.context().map_err(|_| Code::DNN_EXECUTION_FAILED)?;
        if workspace > 0 && !context.blocks.holds(at, workspace) {
            return refuse(driver, Code::DNN_BAD_PARAM, "the workspace is smaller than the plan's");
        }
        let id = context.queue.find(stream).map_err(|_| Code::DNN_BAD_PARAM)?;
        let work = Evaluation { graph, bound, workspace: (at, workspace) };
        driver.submit(id, Work::Evaluation(Box::new(work))).map_err(|_| Code::DNN_EXECUTION_FAILED)
    }
}

/// The addresses and numbers of a graph's tensors: all of those that are not virtual, and no others.
fn bind(
    driver: &mut Driver,
    graph: &Arc<Graph>,
    ids: &[i64],
    pointers: &[u64],
) -> Outcome<BTreeMap<i64, Bound>> {
    let needed = |tensor: &&Tensor| !tensor.is_virtual;
    if let Some(id) = ids.iter().find(|id| graph.tensor(**id).is_none_or(|tensor| tensor.is_virtual)) {
        return refuse(
            driver,
            Code::DNN_BAD_PARAM,
            format!("the pack has a tensor {id} that the graph has not"),
        );
    }
    let mut all = BTreeMap::new();
    for tensor in graph.tensors.iter().filter(needed) {
        let Some(place) = ids.iter().position(|id| *id == tensor.id) else {
            return refuse(driver, Code::DNN_BAD_PARAM, format!("the pack lacks tensor {}", tensor.id));
        };
        let pointer = pointers[place];
        if pointer == 0 {
            return refuse(driver, Code::DNN_NULL_POINTER, format!("tensor {}", tensor.id));
        }
        let bound = if tensor.is_number {
            let host = Host::at(pointer as usize);
            let bytes = given(Array::<[u8; 4]>::at(host).take(1))?[0];
            Bound::Number(match tensor.kind {
                Type::F32 => f32::from_le_bytes(bytes),
                Type::I32 => i32::from_le_bytes(bytes) as f32,
                _ => return refuse(driver, Code::DNN_NOT_SUPPORTED, "a number of this type"),
            })
        } else {
            if !pointer.is_multiple_of(tensor.alignment) {
                return refuse(driver, Code::DNN_MISALIGNED, format!("tensor {}", tensor.id));
            }
            if !driver.context().is_ok_and(|context| context.blocks.holds(pointer, 1)) {
                return refuse(
                    driver,
                    Code::DNN_BAD_PARAM,
                    format!("tensor {} is not on the device", tensor.id),
                );
            }
            Bound::Address(pointer)
        };
        all.insert(tensor.id, bound);
    }
    Ok(all)
}

/// Not framed as the others are: it answers with the version itself.
#[unsafe(no_mangle)]
extern "C" fn cudnnGetVersion() -> usize {
    // The environment is read with the state.
    drop(state::driver());
    version()
}

/// Not framed as the others are: it answers with a pointer and touches no state.
#[unsafe(no_mangle)]
extern "C" fn cudnnGetErrorString(status: c_int) -> *const c_char {
    code::dnn_text(status).as_ptr()
}

/// Not framed as the others are: it has no status.
#[unsafe(no_mangle)]
extern "C" fn cudnnGetLastErrorString(message: Out<c_char>, room: usize) {
    let text = state::driver().dnn.message.clone();
    let _ = message.set_text(&text, room);
}
