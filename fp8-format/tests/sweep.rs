//! Slices of f32 on every path, against the oracle in integers: patterns from all of f32, in both modes, and fused with
//! scales.
//!
//! `FP8_SWEEP_STRIDE=N` takes every N-th pattern, 1 all of them.

#![expect(clippy::print_stdout, reason = "counts are what a long sweep is run for")]

mod oracle;

use fp8_format::slice::{Codec, Path};
use fp8_format::{E4M3, E5M2, Fp8};
use oracle::Spec;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Patterns between two that are taken: few, unless asked for; Miri is slow.
const STRIDE: u64 = if cfg!(miri) { 16_777_213 } else { 65_521 };

/// Patterns taken at a time.
const CHUNK: u64 = 1 << 17;

const SCALES: [f32; 3] = [1.0, 0.37, 3e5];

struct Sweep {
    path: Path,
    codec: Codec,
    conversions: AtomicU64,
    mismatches: AtomicU64,
}

impl Sweep {
    fn new(path: Path) -> Self {
        let count = || AtomicU64::new(0);
        Self { path, codec: Codec::new().on(path), conversions: count(), mismatches: count() }
    }

    fn compare<T: Fp8>(&self, what: &str, patterns: &[u32], got: &[T], want: &[u8]) {
        assert_eq!([got.len(), want.len()], [patterns.len(); 2]);
        let mut wrong = patterns.iter().zip(got).zip(want).filter(|((_, got), want)| got.to_bits() != **want);
        if let Some(((bits, got), want)) = wrong.next() {
            let count = 1 + wrong.count() as u64;
            if self.mismatches.fetch_add(count, Ordering::Relaxed) == 0 {
                println!(
                    "{} {what}: {bits:#010x} gives {got:?}, which should have the code {want:#04x}",
                    self.path
                );
            }
        }
        self.conversions.fetch_add(got.len() as u64, Ordering::Relaxed);
    }

    fn check_amax(&self, got: f32, want: u32) {
        if got.to_bits() != want && self.mismatches.fetch_add(1, Ordering::Relaxed) == 0 {
            println!("{} amax: {:#010x} instead of {want:#010x}", self.path, got.to_bits());
        }
    }
}

fn check<T: Fp8>(sweeps: &[Sweep], spec: Spec, patterns: &[u32]) -> fp8_format::Result<()> {
    let x: Vec<f32> = patterns.iter().map(|bits| f32::from_bits(*bits)).collect();
    let mut codes = vec![T::default(); x.len()];
    let codes_of = |scale: Option<f32>, saturating| -> Vec<u8> {
        let bits = |x: &f32| scale.map_or(x.to_bits(), |scale| (x * scale).to_bits());
        x.iter().map(|x| oracle::encode(spec, oracle::parts_f32(bits(x)), saturating)).collect()
    };
    let want = codes_of(None, false);
    for sweep in sweeps {
        codes.fill(T::default());
        sweep.codec.from_f32(&x, &mut codes)?;
        sweep.compare(&format!("{} from_f32", spec.name), patterns, &codes, &want);
    }
    let want = codes_of(None, true);
    for sweep in sweeps {
        codes.fill(T::default());
        sweep.codec.from_f32_saturating(&x, &mut codes)?;
        sweep.compare(&format!("{} from_f32_saturating", spec.name), patterns, &codes, &want);
    }
    // Magnitudes are ordered as their bits; what lies above infinity is NaN.
    let magnitudes = patterns.iter().map(|bits| bits & 0x7FFF_FFFF);
    let amax = magnitudes.filter(|bits| *bits <= 0x7F80_0000).max().unwrap_or(0);
    for scale in SCALES {
        let want = codes_of(Some(scale), true);
        for sweep in sweeps {
            codes.fill(T::default());
            sweep.check_amax(sweep.codec.quantize(&x, scale, &mut codes)?, amax);
            sweep.compare(&format!("{} quantize by {scale}", spec.name), patterns, &codes, &want);
        }
    }
    Ok(())
}

#[test]
fn patterns_of_f32_on_every_path() {
    let stride: u64 = std::env::var("FP8_SWEEP_STRIDE").map_or(STRIDE, |stride| stride.parse().unwrap());
    assert!(stride > 0, "FP8_SWEEP_STRIDE is 0: it is the distance of two patterns, at least 1");
    let sweeps: Vec<Sweep> = Path::available().map(Sweep::new).collect();
    let count = (u64::from(u32::MAX) / stride) + 1;
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |threads| threads.get()) {
            scope.spawn(|| {
                loop {
                    let first = next.fetch_add(CHUNK, Ordering::Relaxed);
                    if first >= count {
                        break;
                    }
                    let patterns: Vec<u32> =
                        (first..count.min(first + CHUNK)).map(|i| (i * stride) as u32).collect();
                    check::<E4M3>(&sweeps, oracle::E4M3, &patterns).unwrap();
                    check::<E5M2>(&sweeps, oracle::E5M2, &patterns).unwrap();
                }
            });
        }
    });
    let mut total = 0;
    for Sweep { path, conversions, mismatches, .. } in sweeps {
        let mismatches = mismatches.into_inner();
        println!("{path}: {} conversions, {mismatches} mismatches", conversions.into_inner());
        total += mismatches;
    }
    assert_eq!(total, 0, "mismatches");
}
