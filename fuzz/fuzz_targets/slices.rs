//! Every path of this machine gives the bits of the conversions of one value, and writes nothing beside its destination.
//!
//! The first bytes say where the destination begins, how long the slices are, the scale and which function is called; the
//! others are elements, again and again.
#![no_main]

use fp8_format::philox::Philox;
use fp8_format::slice::{Codec, Path};
use fp8_format::{E4M3, E5M2, Fp8, Source};
use half::{bf16, f16};
use libfuzzer_sys::{Corpus, fuzz_target};

/// Room for a destination and what must stay as it is on both sides.
const ROOM: usize = 1 << 13;
const MOST: usize = ROOM - 128;

/// The call that the input describes.
struct Call {
    codec: Codec,
    function: u8,
    offset: usize,
    len: usize,
    scale: f32,
    elements: Vec<u8>,
}

impl Call {
    fn read(input: &[u8]) -> Option<Self> {
        let (&[path, function, offset, len_low, len_high, s0, s1, s2, s3], elements) =
            input.split_first_chunk()?;
        let paths: Vec<Path> = Path::available().collect();
        let bound = if path & 1 == 0 { 0 } else { usize::MAX };
        let codec = Codec::new().on(paths[usize::from(path >> 1) % paths.len()]).streaming_beyond(bound);
        // Mostly short slices; long ones are quantized by tables.
        let len = usize::from(u16::from_le_bytes([len_low, len_high]));
        let len = if function & 0x80 == 0 { len % 300 } else { len % (MOST + 1) };
        let scale = f32::from_le_bytes([s0, s1, s2, s3]);
        let elements = if elements.is_empty() { vec![0] } else { elements.to_vec() };
        Some(Self { codec, function: function & 0x7F, offset: offset.into(), len, scale, elements })
    }

    /// Elements of so many bytes, made of those that were given; no two places see them at the same phase.
    fn source<S, const N: usize>(&self, from: fn([u8; N]) -> S) -> Vec<S> {
        let mut bytes = self.elements.iter().cycle().copied();
        let mut source: Vec<S> = (0..self.len + self.offset % 8)
            .map(|i| {
                let mut element = [0; N];
                element.fill_with(|| bytes.next().unwrap_or_default());
                if i % 64 == 63 {
                    bytes.next();
                }
                from(element)
            })
            .collect();
        source.drain(..self.offset % 8);
        source
    }

    /// Runs `convert` on a destination amid guards, and compares each element with `want`.
    fn run<D: Copy, B: PartialEq + core::fmt::Debug>(
        &self,
        guard: D,
        bits: fn(D) -> B,
        convert: impl FnOnce(&mut [D]),
        want: impl Fn(usize) -> B,
    ) {
        let mut room = vec![guard; self.len + 128];
        let first = self.offset % 128;
        convert(&mut room[first..first + self.len]);
        for (i, d) in room.iter().enumerate() {
            let want = if (first..first + self.len).contains(&i) { want(i - first) } else { bits(guard) };
            assert_eq!(
                bits(*d),
                want,
                "{:?}, function {}, element {i} from {first}",
                self.codec,
                self.function
            );
        }
    }
}

fn amax<S: Source>(x: &[S]) -> f32 {
    x.iter().map(|x| x.to_f32().abs()).filter(|x| !x.is_nan()).fold(0.0, f32::max)
}

fn encode<T: Fp8>(call: &Call) {
    let codec = call.codec;
    let guard = T::from_bits(0xA5);
    let x: Vec<f32> = call.source(f32::from_le_bytes);
    let h: Vec<f16> = call.source(f16::from_le_bytes);
    let b: Vec<bf16> = call.source(bf16::from_le_bytes);
    let run = |convert: &dyn Fn(&mut [T]) -> fp8_format::Result<()>, want: &dyn Fn(usize) -> T| {
        call.run(guard, T::to_bits, |d| convert(d).expect("equal lengths"), |i| want(i).to_bits());
    };
    match call.function / 4 % 6 {
        0 => run(&|d| codec.from_f32(&x, d), &|i| T::from_f32(x[i])),
        1 => run(&|d| codec.from_f32_saturating(&x, d), &|i| T::from_f32_saturating(x[i])),
        2 => run(&|d| codec.from_f16(&h, d), &|i| T::from_f16(h[i])),
        3 => run(&|d| codec.from_f16_saturating(&h, d), &|i| T::from_f16_saturating(h[i])),
        4 => run(&|d| codec.from_bf16(&b, d), &|i| T::from_bf16(b[i])),
        _ => run(&|d| codec.from_bf16_saturating(&b, d), &|i| T::from_bf16_saturating(b[i])),
    }
}

