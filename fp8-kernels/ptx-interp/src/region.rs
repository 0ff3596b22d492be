//! The bytes of one allocation, one init bit per byte, and the shadow of races.

use crate::race::{Access, Conflict, Shadow, Span, Stamp};

/// The value of a byte before it is first written.
pub(crate) const FILL: u8 = 0xAA;

/// The set of bytes that have been written.
#[derive(Clone, Debug, Default)]
pub(crate) struct InitMap {
    words: Vec<u64>,
    missing: usize,
}

impl InitMap {
    fn new(bytes: usize) -> Self {
        Self { words: vec![0; bytes.div_ceil(64)], missing: bytes }
    }

    /// The word that holds a range of 1 to 64 bytes, and the range's bits in it, if it is one word. Every access of a lane has one:
    /// it is aligned to its size.
    #[inline]
    fn word(offset: usize, len: usize) -> Option<(usize, u64)> {
        let from = offset % 64;
        (from + len <= 64 && len > 0).then(|| (offset / 64, (!0u64 >> (64 - len)) << from))
    }

    /// The words a range touches, each with the range's bits in it.
    fn parts(offset: usize, len: usize) -> impl Iterator<Item = (usize, u64)> {
        let end = offset + len;
        let words = if len == 0 { 0..0 } else { offset / 64..end.div_ceil(64) };
        words.map(move |word| {
            let from = offset.max(word * 64) - word * 64;
            let to = end.min(word * 64 + 64) - word * 64;
            (word, (!0u64 >> (64 - (to - from))) << from)
        })
    }

    /// Whether every byte has been written.
    #[inline]
    pub(crate) fn whole(&self) -> bool {
        self.missing == 0
    }

    /// Whether all bytes of the range have been written.
    #[inline]
    pub(crate) fn all(&self, offset: usize, len: usize) -> bool {
        let holds = |(word, bits)| self.words.get(word).is_some_and(|w| w & bits == bits);
        self.missing == 0
            || match Self::word(offset, len) {
                Some(part) => holds(part),
                None => Self::parts(offset, len).all(holds),
            }
    }

    #[inline]
    pub(crate) fn set(&mut self, offset: usize, len: usize, written: bool) {
        if written && self.missing == 0 {
            return;
        }
        match Self::word(offset, len) {
            Some(part) => self.set_part(part, written),
            None => Self::parts(offset, len).for_each(|part| self.set_part(part, written)),
        }
    }

    #[inline]
    fn set_part(&mut self, (word, bits): (usize, u64), written: bool) {
        let Some(w) = self.words.get_mut(word) else { return };
        let changed = bits & if written { !*w } else { *w };
        *w ^= changed;
        let count = changed.count_ones() as usize;
        self.missing = if written { self.missing - count } else { self.missing + count };
    }

    fn first_missing(&self, offset: usize, len: usize) -> Option<usize> {
        (offset..offset + len).find(|&at| !self.all(at, 1))
    }
}

/// One allocation.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) base: u64,
    pub(crate) label: String,
    pub(crate) data: Vec<u8>,
    pub(crate) init: InitMap,
    pub(crate) shadow: Shadow,
    pub(crate) read_only: bool,
    /// The phase of the newest reset: accesses before it were to other memory.
    since: u32,
}

impl Region {
    pub(crate) fn new(base: u64, bytes: usize, label: &str) -> Self {
        let data = vec![FILL; bytes];
        let init = InitMap::new(bytes);
        Self {
            base,
            label: label.to_owned(),
            data,
            init,
            shadow: Shadow::default(),
            read_only: false,
            since: 0,
        }
    }

    pub(crate) fn end(&self) -> u64 {
        self.base + self.data.len() as u64
    }

    /// Makes every byte unwritten again, and untouched before `phase`.
    pub(crate) fn reset(&mut self, phase: u32) {
        self.data.fill(FILL);
        self.init = InitMap::new(self.data.len());
        self.since = phase;
    }

    /// Notes an access of `1 << bits` bytes; what it races with, if anything.
    #[inline]
    pub(crate) fn touch(
        &mut self,
        offset: usize,
        bits: u32,
        stamp: Stamp,
        access: Access,
        span: Span,
    ) -> Option<Conflict> {
        if span.ignored {
            return None;
        }
        let span = Span { launch: span.launch.max(self.since), ..span };
        self.shadow.touch(offset, bits, stamp, access, span)
    }

    /// The bytes of an asynchronous copy arrive, as a write at `stamp`; the caller has checked the bounds.
    pub(crate) fn land(&mut self, offset: usize, data: &[u8], stamp: Stamp) {
        let Some(to) = self.data.get_mut(offset..offset + data.len()) else { return };
        to.copy_from_slice(data);
        self.init.set(offset, data.len(), true);
        self.shadow.land(offset, data.len().trailing_zeros(), stamp);
    }

    /// The offset of `address`, if `len` bytes from there lie inside.
    #[inline]
    pub(crate) fn offset(&self, address: u64, len: usize) -> Option<usize> {
        let offset = address.wrapping_sub(self.base);
        let room = (self.data.len() as u64).checked_sub(len as u64)?;
        (offset <= room).then_some(offset as usize)
    }

    /// The first unwritten byte of a range.
    pub(crate) fn first_missing(&self, offset: usize, len: usize) -> Option<usize> {
        self.init.first_missing(offset, len)
    }

    /// The four bytes at `offset`, which the caller has found inside.
    #[inline]
    pub(crate) fn word(&self, offset: usize) -> u32 {
        let bytes = self.data.get(offset..).and_then(|from| from.first_chunk());
        bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }

    /// Little-endian value of 1, 2, 4 or 8 bytes; the caller has checked the bounds.
    #[inline]
    pub(crate) fn load(&self, offset: usize, bytes: usize) -> u64 {
        let from = self.data.get(offset..).unwrap_or(&[]);
        let take = |out: &mut [u8]| {
            if let Some(source) = from.get(..out.len()) {
                out.copy_from_slice(source);
            }
        };
        match bytes {
            1 => u64::from(from.first().copied().unwrap_or(0)),
            2 => {
                let mut b = [0; 2];
                take(&mut b);
                u64::from(u16::from_le_bytes(b))
            }
            4 => {
                let mut b = [0; 4];
                take(&mut b);
                u64::from(u32::from_le_bytes(b))
            }
            _ => {
                let mut b = [0; 8];
                take(&mut b);
                u64::from_le_bytes(b)
            }
        }
    }

    /// Stores the low bytes of `value`; the caller has checked the bounds.
    #[inline]
    pub(crate) fn store(&mut self, offset: usize, bytes: usize, value: u64) {
        let Some(to) = self.data.get_mut(offset..offset + bytes) else { return };
        match bytes {
            1 => to.copy_from_slice(&[value as u8]),
            2 => to.copy_from_slice(&(value as u16).to_le_bytes()),
            4 => to.copy_from_slice(&(value as u32).to_le_bytes()),
            _ => to.copy_from_slice(&value.to_le_bytes()),
        }
    }
}
