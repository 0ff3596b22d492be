//! One thread of a kernel: its registers, and what is counted while it runs.
//!
//! All lanes are taken to be alike: a shuffle and a vote return the thread's own value, and a barrier waits for nothing. Control flow
//! of the kernels depends on sizes and on whether data are finite, so that this finds the instructions that every thread executes.

use std::collections::BTreeMap;

use super::float16::f16_to_f32;
use super::listing::{Instruction, Listing};
use super::memory::{Memory, SHARED};
use super::operand::{Address, File, Half, Operand, Predicate, Register, Source, Value, Width};
use crate::workspace::Result;

/// The place of parameters in the constant bank of an sm_90.
const PARAMETERS: usize = 0x210;
const CONSTANTS: usize = 0x2000;
/// The bank that holds parameters and sizes.
const BANK: u8 = 0;

/// The counts of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Tally {
    /// Instructions issued, without NOP; one whose guard is false counts, too.
    pub(super) instructions: u64,
    pub(super) opcodes: BTreeMap<String, u64>,
    /// Products of 16 × 8 × 16 that the thread's warp issued.
    pub(super) hmma: u64,
    pub(super) ldmatrix: u64,
    /// Bytes of shared memory that the thread read and wrote.
    pub(super) shared: u64,
    /// Bytes of global memory that it wrote.
    pub(super) written: u64,
    /// The most bytes of global memory that were on their way to the thread at once.
    pub(super) in_flight: u64,
}

/// The sizes of a launch, and which thread of it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) grid: u32,
    pub(super) threads: u32,
    pub(super) block: u32,
    pub(super) thread: u32,
}

pub(super) struct Thread<'a> {
    pub(super) listing: &'a Listing,
    pub(super) place: Place,
    own: [u32; 256],
    uniform: [u32; 256],
    predicates: [bool; 8],
    uniform_predicates: [bool; 8],
    constants: Vec<u8>,
    pub(super) memory: &'a mut Memory,
    pub(super) shared: &'a mut Vec<u8>,
    pub(super) tally: Tally,
    /// The result of the last reducing barrier.
    pub(super) vote: bool,
    /// The load on whose data each register waits, from 1 on, and the bytes of each load under way.
    awaited: [u32; 256],
    loads: BTreeMap<u32, u64>,
    next_load: u32,
    /// Bytes of asynchronous copies, those not yet committed last.
    copies: Vec<u64>,
}

impl<'a> Thread<'a> {
    /// A thread at the start of its kernel. `shared` keeps what threads before it wrote.
    pub(super) fn new(
        listing: &'a Listing,
        place: Place,
        parameters: &[u8],
        memory: &'a mut Memory,
        shared: &'a mut Vec<u8>,
    ) -> Result<Self> {
        let mut constants = vec![0; CONSTANTS];
        let sizes = [place.threads, 1, 1, place.grid, 1, 1];
        for (word, size) in constants.chunks_exact_mut(4).zip(sizes) {
            word.copy_from_slice(&size.to_le_bytes());
        }
        let room = constants.get_mut(PARAMETERS..PARAMETERS + parameters.len());
        room.ok_or("sass: more parameters than constant memory")?.copy_from_slice(parameters);
        shared.resize(SHARED, 0);
        Ok(Self {
            listing,
            place,
            own: [0; 256],
            uniform: [0; 256],
            predicates: [false; 8],
            uniform_predicates: [false; 8],
            constants,
            memory,
            shared,
            tally: Tally::default(),
            vote: false,
            awaited: [0; 256],
            loads: BTreeMap::new(),
            next_load: 1,
            copies: vec![0],
        })
    }

    /// Counts an instruction that is issued, whether or not its guard is true.
    pub(super) fn count(&mut self, instruction: &Instruction) {
        if instruction.opcode == "NOP" {
            return;
        }
        self.tally.instructions += 1;
        match self.tally.opcodes.get_mut(&instruction.opcode) {
            Some(count) => *count += 1,
            None => drop(self.tally.opcodes.insert(instruction.opcode.clone(), 1)),
        }
    }

    // ---- registers and predicates ----

