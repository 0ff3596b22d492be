//! The encoding of messages.
//!
//! A frame is a kind (u8), the length of its head (u32), the head, and the elements of the tensors that the head
//! announces, in order. Numbers are little-endian, texts are a u32 length and UTF-8, elements are in the sender's byte
//! order, which ranks compare when they connect.
//!
//! Input is not trusted. The length of a head is limited. Elements are read piece by piece, so memory is allocated only for bytes
//! that have arrived. Anything else than a well-formed frame is an error.

mod failure;
mod head;

use crate::Failure;
use crate::message::{Message, Operation, Part};
use failure::put_failure;
use fp8_kernels::{DType, Device, Element, Shape, Tensor, bf16, f16};
use head::{Head, invalid, put_number, put_part, put_ranks, put_text};
use std::io::{self, Read, Write};

/// The longest head, which is enough for the names of half a million slots.
const MAX_HEAD: usize = 64 << 20;
/// Elements are read and written in pieces of this many bytes.
const PIECE: usize = 1 << 20;
/// The frames that ranks exchange once they are connected.
#[derive(Debug)]
pub(crate) enum Frame {
    /// A rank's message for the current exchange.
    Bring(Message),
    /// The result of an exchange: the parts of all ranks, in rank order.
    Complete(Vec<Option<Part>>),
    /// The group has failed.
    Fail(Failure),
    /// These ranks have left the group. A rank sends only itself.
    Left(Vec<usize>),
    /// All ranks have joined.
    Welcome,
    /// The numbers of calls that a rank has made without an exchange.
    Calls(Vec<u64>),
    /// A message for one rank. On the way to rank 0, `peer` is the rank that it is for, and then the rank that it is from.
    Mail { peer: usize, message: Message },
}

/// Sends one frame.
pub(crate) fn send(out: &mut impl Write, frame: &Frame) -> io::Result<()> {
    match frame {
        Frame::Bring(message) => bring(out, message),
        Frame::Complete(parts) => complete(out, parts.len(), parts.iter().map(Option::as_ref)),
        Frame::Fail(failure) => {
            let mut head = Vec::new();
            put_failure(&mut head, failure);
            start(out, 3, &head)
        }
        Frame::Left(ranks) => {
            let mut head = Vec::new();
            put_ranks(&mut head, ranks);
            start(out, 4, &head)
        }
        Frame::Welcome => start(out, 5, &[]),
        Frame::Calls(numbers) => {
            let mut head = Vec::new();
            put_number(&mut head, numbers.len() as u64);
            numbers.iter().for_each(|&number| put_number(&mut head, number));
            start(out, 6, &head)
        }
        Frame::Mail { peer, message } => {
            let mut head = Vec::new();
            put_number(&mut head, *peer as u64);
            put_message(&mut head, message);
            start(out, 7, &head)?;
            elements(out, message.part.as_ref())
        }
    }?;
    out.flush()
}

/// Sends shared messages as a [`Frame::Complete`].
pub(crate) fn send_all(out: &mut impl Write, all: &[Message]) -> io::Result<()> {
    complete(out, all.len(), all.iter().map(|message| message.part.as_ref()))?;
    out.flush()
}

fn bring(out: &mut impl Write, message: &Message) -> io::Result<()> {
    let mut head = Vec::new();
    put_message(&mut head, message);
    start(out, 1, &head)?;
    elements(out, message.part.as_ref())
}

fn put_message(head: &mut Vec<u8>, message: &Message) {
    let (tag, argument) = match message.call.operation {
        Operation::AgreeOnNames => (0, 0),
        Operation::AllReduceArena => (1, 0),
        Operation::AllReduce(op) => (2, op as u64),
        Operation::AllGather => (3, 0),
        Operation::ReduceScatter(op) => (4, op as u64),
        Operation::Broadcast { root } => (5, root as u64),
        Operation::Barrier => (6, 0),
        Operation::AgreeOnState => (7, 0),
        Operation::Split => (8, 0),
        Operation::Connect => (9, 0),
        Operation::AllToAll => (10, 0),
        Operation::Send { to } => (11, to as u64),
        Operation::Receive { from } => (12, from as u64),
    };
    head.push(tag);
    put_number(head, argument);
    put_text(head, &message.call.what);
    put_number(head, message.names.len() as u64);
    message.names.iter().for_each(|name| put_text(head, name));
    put_part(head, message.part.as_ref());
}

