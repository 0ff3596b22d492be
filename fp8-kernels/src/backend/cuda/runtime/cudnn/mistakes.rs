//! Mistakes planted in the graphs of attention: the simulated cuDNN evaluates what it is given, so each gives another result than
//! the CPU, or a graph that the real library has no kernel for.

use super::attention::{Attention, Direction, Element, Layout, Lengths, Mask, Sums};
use super::describe::Target;
use super::graph::{Graph, Number, Operation, Place, Storage};
use super::library::Cudnn;
use super::numbers::{Mode, Reduce};
use super::plan::{Choice, Plan};
use crate::backend::Backend;
use crate::ops::{self, Diagonal, ScoreOptions, Sequences};
use crate::{CudaOptions, DType, Device, Tensor};
use fp8_cuda_sim::{Control, library_path};
use std::collections::HashMap;

const BATCH: usize = 2;
const HEADS: usize = 4;
const GROUPS: usize = 2;
const QUERIES: usize = 24;
const KEYS: usize = 40;
const HEAD: usize = 64;

/// One kind of call, and what the CPU says it gives.
struct Subject {
    call: Attention,
    sequences: fn(&Device) -> Sequences,
    options: ScoreOptions<'static>,
}

fn subject(direction: Direction, mask: Mask, lengths: Lengths) -> Subject {
    let (own, other) = (Layout::dense(QUERIES, HEADS, HEAD), Layout::dense(KEYS, GROUPS, HEAD));
    let call = Attention {
        direction,
        element: Element::Bf16,
        batch: BATCH,
        heads: HEADS,
        groups: GROUPS,
        queries: QUERIES,
        keys: KEYS,
        head_dim: HEAD,
        mask,
        lengths,
        q: own,
        k: other,
        v: other,
        o: own,
        dq: own,
        dk: other,
        dv: other,
        dy: own,
        stats_head: QUERIES as i64,
        stats_batch: (HEADS * QUERIES) as i64,
    };
    let options = ScoreOptions {
        causal: mask.causal,
        window: (mask.left.map(|left| left as usize), None),
        diagonal: if mask.bottom_right { Diagonal::BottomRight } else { Diagonal::TopLeft },
        ..Default::default()
    };
    let sequences: fn(&Device) -> Sequences = match lengths {
        Lengths::Padded => |device| {
            let list = |values: [i32; BATCH]| Tensor::from_vec(values.to_vec(), [BATCH], device).unwrap();
            Sequences::Padded { queries: Some(list(QUERY_LENGTHS)), keys: Some(list(KEY_LENGTHS)) }
        },
        Lengths::All | Lengths::Packed => |_| Sequences::Full,
    };
    Subject { call, sequences, options }
}

const QUERY_LENGTHS: [i32; BATCH] = [24, 9];
const KEY_LENGTHS: [i32; BATCH] = [17, 40];

/// The graph that a mistake is planted in.
#[derive(Clone, Copy, PartialEq)]
enum In {
    Forward(Mask, Lengths),
    Backward(Mask, Lengths),
}

const FULL: Mask = Mask { causal: false, left: None, bottom_right: false };
const CAUSAL: Mask = Mask { causal: true, ..FULL };
const WINDOW: Mask = Mask { left: Some(11), ..FULL };
const BOTTOM_RIGHT: Mask = Mask { bottom_right: true, ..CAUSAL };

fn direction_of(place: In) -> (Direction, Mask, Lengths) {
    match place {
        In::Forward(mask, lengths) => (Direction::Forward, mask, lengths),
        In::Backward(mask, lengths) => (Direction::Backward(Sums::InMemory), mask, lengths),
    }
}

type Plant = fn(&mut Graph);

