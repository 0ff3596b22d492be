//! The one device: its architecture, its attributes, and how targets of modules match it.
//!
//! Limits are those of the CUDA C Programming Guide, "Technical Specifications per Compute Capability".

/// A compute capability the device can have: 8.9, 9.0, 10.0 or 12.0, and 8.0, which has no FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arch(u32);

impl Arch {
    pub(crate) const DEFAULT: Self = Self(90);

    /// `90`, `sm_90` or `sm_90a` for one of the known devices.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.strip_prefix("sm_").unwrap_or(text).trim_end_matches(['a', 'f']);
        match digits.parse() {
            Ok(number @ (80 | 89 | 90 | 100 | 120)) => Ok(Self(number)),
            _ => Err("expected 80, 89, 90, 100 or 120, or the same as sm_90".into()),
        }
    }

    /// 90 for compute capability 9.0.
    pub(crate) fn number(self) -> u32 {
        self.0
    }

    pub(crate) fn name(self) -> String {
        format!("PTX interpreter (sm_{})", self.0)
    }

    /// Largest shared memory of a block after opting in.
    pub(crate) fn shared_optin(self) -> u32 {
        match self.0 {
            80 => 163 << 10,
            90 | 100 => 227 << 10,
            _ => 99 << 10,
        }
    }

    pub(crate) fn shared_per_sm(self) -> u32 {
        match self.0 {
            80 => 164 << 10,
            90 | 100 => 228 << 10,
            _ => 100 << 10,
        }
    }

    pub(crate) fn threads_per_sm(self) -> u32 {
        match self.0 {
            80 | 90 | 100 => 2048,
            _ => 1536,
        }
    }

    pub(crate) fn blocks_per_sm(self) -> u32 {
        match self.0 {
            80 | 90 | 100 => 32,
            _ => 24,
        }
    }
}

/// Shared memory of a block without opting in.
pub(crate) const SHARED_PER_BLOCK: u32 = 48 << 10;
/// Shared memory that the system reserves of each block (compute capability 8.0 and later).
pub(crate) const SHARED_RESERVED: u32 = 1 << 10;
pub(crate) const THREADS_PER_BLOCK: u32 = 1024;
pub(crate) const REGISTERS: u32 = 65_536;
pub(crate) const WARP: u32 = 32;
pub(crate) const BLOCK_LIMITS: [u32; 3] = [1024, 1024, 64];
pub(crate) const GRID_LIMITS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Value of a `CUdevice_attribute`; `None` for one this device does not know.
pub(crate) fn attribute(arch: Arch, sm_count: u32, attribute: i32) -> Option<i32> {
    let value = match attribute {
        1 => THREADS_PER_BLOCK,
        2 => BLOCK_LIMITS[0],
        3 => BLOCK_LIMITS[1],
        4 => BLOCK_LIMITS[2],
        5 => GRID_LIMITS[0],
        6 => GRID_LIMITS[1],
        7 => GRID_LIMITS[2],
        8 => SHARED_PER_BLOCK,
        9 => 65_536, // constant memory
        10 => WARP,
        11 => i32::MAX as u32, // pitch
        12 => REGISTERS,
        13 | 36 => 0, // no core clock and no memory clock: times on this device say nothing about hardware
        14 => 512,    // texture alignment
        15 => 1,      // copies overlap kernels
        16 => sm_count,
        17 => 0,           // no run-time limit on kernels
        18 => 0,           // not integrated
        19 => 0,           // kernels cannot read host memory
        20 => 0,           // compute mode: default
        31 => 1,           // concurrent kernels
        32 => 0,           // ECC
        33 | 34 | 50 => 0, // PCI bus, device and domain
        35 => 0,           // not a TCC driver
        37 => 1024,        // memory bus width
        38 => 32 << 20,    // L2
        39 => arch.threads_per_sm(),
        40 => 2, // copy engines
        41 => 1, // unified addressing
        75 => arch.number() / 10,
        76 => arch.number() % 10,
        78 => 1,      // stream priorities
        79 | 80 => 1, // global and local loads cached in L1
        81 => arch.shared_per_sm(),
        82 => REGISTERS,   // per multiprocessor
        83 => 0,           // managed memory
        84 | 85 => 0,      // not a multi-GPU board
        86 | 88 | 89 => 0, // native atomics on the host, pageable and concurrent managed access
        90 => 0,           // compute preemption
        91 => 0,           // host pointers of registered memory
        95 => 0,           // cooperative launch
        97 => arch.shared_optin(),
        102 => 0, // virtual memory management
        106 => arch.blocks_per_sm(),
        111 => SHARED_RESERVED,
        115 => 1, // memory pools: cuMemAllocAsync
        119 => 0, // handle types a pool can export
        120 => 0, // cluster launch
        _ => return None,
    };
    i32::try_from(value).ok()
}

