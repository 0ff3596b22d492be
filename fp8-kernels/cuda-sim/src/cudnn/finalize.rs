//! Finalizing descriptors: what the documentation demands of each kind's attributes.

use std::sync::Arc;

use super::answers::{self, Choice};
use super::graph::{Graph, Mode, Operation, Part, Tensor, Type};
use super::objects::{Descriptor, Dnn, Made, Values};
use crate::code::{Code, Outcome};

/// The object that a descriptor becomes, or the status and what was wrong.
type Finalized<T> = Result<T, (Code, String)>;

fn bad<T>(why: impl Into<String>) -> Finalized<T> {
    Err((Code::DNN_BAD_PARAM, why.into()))
}

/// A descriptor's attributes, with the descriptors that they refer to.
struct Reader<'a> {
    dnn: &'a Dnn,
    descriptor: &'a Descriptor,
}

impl Reader<'_> {
    fn values(&self, attribute: i32) -> Option<&Values> {
        self.descriptor.values.get(&attribute)
    }

    fn ints(&self, attribute: i32) -> Finalized<Vec<i64>> {
        match self.values(attribute) {
            Some(Values::Ints(values)) => Ok(values.clone()),
            _ => bad(format!("attribute {attribute} is not set")),
        }
    }

    fn int(&self, attribute: i32) -> Finalized<i64> {
        self.ints(attribute)?.first().copied().ok_or((Code::DNN_BAD_PARAM, "no value".into()))
    }

    fn number(&self, attribute: i32) -> Finalized<i32> {
        match self.values(attribute) {
            Some(Values::Numbers(values)) if values.len() == 1 => Ok(values[0]),
            _ => bad(format!("attribute {attribute} is not set")),
        }
    }

    fn flag(&self, attribute: i32) -> bool {
        matches!(self.values(attribute), Some(Values::Flags(values)) if values == &[true])
    }

    fn words(&self, attribute: i32) -> Finalized<&[u64]> {
        match self.values(attribute) {
            Some(Values::Words(values)) => Ok(values),
            _ => bad(format!("attribute {attribute} is not set")),
        }
    }

    fn kind(&self, attribute: i32) -> Finalized<Type> {
        let number = self.number(attribute)?;
        Type::from_number(number).ok_or((Code::DNN_NOT_SUPPORTED, format!("data type {number}")))
    }

    /// The finalized descriptors of an attribute.
    fn made(&self, attribute: i32) -> Finalized<Vec<&Made>> {
        let find = |handle: &u64| match self.dnn.descriptors.get(handle) {
            Some(Descriptor { made: Some(made), .. }) => Ok(made),
            Some(_) => Err((Code::DNN_NOT_FINALIZED, format!("attribute {attribute}"))),
            None => bad(format!("attribute {attribute} names no descriptor")),
        };
        self.words(attribute)?.iter().map(find).collect()
    }

    fn one(&self, attribute: i32) -> Finalized<&Made> {
        self.made(attribute)?.first().copied().ok_or((Code::DNN_BAD_PARAM, "no descriptor".into()))
    }

    fn tensor(&self, attribute: i32) -> Finalized<Tensor> {
        match self.one(attribute)? {
            Made::Tensor(tensor) => Ok(tensor.clone()),
            _ => Err((Code::DNN_DESCRIPTOR_TYPE, format!("attribute {attribute} is no tensor"))),
        }
    }

    fn optional(&self, attribute: i32) -> Finalized<Option<Tensor>> {
        self.values(attribute).map(|_| self.tensor(attribute)).transpose()
    }

    fn graph(&self, attribute: i32) -> Finalized<Arc<Graph>> {
        match self.one(attribute)? {
            Made::Graph(graph) => Ok(Arc::clone(graph)),
            _ => Err((Code::DNN_DESCRIPTOR_TYPE, format!("attribute {attribute} is no graph"))),
        }
    }

    fn expect_handle(&self, attribute: i32) -> Finalized<()> {
        match self.words(attribute)?.first() {
            Some(handle) if self.dnn.handles.contains_key(handle) => Ok(()),
            _ => bad("no such library handle"),
        }
    }
}

