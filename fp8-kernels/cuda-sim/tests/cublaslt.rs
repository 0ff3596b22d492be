//! cuBLASLt: products against a plain loop, and every refusal with its code.
//!
//! Inputs are small integers and factors powers of two, so that sums are exact in any order: results have one right value,
//! rounded once to the output's type.
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls of the C interface, one after another under one contract"
)]

#[path = "lt/fp4.rs"]
mod fp4;
mod lt;
mod rig;
#[path = "lt/scale_modes.rs"]
mod scale_modes;

use cudarc::driver::CudaSlice;
use lt::{BF16, Case, E4M3, E5M2, F16, F32, INVALID, Lab, NOT_SUPPORTED, decode, round, value};
use rig::{code, rig};

const FP8: [[i32; 4]; 9] = [
    [E4M3, E4M3, BF16, BF16],
    [E4M3, E4M3, F16, F16],
    [E4M3, E4M3, F32, F32],
    [E4M3, E5M2, BF16, BF16],
    [E5M2, E4M3, F32, F32],
    [E4M3, E4M3, BF16, E4M3],
    [E5M2, E4M3, F16, E4M3],
    [E4M3, E5M2, BF16, E5M2],
    [E5M2, E4M3, BF16, E5M2],
];
const WIDE: [[i32; 4]; 5] = [
    [BF16, BF16, BF16, BF16],
    [BF16, BF16, F32, F32],
    [F16, F16, F16, F16],
    [F16, F16, F32, F32],
    [F32, F32, F32, F32],
];
const ALL: [[bool; 2]; 4] = [[true, false], [false, false], [false, true], [true, true]];

/// D as a plain loop finds it, and its amax.
fn expected(case: &Case) -> (Vec<f64>, f64) {
    let [m, n, k] = case.sizes;
    let [sa, sb, sc, sd] = case.scales.map(|scale| f64::from(scale.unwrap_or(1.0)));
    let (mut all, mut amax) = (Vec::new(), 0f64);
    for j in 0..n {
        for i in 0..m {
            let products = (0..k).map(|l| value(0, i, l) * value(1, l, j));
            let mut sum = f64::from(case.alpha) * sa * sb * products.sum::<f64>();
            sum += f64::from(case.beta) * sc * value(2, i, j);
            sum += case.bias.map_or(0.0, |_| value(3, i, 0));
            amax = amax.max(sum.abs());
            all.push(round(if case.types[3] >= E4M3 { sum * sd } else { sum }, case.types[3]));
        }
    }
    (all, amax)
}

fn expect_right(lab: &Lab<'_>, case: &Case) {
    let (result, amax) = lab.run(case);
    let (values, largest) = expected(case);
    assert!(values.iter().any(|value| *value != 0.0));
    assert_eq!(result, values, "{case:?}");
    if case.amax {
        assert_eq!(f64::from(amax), largest, "{case:?}");
    }
}

#[test]
fn wide_products_are_right() {
    let rig = rig();
    let lab = Lab::new(&rig);
    for types in WIDE {
        for transposed in ALL {
            let plain = Case { types, transposed, sizes: [7, 5, 9], ..Case::default() };
            expect_right(&lab, &plain);
            let all = Case { gap: 3, alpha: 0.5, beta: 1.0, bias: Some(types[3]), ..plain };
            expect_right(&lab, &all);
        }
    }
    drop(lab);
    rig.finish();
}

#[test]
fn fp8_products_are_right() {
    let rig = rig();
    let lab = Lab::new(&rig);
    for types in FP8 {
        let is_fp8 = types[3] >= E4M3;
        let scale_d = is_fp8.then_some(0.125);
        let plain = Case { types, ..Case::default() };
        expect_right(&lab, &plain);
        let scales = [Some(0.5), Some(4.0), None, scale_d];
        let scaled = Case { scales, amax: is_fp8, ..plain };
        expect_right(&lab, &scaled);
        let bias = Some(if types[2] == F32 { BF16 } else { types[2] });
        expect_right(&lab, &Case { bias, beta: 1.0, gap: 16, ..scaled });
    }
    drop(lab);
    rig.finish();
}

