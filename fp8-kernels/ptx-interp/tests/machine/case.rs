//! A launch with all it needs: made argument by argument, run as often as wanted, each time in fresh memory.

use super::{Arg, bytes, params};
use ptx_interp::{Launch, Memory, Module, Report};

/// A launch, and what each of its buffers should hold afterwards.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    grid: [u32; 3],
    block: u32,
    shared: usize,
    args: Vec<Value>,
    /// For each buffer, in order; `None` where anything may.
    wanted: Vec<Option<Vec<u8>>>,
}

#[derive(Clone, Debug)]
enum Value {
    Number(Arg),
    Buffer { before: Option<Vec<u8>>, bytes: usize },
}

/// The bytes of each buffer; `None` for one with unwritten bytes.
pub(crate) type Outputs = Vec<Option<Vec<u8>>>;

pub(crate) fn floats(values: &[f32]) -> Vec<u8> {
    bytes(values, f32::to_le_bytes)
}

impl Case {
    pub(crate) fn new(grid: [u32; 3], block: u32) -> Self {
        Self { grid, block, shared: 0, args: Vec::new(), wanted: Vec::new() }
    }

    pub(crate) fn shared(self, shared: usize) -> Self {
        Self { shared, ..self }
    }

    pub(crate) fn number(mut self, arg: Arg) -> Self {
        self.args.push(Value::Number(arg));
        self
    }

    pub(crate) fn u32(self, value: usize) -> Self {
        self.number(Arg::U32(value.try_into().expect("a 32-bit number")))
    }

    pub(crate) fn u64(self, value: usize) -> Self {
        self.number(Arg::U64(value as u64))
    }

    pub(crate) fn f32(self, value: f32) -> Self {
        self.number(Arg::F32(value))
    }

    pub(crate) fn null(self) -> Self {
        self.u64(0)
    }

    /// A buffer the kernel reads.
    pub(crate) fn input(self, data: Vec<u8>) -> Self {
        let wanted = data.clone();
        self.buffer(Some(data), wanted)
    }

    /// A buffer that holds `before`, or nothing, and should hold `after`.
    pub(crate) fn buffer(mut self, before: Option<Vec<u8>>, after: Vec<u8>) -> Self {
        self.args.push(Value::Buffer { before, bytes: after.len() });
        self.wanted.push(Some(after));
        self
    }

    /// A buffer the kernel changes.
    pub(crate) fn cells(mut self, before: Vec<u8>) -> Self {
        self.args.push(Value::Buffer { bytes: before.len(), before: Some(before) });
        self.wanted.push(None);
        self
    }

    /// An unwritten buffer.
    pub(crate) fn room(mut self, bytes: usize) -> Self {
        self.args.push(Value::Buffer { before: None, bytes });
        self.wanted.push(None);
        self
    }

    pub(crate) fn run(&self, module: &Module, kernel: &str, seed: u64) -> Result<Outputs, Box<Report>> {
        let kernel = module.kernel(kernel).expect("the kernel");
        let memory = Memory::new();
        let mut buffers = Vec::new();
        let mut place = |(number, value): (usize, &Value)| match value {
            Value::Number(arg) => *arg,
            Value::Buffer { before, bytes } => {
                let address = memory.allocate(*bytes, &format!("argument {number}"));
                if let Some(before) = before {
                    memory.write(address, before).expect("fits");
                }
                buffers.push((address, *bytes));
                Arg::U64(address)
            }
        };
        let args: Vec<Arg> = self.args.iter().enumerate().map(&mut place).collect();
        let params = params(kernel, &args);
        let launch = Launch {
            grid: self.grid,
            block: [self.block, 1, 1],
            dynamic_shared: self.shared,
            params: &params,
            seed,
            ..Launch::default()
        };
        ptx_interp::run(kernel, &launch, &memory)?;
        let read = |&(address, bytes): &(u64, usize)| {
            let mut out = vec![0; bytes];
            memory.read(address, &mut out).ok().map(|()| out)
        };
        Ok(buffers.iter().map(read).collect())
    }

    /// Whether every buffer holds what it should.
    pub(crate) fn right(&self, module: &Module, kernel: &str, seed: u64) -> Result<bool, Box<Report>> {
        let outputs = self.run(module, kernel, seed)?;
        let holds = |(wanted, got): (&Option<Vec<u8>>, &Option<Vec<u8>>)| wanted.is_none() || wanted == got;
        Ok(self.wanted.iter().zip(&outputs).all(holds))
    }

    /// Describes the first byte that is not what it should be.
    pub(crate) fn difference(&self, module: &Module, kernel: &str, seed: u64) -> String {
        let outputs = self.run(module, kernel, seed).expect("ran before");
        for (n, (wanted, got)) in self.wanted.iter().zip(outputs).enumerate() {
            let (Some(wanted), Some(got)) = (wanted, &got) else {
                if wanted.is_some() {
                    return format!("buffer {n} has unwritten bytes");
                }
                continue;
            };
            let differ: Vec<usize> = (0..wanted.len()).filter(|&i| wanted[i] != got[i]).collect();
            if let Some(&i) = differ.first() {
                let (all, count, wanted, got) = (got.len(), differ.len(), wanted[i], got[i]);
                return format!(
                    "buffer {n}: byte {i} is {got:#04x}, not {wanted:#04x}; {count} of {all} differ"
                );
            }
        }
        "no difference".to_owned()
    }
}
