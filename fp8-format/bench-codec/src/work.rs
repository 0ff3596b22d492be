//! The measurements of this crate: each work on each path, with buffers that all of them share.

use crate::buffer::Buffer;
use crate::row::{Format, Row, Source, Work};
use fp8_format::slice::{Codec, Path};
use fp8_format::{E4M3, E5M2, E8M0, Fp8};
use half::{bf16, f16};
use std::error::Error;

/// A scale as a tensor's maximum gives it, and the power of two below.
const SCALES: [(&str, f32); 2] = [("any", 448.0 / 6.3), ("power_of_two", 64.0)];

/// Sources and destinations of a number of elements.
pub(crate) struct Buffers {
    pub(crate) f32s: Buffer<f32>,
    pub(crate) f16s: Buffer<f16>,
    pub(crate) bf16s: Buffer<bf16>,
    codes: Buffer<E4M3>,
    codes5: Buffer<E5M2>,
    pub(crate) out: Buffer<E4M3>,
    pub(crate) out5: Buffer<E5M2>,
    pub(crate) columns: Buffer<E4M3>,
    columns5: Buffer<E5M2>,
    wide: Buffer<f32>,
    wide_f16: Buffer<f16>,
    wide_bf16: Buffer<bf16>,
    /// Scales of blocks, rowwise and columnwise: at most one for 32 elements.
    pub(crate) scales: [Buffer<f32>; 2],
    pub(crate) e8m0: [Buffer<E8M0>; 2],
    /// Two codes a byte, and a scale for 16 elements: NVFP4.
    pub(crate) packed: Buffer<u8>,
    pub(crate) e4m3: Buffer<E4M3>,
    /// The memory that the ceiling writes in place of `out` and `columns` together.
    pairs: Buffer<[u8; 2]>,
    pub(crate) elements: usize,
}

impl Buffers {
    /// Allocates the buffers, in pages of 2 MiB if `has_huge_pages`.
    pub(crate) fn new(elements: usize, has_huge_pages: bool) -> Result<Self, Box<dyn Error>> {
        let value = |i: usize| normal(i as u64);
        let huge = has_huge_pages;
        Ok(Self {
            f32s: Buffer::new(elements, huge, value)?,
            f16s: Buffer::new(elements, huge, |i| f16::from_f32(value(i)))?,
            bf16s: Buffer::new(elements, huge, |i| bf16::from_f32(value(i)))?,
            codes: Buffer::new(elements, huge, |i| E4M3::from_f32(value(i) * 40.0))?,
            codes5: Buffer::new(elements, huge, |i| E5M2::from_f32(value(i) * 40.0))?,
            out: Buffer::new(elements, huge, |_| E4M3::ZERO)?,
            out5: Buffer::new(elements, huge, |_| E5M2::ZERO)?,
            columns: Buffer::new(elements, huge, |_| E4M3::ZERO)?,
            columns5: Buffer::new(elements, huge, |_| E5M2::ZERO)?,
            wide: Buffer::new(elements, huge, |_| 0.0)?,
            wide_f16: Buffer::new(elements, huge, |_| f16::ZERO)?,
            wide_bf16: Buffer::new(elements, huge, |_| bf16::ZERO)?,
            scales: [Buffer::new(elements / 32, huge, |_| 0.0)?, Buffer::new(elements / 32, huge, |_| 0.0)?],
            e8m0: [
                Buffer::new(elements / 32, huge, |_| E8M0::ONE)?,
                Buffer::new(elements / 32, huge, |_| E8M0::ONE)?,
            ],
            packed: Buffer::new(elements / 2, huge, |_| 0)?,
            e4m3: Buffer::new(elements / 16, huge, |_| E4M3::ZERO)?,
            pairs: Buffer::new(elements, huge, |_| [0; 2])?,
            elements,
        })
    }

    /// Returns the memory that the ceiling of these lines reads and writes: that of the works themselves, since one part of a
    /// machine's memory can be slower than another.
    pub(crate) fn of_ceiling(&mut self, [reads, writes]: [usize; 2]) -> (&[u8], &mut [u8]) {
        let read = match reads {
            4 | 8 => self.f32s.bytes(),
            2 => self.bf16s.bytes(),
            _ => self.codes.bytes(),
        };
        let written = match (reads, writes) {
            (_, 0) => &mut [],
            (1, 1) => self.columns.bytes_mut(),
            (1, 2) => self.wide_bf16.bytes_mut(),
            (1, _) => self.wide.bytes_mut(),
            (8, _) => &mut self.packed,
            (_, 1) => self.out.bytes_mut(),
            _ => self.pairs.bytes_mut(),
        };
        (read, written)
    }