#[test]
fn newer_gpus_take_every_layout_of_fp8() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let case = |transposed| Case { transposed, ..Case::default() };
    for transposed in &ALL[1..] {
        assert_eq!(lab.codes(&case(*transposed)), [NOT_SUPPORTED; 2]);
    }
    drop(lab);
    rig.finish();
    for (arch, expected) in [("89", NOT_SUPPORTED), ("120", NOT_SUPPORTED), ("100", 0)] {
        let (control, turn) = rig::turn();
        control.set("arch", arch).unwrap();
        let rig = rig::rig_on(control, turn);
        let lab = Lab::new(&rig);
        assert_eq!(lab.codes(&case(ALL[0])), [0; 2], "sm_{arch}");
        for transposed in &ALL[1..] {
            assert_eq!(lab.codes(&case(*transposed)), [expected; 2], "sm_{arch}");
            if expected == 0 {
                expect_right(&lab, &case(*transposed));
            }
        }
        drop(lab);
        rig.finish();
    }
}

#[test]
fn products_outside_the_tables_are_refused() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let base = Case::default();
    let wide = Case { types: WIDE[0], ..base };
    let to_fp8 = Case { types: FP8[5], ..base };
    let types = |types| Case { types, ..base };
    let refused = [
        ("k = 60", Case { sizes: [32, 16, 60], ..base }),
        ("m = 40", Case { sizes: [40, 16, 32], ..base }),
        ("n = 8", Case { sizes: [32, 8, 32], ..base }),
        ("a leading dimension", Case { gap: 8, ..base }),
        ("E5M2 × E5M2", types([E5M2, E5M2, BF16, BF16])),
        ("E5M2 of E4M3 alone", types([E4M3, E4M3, BF16, E5M2])),
        ("C in FP8", types([E4M3, E4M3, E4M3, E4M3])),
        ("C in f32 for D in FP8", types([E4M3, E4M3, F32, E4M3])),
        ("C and D apart", types([E4M3, E4M3, BF16, F32])),
        ("FP8 × bf16", types([E4M3, BF16, BF16, BF16])),
        ("bf16 × f16", types([BF16, F16, F32, F32])),
        ("f16 of bf16", types([BF16, BF16, F16, F16])),
        ("bf16 of f32", types([F32, F32, BF16, BF16])),
        ("i8", types([3, 3, F32, F32])),
        ("an f32 bias", Case { bias: Some(F32), ..base }),
        ("an f32 bias of bf16", Case { bias: Some(F32), ..wide }),
        ("a bias unlike C", Case { bias: Some(F16), ..to_fp8 }),
        ("an amax of bf16", Case { amax: true, ..base }),
        ("a scale of bf16", Case { scales: [None, None, None, Some(1.0)], ..base }),
    ];
    for (what, case) in refused {
        assert_eq!(lab.codes(&case), [NOT_SUPPORTED; 2], "{what}");
    }
    assert_eq!(lab.codes(&to_fp8), [0; 2]);
    drop(lab);
    rig.finish();
}

#[test]
fn shapes_that_do_not_match_are_refused() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let buffer = lab.stream.alloc_zeros::<u8>(1 << 16).unwrap();
    let at = lab.address(&buffer);
    // A is [k, m] and transposed.
    let right = [(E4M3, 32, 32, 32), (E4M3, 32, 16, 32), (BF16, 32, 16, 32), (BF16, 32, 16, 32)];
    let mut wrong = vec![right; 7];
    wrong[1][0].1 = 16; // k of A
    wrong[2][1].2 = 32; // n of B
    wrong[3][2].1 = 16; // m of C
    wrong[4][3].2 = 32; // n of D
    wrong[5][0].3 = 16; // a leading dimension below the rows
    wrong[6][3].3 = -32;
    for (index, layouts) in wrong.into_iter().enumerate() {
        let codes = lab.codes_of(&Case::default(), layouts, [at; 4]);
        assert_eq!(codes, [if index == 0 { 0 } else { INVALID }; 2], "{layouts:?}");
    }
    let mut empty = right;
    (empty[1].2, empty[2].2, empty[3].2) = (0, 0, 0);
    assert_eq!(lab.codes_of(&Case::default(), empty, [at; 4]), [INVALID; 2]);
    let mut huge = right.map(|(kind, ..)| (kind, 1 << 62, 1 << 62, 1 << 62));
    huge[0].0 = E4M3;
    assert_eq!(lab.codes_of(&Case::default(), huge, [at; 4]), [0, INVALID]);
    drop((buffer, lab));
    rig.finish();
}

