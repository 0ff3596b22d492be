//! One kernel while it is parsed: registers and scopes, constants, symbols, labels, and the decoded instructions.

use std::collections::HashMap;
use std::sync::Arc;

use crate::LoadError;
use crate::ir::{Cond, Inst, Op, Special, Together, Ty, VARIABLES};
use crate::lanes::Reg;
use crate::module::{Array, Counts, Kernel, Location, Param, Variable};
use crate::provenance::{Flow, Provenance};

/// An operand with its names resolved; symbols may still turn out to be labels.
#[derive(Clone, Debug)]
pub(crate) enum Operand {
    /// A register and its declared bits.
    Register(Reg, u32),
    Not(usize),
    Integer(u64),
    F32(u32),
    F64(u64),
    Symbol(String, i64),
    Address(Box<Operand>, i64),
    Vector(Vec<Operand>),
    Pair(Box<Operand>, Box<Operand>),
    Sink,
}

/// An instruction as written.
pub(crate) struct Statement<'a> {
    pub(crate) guard: Option<Cond>,
    pub(crate) opcode: &'a str,
    pub(crate) operands: &'a [Operand],
    pub(crate) line: u32,
    pub(crate) text: &'a str,
}

impl Statement<'_> {
    pub(crate) fn error<T>(&self, what: impl AsRef<str>) -> Result<T, LoadError> {
        Err(LoadError::new(self.line, format!("{}: {}", self.text.trim(), what.as_ref())))
    }
}

/// A declaration of a variable: its alignment, name and size in bytes; none for `name[]`.
#[derive(Clone, Debug)]
pub(crate) struct Declared {
    pub(crate) align: usize,
    pub(crate) name: String,
    pub(crate) bytes: Option<usize>,
    pub(crate) initial: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
enum Declaration {
    One(Reg, u32),
    /// Registers `name0` … in one file, from the first number.
    Many(Reg, usize, u32),
}

#[derive(Debug)]
enum Symbol {
    Shared(usize),
    Local(usize),
    Param(usize),
    Variable(u64),
}

/// A kernel under construction.
pub(crate) struct Builder {
    name: String,
    /// The module's `.target`.
    pub(crate) target: String,
    module_shared: Vec<Declared>,
    pub(crate) max_threads: Option<u32>,
    params: Vec<(String, Param)>,
    params_size: usize,
    counts: Counts,
    declared: u32,
    scopes: Vec<HashMap<String, Declaration>>,
    constants: Vec<(Reg, u64)>,
    interned: HashMap<(bool, u64), Reg>,
    specials: Vec<(Special, Reg, u64)>,
    symbols: HashMap<String, Symbol>,
    arrays: Vec<Array>,
    static_shared: usize,
    shared_align: usize,
    local_bytes: usize,
    labels: HashMap<String, (usize, usize)>,
    /// Open scopes by number, and each scope's parent, for labels.
    scope_path: Vec<usize>,
    scope_count: usize,
    wanted: Vec<(usize, Vec<String>, u32)>,
    tables: HashMap<String, Vec<String>>,
    locations: Vec<Location>,
    location: Option<u32>,
    code: Vec<Inst>,
    pub(crate) provenance: Provenance,
    flag: Option<usize>,
}

impl Builder {
    pub(crate) fn new(name: &str, target: &str, module_shared: &[Declared], variables: &[Variable]) -> Self {
        let mut symbols = HashMap::new();
        let mut address = VARIABLES;
        for variable in variables {
            symbols.insert(variable.name.clone(), Symbol::Variable(address));
            address = (address + variable.data.len() as u64).next_multiple_of(256) + 256;
        }
        Self {
            name: name.to_owned(),
            target: target.to_owned(),
            module_shared: module_shared.to_vec(),
            max_threads: None,
            params: Vec::new(),
            params_size: 0,
            counts: Counts::default(),
            declared: 0,
            scopes: vec![HashMap::new()],
            constants: Vec::new(),
            interned: HashMap::new(),
            specials: Vec::new(),
            symbols,
            arrays: Vec::new(),
            static_shared: 0,
            shared_align: 1,
            local_bytes: 0,
            labels: HashMap::new(),
            scope_path: vec![0],
            scope_count: 0,
            wanted: Vec::new(),
            tables: HashMap::new(),
            locations: Vec::new(),
            location: None,
            code: Vec::new(),
            provenance: Provenance::default(),
            flag: None,
        }
    }