    /// Rows and columns of all elements as a matrix of this shape.
    fn matrix(&self, shape: Shape) -> (usize, usize) {
        let [rows, cols] = shape.of(self.elements);
        (rows, cols)
    }
}

/// The shape of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// As high as wide, or half as high.
    Square,
    /// 64 columns: activations of many tokens by heads.
    Tall,
}

impl Shape {
    /// Rows and columns.
    pub(crate) fn of(self, elements: usize) -> [usize; 2] {
        let rows = match self {
            Self::Square => 1 << (elements.ilog2() / 2),
            Self::Tall => elements / 64,
        };
        [rows, elements / rows]
    }
}

/// About normally distributed: a sum of twelve uniform numbers, of bits that belong to `i`.
fn normal(i: u64) -> f32 {
    let mut state = i.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D;
    let mut sum = 0;
    for _ in 0..4 {
        state ^= state >> 33;
        state = state.wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        sum += (state & 0xFFFF) + (state >> 16 & 0xFFFF) + (state >> 32 & 0xFFFF);
    }
    sum as f32 / 65536.0 - 6.0
}

/// One measurement of this crate.
pub(crate) struct Task {
    /// Without what is measured.
    pub(crate) row: Row,
    /// The shape, if the work takes a matrix.
    pub(crate) shape: Option<Shape>,
    pub(crate) run: Box<dyn Fn(&mut Buffers) + Send + Sync>,
}

/// Tasks that move the same bytes.
pub(crate) struct Group {
    /// Lines of 64 bytes for 64 elements, in and out; for 128 where two codes share a byte.
    pub(crate) lines: [usize; 2],
    pub(crate) threads: usize,
    pub(crate) tasks: Vec<Task>,
}

impl Group {
    pub(crate) fn new(lines: [usize; 2], threads: usize) -> Self {
        Self { lines, threads, tasks: Vec::new() }
    }

    fn add(
        &mut self,
        work: Work,
        path: Path,
        (source, format): (Source, Format),
        scale: Option<&'static str>,
        run: impl Fn(Codec, &mut Buffers) + Send + Sync + 'static,
    ) {
        let codec = Codec::new().on(path);
        let codec = if self.threads > 1 { codec.parallel() } else { codec };
        let row = Row::of(work, path.name(), source, format, scale, self.threads);
        self.tasks.push(Task { row, shape: None, run: Box::new(move |buffers| run(codec, buffers)) });
    }

    /// A work whose matrix has this shape.
    pub(crate) fn add_matrix(
        &mut self,
        work: Work,
        path: Path,
        kind: (Source, Format),
        shape: Shape,
        run: impl Fn(Codec, &mut Buffers, (usize, usize)) + Send + Sync + 'static,
    ) {
        self.add(work, path, kind, None, move |codec, b| {
            let matrix = b.matrix(shape);
            run(codec, b, matrix);
        });
        if let Some(task) = self.tasks.last_mut() {
            task.shape = Some(shape);
        }
    }

    /// Says of which kind the scales of the last task are.
    pub(crate) fn name_scale(&mut self, scale: &str) {
        if let Some(task) = self.tasks.last_mut() {
            task.row.scale = Some(scale.to_owned());
        }
    }
}

/// A call of the crate that cannot fail here: lengths are equal.
pub(crate) fn done<T, E>(result: Result<T, E>) {
    assert!(result.is_ok(), "slices of the same length");
}