/// A `.target` or `-arch` name: `sm_90`, `sm_90a`, `sm_100f`, `compute_90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) number: u32,
    /// `a`: code for exactly this architecture. `f`: for its family.
    pub(crate) suffix: Option<char>,
}

impl Target {
    /// Reads `sm_<number>[a|f]`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let rest = text.strip_prefix("sm_")?;
        let digits = rest.trim_end_matches(['a', 'f']);
        let suffix = match &rest[digits.len()..] {
            "" => None,
            "a" => Some('a'),
            "f" => Some('f'),
            _ => return None,
        };
        Some(Self { number: digits.parse().ok()?, suffix })
    }

    /// Whether PTX that NVRTC made for this target can stand for that of another one, with the name of the target replaced. Code
    /// for one architecture alone needs another such target: here, one of those that have FP4.
    pub(crate) fn code_serves(self, other: Self) -> bool {
        self.suffix.is_none() || other.suffix.is_some() && self.number >= 100 && other.number >= 100
    }

    /// Whether PTX for this target can be compiled for `arch`.
    ///
    /// PTX ISA, ".target": PTX for sm_x runs on later architectures; `a` targets have "no forward compatibility",
    /// `f` targets run on devices "of the same family", that is here the same major version.
    pub(crate) fn ptx_runs_on(self, arch: Arch) -> bool {
        match self.suffix {
            None => self.number <= arch.number(),
            Some('f') => self.number / 10 == arch.number() / 10 && self.number <= arch.number(),
            Some(_) => self.number == arch.number(),
        }
    }

    /// Whether a CUBIN for this target runs on `arch`.
    ///
    /// CUDA C Programming Guide, "Binary Compatibility": "a cubin object generated for compute capability X.y will
    /// only execute on devices of compute capability X.z where z >= y".
    pub(crate) fn cubin_runs_on(self, arch: Arch) -> bool {
        self.ptx_runs_on(arch) && self.number / 10 == arch.number() / 10
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        Target::parse(text).unwrap()
    }

    #[test]
    fn targets_match_as_documented() {
        let [ada, hopper, blackwell] = ["89", "sm_90", "100"].map(|text| Arch::parse(text).unwrap());
        assert!(target("sm_89").ptx_runs_on(hopper) && !target("sm_89").cubin_runs_on(hopper));
        assert!(target("sm_86").cubin_runs_on(ada) && !target("sm_90").ptx_runs_on(ada));
        assert!(target("sm_90a").ptx_runs_on(hopper) && !target("sm_90a").ptx_runs_on(blackwell));
        assert!(target("sm_100f").cubin_runs_on(blackwell) && !target("sm_100f").ptx_runs_on(hopper));
        let serves = ["sm_100", "sm_100a", "sm_120a", "sm_90a"]
            .map(|name| target("sm_100a").code_serves(target(name)));
        assert_eq!(serves, [false, true, true, false]);
        assert!(target("sm_89").code_serves(target("sm_100a")));
        assert_eq!(Target::parse("sm_90aa"), None);
        assert_eq!(Target::parse("compute_90"), None);
    }
}