/// A mistake by name, where it is planted, and how.
const MISTAKES: [(&str, In, Plant); 16] = [
    ("heads and rows of q exchanged", In::Forward(CAUSAL, Lengths::All), |graph| {
        at(graph, Place::Query, |tensor| tensor.strides.swap(1, 2));
    }),
    ("a stride of v that is one head short", In::Forward(FULL, Lengths::All), |graph| {
        at(graph, Place::Value, |tensor| tensor.strides[2] -= HEAD as i64);
    }),
    ("k not transposed", In::Forward(FULL, Lengths::All), |graph| {
        at(graph, Place::Key, |tensor| tensor.strides = [5120, 40, 1, 40]);
    }),
    ("a causal mask that hides a query's own key", In::Forward(CAUSAL, Lengths::All), |graph| {
        modes(graph, Mode::GreaterOrEqual, Mode::Greater);
    }),
    ("a window that is one key wider", In::Forward(WINDOW, Lengths::All), |graph| {
        numbers(graph, |number| {
            if let Number::F32(reach) = number
                && reach.is_finite()
            {
                *reach += 1.0
            }
        });
    }),
    ("a diagonal that is one key to the right", In::Forward(BOTTOM_RIGHT, Lengths::All), |graph| {
        numbers(graph, |number| {
            if let Number::I32(KEYS_I32) = number {
                *number = Number::I32(KEYS_I32 + 1)
            }
        });
    }),
    ("no scale", In::Forward(CAUSAL, Lengths::All), |graph| {
        at(graph, Place::Scale, |tensor| tensor.storage = Storage::Number(Number::F32(1.0)));
    }),
    ("a group's head for the next group", In::Forward(FULL, Lengths::All), |graph| {
        at(graph, Place::Key, |tensor| tensor.strides[1] = 0);
    }),
    ("lengths of queries and keys exchanged", In::Forward(FULL, Lengths::Padded), |graph| {
        swap(graph, Place::QueryLengths, Place::KeyLengths);
    }),
    ("products with padded keys", In::Forward(FULL, Lengths::Padded), |graph| {
        for operation in &mut graph.operations {
            if let Operation::Matmul { real: real @ [_, None, Some(_)], .. } = operation {
                real[2] = None;
            }
        }
    }),
    ("statistics of the wrong sign", In::Backward(CAUSAL, Lengths::All), |graph| {
        let stats = graph.tensors.iter().position(|tensor| tensor.storage == Storage::At(Place::Stats));
        for operation in &mut graph.operations {
            if let Operation::Pointwise { mode, b: Some(b), .. } = operation
                && Some(b.unique()) == stats.map(|index| index as i64 + 1)
            {
                *mode = Mode::Add;
            }
        }
    }),
    ("dk and dv exchanged", In::Backward(CAUSAL, Lengths::All), |graph| {
        swap(graph, Place::KeyGradient, Place::ValueGradient);
    }),
    ("probabilities not transposed", In::Backward(FULL, Lengths::All), |graph| {
        for operation in graph.operations.clone() {
            if let Operation::Reshape { y, .. } = operation {
                let tensor = &mut graph.tensors[y.unique() as usize - 1];
                tensor.strides = super::graph::dense(tensor.extents);
            }
        }
    }),
    ("the largest of a group's gradients for their sum", In::Backward(CAUSAL, Lengths::All), |graph| {
        for operation in &mut graph.operations {
            if let Operation::Reduction { reduce, y, .. } = operation
                && graph.tensors[y.unique() as usize - 1].storage == Storage::At(Place::ValueGradient)
            {
                *reduce = Reduce::Max;
            }
        }
    }),
    ("sums of dy · dy for those of dy · o", In::Backward(CAUSAL, Lengths::All), |graph| {
        for operation in &mut graph.operations {
            if let Operation::Pointwise { mode: Mode::Mul, x, b: Some(b), .. } = operation
                && graph.tensors[b.unique() as usize - 1].storage == Storage::At(Place::Output)
            {
                *b = *x;
            }
        }
    }),
    ("k's rows for dq one batch entry further", In::Backward(FULL, Lengths::All), |graph| {
        at(graph, Place::Key, |tensor| tensor.strides[0] = 0);
    }),
];

const KEYS_I32: i32 = KEYS as i32;

fn at(graph: &mut Graph, place: Place, plant: impl Fn(&mut super::graph::Tensor)) {
    graph.tensors.iter_mut().filter(|tensor| tensor.storage == Storage::At(place)).for_each(plant);
}

fn numbers(graph: &mut Graph, plant: impl Fn(&mut Number)) {
    for tensor in &mut graph.tensors {
        if let Storage::Number(number) = &mut tensor.storage {
            plant(number);
        }
    }
}

fn modes(graph: &mut Graph, from: Mode, to: Mode) {
    for operation in &mut graph.operations {
        match operation {
            Operation::Pointwise { mode, .. } if *mode == from => *mode = to,
            _ => {}
        }
    }
}

fn swap(graph: &mut Graph, one: Place, other: Place) {
    for tensor in &mut graph.tensors {
        tensor.storage = match tensor.storage {
            Storage::At(place) if place == one => Storage::At(other),
            Storage::At(place) if place == other => Storage::At(one),
            storage => storage,
        };
    }
}