    pub(crate) fn param(&mut self, name: String, mut param: Param) {
        param.offset = self.params_size.next_multiple_of(param.align);
        self.params_size = param.offset + param.size;
        self.symbols.insert(name.clone(), Symbol::Param(param.offset));
        self.params.push((name, param));
    }

    pub(crate) fn open(&mut self) {
        self.scopes.push(HashMap::new());
        self.scope_count += 1;
        self.scope_path.push(self.scope_count);
    }

    pub(crate) fn close(&mut self) {
        self.scopes.pop();
        self.scope_path.pop();
    }

    fn fresh(&mut self, bits: u32) -> Reg {
        let (count, reg): (&mut usize, fn(usize) -> Reg) = match bits {
            1 => (&mut self.counts.p, Reg::P),
            64 => (&mut self.counts.d, Reg::D),
            _ => (&mut self.counts.w, Reg::W),
        };
        *count += 1;
        reg(*count - 1)
    }

    /// `.reg .b32 %r<count>` or `.reg .b32 name`.
    pub(crate) fn declare(
        &mut self,
        name: &str,
        count: Option<usize>,
        ty: Ty,
        line: u32,
    ) -> Result<(), LoadError> {
        let number = count.unwrap_or(1);
        if number > 1 << 16 || self.counts.w + self.counts.d + self.counts.p > 1 << 18 {
            return Err(LoadError::new(line, format!("{name}: {number} registers are too many")));
        }
        let bits = ty.bits();
        let mut first = None;
        for _ in 0..number {
            let reg = self.fresh(bits);
            first.get_or_insert(reg);
        }
        let Some(first) = first else { return Ok(()) };
        self.declared += number as u32 * bits.div_ceil(32) * u32::from(bits > 1);
        let declaration = match count {
            None => Declaration::One(first, bits),
            Some(count) => Declaration::Many(first, count, bits),
        };
        match self.scopes.last_mut().and_then(|scope| scope.insert(name.to_owned(), declaration)) {
            Some(_) => Err(LoadError::new(line, format!("register {name} is declared twice"))),
            None => Ok(()),
        }
    }

    /// The register of that name in the innermost scope that has one, and its bits.
    pub(crate) fn register(&self, name: &str) -> Option<(Reg, u32)> {
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let digits = &name[stem.len()..];
        let number =
            (digits == "0" || !digits.starts_with('0')).then(|| digits.parse::<usize>().ok()).flatten();
        self.scopes.iter().rev().find_map(|scope| {
            if let Some(Declaration::One(reg, bits)) = scope.get(name) {
                return Some((*reg, *bits));
            }
            let Some(Declaration::Many(first, count, bits)) = scope.get(stem) else { return None };
            let number = number.filter(|n| n < count)?;
            let reg = match *first {
                Reg::W(r) => Reg::W(r + number),
                Reg::D(r) => Reg::D(r + number),
                Reg::P(r) => Reg::P(r + number),
            };
            Some((reg, *bits))
        })
    }

    /// The register that holds a special value.
    pub(crate) fn special(&mut self, special: Special) -> Reg {
        if let Some((_, reg, _)) = self.specials.iter().find(|(other, ..)| *other == special) {
            return *reg;
        }
        let reg = self.fresh(32);
        self.specials.push((special, reg, 0));
        reg
    }

    /// A register that holds a constant, of the 64-bit file or the 32-bit one.
    pub(crate) fn constant(&mut self, wide: bool, value: u64) -> Reg {
        if let Some(reg) = self.interned.get(&(wide, value)) {
            return *reg;
        }
        let reg = self.fresh(if wide { 64 } else { 32 });
        self.constants.push((reg, value));
        self.interned.insert((wide, value), reg);
        reg
    }

    /// A register nobody else names.
    pub(crate) fn temporary(&mut self, ty: Ty) -> Reg {
        self.fresh(ty.bits())
    }

    /// Adds an operation in front of the one being decoded.
    pub(crate) fn push(&mut self, statement: &Statement<'_>, op: Op) {
        let Statement { guard, line, .. } = *statement;
        self.code.push(Inst { guard, op, line, loc: self.location });
    }

    /// The flag register of `add.cc`.
    pub(crate) fn flag(&mut self) -> usize {
        if let Some(flag) = self.flag {
            return flag;
        }
        self.counts.p += 1;
        self.flag = Some(self.counts.p - 1);
        self.counts.p - 1
    }