#[test]
fn pointers_are_checked() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let case = Case::default();
    let buffer = lab.stream.alloc_zeros::<u8>(4096).unwrap();
    let at = lab.address(&buffer);
    let layouts = case.layouts();
    assert_eq!(lab.codes_of(&case, layouts, [at; 4]), [0, 0]);
    for index in 0..4 {
        // C is not read: beta is 0.
        let expected = if index == 2 { 0 } else { INVALID };
        // Unaligned, null, and one that ends too early: the smallest matrix has 512 bytes.
        for wrong in [at + 8, 0, at + 4096 - 256] {
            let mut places = [at; 4];
            places[index] = wrong;
            assert_eq!(lab.codes_of(&case, layouts, places), [0, expected], "matrix {index} at +{wrong}");
        }
    }
    let added = Case { beta: 1.0, ..case };
    assert_eq!(lab.codes_of(&added, layouts, [at, at, 0, at]), [0, INVALID]);
    // Other types need no more than their elements' alignment.
    let wide = Case { types: WIDE[0], ..case };
    assert_eq!(lab.codes_of(&wide, wide.layouts(), [at + 2; 4]), [0, 0]);
    assert_eq!(lab.codes_of(&wide, wide.layouts(), [at + 1; 4]), [0, INVALID]);
    drop((buffer, lab));
    rig.finish();
}

#[test]
fn places_of_factors_are_checked() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let buffer = lab.stream.alloc_zeros::<u8>(4096).unwrap();
    let at = lab.address(&buffer);
    let case = Case { types: FP8[5], ..Case::default() };
    let places = |scale: u64, amax: u64, bias: u64| {
        let operation = lab.operation(&case);
        for (attribute, address) in [(17, scale), (20, scale), (21, amax), (8, bias)] {
            assert_eq!(lab.set(operation, attribute, &address.to_le_bytes()), 0);
        }
        assert_eq!(lab.set(operation, 7, &4u32.to_le_bytes()), 0);
        let code = lab.multiply(operation, case.layouts(), [at, at, 0, at], case.beta, None, (0, 0));
        lab.destroy_operation(operation);
        code
    };
    // In place C and D are of one layout.
    let operation = lab.operation(&case);
    assert_eq!(lab.multiply(operation, case.layouts(), [at; 4], case.beta, None, (0, 0)), INVALID);
    lab.destroy_operation(operation);
    assert_eq!(places(at, at, at), 0);
    assert_eq!(places(0, 0, at), 0, "factors may be left out");
    for wrong in [at + 2, at + 4094, 16] {
        assert_eq!((places(wrong, at, at), places(at, wrong, at)), (INVALID, INVALID), "+{wrong}");
    }
    assert_eq!(
        (places(at, at, 0), places(at, at, at + 1), places(at, at, at + 4090)),
        (INVALID, INVALID, INVALID)
    );
    drop((buffer, lab));
    rig.finish();
}

