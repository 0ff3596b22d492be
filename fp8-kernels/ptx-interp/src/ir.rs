//! Decoded instructions: what the parser makes and the warps run.

use crate::lanes::{Compare, Map, Reg};
use crate::numeric::Round;
use crate::race::Access;

/// An instruction type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ty {
    Pred,
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    BF16,
    BF16x2,
    F32,
    F64,
}

impl Ty {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::BF16,
            "bf16x2" => Self::BF16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Bits of a value; a predicate has 1.
    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::Pred => 1,
            Self::B8 | Self::U8 | Self::S8 => 8,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::BF16 => 16,
            Self::B32 | Self::U32 | Self::S32 | Self::F16x2 | Self::BF16x2 | Self::F32 => 32,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 64,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        (self.bits() as usize).div_ceil(8)
    }

    pub(crate) fn signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub(crate) fn unsigned(self) -> bool {
        matches!(self, Self::U8 | Self::U16 | Self::U32 | Self::U64)
    }

    pub(crate) fn integer(self) -> bool {
        self.signed() || self.unsigned()
    }

    pub(crate) fn untyped(self) -> bool {
        matches!(self, Self::B8 | Self::B16 | Self::B32 | Self::B64)
    }
}

/// A state space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
}

/// Addresses at which shared, local and parameter memory begin in the generic space, and module variables in the global one.
pub(crate) const SHARED_WINDOW: u64 = 0x0100_0000_0000;
pub(crate) const LOCAL_WINDOW: u64 = 0x0200_0000_0000;
pub(crate) const PARAM_WINDOW: u64 = 0x0300_0000_0000;
pub(crate) const WINDOW_BYTES: u64 = 1 << 32;
pub(crate) const VARIABLES: u64 = 0x6000_0000_0000;

/// A memory operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mem {
    pub(crate) space: Space,
    pub(crate) base: Reg,
    pub(crate) offset: i64,
    /// Bytes of one element.
    pub(crate) bytes: usize,
    /// Elements, for vectors.
    pub(crate) count: usize,
    /// The shared array the base belongs to, where that is known.
    pub(crate) array: Option<usize>,
    pub(crate) access: Access,
}

/// A read-modify-write operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtomOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}

/// A combination of predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

/// A predicate operand, perhaps negated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cond {
    pub(crate) pred: usize,
    pub(crate) negated: bool,
}

/// The rule by which a shuffle picks its source lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// A warp-wide reduction to one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduce {
    Add,
    MinU,
    MaxU,
    MinS,
    MaxS,
    And,
    Or,
    Xor,
}

/// A warp-wide or block-wide combination of predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
    Count,
}

/// Rounding to an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    None,
    Float(Round),
    Integer(Round),
}

/// A conversion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cvt {
    pub(crate) to: Ty,
    pub(crate) from: Ty,
    pub(crate) round: Rounding,
    pub(crate) ftz: bool,
    pub(crate) sat: bool,
    /// Bits of the destination register, which may be wider than `to`.
    pub(crate) bits: u32,
}

/// The elements of a matrix operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    BF16,
    E4M3,
    E5M2,
}

/// An operation that the lanes of a warp do together.
#[derive(Clone, Debug)]
pub(crate) enum Together {
    Shuffle {
        kind: Shuffle,
        d: Option<Reg>,
        p: Option<usize>,
        a: Reg,
        b: Reg,
        c: Reg,
    },
    Vote {
        kind: Vote,
        d: Reg,
        a: Cond,
    },
    Reduce {
        kind: Reduce,
        d: Reg,
        a: Reg,
    },
    MatchAny {
        d: Reg,
        a: Reg,
    },
    MatchAll {
        d: Reg,
        p: Option<usize>,
        a: Reg,
    },
    Barrier,
    /// `mma`: `d = a · b + c`, for a and b of the same or different elements of one size.
    Multiply {
        elements: [Element; 2],
        d: [Reg; 4],
        a: [Reg; 4],
        b: [Reg; 2],
        c: [Reg; 4],
    },
    /// `ldmatrix`: as many matrices as there are destinations.
    LoadMatrix {
        mem: Mem,
        d: [Option<Reg>; 4],
        transposed: bool,
    },
}

/// An operation.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// A function of whole registers; `n` sources count.
    Map {
        run: Map,
        d: Reg,
        s: [Reg; 3],
        n: usize,
    },
    /// Sum with carry in and out through the flag register.
    Carry {
        d: Reg,
        a: Reg,
        b: Reg,
        subtract: bool,
        carry_in: bool,
        carry_out: bool,
        flag: usize,
    },
    /// Any function of three bits, by its table.
    Lop3 {
        d: Reg,
        s: [Reg; 3],
        table: u8,
    },
    /// Comparison: `p` and its complement `q`, each combined with `with`.
    Set {
        test: Compare,
        a: Reg,
        b: Reg,
        p: Option<usize>,
        q: Option<usize>,
        with: Option<(Logic, Cond)>,
    },
    /// Predicates of predicates.
    Logic {
        kind: Logic,
        d: usize,
        a: Cond,
        b: Cond,
    },
    /// `p ? a : b`.
    Select {
        d: Reg,
        a: Reg,
        b: Reg,
        p: usize,
    },
    /// Several values to the bits of one, lowest first.
    Pack {
        d: Reg,
        parts: Vec<Reg>,
        bits: u32,
    },
    /// The bits of one to several values, lowest first.
    Unpack {
        parts: Vec<Option<Reg>>,
        a: Reg,
        bits: u32,
    },
    Convert {
        cvt: Cvt,
        d: Reg,
        a: Reg,
    },
    /// `extend`: bits to which a signed value is extended, 0 for others.
    Load {
        mem: Mem,
        d: Vec<Option<Reg>>,
        extend: u32,
    },
    Store {
        mem: Mem,
        s: Vec<Reg>,
    },
    Atomic {
        mem: Mem,
        kind: AtomOp,
        ty: Ty,
        d: Option<Reg>,
        b: Reg,
        c: Option<Reg>,
    },
    Branch {
        target: usize,
    },
    Jump {
        index: Reg,
        targets: Vec<usize>,
    },
    Exit,
    Trap,
    /// `bar.sync`, perhaps with a reduction of predicates.
    Barrier {
        id: Reg,
        count: Option<Reg>,
        reduce: Option<(Vote, Reg, Cond)>,
    },
    /// Operations of the lanes named in `mask`.
    Together {
        what: Together,
        mask: Reg,
    },
    ActiveMask {
        d: Reg,
    },
    /// `cp.async`: `size` bytes of the source, all where there is none, then zeros.
    Copy {
        to: Mem,
        from: Mem,
        size: Option<Reg>,
    },
    /// `cp.async.commit_group`
    Commit,
    /// `cp.async.wait_group` with the groups that may be under way; none for `cp.async.wait_all`.
    Wait {
        most: Option<u32>,
    },
    Nothing,
}

/// An instruction and where it comes from.
#[derive(Clone, Debug)]
pub(crate) struct Inst {
    pub(crate) guard: Option<Cond>,
    pub(crate) op: Op,
    /// Line of the PTX text.
    pub(crate) line: u32,
    /// Index into the kernel's source lines.
    pub(crate) loc: Option<u32>,
}

/// A value that a warp finds in a register when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    LaneId,
    WarpId,
    WarpCount,
    MaskEq,
    MaskLt,
    MaskLe,
    MaskGt,
    MaskGe,
    DynamicShared,
    DynamicSize,
    TotalSize,
}