    /// A register that holds a symbol's address plus an offset: an address of its own space, not a generic one.
    pub(crate) fn symbol(&mut self, name: &str, offset: i64, wide: bool) -> Option<Reg> {
        if !self.symbols.contains_key(name) {
            let declared = self.module_shared.iter().find(|declared| declared.name == name)?.clone();
            self.place_shared(&declared);
        }
        let (value, array) = match self.symbols.get(name)? {
            Symbol::Shared(array) => {
                let index = *array;
                let array = self.arrays.get(index)?;
                if array.bytes.is_none() {
                    let reg = self.fresh(if wide { 64 } else { 32 });
                    self.specials.push((Special::DynamicShared, reg, offset as u64));
                    self.provenance.array(reg, index);
                    return Some(reg);
                }
                (array.offset as u64, Some(index))
            }
            Symbol::Local(at) | Symbol::Param(at) => (*at as u64, None),
            Symbol::Variable(address) => (*address, None),
        };
        let reg = self.fresh(if wide { 64 } else { 32 });
        self.constants.push((reg, value.wrapping_add(offset as u64)));
        if let Some(array) = array {
            self.provenance.array(reg, array);
        }
        Some(reg)
    }

    fn place_shared(&mut self, declared: &Declared) {
        let mut array = Array { name: declared.name.clone(), offset: 0, bytes: declared.bytes };
        match declared.bytes {
            Some(bytes) => {
                array.offset = self.static_shared.next_multiple_of(declared.align);
                self.static_shared = array.offset.saturating_add(bytes);
            }
            None => self.shared_align = self.shared_align.max(declared.align).max(16),
        }
        self.symbols.insert(declared.name.clone(), Symbol::Shared(self.arrays.len()));
        self.arrays.push(array);
    }

    pub(crate) fn shared_array(&mut self, declared: &Declared, line: u32) -> Result<(), LoadError> {
        if declared.bytes.is_none()
            || !declared.initial.is_empty()
            || self.symbols.contains_key(&declared.name)
        {
            return Err(LoadError::new(line, format!("shared array {}: needs a size, once", declared.name)));
        }
        self.place_shared(declared);
        Ok(())
    }

    pub(crate) fn local_array(&mut self, declared: &Declared, line: u32) -> Result<(), LoadError> {
        let bytes = declared.bytes.filter(|&bytes| declared.initial.is_empty() && bytes <= 1 << 20);
        let offset = self.local_bytes.next_multiple_of(declared.align);
        match bytes {
            Some(bytes) if !self.symbols.contains_key(&declared.name) => {
                self.symbols.insert(declared.name.clone(), Symbol::Local(offset));
                self.local_bytes = offset + bytes;
                Ok(())
            }
            _ => Err(LoadError::new(
                line,
                format!("local array {}: needs a size up to 1 MiB, once", declared.name),
            )),
        }
    }

    pub(crate) fn locate(&mut self, location: Location) {
        if location.line == 0 {
            return; // code of the compiler's own: the line before is the better answer
        }
        if self.locations.last() != Some(&location) {
            self.locations.push(location);
        }
        self.location = Some(self.locations.len() as u32 - 1);
    }

    fn scoped(&self, name: &str, path: &[usize]) -> Option<usize> {
        path.iter().rev().find_map(|scope| self.labels.get(&format!("{scope} {name}"))).map(|(at, _)| *at)
    }

    pub(crate) fn label(&mut self, name: String, line: u32) -> Result<(), LoadError> {
        let scope = self.scope_path.last().copied().unwrap_or(0);
        match self.labels.insert(format!("{scope} {name}"), (self.code.len(), scope)) {
            Some(_) => Err(LoadError::new(line, format!("label {name} is defined twice"))),
            None => Ok(()),
        }
    }

    pub(crate) fn jump_table(&mut self, name: String, targets: Vec<String>) {
        self.tables.insert(name, targets);
    }

    /// Adds a decoded instruction, whose opcode without modifiers is `base`.
    pub(crate) fn add(&mut self, base: &str, op: Op, statement: &Statement<'_>) -> Result<(), LoadError> {
        self.flow(base, statement);
        let Statement { guard, line, .. } = *statement;
        if let Op::Branch { .. } | Op::Jump { .. } = op {
            let names = self.target_names(base, statement)?;
            // The scope path goes along, so that labels of inline assembly may recur.
            let path = self.scope_path.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
            let names = names.into_iter().map(|name| format!("{path}\n{name}")).collect();
            self.wanted.push((self.code.len(), names, line));
        }
        self.code.push(Inst { guard, op, line, loc: self.location });
        Ok(())
    }

