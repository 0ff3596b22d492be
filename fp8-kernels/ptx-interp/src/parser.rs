//! The grammar around instructions: directives, declarations, scopes and operands.
//!
//! Whatever is not listed here is an error with its line; nothing is skipped but debug strings, which give names.

use std::collections::HashMap;
use std::sync::Arc;

use crate::LoadError;
use crate::builder::{Builder, Declared};
use crate::ir::Ty;
use crate::lexer::{Lexeme, Token, lex};
use crate::module::{Kernel, Location, Module, Param, Variable};

mod instruction;
mod tokens;

impl Module {
    /// Reads PTX text as NVRTC writes it.
    ///
    /// # Errors
    /// For every directive, opcode, modifier, type or operand that is not known, with its line: what loads, runs as PTX says.
    pub fn parse(ptx: &str) -> Result<Self, LoadError> {
        let tokens = lex(ptx)?;
        let mut parser = Parser {
            tokens,
            at: 0,
            version: None,
            target: None,
            kernels: Vec::new(),
            files: HashMap::new(),
            strings: HashMap::new(),
            variables: Vec::new(),
            shared: Vec::new(),
        };
        while parser.at < parser.tokens.len() {
            parser.top_level()?;
        }
        parser.finish()
    }
}

struct Parser {
    tokens: Vec<Lexeme>,
    at: usize,
    version: Option<String>,
    target: Option<String>,
    kernels: Vec<Kernel>,
    files: HashMap<u64, String>,
    strings: HashMap<String, String>,
    variables: Vec<Variable>,
    /// Shared arrays of the module: name, alignment, bytes (none: dynamic).
    shared: Vec<Declared>,
}

impl Parser {
    fn top_level(&mut self) -> Result<(), LoadError> {
        let word = self.word()?;
        match word.as_str() {
            ".version" => {
                // "9.0" comes as the integer 9 and the word ".0".
                let (major, minor) = (self.integer()?, self.version_minor()?);
                self.version = Some(format!("{major}.{minor}"));
                if !(7..=9).contains(&major) {
                    return self.error(format!("PTX version {major}.{minor}: 7.0 to 9.x are read"));
                }
            }
            ".target" => self.target_line()?,
            ".address_size" => {
                if self.integer()? != 64 {
                    return self.error("address size: only 64 is read");
                }
            }
            ".file" => self.file()?,
            ".section" => self.section()?,
            ".extern" => {
                if !self.eat_word(".shared") {
                    return self.unexpected("\".shared\" after \".extern\"");
                }
                let declared = self.declaration()?;
                self.shared.push(declared);
            }
            ".shared" => {
                let declared = self.declaration()?;
                self.shared.push(declared);
            }
            ".global" | ".const" => self.variable()?,
            ".visible" | ".weak" => return self.top_level_symbol(),
            ".entry" => self.entry()?,
            other => return self.error(format!("directive {other:?} is not known here")),
        }
        Ok(())
    }

    fn top_level_symbol(&mut self) -> Result<(), LoadError> {
        match self.peek_word() {
            Some(".entry" | ".global" | ".const" | ".shared") => self.top_level(),
            _ => self.unexpected("\".entry\" or a variable"),
        }
    }

    fn version_minor(&mut self) -> Result<u64, LoadError> {
        match self.peek_word().and_then(|word| word.strip_prefix('.')).and_then(|digits| digits.parse().ok())
        {
            Some(minor) => {
                self.at += 1;
                Ok(minor)
            }
            None => self.unexpected("a version such as 9.0"),
        }
    }

    fn target_line(&mut self) -> Result<(), LoadError> {
        let target = self.word()?;
        let number = target.strip_prefix("sm_").map(|n| n.strip_suffix(['a', 'f']).unwrap_or(n));
        if number.and_then(|n| n.parse::<u32>().ok()).is_none_or(|n| !(75..=121).contains(&n)) {
            self.at -= 1;
            return self.error(format!("target {target:?}: sm_75 to sm_121 are read"));
        }
        self.target = Some(target);
        Ok(())
    }

    fn file(&mut self) -> Result<(), LoadError> {
        let index = self.integer()?;
        let name = self.text()?;
        self.files.insert(index, name);
        while self.eat(',') {
            self.integer()?; // modification time and size
        }
        Ok(())
    }