/// Finalizes a descriptor of a library of this version on a device of this architecture.
pub(super) fn finalize(dnn: &mut Dnn, handle: u64, version: usize, arch: u32) -> Outcome {
    let made = match dnn.descriptors.get(&handle) {
        None => Err((Code::DNN_BAD_PARAM, "no such descriptor".to_owned())),
        Some(descriptor) => make(&Reader { dnn, descriptor }, version, arch),
    };
    match made {
        Ok(made) => {
            if let Some(descriptor) = dnn.descriptors.get_mut(&handle) {
                descriptor.made = Some(made);
            }
            Ok(())
        }
        Err((code, why)) => {
            dnn.message = why;
            Err(code)
        }
    }
}

fn make(of: &Reader<'_>, version: usize, arch: u32) -> Finalized<Made> {
    Ok(match of.descriptor.kind {
        0 => Made::Part(pointwise_part(of)?),
        2 => Made::Engine { graph: of.graph(1300)?, number: of.int(1301)? },
        3 => configuration(of, version, arch)?,
        4 => match of.number(200)? {
            0..=3 => Made::Heuristics(of.graph(201)?),
            mode => return bad(format!("heuristics mode {mode}")),
        },
        5 => {
            of.expect_handle(400)?;
            let Made::Configuration { graph, choice } = of.one(401)? else {
                return Err((Code::DNN_DESCRIPTOR_TYPE, "no engine configuration".into()));
            };
            answers::plan(version, arch, graph, choice).map_err(|refusal| (refusal.code, refusal.why))?;
            Made::Plan { graph: Arc::clone(graph), workspace: answers::WORKSPACE }
        }
        7 => Made::Knob { kind: of.number(600)?, value: of.int(601)? },
        13 => Made::Operation(Box::new(pointwise(of)?)),
        15 => Made::Graph(Arc::new(graph(of)?)),
        16 => pack(of)?,
        17 => Made::Tensor(tensor(of)?),
        18 => {
            of.kind(1500)?;
            let padding = match of.values(1503) {
                Some(Values::Doubles(values)) => values.first().copied(),
                _ => None,
            };
            Made::Part(Part::Matmul { padding })
        }
        19 => Made::Operation(Box::new(matmul(of)?)),
        21 => {
            of.kind(1601)?;
            let is_maximum = match of.number(1600)? {
                0 => false,
                3 => true,
                operator => return Err((Code::DNN_NOT_SUPPORTED, format!("reduction {operator}"))),
            };
            Made::Part(Part::Reduction { is_maximum })
        }
        22 => Made::Operation(Box::new(reduction(of)?)),
        31 => Made::Operation(Box::new(reshape(of)?)),
        kind => return bad(format!("descriptor type {kind}")),
    })
}

/// Tensors of four axes, as attention's are.
fn tensor(of: &Reader<'_>) -> Finalized<Tensor> {
    let four = |attribute: i32, least: i64| -> Finalized<[usize; 4]> {
        let values = of.ints(attribute)?;
        let size = |value: &i64| usize::try_from(*value).ok().filter(|_| *value >= least);
        let values: Option<Vec<usize>> = values.iter().map(size).collect();
        match values.and_then(|values| values.try_into().ok()) {
            Some(four) => Ok(four),
            None => bad(format!("attribute {attribute}: four numbers from {least} on")),
        }
    };
    let (kind, extents, strides) = (of.kind(901)?, four(902, 1)?, four(903, 0)?);
    let (is_virtual, is_number) = (of.flag(907), of.flag(908));
    if is_virtual && is_number {
        return bad("a virtual tensor has no value");
    }
    let alignment = match of.values(900) {
        Some(_) => of.int(900)?,
        None => 1,
    };
    let alignment = match u64::try_from(alignment) {
        Ok(alignment) if alignment.is_power_of_two() => alignment,
        _ => return bad("BYTE_ALIGNMENT is a power of two"),
    };
    let offsets = match of.optional(913)? {
        None => None,
        Some(offsets) => {
            let is_list = offsets.extents == [extents[0] + 1, 1, 1, 1] && offsets.kind == Type::I32;
            if !is_list || offsets.is_virtual || offsets.is_number {
                return bad("ragged offsets: one i32 for each batch entry and one for the end");
            }
            Some(Arc::new(offsets))
        }
    };
    Ok(Tensor { id: of.int(906)?, kind, extents, strides, alignment, is_virtual, is_number, offsets })
}