#[test]
fn attributes_have_their_sizes_and_values() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let operation = lab.operation(&Case::default());
    let (four, eight, one) = ([0u8; 4], [0u8; 8], [0u8; 1]);
    for (attribute, size) in
        [(3, 4), (4, 4), (7, 4), (8, 8), (17, 8), (18, 8), (19, 8), (20, 8), (21, 8), (25, 1), (26, 4)]
    {
        for bytes in [&one[..], &four, &eight] {
            let expected = if bytes.len() == size { 0 } else { INVALID };
            assert_eq!(
                lab.set(operation, attribute, bytes),
                expected,
                "attribute {attribute} of {}",
                bytes.len()
            );
        }
        // SAFETY: null is what the call is about.
        let null =
            unsafe { (lab.api.cublasLtMatmulDescSetAttribute)(operation, attribute, std::ptr::null(), size) };
        assert_eq!(null, INVALID);
    }
    let number = |attribute, number: i32| lab.set(operation, attribute, &number.to_le_bytes());
    assert_eq!((number(3, 2), number(3, 1)), (NOT_SUPPORTED, 0), "a conjugate is no transpose");
    assert_eq!((number(0, 68), number(0, 64)), (0, NOT_SUPPORTED), "sums in f32");
    assert_eq!(
        (number(2, 2), number(31, 6)),
        (NOT_SUPPORTED, NOT_SUPPORTED),
        "vectors of factors, modes that do not exist"
    );
    assert_eq!(number(99, 0), INVALID);
    let mut made = 0;
    // SAFETY: the handle lives through the call.
    let refused = unsafe { (lab.api.cublasLtMatmulDescCreate)(&mut made, 64, 2) };
    assert_eq!((refused, made), (NOT_SUPPORTED, 0), "sums in f16");
    lab.destroy_operation(operation);
    drop(lab);
    rig.finish();
}

#[test]
fn factors_and_matrices_are_read_when_the_product_runs() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let case = Case { types: FP8[5], ..Case::default() };
    let [one, three] = [1.0f64, 3.0].map(|value| lt::encode(value, E4M3)[0]);
    let mut matrices = lab.stream.clone_htod(&vec![one; 2048]).unwrap();
    let mut factors = lab.stream.clone_htod(&[0.125f32, 99.0]).unwrap();
    let (at, scale) = (lab.address(&matrices), lab.address_f32(&factors));
    let operation = lab.operation(&case);
    for (attribute, address) in [(20, scale), (21, scale + 4)] {
        assert_eq!(lab.set(operation, attribute, &address.to_le_bytes()), 0);
    }
    let multiply = || lab.multiply(operation, case.layouts(), [at, at, at, at + 1024], 0.0, None, (0, 0));
    let read = |matrices: &CudaSlice<u8>, factors: &CudaSlice<f32>| {
        let codes = lab.stream.clone_dtoh(matrices).unwrap();
        assert!(codes[1024..1536].iter().all(|code| *code == codes[1024]));
        (decode(&codes[1024..1025], E4M3), lab.stream.clone_dtoh(factors).unwrap()[1])
    };
    assert_eq!(multiply(), 0);
    assert_eq!(
        read(&matrices, &factors),
        (4.0, 32.0),
        "32 ones, an eighth of it, and the amax in place of 99"
    );
    lab.stream.memcpy_htod(&vec![three; 1024], &mut matrices.slice_mut(..1024)).unwrap();
    lab.stream.memcpy_htod(&[2.0], &mut factors.slice_mut(..1)).unwrap();
    assert_eq!(multiply(), 0);
    assert_eq!(
        read(&matrices, &factors),
        (448.0, 288.0),
        "too large for E4M3: saturated; the amax is the sum's"
    );
    lab.stream.memcpy_htod(&vec![one; 1024], &mut matrices.slice_mut(..1024)).unwrap();
    assert_eq!(multiply(), 0);
    assert_eq!(read(&matrices, &factors), (64.0, 32.0), "a smaller amax than before");
    lab.destroy_operation(operation);
    drop((matrices, factors, lab));
    rig.finish();
}