    pub(super) fn register(&mut self, register: Register) -> u32 {
        match register.index {
            None => 0,
            Some(index) if register.file == File::Uniform => self.uniform[usize::from(index)],
            Some(index) => {
                self.arrive(index);
                self.own[usize::from(index)]
            }
        }
    }

    /// The register `plus` places behind, which makes a value of several words.
    fn behind(register: Register, plus: u8) -> Register {
        Register { index: register.index.and_then(|index| index.checked_add(plus)), ..register }
    }

    pub(super) fn pair_of(&mut self, register: Register) -> u64 {
        u64::from(self.register(register)) | u64::from(self.register(Self::behind(register, 1))) << 32
    }

    pub(super) fn set(&mut self, register: Register, value: u32) {
        match register.index {
            None => {}
            Some(index) if register.file == File::Uniform => self.uniform[usize::from(index)] = value,
            Some(index) => {
                self.arrive(index);
                self.own[usize::from(index)] = value;
            }
        }
    }

    pub(super) fn set_words(&mut self, register: Register, words: &[u32]) {
        for (plus, word) in (0..).zip(words) {
            self.set(Self::behind(register, plus), *word);
        }
    }

    pub(super) fn words(&mut self, register: Register, count: usize) -> Vec<u32> {
        (0..count as u8).map(|plus| self.register(Self::behind(register, plus))).collect()
    }

    pub(super) fn is(&self, predicate: Predicate) -> bool {
        let registers = match predicate.file {
            File::Own => &self.predicates,
            File::Uniform => &self.uniform_predicates,
        };
        predicate.index.is_none_or(|index| registers[usize::from(index)]) != predicate.is_negated
    }

    pub(super) fn set_predicate(&mut self, predicate: Predicate, value: bool) {
        if let Some(index) = predicate.index {
            match predicate.file {
                File::Own => self.predicates[usize::from(index)] = value,
                File::Uniform => self.uniform_predicates[usize::from(index)] = value,
            }
        }
    }

    /// The first seven predicates as bits.
    pub(super) fn predicate_bits(&self) -> u32 {
        (0..7).map(|bit| u32::from(self.predicates[bit]) << bit).sum()
    }

    // ---- loads under way ----

    /// A load of so many bytes into registers was issued.
    pub(super) fn depart(&mut self, register: Register, bytes: u64) {
        let (Some(first), File::Own) = (register.index, register.file) else { return };
        let load = self.next_load;
        self.next_load += 1;
        self.loads.insert(load, bytes);
        for plus in 0..bytes.div_ceil(4) {
            if let Some(awaited) = self.awaited.get_mut(usize::from(first) + plus as usize) {
                *awaited = load;
            }
        }
        self.measure();
    }

    /// The thread needs a register: it waits for the load that fills it.
    fn arrive(&mut self, index: u8) {
        let load = std::mem::take(&mut self.awaited[usize::from(index)]);
        if load != 0 {
            self.loads.remove(&load);
        }
    }

    pub(super) fn copy(&mut self, bytes: u64) {
        if let Some(open) = self.copies.last_mut() {
            *open += bytes;
        }
        self.measure();
    }

    pub(super) fn commit_copies(&mut self) {
        self.copies.push(0);
    }

    /// Waits until at most so many groups of copies are under way.
    pub(super) fn wait_for_copies(&mut self, groups: usize) {
        let done = (self.copies.len() - 1).saturating_sub(groups);
        self.copies.drain(..done);
    }

    fn measure(&mut self) {
        let now = self.loads.values().sum::<u64>() + self.copies.iter().sum::<u64>();
        self.tally.in_flight = self.tally.in_flight.max(now);
    }

    // ---- operands ----