macro_rules! for_sources {
    ($($source:expr, $field:ident, $lines:literal, $from:ident, $from_saturating:ident;)*) => {
        /// Conversion and quantization from each source.
        pub(crate) fn encoding(path: Path, threads: usize) -> Vec<Group> {
            let mut groups = Vec::new();
            $(
                let mut group = Group::new([$lines, 1], threads);
                let kinds = [($source, Format::E4M3), ($source, Format::E5M2)];
                group.add(Work::Convert, path, kinds[0], None, |codec, b| {
                    done(codec.$from_saturating(&b.$field, &mut b.out));
                });
                group.add(Work::Convert, path, kinds[1], None, |codec, b| {
                    done(codec.$from_saturating(&b.$field, &mut b.out5));
                });
                for (name, scale) in SCALES {
                    group.add(Work::Quantize, path, kinds[0], Some(name), move |codec, b| {
                        done(codec.quantize(&b.$field, scale, &mut b.out));
                    });
                    group.add(Work::Quantize, path, kinds[1], Some(name), move |codec, b| {
                        done(codec.quantize(&b.$field, scale, &mut b.out5));
                    });
                }
                groups.push(group);
            )*
            groups
        }

        /// The rest of what reads a source, on one thread.
        pub(crate) fn reading(path: Path) -> Vec<Group> {
            let mut groups = Vec::new();
            $(
                let mut group = Group::new([$lines, 0], 1);
                group.add(Work::Amax, path, ($source, Format::None), None, |codec, b| {
                    std::hint::black_box(codec.amax(&b.$field));
                });
                groups.push(group);
                let mut group = Group::new([$lines, 2], 1);
                // The other paths are slow at them anyway, and take long to say so.
                let is_best = path == Path::best();
                for shape in [Shape::Square].into_iter().chain(is_best.then_some(Shape::Tall)) {
                    let kind = ($source, Format::E4M3);
                    group.add_matrix(Work::QuantizeTranspose, path, kind, shape, |codec, b, (rows, cols)| {
                        let (out, columns) = (&mut b.out, &mut b.columns);
                        done(codec.quantize_transpose(&b.$field, rows, cols, SCALES[0].1, out, columns));
                    });
                    let kind = ($source, Format::E5M2);
                    group.add_matrix(Work::QuantizeTranspose, path, kind, shape, |codec, b, (rows, cols)| {
                        let (out, columns) = (&mut b.out5, &mut b.columns5);
                        done(codec.quantize_transpose(&b.$field, rows, cols, SCALES[0].1, out, columns));
                    });
                }
                groups.push(group);
            )*
            groups
        }
    };
}

for_sources! {
    Source::F32, f32s, 4, from_f32, from_f32_saturating;
    Source::F16, f16s, 2, from_f16, from_f16_saturating;
    Source::BF16, bf16s, 2, from_bf16, from_bf16_saturating;
}

/// Decoding, and transposition of codes.
pub(crate) fn decoding(path: Path) -> Vec<Group> {
    macro_rules! decode {
        ($source:expr, $lines:literal, $to:ident, $field:ident) => {{
            let mut group = Group::new([1, $lines], 1);
            group.add(Work::Decode, path, ($source, Format::E4M3), None, |codec, b| {
                done(codec.$to(&b.codes, &mut b.$field));
            });
            group.add(Work::Decode, path, ($source, Format::E5M2), None, |codec, b| {
                done(codec.$to(&b.codes5, &mut b.$field));
            });
            group
        }};
    }
    let mut transpose = Group::new([1, 1], 1);
    let kind = (Source::None, Format::E4M3);
    transpose.add_matrix(Work::Transpose, path, kind, Shape::Square, |codec, b, (rows, cols)| {
        done(codec.transpose(&b.codes, rows, cols, &mut b.columns));
    });
    vec![
        decode!(Source::F32, 4, to_f32, wide),
        decode!(Source::F16, 2, to_f16, wide_f16),
        decode!(Source::BF16, 2, to_bf16, wide_bf16),
        transpose,
    ]
}

/// The scalar functions of another crate, in a loop as its users write it.
pub(crate) fn float8() -> Vec<Group> {
    fn convert<T: Fp8, U>(x: &[f32], out: &mut [T], encode: impl Fn(f32) -> U, bits: impl Fn(U) -> u8) {
        for (code, x) in out.iter_mut().zip(x) {
            *code = T::from_bits(bits(encode(*x)));
        }
    }
    let row = |format| Row {
        peer: Some("float8".into()),
        ..Row::of(Work::Convert, "", Source::F32, format, None, 1)
    };
    let mut group = Group::new([4, 1], 1);
    group.tasks.push(Task {
        row: row(Format::E4M3),
        shape: None,
        run: Box::new(|b| convert(&b.f32s, &mut b.out, float8::F8E4M3::from_f32, |x| x.to_bits())),
    });
    group.tasks.push(Task {
        row: row(Format::E5M2),
        shape: None,
        run: Box::new(|b| convert(&b.f32s, &mut b.out5, float8::F8E5M2::from_f32, |x| x.to_bits())),
    });
    vec![group]
}
