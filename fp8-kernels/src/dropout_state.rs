//! Seeds of dropout on a device, and the random numbers that masks are drawn from.

use crate::backend::{Backend, dispatch};
use crate::cells::Counts;
use crate::ops::DropoutKey;
use crate::{Device, Error, Result};

/// A seed and a count on a device, from which each training step takes a key of its own.
///
/// Key n, counted from 0, is the n-th number of SplitMix64 with this seed. [`draw`](Self::draw) counts on the device, so a
/// recorded step takes a new key at each replay: replay n draws what step n would draw without a graph. Keys are the same on
/// every device. Clones share the state.
///
/// ```
/// use fp8_kernels::{Device, DropoutState};
/// let state = DropoutState::new(0, &Device::cpu())?;
/// let (first, second) = (state.draw()?, state.draw()?);
/// assert_eq!(first.read()?.seed, 0xE220_A839_7B1D_CDAF);
/// assert_ne!(first.read()?.seed, second.read()?.seed);
/// assert_eq!(state.read()?, (0, 2)); // the seed, and how many keys were taken
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DropoutState {
    device: Device,
    /// The seed, and how many keys were taken.
    counts: Counts,
}

impl DropoutState {
    /// Creates a state of which no key was taken.
    ///
    /// # Errors
    /// A step is being recorded in a graph; the device is out of memory or failed.
    pub fn new(seed: u64, device: &Device) -> Result<Self> {
        device.expect_eager("dropout state", "run the step once before")?;
        let state = Self { device: device.clone(), counts: Counts::new(2, device)? };
        state.set(seed, 0)?;
        Ok(state)
    }

    /// Returns the device that the state is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the seed, and how many keys were taken. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// A step that is being recorded; the device failed; none on the CPU.
    pub fn read(&self) -> Result<(u64, u64)> {
        let counts = self.counts.read(0..2)?;
        Ok((counts.first().copied().unwrap_or_default(), counts.get(1).copied().unwrap_or_default()))
    }

    /// Sets the seed, and how many keys were taken, as when training resumes from a checkpoint.
    ///
    /// # Errors
    /// A step that is being recorded; the device failed; none on the CPU.
    pub fn set(&self, seed: u64, taken: u64) -> Result<()> {
        self.device.expect_eager("dropout state", "set it before the replay")?;
        self.counts.write(&[seed, taken])
    }

    /// Takes the next key. All masks of a step are drawn from it: see [`DropoutDraw::mask`].
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn draw(&self) -> Result<DropoutDraw> {
        let key = dispatch!(self.device, dropout::advance(&self.counts, &self.device))?;
        Ok(DropoutDraw { key: Source::Device(key), first: 0 })
    }
}

/// The random numbers of one mask, for [`dropout`](crate::ops::dropout()) and other operations: a [`DropoutKey`], on the host
/// or on a device.
///
/// A draw on the device comes from [`DropoutState::draw`]. A `DropoutKey` converts into one on the host, which each operation
/// uploads. Two are equal if they are clones of each other, or equal on the host.
///
/// ```
/// use fp8_kernels::{DType, Device, DropoutState, Tensor, ops};
/// let device = Device::cpu();
/// let draw = DropoutState::new(1, &device)?.draw()?;
/// let x = Tensor::full(1.0, [100], DType::F32, &device)?;
/// let first = ops::dropout(&x, 0.5, draw.mask(0))?.to_vec::<f32>()?;
/// let second = ops::dropout(&x, 0.5, draw.mask(1))?.to_vec::<f32>()?;
/// assert_ne!(first, second);
/// assert_eq!(ops::dropout(&x, 0.5, draw.mask(0).read()?)?.to_vec::<f32>()?, first);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DropoutDraw {
    pub(crate) key: Source,
    /// The number of counters from the key's offset to the beginning of the mask.
    pub(crate) first: u64,
}

#[derive(Debug, Clone)]
pub(crate) enum Source {
    Host(DropoutKey),
    /// Seed and offset.
    Device(Counts),
}

impl DropoutDraw {
    /// The counters between two masks of a step: room for 2⁴⁶ elements each, and for 2²⁰ masks.
    const COUNTERS: u64 = 1 << 44;

    /// Returns the random numbers of mask `number` of the same step: they begin `number · 2⁴⁴` counters behind those of mask 0.
    /// The numbers of 2²⁰ masks do not overlap.
    #[must_use]
    pub fn mask(&self, number: u64) -> Self {
        let first = self.first.wrapping_add(number.wrapping_mul(Self::COUNTERS));
        Self { key: self.key.clone(), first }
    }

    /// Returns the random numbers of a part of the mask, which begins at element `element` of the whole tensor. With them, a rank
    /// that holds some rows of a tensor drops what one device would drop in the whole.
    ///
    /// # Errors
    /// An `element` that is not a multiple of 4: four elements share a counter.
    ///
    /// ```
    /// use fp8_kernels::{DType, Device, DropoutDraw, Tensor, ops};
    /// let draw = DropoutDraw::from(ops::DropoutKey { seed: 1, offset: 0 });
    /// let whole = Tensor::full(1.0, [8, 4], DType::F32, &Device::cpu())?;
    /// let last_rows = ops::rows(&whole, 3..8)?;
    /// let y = ops::dropout(&last_rows, 0.5, draw.at(3 * 4)?)?;
    /// assert_eq!(y.to_vec::<f32>()?, ops::dropout(&whole, 0.5, &draw)?.to_vec::<f32>()?[12..]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn at(&self, element: u64) -> Result<Self> {
        const LANES: u64 = 4;
        if !element.is_multiple_of(LANES) {
            let remedy =
                "a part of a mask begins at a multiple of 4: cut the tensor at such an element".to_owned();
            return Err(Error::Option {
                op: "dropout",
                option: "element",
                value: element.to_string(),
                remedy,
            });
        }
        Ok(Self { key: self.key.clone(), first: self.first.wrapping_add(element / LANES) })
    }

    /// Returns the key. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// A step that is being recorded; the device failed; none on the CPU.
    pub fn read(&self) -> Result<DropoutKey> {
        let key = match &self.key {
            Source::Host(key) => *key,
            Source::Device(counts) => {
                let counts = counts.read(0..2)?;
                let of = |index: usize| counts.get(index).copied().unwrap_or_default();
                DropoutKey { seed: of(0), offset: of(1) }
            }
        };
        Ok(DropoutKey { offset: key.offset.wrapping_add(self.first), ..key })
    }

    /// Checks that operations on tensors of `device` can use it.
    pub(crate) fn check(&self, op: &'static str, device: &Device) -> Result<()> {
        match &self.key {
            Source::Device(counts) => device.expect_same(op, counts.device()),
            Source::Host(_) => match device.backend() {
                Backend::Cpu => Ok(()),
                Backend::Cuda(gpu) => {
                    let remedy = "its mask would be the same at each replay: draw it from a DropoutState";
                    gpu.expect_eager(op, remedy)
                }
            },
        }
    }
}

impl From<DropoutKey> for DropoutDraw {
    fn from(key: DropoutKey) -> Self {
        Self { key: Source::Host(key), first: 0 }
    }
}

impl From<&Self> for DropoutDraw {
    fn from(draw: &Self) -> Self {
        draw.clone()
    }
}

impl PartialEq for DropoutDraw {
    fn eq(&self, other: &Self) -> bool {
        let same = match (&self.key, &other.key) {
            (Source::Host(key), Source::Host(other)) => key == other,
            (Source::Device(counts), Source::Device(other)) => counts.is_same(other),
            _ => false,
        };
        same && self.first == other.first
    }
}