    /// A word of constant memory.
    pub(super) fn constant(&mut self, bank: u8, place: &Address, bytes: usize) -> Result<u64> {
        let offset = self.sum(place) as usize & 0xffff_ffff;
        let from = if bank == BANK { Some(&self.constants) } else { self.listing.constants.get(&bank) };
        let word = from.and_then(|from| from.get(offset..offset + bytes));
        let word = word.ok_or_else(|| format!("nothing is at place {offset:#x} of constant bank {bank}"))?;
        Ok(word.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    /// The address that a sum of registers and a number is.
    pub(super) fn sum(&mut self, address: &Address) -> u64 {
        let mut sum = address.offset as u64;
        for (register, width) in &address.registers {
            sum = sum.wrapping_add(match width {
                Width::Pair => self.pair_of(*register),
                Width::Word => self.register(*register).into(),
                Width::Times(factor) => u64::from(self.register(*register)) * u64::from(*factor),
            });
        }
        sum
    }

    /// The bits of a value before its sign is changed.
    pub(super) fn bits(&mut self, value: &Value) -> Result<u32> {
        match &value.source {
            Source::Register(register) => Ok(self.register(*register)),
            Source::Number(bits) => Ok(*bits),
            Source::Constant(bank, place) => Ok(self.constant(*bank, place, 4)? as u32),
        }
    }

    pub(super) fn integer(&mut self, value: &Value) -> Result<u32> {
        let mut bits = self.bits(value)?;
        if value.is_absolute {
            bits = (bits as i32).unsigned_abs();
        }
        if value.is_negated {
            bits = bits.wrapping_neg();
        }
        Ok(if value.is_inverted { !bits } else { bits })
    }

    /// A value of two words. A number is extended with zeros.
    pub(super) fn wide(&mut self, value: &Value) -> Result<u64> {
        let bits = match &value.source {
            Source::Register(register) => self.pair_of(*register),
            Source::Number(bits) => u64::from(*bits),
            Source::Constant(bank, place) => self.constant(*bank, place, 8)?,
        };
        let bits = if value.is_negated { bits.wrapping_neg() } else { bits };
        Ok(if value.is_inverted { !bits } else { bits })
    }

    pub(super) fn float(&mut self, value: &Value) -> Result<f32> {
        let bits = self.bits(value)?;
        let float = match value.half {
            None => f32::from_bits(bits),
            Some(Half::Low) => f16_to_f32(bits as u16),
            Some(Half::High) => f16_to_f32((bits >> 16) as u16),
        };
        let float = if value.is_absolute { float.abs() } else { float };
        Ok(if value.is_negated { -float } else { float })
    }
}

/// The operands of an instruction, read one after the other.
pub(super) struct Operands<'a>(std::slice::Iter<'a, Operand>);

impl<'a> Operands<'a> {
    pub(super) fn of(instruction: &'a Instruction) -> Self {
        Self(instruction.operands.iter())
    }

    pub(super) fn next_value(&mut self) -> Result<&'a Value> {
        match self.0.next() {
            Some(Operand::Value(value)) => Ok(value),
            other => Err(format!("a value is wanted, not {other:?}").into()),
        }
    }

    /// A register to write to.
    pub(super) fn target(&mut self) -> Result<Register> {
        match self.next_value()?.source {
            Source::Register(register) => Ok(register),
            _ => Err("a register is wanted".into()),
        }
    }

    pub(super) fn predicate(&mut self) -> Result<Predicate> {
        self.optional_predicate().ok_or_else(|| "a predicate is wanted".into())
    }

    /// The next operand if it is a predicate.
    pub(super) fn optional_predicate(&mut self) -> Option<Predicate> {
        match self.0.as_slice().first() {
            Some(Operand::Predicate(predicate)) => {
                self.0.next();
                Some(*predicate)
            }
            _ => None,
        }
    }

    pub(super) fn number(&mut self) -> Result<u32> {
        match self.next_value()?.source {
            Source::Number(bits) => Ok(bits),
            _ => Err("a number is wanted".into()),
        }
    }

    pub(super) fn memory(&mut self) -> Result<&'a Address> {
        match self.0.next() {
            Some(Operand::Memory(address)) => Ok(address),
            other => Err(format!("an address is wanted, not {other:?}").into()),
        }
    }

    pub(super) fn name(&mut self) -> Result<&'a str> {
        match self.0.next() {
            Some(Operand::Name(name)) => Ok(name),
            other => Err(format!("a name is wanted, not {other:?}").into()),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.as_slice().is_empty()
    }

    pub(super) fn rest(&self) -> &'a [Operand] {
        self.0.as_slice()
    }
}