    /// `.section .debug_str { label: .b8 bytes … }`: the names `.loc` refers to.
    fn section(&mut self) -> Result<(), LoadError> {
        let name = self.word()?;
        if name != ".debug_str" {
            return self.error(format!("section {name:?}: only .debug_str is read"));
        }
        self.require('{')?;
        let mut label = None;
        while !self.eat('}') {
            let word = self.word()?;
            if self.eat(':') {
                label = Some(word);
                continue;
            }
            if word != ".b8" {
                return self.error(format!("{word:?} in .debug_str: only .b8 is read"));
            }
            let mut bytes = vec![self.integer()? as u8];
            while self.eat(',') {
                bytes.push(self.integer()? as u8);
            }
            if let Some(label) = &label {
                let text = bytes.split(|&b| b == 0).next().unwrap_or_default();
                self.strings.entry(label.clone()).or_default().push_str(&String::from_utf8_lossy(text));
            }
        }
        Ok(())
    }

    /// `.align 4 .b8 name[24] = {…}`, without the semicolon's predecessor.
    pub(crate) fn declaration(&mut self) -> Result<Declared, LoadError> {
        let mut align = None;
        if self.eat_word(".align") {
            align = Some(self.size()?);
        }
        let (ty, bits) = self.declared_type()?;
        let name = self.word()?;
        let mut elements = Some(1);
        if self.eat('[') {
            elements = if self.is(']') { None } else { Some(self.size()?) };
            self.require(']')?;
        }
        let bytes = elements.map(|n| n.saturating_mul(ty.bytes()));
        let mut initial = Vec::new();
        if self.eat('=') {
            let braced = self.eat('{');
            loop {
                let value = match self.peek() {
                    Some(&Token::F32(value)) if ty == Ty::F32 => {
                        self.at += 1;
                        u64::from(value)
                    }
                    Some(&Token::F64(value)) if ty == Ty::F64 => {
                        self.at += 1;
                        value
                    }
                    _ => self.integer()?,
                };
                initial.extend_from_slice(&value.to_le_bytes()[..ty.bytes()]);
                if !(braced && self.eat(',')) {
                    break;
                }
            }
            if braced {
                self.require('}')?;
            }
        }
        self.require(';')?;
        let align = align.unwrap_or(bits / 8);
        if !align.is_power_of_two() || align > 1 << 16 {
            return self.error(format!("alignment {align}: a power of two up to 65536 belongs here"));
        }
        if bytes.is_some_and(|bytes| initial.len() > bytes) {
            return self.error(format!("{name}: more initial values than elements"));
        }
        Ok(Declared { align, name, bytes, initial })
    }

    fn declared_type(&mut self) -> Result<(Ty, usize), LoadError> {
        let ty = self.peek_word().and_then(|word| word.strip_prefix('.')).and_then(Ty::parse);
        let Some(ty) = ty else { return self.unexpected("a type") };
        self.at += 1;
        Ok((ty, ty.bits().next_multiple_of(8) as usize))
    }

    fn variable(&mut self) -> Result<(), LoadError> {
        let Declared { align, name, bytes, initial } = self.declaration()?;
        let Some(bytes) = bytes else { return self.error(format!("{name}: a variable needs a size")) };
        if align > 256 {
            return self.error(format!("{name}: variables are aligned to 256 at most"));
        }
        let mut data = initial;
        data.resize(bytes, 0);
        self.variables.push(Variable { name, data });
        Ok(())
    }

    fn entry(&mut self) -> Result<(), LoadError> {
        let name = self.word()?;
        let target = self.target.as_deref().unwrap_or_default();
        let mut builder = Builder::new(&name, target, &self.shared, &self.variables);
        if self.eat('(') && !self.eat(')') {
            loop {
                self.param(&mut builder)?;
                if !self.eat(',') {
                    break;
                }
            }
            self.require(')')?;
        }
        while !self.is('{') {
            let word = self.word()?;
            match word.as_str() {
                ".maxntid" | ".reqntid" => {
                    let mut threads = self.integer()?;
                    while self.eat(',') {
                        threads = threads.saturating_mul(self.integer()?);
                    }
                    builder.max_threads = Some(threads.min(u64::from(u32::MAX)) as u32);
                }
                ".minnctapersm" | ".maxnreg" => {
                    self.integer()?;
                }
                other => return self.error(format!("directive {other:?} is not known before a body")),
            }
        }
        self.require('{')?;
        self.body(&mut builder)?;
        let kernel = builder.finish()?;
        if self.kernels.iter().any(|other| other.name == kernel.name) {
            return self.error(format!("kernel {name:?} is defined twice"));
        }
        self.kernels.push(kernel);
        Ok(())
    }