fn complete<'a>(
    out: &mut impl Write,
    len: usize,
    parts: impl Iterator<Item = Option<&'a Part>> + Clone,
) -> io::Result<()> {
    let mut head = Vec::new();
    put_number(&mut head, len as u64);
    parts.clone().for_each(|part| put_part(&mut head, part));
    start(out, 2, &head)?;
    parts.into_iter().try_for_each(|part| elements(out, part))
}

fn start(out: &mut impl Write, kind: u8, head: &[u8]) -> io::Result<()> {
    let len = u32::try_from(head.len()).ok().filter(|&len| len as usize <= MAX_HEAD);
    let len = len.ok_or_else(|| invalid(format!("a head of {} bytes", head.len())))?;
    // One write, so that a small frame is one packet.
    let mut bytes = Vec::with_capacity(head.len() + 5);
    bytes.push(kind);
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(head);
    out.write_all(&bytes)
}

fn elements(out: &mut impl Write, part: Option<&Part>) -> io::Result<()> {
    let Some(data) = part.and_then(|part| part.data.as_ref()) else { return Ok(()) };
    match data.dtype() {
        DType::F32 => pieces::<f32>(out, data),
        DType::BF16 => pieces::<bf16>(out, data),
        DType::F16 => pieces::<f16>(out, data),
        DType::I32 => pieces::<i32>(out, data),
        DType::U8 => pieces::<u8>(out, data),
    }
}

fn pieces<T: Element>(out: &mut impl Write, data: &Tensor) -> io::Result<()> {
    let data = data.as_slice::<T>().map_err(io::Error::other)?;
    bytemuck::cast_slice::<T, u8>(data).chunks(PIECE).try_for_each(|piece| out.write_all(piece))
}

/// Receives one frame. If the stream ends, also before the first byte, the error is [`io::ErrorKind::UnexpectedEof`].
pub(crate) fn receive(input: &mut impl Read) -> io::Result<Frame> {
    let mut first = [0; 5];
    input.read_exact(&mut first)?;
    let [kind, len @ ..] = first;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_HEAD || !(1..=7).contains(&kind) {
        return Err(invalid(format!("a frame of kind {kind} with a head of {len} bytes")));
    }
    let bytes = read_elements::<u8>(input, len)?;
    let mut head = Head(&bytes);
    let frame = match kind {
        1 => Frame::Bring(message(input, &mut head)?),
        2 => {
            let announced: Vec<_> = (0..head.number()?).map(|_| head.part()).collect::<io::Result<_>>()?;
            let fill = |part: Option<(Part, bool)>| {
                part.map(|(part, has_data)| filled(input, part, has_data)).transpose()
            };
            Frame::Complete(announced.into_iter().map(fill).collect::<io::Result<_>>()?)
        }
        3 => Frame::Fail(head.failure()?),
        4 => Frame::Left(head.ranks()?),
        6 => Frame::Calls((0..head.number()?).map(|_| head.number()).collect::<io::Result<_>>()?),
        7 => Frame::Mail { peer: head.count()?, message: message(input, &mut head)? },
        _ => Frame::Welcome,
    };
    if head.0.is_empty() { Ok(frame) } else { Err(invalid("a head with bytes left over".to_owned())) }
}

fn message(input: &mut impl Read, head: &mut Head<'_>) -> io::Result<Message> {
    let call = head.call()?;
    let names = (0..head.number()?).map(|_| head.text().map(Into::into)).collect::<io::Result<_>>()?;
    let part = head.part()?.map(|(part, has_data)| filled(input, part, has_data)).transpose()?;
    Ok(Message { call, names, part })
}