#[test]
fn destroyed_handles_are_refused_and_forgotten_ones_listed() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let case = Case::default();
    let buffer = lab.stream.alloc_zeros::<u8>(4096).unwrap();
    let at = lab.address(&buffer);
    let listed = |what: &str| rig.control.live().lines().any(|line| line == what);
    let (mut library, mut layout, mut preference) = (0, 0, 0);
    let operation = lab.operation(&case);
    let api = &lab.api;
    // SAFETY: handles live through the calls; destroyed ones are what the test is about.
    unsafe {
        assert_eq!((api.cublasLtCreate)(&mut library), 0);
        assert_eq!((api.cublasLtMatrixLayoutCreate)(&mut layout, E4M3, 32, 32, 32), 0);
        assert_eq!((api.cublasLtMatmulPreferenceCreate)(&mut preference), 0);
        for line in ["handles 2", "matmul descriptors 1", "layouts 1", "preferences 1"] {
            assert!(listed(&format!("cublasLt {line}")), "{line}: {}", rig.control.live());
        }
        assert_eq!((api.cublasLtMatmulDescCreate)(std::ptr::null_mut(), 68, 0), INVALID);
        assert_eq!((api.cublasLtMatmulDescDestroy)(layout), INVALID, "a handle of another kind");
        assert_eq!(((api.cublasLtDestroy)(library), (api.cublasLtDestroy)(library)), (0, 1));
        assert_eq!(
            ((api.cublasLtMatrixLayoutDestroy)(layout), (api.cublasLtMatrixLayoutDestroy)(layout)),
            (0, INVALID)
        );
        let destroy = api.cublasLtMatmulPreferenceDestroy;
        assert_eq!((destroy(preference), destroy(preference)), (0, INVALID));
    }
    let multiply = |library, operation| lab.multiply_by(library, operation, case.layouts(), [at; 4]);
    assert_eq!(multiply(lab.library, operation), 0);
    assert_eq!(multiply(library, operation), 1, "a library that is gone");
    lab.destroy_operation(operation);
    assert_eq!(multiply(lab.library, operation), INVALID);
    drop((buffer, lab));
    rig.finish();
}

#[test]
fn a_dead_device_multiplies_nothing() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let kernel = rig.load("add_one");
    let buffer = lab.stream.alloc_zeros::<u8>(4096).unwrap();
    let at = lab.address(&buffer);
    rig::add_one(&lab.stream, &kernel, at, 1025).unwrap();
    assert_eq!(code(lab.stream.synchronize()), 700);
    let case = Case::default();
    assert_eq!(lab.codes_of(&case, case.layouts(), [at; 4]), [0, 13]);
    let mut library = 0;
    // SAFETY: the handle lives through the call.
    assert_eq!((unsafe { (lab.api.cublasLtCreate)(&mut library) }, library), (1, 0));
    drop((buffer, kernel, lab));
    rig.finish_dead();
}

#[test]
fn a_product_takes_part_in_a_graph() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let case = Case::default();
    let one = lt::encode(1.0, E4M3)[0];
    let mut inputs = lab.stream.clone_htod(&vec![one; 1024]).unwrap();
    let output = lab.stream.alloc_zeros::<u8>(1024).unwrap();
    lab.stream.synchronize().unwrap();
    let (at, to) = (lab.address(&inputs), lab.address(&output));
    let operation = lab.operation(&case);
    let mode = cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    lab.stream.begin_capture(mode).unwrap();
    assert_eq!(lab.multiply(operation, case.layouts(), [at, at, at, to], 0.0, None, (0, 0)), 0);
    let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
    lab.destroy_operation(operation); // its numbers are the graph's now
    // SAFETY: handles live through the calls and are destroyed once.
    unsafe {
        use cudarc::driver::sys;
        let stream = lab.stream.cu_stream();
        assert_eq!(rig::status(sys::cuStreamEndCapture(stream, &mut graph)), 0);
        assert_eq!(rig::status(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0)), 0);
        for factor in [1.0, 2.0] {
            lab.stream.memcpy_htod(&vec![lt::encode(factor, E4M3)[0]; 1024], &mut inputs).unwrap();
            assert_eq!(rig::status(sys::cuGraphLaunch(executable, stream)), 0);
            let found = lab.stream.clone_dtoh(&output).unwrap();
            assert_eq!(decode(&found[..2], BF16), 32.0 * factor * factor);
        }
        assert_eq!(rig::status(sys::cuGraphExecDestroy(executable)), 0);
        assert_eq!(rig::status(sys::cuGraphDestroy(graph)), 0);
    }
    drop((inputs, output, lab));
    rig.finish();
}