    fn target_names(&self, base: &str, statement: &Statement<'_>) -> Result<Vec<String>, LoadError> {
        match (base, statement.operands.last()) {
            ("bra", Some(Operand::Symbol(name, 0))) => Ok(vec![name.clone()]),
            ("brx", Some(Operand::Symbol(name, 0))) => match self.tables.get(name) {
                Some(targets) => Ok(targets.clone()),
                None => statement.error("no .branchtargets of that name before it"),
            },
            _ => statement.error("a label belongs here"),
        }
    }

    /// Notes what the destination's address bits come from.
    fn flow(&mut self, base: &str, statement: &Statement<'_>) {
        let mut registers = Vec::new();
        for operand in statement.operands.iter().skip(1) {
            match operand {
                Operand::Register(reg, _) => registers.push(*reg),
                Operand::Vector(parts) => registers.extend(parts.iter().filter_map(|part| match part {
                    Operand::Register(reg, _) => Some(*reg),
                    _ => None,
                })),
                _ => {}
            }
        }
        let loads = matches!(base, "ld" | "ldmatrix" | "atom" | "shfl" | "setp");
        let flow = match base {
            "mov" | "add" | "sub" | "cvta" | "cvt" | "or" | "mad" => Flow::Sum,
            "selp" => Flow::Either,
            _ if loads => Flow::Plain,
            _ => Flow::Other,
        };
        if loads {
            registers.clear();
        }
        // Symbols became constants while the instruction was decoded.
        registers.extend(self.provenance.take_new());
        match statement.operands.first() {
            Some(Operand::Register(reg, _)) => self.provenance.note(*reg, flow, &registers),
            Some(Operand::Vector(parts)) => {
                for part in parts {
                    if let Operand::Register(reg, _) = part {
                        self.provenance.note(*reg, flow, &registers);
                    }
                }
            }
            Some(Operand::Pair(first, _)) => {
                if let Operand::Register(reg, _) = &**first {
                    self.provenance.note(*reg, flow, &registers);
                }
            }
            _ => {}
        }
    }

    /// Resolves labels and arrays.
    pub(crate) fn finish(mut self) -> Result<Kernel, LoadError> {
        let line = self.code.last().map_or(1, |inst| inst.line);
        for (at, names, line) in std::mem::take(&mut self.wanted) {
            let mut found = Vec::new();
            for name in names {
                let (path, name) = name.split_once('\n').unwrap_or(("0", &name));
                let path: Vec<usize> = path.split(' ').filter_map(|scope| scope.parse().ok()).collect();
                let target = self.scoped(name, &path);
                found.push(
                    target.ok_or_else(|| LoadError::new(line, format!("label {name} is not defined")))?,
                );
            }
            match self.code.get_mut(at).map(|inst| &mut inst.op) {
                Some(Op::Branch { target }) => *target = found.first().copied().unwrap_or(0),
                Some(Op::Jump { targets, .. }) => *targets = found,
                _ => {}
            }
        }
        // The end of a body ends a thread.
        self.code.push(Inst { guard: None, op: Op::Exit, line, loc: self.location });
        let arrays = self.provenance.solve();
        for inst in &mut self.code {
            if let Op::Load { mem, .. }
            | Op::Store { mem, .. }
            | Op::Atomic { mem, .. }
            | Op::Copy { to: mem, .. }
            | Op::Together { what: Together::LoadMatrix { mem, .. }, .. } = &mut inst.op
            {
                mem.array = arrays.get(&mem.base).copied();
            }
        }
        Ok(Kernel {
            name: self.name,
            params: self.params.into_iter().map(|(_, param)| param).collect(),
            params_size: self.params_size,
            static_shared: self.static_shared,
            shared_align: self.shared_align,
            local_bytes: self.local_bytes,
            max_threads: self.max_threads,
            declared: self.declared,
            code: self.code,
            counts: self.counts,
            constants: self.constants,
            specials: self.specials,
            arrays: self.arrays,
            locations: self.locations,
            lines: Arc::from([]),
            variables: Arc::from([]),
        })
    }
}