fn filled(input: &mut impl Read, part: Part, has_data: bool) -> io::Result<Part> {
    if !has_data {
        return Ok(part);
    }
    let shape = part.shape;
    let data = match part.dtype {
        DType::F32 => tensor::<f32>(input, shape),
        DType::BF16 => tensor::<bf16>(input, shape),
        DType::F16 => tensor::<f16>(input, shape),
        DType::I32 => tensor::<i32>(input, shape),
        DType::U8 => tensor::<u8>(input, shape),
    }?;
    Ok(Part { data: Some(data), ..part })
}

fn tensor<T: Element>(input: &mut impl Read, shape: Shape) -> io::Result<Tensor> {
    let data = read_elements::<T>(input, shape.numel())?;
    Tensor::from_vec(data, shape, &Device::cpu()).map_err(io::Error::other)
}

fn read_elements<T: Element>(input: &mut impl Read, len: usize) -> io::Result<Vec<T>> {
    let piece = PIECE / size_of::<T>();
    let mut data: Vec<T> = Vec::new();
    while data.len() < len {
        let start = data.len();
        let more = piece.min(len - start);
        data.try_reserve(more).map_err(io::Error::other)?;
        data.resize(start + more, T::default());
        input.read_exact(bytemuck::cast_slice_mut(&mut data[start..]))?;
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;
    use crate::message::Call;
    use proptest::prelude::*;
    use std::time::Duration;

    fn bytes(frame: &Frame) -> Vec<u8> {
        let mut bytes = Vec::new();
        send(&mut bytes, frame).unwrap();
        bytes
    }

    fn failures() -> Vec<Failure> {
        let name = |name: &str| Some(name.into());
        vec![
            Failure::GaveUp { rank: 3, reason: "out of tokens, ε".into() },
            Failure::Left { ranks: vec![0, 2] },
            Failure::Deadline { missing: vec![1], waited: Duration::from_millis(1234) },
            Failure::Lost { rank: 1, reason: "gone".into() },
            Failure::Settings {
                property: "the world size".into(),
                rank: 1,
                value: "3".into(),
                other: 0,
                other_value: "2".into(),
            },
            Failure::Twice { rank: 7 },
            Failure::SecondJob { port: 29_500 },
            Failure::Token { rank: 2 },
            Failure::Disagree {
                property: "the shape, dimension 0 aside,",
                rank: 2,
                value: "[3]".into(),
                other: 0,
                other_value: "[2]".into(),
            },
            Failure::Lone {
                comparing: 2,
                call: "agree_on_state `parameters`".into(),
                other: 0,
                other_call: "barrier".into(),
            },
            Failure::Names { index: 4, rank: 1, value: None, other: 0, other_value: name("b") },
            Failure::Names { index: 4, rank: 1, value: name(""), other: 0, other_value: None },
        ]
    }

    #[test]
    fn failures_come_back() {
        for failure in failures() {
            let Frame::Fail(found) = receive(&mut bytes(&Frame::Fail(failure.clone())).as_slice()).unwrap()
            else {
                panic!("another frame");
            };
            assert_eq!(found, failure);
        }
    }

    fn message() -> Message {
        let data = Tensor::from_vec(vec![1.5f32, -0.0, f32::NAN], [3, 1], &Device::cpu()).unwrap();
        Message {
            call: Call { operation: Operation::ReduceScatter(ReduceOp::Max), what: "fc.weight".into() },
            names: vec!["a".into(), "".into()],
            part: Some(Part { dtype: DType::F32, shape: [3, 1].into(), data: Some(data) }),
        }
    }

    #[test]
    fn messages_come_back() {
        let Frame::Bring(found) = receive(&mut bytes(&Frame::Bring(message())).as_slice()).unwrap() else {
            panic!("another frame");
        };
        let sent = message();
        assert_eq!((&found.call, &found.names), (&sent.call, &sent.names));
        let bits = |message: &Message| {
            let part = message.part.as_ref().unwrap();
            let data = part.data.as_ref().unwrap().to_vec::<f32>().unwrap();
            (part.dtype, part.shape, data.iter().map(|value| value.to_bits()).collect::<Vec<_>>())
        };
        assert_eq!(bits(&found), bits(&sent));
    }

    #[test]
    fn tensors_of_many_pieces_come_back() {
        let data: Vec<i32> = (0..700_000).collect();
        let tensor = Tensor::from_vec(data.clone(), [data.len()], &Device::cpu()).unwrap();
        let part = Part { dtype: DType::I32, shape: *tensor.shape(), data: Some(tensor) };
        let sent = bytes(&Frame::Complete(vec![None, Some(part.clone()), Some(Part { data: None, ..part })]));
        let Frame::Complete(found) = receive(&mut sent.as_slice()).unwrap() else { panic!("another frame") };
        let [None, Some(full), Some(empty)] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!(full.data.as_ref().unwrap().to_vec::<i32>().unwrap(), data);
        assert!(empty.data.is_none() && empty.shape == full.shape);
    }

    #[test]
    fn lengths_that_lie_cost_no_memory() {
        // A head of 64 MiB and one byte of it; a tensor of 1 TiB and four bytes of it; more than that.
        let mut head = vec![1];
        head.extend((MAX_HEAD as u32).to_le_bytes());
        head.push(0);
        assert_eq!(receive(&mut head.as_slice()).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        for (extent, kind) in
            [(1u64 << 38, io::ErrorKind::UnexpectedEof), (1 << 39, io::ErrorKind::InvalidData)]
        {
            let mut head = vec![3];
            put_number(&mut head, 0);
            put_text(&mut head, "x");
            put_number(&mut head, 0);
            head.extend([2, 0, 1]);
            put_number(&mut head, extent);
            let mut frame = Vec::new();
            start(&mut frame, 1, &head).unwrap();
            frame.extend([0; 4]);
            assert_eq!(receive(&mut frame.as_slice()).unwrap_err().kind(), kind);
        }
    }

    #[test]
    fn what_is_none_of_this_protocol_is_named() {
        // A collective whose name is empty, in front of what follows it.
        let gather = |rest: &[u8]| [&[3][..], &[0; 12], rest].concat();
        let huge = [&[0; 8][..], &[2, 0, 1], &(1u64 << 39).to_le_bytes()].concat();
        for (kind, head, what) in [
            (9, vec![], "a frame of kind 9 with a head of 0 bytes"),
            (5, vec![0], "a head with bytes left over"),
            (4, vec![1, 0, 0, 0, 0, 0, 0, 0], "a head that is too short"),
            (1, [&[13][..], &[0; 8]].concat(), "collective 13"),
            (7, vec![1; 8], "a head that is too short"),
            (1, vec![2, 7, 0, 0, 0, 0, 0, 0, 0], "reduction 7"),
            (1, [&[3][..], &[0; 8], &[1, 0, 0, 0, 0xff]].concat(), "a text that is not UTF-8"),
            (1, gather(&[0, 0, 0, 0, 0, 0, 0, 0, 7]), "part 7"),
            (1, gather(&[0, 0, 0, 0, 0, 0, 0, 0, 2, 9]), "dtype 9"),
            (1, gather(&huge), "a tensor of shape [549755813888]"),
        ] {
            let frame = [&[kind][..], &(head.len() as u32).to_le_bytes(), &head].concat();
            let error = receive(&mut frame.as_slice()).unwrap_err();
            assert_eq!(error.to_string(), format!("{what} is not part of the protocol"));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn any_bytes_are_a_frame_or_an_error(kind in 0u8..8, head in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut frame = vec![kind];
            frame.extend((head.len() as u32).to_le_bytes());
            frame.extend(head);
            let _ = receive(&mut frame.as_slice());
        }

        #[test]
        fn a_changed_byte_is_a_frame_or_an_error(at: prop::sample::Index, byte: u8, cut in 0usize..8) {
            let failures = failures().into_iter().map(Frame::Fail);
            for frame in failures.chain([Frame::Bring(message())]) {
                let mut sent = bytes(&frame);
                let at = at.index(sent.len());
                sent[at] = byte;
                sent.truncate(sent.len() - cut.min(sent.len()));
                let _ = receive(&mut sent.as_slice());
            }
        }
    }
}