/// The error of the results that a graph gives on the device: `None` if the results are those of the CPU.
fn fault(device: &Device, library: &Cudnn, subject: &Subject, graph: &Graph) -> Option<String> {
    let Backend::Cuda(gpu) = device.backend() else { panic!("a GPU") };
    let cpu = Device::cpu();
    let tensor = |seed: u32, shape: [usize; 4]| {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from((state >> 16) as u16) / 32_768.0 - 1.0
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
        ops::cast(&Tensor::from_vec(values, shape, &cpu).unwrap(), DType::BF16).unwrap()
    };
    let (rows, columns) = ([BATCH, QUERIES, HEADS, HEAD], [BATCH, KEYS, GROUPS, HEAD]);
    let (q, k, v, dy) = (tensor(1, rows), tensor(2, columns), tensor(3, columns), tensor(4, rows));
    let sequences = (subject.sequences)(&cpu);
    let (o, saved) = ops::attention(&q, &k, &v, &sequences, subject.options).unwrap();
    let (dq, dk, dv) =
        ops::attention_backward(&dy, &q, &k, &v, &o, &saved, &sequences, subject.options).unwrap();
    let stats = saved.log_sum_exp().unwrap();
    let is_forward = subject.call.direction == Direction::Forward;

    let list = |values: [i32; BATCH]| Tensor::from_vec(values.to_vec(), [BATCH], device).unwrap();
    let room = |like: &Tensor| Tensor::zeros(*like.shape(), like.dtype(), device).unwrap();
    let there = |x: &Tensor| x.to_device(device).unwrap();
    let wide = |shape: [usize; 4]| Tensor::zeros(shape, DType::F32, device).unwrap();
    let tensors = HashMap::from([
        (Place::Query, there(&q)),
        (Place::Key, there(&k)),
        (Place::Value, there(&v)),
        (Place::OutputGradient, there(&dy)),
        (Place::Output, if is_forward { room(&o) } else { there(&o) }),
        (Place::Stats, if is_forward { room(&stats) } else { there(&stats) }),
        (Place::QueryGradient, room(&dq)),
        (Place::KeyGradient, room(&dk)),
        (Place::ValueGradient, room(&dv)),
        (Place::RowSums, wide([BATCH, HEADS, QUERIES, 1])),
        (Place::QuerySums, wide([BATCH, HEADS, QUERIES, HEAD])),
        (Place::QueryLengths, list(QUERY_LENGTHS)),
        (Place::KeyLengths, list(KEY_LENGTHS)),
    ]);
    let workspace = Tensor::zeros([1024], DType::U8, device).unwrap();
    device.synchronize().unwrap();

    let handle = library.create().unwrap();
    library.set_stream(handle, gpu.raw_stream().cast()).unwrap();
    let planned = Plan::new(library, graph, Choice::Heuristics, Target::Handle(handle));
    let refused = planned.map(|plan| {
        let address =
            |place: Place| tensors.get(&place).map_or(0, |tensor| tensor.cuda("check").unwrap().ptr());
        let scale = 1.0 / (HEAD as f32).sqrt();
        let workspace = workspace.cuda("check").unwrap().ptr();
        // SAFETY: the tensors have the extents of the call; a graph with a mistake runs on the simulated device alone, which
        // checks every access.
        unsafe { plan.run(library, handle, scale, workspace, address) }.unwrap();
    });
    library.destroy(handle);
    if let Err((call, status)) = refused {
        return Some(format!("{call} {status}"));
    }
    if let Err(error) = device.synchronize() {
        return Some(error.to_string());
    }
    let results: Vec<(Place, &Tensor)> = match is_forward {
        true => vec![(Place::Output, &o), (Place::Stats, &stats)],
        false => vec![(Place::QueryGradient, &dq), (Place::KeyGradient, &dk), (Place::ValueGradient, &dv)],
    };
    results.into_iter().find_map(|(place, want)| {
        let (got, want) = (tensors[&place].to_f32_vec().unwrap(), want.to_f32_vec().unwrap());
        // Statistics of padding mean nothing.
        let pairs = || got.iter().zip(&want).filter(|(_, want)| want.is_finite());
        let distance: f64 = pairs().map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>().sqrt();
        let size: f64 = pairs().map(|(_, y)| f64::from(*y).powi(2)).sum::<f64>().sqrt();
        let is_close = distance <= 0.02 * size; // false for NaN
        (!is_close).then(|| format!("{place:?} is {distance} of {size} off"))
    })
}

#[test]
fn every_planted_mistake_is_found() {
    let path = library_path().unwrap();
    let control = Control::open(&path).unwrap();
    control.set("cudnn", "92801").unwrap();
    let options = CudaOptions { library: Some(path.clone()), cudnn: Some(false), ..Default::default() };
    // SAFETY: the simulated driver has no initializers.
    let library = unsafe { libloading::Library::new(&path) }.unwrap();
    let library = Cudnn::new(Box::leak(Box::new(library))).unwrap();
    for (name, place, plant) in MISTAKES {
        // A mistake may kill the device.
        let device = Device::cuda_with_options(&options).unwrap();
        let (direction, mask, lengths) = direction_of(place);
        let subject = subject(direction, mask, lengths);
        let right = subject.call.graph();
        assert_eq!(fault(&device, &library, &subject, &right), None, "without: {name}");
        let mut wrong = right.clone();
        plant(&mut wrong);
        assert_ne!(wrong, right, "{name}: nothing planted");
        let found = fault(&device, &library, &subject, &wrong);
        assert!(found.is_some(), "{name}: not found");
        drop(device);
        control.reset().unwrap();
    }
}