fn quantize<T: Fp8, S: Source>(call: &Call, x: &[S]) {
    let (codec, scale) = (call.codec, call.scale);
    let guard = T::from_bits(0xA5);
    assert_eq!(codec.amax(x), amax(x));
    let code = |i: usize| T::from_f32_saturating(x[i].to_f32() * scale).to_bits();
    let convert = |d: &mut [T]| assert_eq!(codec.quantize(x, scale, d), Ok(amax(x)));
    call.run(guard, T::to_bits, convert, code);

    let random = Philox::new(call.elements[0].into(), u64::MAX - 9).at(call.offset as u64);
    let convert = |d: &mut [T]| assert_eq!(codec.quantize_stochastic(x, scale, random, d), Ok(amax(x)));
    call.run(guard, T::to_bits, convert, |i| {
        T::from_f32_stochastic(x[i].to_f32() * scale, random.word(i as u64)).to_bits()
    });

    // A matrix of the same elements, as far as they make whole rows.
    let cols = 1 + usize::from(call.elements[0]);
    let rows = x.len() / cols;
    let matrix = &x[..rows * cols];
    let call = Call { len: matrix.len(), elements: Vec::new(), ..*call };
    let mut codes = vec![guard; matrix.len()];
    let columns = |at: usize| code(at % rows * cols + at / rows);
    let convert = |d: &mut [T]| {
        let got = codec.quantize_transpose(matrix, rows, cols, scale, &mut codes, d);
        assert_eq!(got, Ok(amax(matrix)));
    };
    call.run(guard, T::to_bits, convert, columns);
    assert!(codes.iter().enumerate().all(|(i, got)| got.to_bits() == code(i)));
    let convert = |d: &mut [T]| codec.transpose(&codes, rows, cols, d).expect("a matrix");
    call.run(guard, T::to_bits, convert, columns);
}

fn decode<T: Fp8, D: Source>(call: &Call, guard: D, bits: fn(D) -> u32, nan: u32) {
    let codes: Vec<T> = call.source(|[code]| T::from_bits(code));
    let convert = |d: &mut [D]| call.codec.dequantize(&codes, call.scale, d).expect("equal lengths");
    call.run(guard, bits, convert, |i| {
        let v = codes[i].to_f32() * call.scale;
        if v.is_nan() { nan } else { bits(D::from_f32(v)) }
    });
}

fn values<T: Fp8>(call: &Call) {
    let codes: Vec<T> = call.source(|[code]| T::from_bits(code));
    let codec = call.codec;
    let lengths = "equal lengths";
    call.run(0.3, f32::to_bits, |d| codec.to_f32(&codes, d).expect(lengths), |i| codes[i].to_f32().to_bits());
    let guard = f16::from_bits(0x5A5A);
    call.run(
        guard,
        f16::to_bits,
        |d| codec.to_f16(&codes, d).expect(lengths),
        |i| codes[i].to_f16().to_bits(),
    );
    let guard = bf16::from_bits(0x5A5A);
    call.run(
        guard,
        bf16::to_bits,
        |d| codec.to_bf16(&codes, d).expect(lengths),
        |i| codes[i].to_bf16().to_bits(),
    );
}

fn functions<T: Fp8>(call: &Call) {
    match call.function % 4 {
        0 => encode::<T>(call),
        1 => match call.function / 4 % 3 {
            0 => quantize::<T, f32>(call, &call.source(f32::from_le_bytes)),
            1 => quantize::<T, f16>(call, &call.source(f16::from_le_bytes)),
            _ => quantize::<T, bf16>(call, &call.source(bf16::from_le_bytes)),
        },
        2 => match call.function / 4 % 3 {
            0 => decode::<T, f32>(call, 0.3, f32::to_bits, 0x7FFF_FFFF),
            1 => decode::<T, f16>(call, f16::from_bits(0x5A5A), |x| x.to_bits().into(), 0x7FFF),
            _ => decode::<T, bf16>(call, bf16::from_bits(0x5A5A), |x| x.to_bits().into(), 0x7FFF),
        },
        _ => values::<T>(call),
    }
}

fuzz_target!(|input: &[u8]| -> Corpus {
    let Some(call) = Call::read(input) else { return Corpus::Reject };
    if call.function & 0x40 == 0 {
        functions::<E4M3>(&call);
    } else {
        functions::<E5M2>(&call);
    }
    Corpus::Keep
});