fn pointwise_part(of: &Reader<'_>) -> Finalized<Part> {
    let number = of.number(0)?;
    let Some(mode) = Mode::from_number(number) else {
        return Err((Code::DNN_NOT_SUPPORTED, format!("pointwise mode {number}")));
    };
    of.kind(1)?;
    let axis = match (mode, of.values(9)) {
        (Mode::Index, Some(_)) => match usize::try_from(of.int(9)?) {
            Ok(axis @ 0..=3) => Some(axis),
            _ => return bad("AXIS is one of four"),
        },
        (Mode::Index, None) => return bad("GEN_INDEX needs AXIS"),
        (_, Some(_)) => return bad("AXIS is for GEN_INDEX"),
        (_, None) => None,
    };
    Ok(Part::Pointwise { mode, number, axis })
}

/// Inputs have the output's extents, or 1.
fn pointwise(of: &Reader<'_>) -> Finalized<Operation> {
    let Made::Part(Part::Pointwise { mode, number, axis }) = *of.one(750)? else {
        return Err((Code::DNN_DESCRIPTOR_TYPE, "no pointwise descriptor".into()));
    };
    let (x, b, y, t) = (of.tensor(751)?, of.optional(752)?, of.tensor(753)?, of.optional(758)?);
    let inputs: Vec<Tensor> = [Some(x), b, t].into_iter().flatten().collect();
    if inputs.len() != mode.inputs() {
        return bad(format!("{mode:?} has {} inputs, got {}", mode.inputs(), inputs.len()));
    }
    for input in &inputs {
        let fits = input.extents.iter().zip(y.extents).all(|(&of, to)| of == to || of == 1);
        if !fits {
            let (from, to) = (input.extents, y.extents);
            return Err((Code::DNN_SHAPE_MISMATCH, format!("{mode:?}: {from:?} does not repeat to {to:?}")));
        }
    }
    if mode.is_condition() != (y.kind == Type::Boolean) {
        return bad(format!("{mode:?} gives {}", y.kind.name()));
    }
    let conditions = match mode {
        Mode::And => &inputs[..],
        Mode::Select => &inputs[2..],
        _ => &[],
    };
    if conditions.iter().any(|condition| condition.kind != Type::Boolean) {
        return bad(format!("{mode:?} takes truth values"));
    }
    expect_output(&y)?;
    Ok(Operation::Pointwise { mode, number, axis, inputs, y })
}

fn expect_output(y: &Tensor) -> Finalized<()> {
    if y.is_number { bad("an output is no number") } else { Ok(()) }
}

/// `[batch, heads, m, k] · [batch, groups, k, n] = [batch, heads, m, n]`.
fn matmul(of: &Reader<'_>) -> Finalized<Operation> {
    let Made::Part(Part::Matmul { padding }) = *of.one(1523)? else {
        return Err((Code::DNN_DESCRIPTOR_TYPE, "no matmul descriptor".into()));
    };
    let (a, b, c) = (of.tensor(1520)?, of.tensor(1521)?, of.tensor(1522)?);
    let ([batch, heads, m, k], [b_batch, groups, b_k, n]) = (a.extents, b.extents);
    if b_batch != batch || b_k != k || !heads.is_multiple_of(groups) || c.extents != [batch, heads, m, n] {
        let (a, b, c) = (a.extents, b.extents, c.extents);
        return Err((Code::DNN_BAD_PARAM, format!("matmul: {a:?} · {b:?} = {c:?}")));
    }
    let mut real = [None, None, None];
    for (place, attribute) in real.iter_mut().zip([1525, 1526, 1527]) {
        let lengths = of.optional(attribute)?;
        let is_list = |lengths: &Tensor| {
            lengths.extents == [batch, 1, 1, 1] && lengths.kind == Type::I32 && !lengths.is_virtual
        };
        if lengths.as_ref().is_some_and(|lengths| !is_list(lengths)) {
            return bad("an override is one i32 for each batch entry");
        }
        *place = lengths;
    }
    expect_output(&c)?;
    Ok(Operation::Matmul { a, b, c, real, padding })
}