    fn param(&mut self, builder: &mut Builder) -> Result<(), LoadError> {
        if !self.eat_word(".param") {
            return self.unexpected("\".param\"");
        }
        let mut align = if self.eat_word(".align") { Some(self.size()?) } else { None };
        let (ty, _) = self.declared_type()?;
        if self.eat_word(".ptr") {
            let _space = [".global", ".shared", ".const", ".local"].iter().any(|space| self.eat_word(space));
            if self.eat_word(".align") {
                self.size()?; // of what it points to
            }
        } else if align.is_none() && self.eat_word(".align") {
            align = Some(self.size()?);
        }
        let name = self.word()?;
        let mut size = ty.bytes();
        if self.eat('[') {
            size = size.saturating_mul(self.size()?);
            self.require(']')?;
        }
        let align = align.unwrap_or(ty.bytes());
        if ty == Ty::Pred || !align.is_power_of_two() || size > 32_764 {
            return self.error(format!("parameter {name}: {size} bytes aligned to {align} are not possible"));
        }
        builder.param(name, Param { offset: 0, size, align });
        Ok(())
    }

    /// Everything up to the brace that closes the function.
    fn body(&mut self, builder: &mut Builder) -> Result<(), LoadError> {
        let mut depth = 0;
        loop {
            if self.eat(';') {
                continue;
            }
            if self.eat('{') {
                depth += 1;
                builder.open();
                continue;
            }
            if self.eat('}') {
                if depth == 0 {
                    return Ok(());
                }
                depth -= 1;
                builder.close();
                continue;
            }
            if self.is('@') {
                self.instruction(builder)?;
                continue;
            }
            let Some(word) = self.peek_word() else { return self.unexpected("a statement") };
            if word.starts_with('.') {
                self.directive(builder)?;
                continue;
            }
            let is_label = self.tokens.get(self.at + 1).is_some_and(|l| l.token == Token::Punct(':'));
            if is_label {
                let line = self.line();
                let name = self.word()?;
                self.require(':')?;
                if self.eat_word(".branchtargets") {
                    let mut targets = vec![self.word()?];
                    while self.eat(',') {
                        targets.push(self.word()?);
                    }
                    self.require(';')?;
                    builder.jump_table(name, targets);
                } else {
                    builder.label(name, line)?;
                }
                continue;
            }
            self.instruction(builder)?;
        }
    }

    fn directive(&mut self, builder: &mut Builder) -> Result<(), LoadError> {
        let line = self.line();
        let word = self.word()?;
        match word.as_str() {
            ".reg" => {
                let (ty, _) = self.declared_type()?;
                loop {
                    let name = self.word()?;
                    if self.eat('<') {
                        let count = self.size()?;
                        self.require('>')?;
                        builder.declare(&name, Some(count), ty, line)?;
                    } else {
                        builder.declare(&name, None, ty, line)?;
                    }
                    if !self.eat(',') {
                        break;
                    }
                }
                self.require(';')
            }
            ".loc" => self.location(builder),
            ".pragma" => {
                let text = self.text()?;
                // Hints: whether a loop is unrolled, and which bytes of the next load are used.
                if text != "nounroll" && !text.starts_with("used_bytes_mask ") {
                    return self.error(format!("pragma {text:?} is not known"));
                }
                self.require(';')
            }
            ".shared" => {
                let declared = self.declaration()?;
                builder.shared_array(&declared, line)
            }
            ".local" => {
                let declared = self.declaration()?;
                builder.local_array(&declared, line)
            }
            other => Err(LoadError::new(line, format!("directive {other:?} is not known in a body"))),
        }
    }

    /// `.loc file line column[, function_name label[+offset], inlined_at file line column]`
    fn location(&mut self, builder: &mut Builder) -> Result<(), LoadError> {
        let (file, line, _column) = (self.integer()?, self.integer()? as u32, self.integer()?);
        let mut location = Location { file, line, function: None, inlined_at: None };
        while self.eat(',') {
            let word = self.word()?;
            match word.as_str() {
                "function_name" => {
                    location.function = Some(self.word()?);
                    if self.eat('+') {
                        self.integer()?;
                    }
                }
                "inlined_at" => {
                    let (file, line, _column) = (self.integer()?, self.integer()? as u32, self.integer()?);
                    location.inlined_at = Some((file, line));
                }
                other => return self.error(format!("{other:?} in .loc is not known")),
            }
        }
        builder.locate(location);
        Ok(())
    }

    fn finish(mut self) -> Result<Module, LoadError> {
        let Some(target) = self.target.take() else { return self.error("no .target") };
        if self.version.is_none() {
            return self.error("no .version");
        }
        let variables: Arc<[Variable]> = std::mem::take(&mut self.variables).into();
        let mut kernels = std::mem::take(&mut self.kernels);
        for kernel in &mut kernels {
            kernel.name_lines(&self.files, &self.strings);
            kernel.variables = Arc::clone(&variables);
        }
        Ok(Module { target, kernels })
    }
}