/// Each axis has the same extent, or one that divides it: neighbours are reduced.
fn reduction(of: &Reader<'_>) -> Finalized<Operation> {
    let Made::Part(Part::Reduction { is_maximum }) = *of.one(1612)? else {
        return Err((Code::DNN_DESCRIPTOR_TYPE, "no reduction descriptor".into()));
    };
    let (x, y) = (of.tensor(1610)?, of.tensor(1611)?);
    if !x.extents.iter().zip(y.extents).all(|(x, y)| x.is_multiple_of(y)) {
        return Err((Code::DNN_SHAPE_MISMATCH, format!("reduction: {:?} to {:?}", x.extents, y.extents)));
    }
    expect_output(&y)?;
    Ok(Operation::Reduction { is_maximum, x, y })
}

/// The same elements, with two axes exchanged where the extents are.
fn reshape(of: &Reader<'_>) -> Finalized<Operation> {
    let (x, y) = (of.tensor(2200)?, of.tensor(2201)?);
    if x.numel() != y.numel() || !y.is_virtual {
        return Err((Code::DNN_SHAPE_MISMATCH, format!("reshape: {:?} to {:?}", x.extents, y.extents)));
    }
    Ok(Operation::Reshape { x, y })
}

/// Every tensor is one thing under its id; what is virtual is written once, before it is read.
fn graph(of: &Reader<'_>) -> Finalized<Graph> {
    of.expect_handle(800)?;
    let mut operations = Vec::new();
    for made in of.made(801)? {
        match made {
            Made::Operation(operation) => operations.push((**operation).clone()),
            _ => return Err((Code::DNN_DESCRIPTOR_TYPE, "no operation".into())),
        }
    }
    if operations.is_empty() {
        return bad("no operations");
    }
    let mut tensors: Vec<Tensor> = Vec::new();
    let mut written: Vec<i64> = Vec::new();
    for operation in &operations {
        for tensor in operation.inputs().into_iter().chain([operation.output()]) {
            match tensors.iter().find(|known| known.id == tensor.id) {
                Some(known) if known != tensor => {
                    return Err((Code::DNN_DUPLICATED, format!("two tensors have the id {}", tensor.id)));
                }
                Some(_) => {}
                None => tensors.push(tensor.clone()),
            }
        }
        if let Some(unwritten) =
            operation.inputs().iter().find(|input| input.is_virtual && !written.contains(&input.id))
        {
            return bad(format!("tensor {} is virtual and was not written", unwritten.id));
        }
        let output = operation.output().id;
        if written.contains(&output) {
            return bad(format!("tensor {output} is written twice"));
        }
        written.push(output);
    }
    // Offsets are read by the tensors that have them, and appear in no operation.
    for offsets in tensors.clone().into_iter().filter_map(|tensor| tensor.offsets) {
        if tensors.iter().all(|tensor| tensor.id != offsets.id) {
            tensors.push((*offsets).clone());
        }
    }
    Ok(Graph { tensors, operations })
}

fn configuration(of: &Reader<'_>, version: usize, arch: u32) -> Finalized<Made> {
    let Made::Engine { graph, number } = of.one(300)? else {
        return Err((Code::DNN_DESCRIPTOR_TYPE, "no engine".into()));
    };
    let mut knobs = Vec::new();
    if of.values(302).is_some() {
        for made in of.made(302)? {
            match made {
                Made::Knob { kind, value } => knobs.push((*kind, *value)),
                _ => return Err((Code::DNN_DESCRIPTOR_TYPE, "no knob choice".into())),
            }
        }
    }
    let choice = Choice::Engine { number: *number, knobs };
    answers::plan(version, arch, graph, &choice).map_err(|refusal| (refusal.code, refusal.why))?;
    Ok(Made::Configuration { graph: Arc::clone(graph), choice })
}

fn pack(of: &Reader<'_>) -> Finalized<Made> {
    let (ids, pointers) = (of.ints(1000)?, of.words(1001)?.to_vec());
    if ids.len() != pointers.len() {
        return bad(format!("{} ids and {} pointers", ids.len(), pointers.len()));
    }
    let mut sorted = ids.clone();
    sorted.sort_unstable();
    if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err((Code::DNN_DUPLICATED, "an id occurs twice".into()));
    }
    let workspace = match of.values(1003) {
        Some(_) => of.words(1003)?.first().copied().unwrap_or(0),
        None => 0,
    };
    Ok(Made::Pack { ids, pointers, workspace })
}
