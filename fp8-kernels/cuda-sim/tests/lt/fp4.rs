//! FP4 operands with E4M3 factors of 16 values, and alpha and beta on the device.
//!
//! Codes and factors are small, so that sums are exact in any order and results have one right value, rounded once.

#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use cudarc::driver::CudaSlice;

use crate::lt::{self, BF16, Case, E2M1, E4M3, F16, F32, INVALID, Lab, NOT_SUPPORTED};
use crate::rig::{self, Rig};
use crate::scale_modes::{SCALAR, VEC16, VEC32, code};

const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// E4M3 codes, and what they are.
const FACTORS: [(u8, f64); 4] = [(0x30, 0.5), (0x38, 1.0), (0x3c, 1.5), (0x40, 2.0)];

/// m, n, k: the smallest, one that has more than a tile of factors both ways, and an odd number of blocks.
const SIZES: [[usize; 3]; 3] = [[8, 1, 32], [136, 3, 96], [16, 130, 160]];

/// A device with FP4.
fn device(arch: &str, version: &str) -> Rig {
    let (control, turn) = rig::turn();
    control.set("arch", arch).unwrap();
    control.set("cublas", version).unwrap();
    rig::rig_on(control, turn)
}

fn case(sizes: [usize; 3], output: i32) -> Case {
    Case { types: [E2M1, E2M1, output, output], sizes, ..Case::default() }
}

/// The code at column `l` of row `i` of an operand.
fn element(which: usize, i: usize, l: usize) -> u8 {
    ((i * 7 + l * 3 + which * 11 + i * l) % 16) as u8
}

fn value(code: u8) -> f64 {
    VALUES[usize::from(code & 7)] * if code >= 8 { -1.0 } else { 1.0 }
}

fn factor(which: usize, i: usize, block: usize) -> (u8, f64) {
    FACTORS[(i * 5 + block * 3 + which + i / 32 + i / 128) % 4]
}

/// An operand `[rows, k]` whose rows are `ld` codes apart, the first of two in the low half of a byte.
fn packed(code: impl Fn(usize, usize) -> u8, [rows, k]: [usize; 2], ld: usize) -> Vec<u8> {
    // Codes in gaps are not zeros, so that a wrong row shows.
    let at = |i, l| if l < k { code(i, l) } else { 0x5 };
    (0..rows * ld / 2)
        .map(|byte| (byte * 2 / ld, byte * 2 % ld))
        .map(|(i, l)| at(i, l) | at(i, l + 1) << 4)
        .collect()
}

/// Factors `[rows, k / 16]` as the library wants them: tiles of 128 rows by 4 blocks, zeros where there are no more.
fn swizzled(factor: impl Fn(usize, usize) -> u8, [rows, k]: [usize; 2]) -> Vec<u8> {
    let (blocks, wide) = (k / 16, (k / 16).next_multiple_of(4));
    let mut all = vec![0; rows.next_multiple_of(128) * wide];
    for (r, b) in (0..rows).flat_map(|r| (0..blocks).map(move |b| (r, b))) {
        all[(r / 128 * (wide / 4) + b / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + b % 4] = factor(r, b);
    }
    all
}

/// The sums that D is made of, in f64.
fn sum([i, j]: [usize; 2], k: usize) -> f64 {
    let product = |l: usize| value(element(0, i, l)) * value(element(1, j, l));
    (0..k).map(|l| product(l) * factor(0, i, l / 16).1 * factor(1, j, l / 16).1).sum()
}

/// A product on the device.
struct Product<'a> {
    lab: &'a Lab<'a>,
    case: Case,
    operation: u64,
    /// A, B, C, D.
    matrices: [CudaSlice<u8>; 4],
    _factors: [CudaSlice<u8>; 2],
    _bias: Option<CudaSlice<u8>>,
}

impl Drop for Product<'_> {
    fn drop(&mut self) {
        self.lab.destroy_operation(self.operation);
    }
}

impl<'a> Product<'a> {
    fn new(lab: &'a Lab<'a>, case: Case) -> Self {
        Self::with(lab, case, element, |which, i, block| factor(which, i, block).0)
    }

    fn with(
        lab: &'a Lab<'a>,
        case: Case,
        element: fn(usize, usize, usize) -> u8,
        factor: fn(usize, usize, usize) -> u8,
    ) -> Self {
        let [m, n, k] = case.sizes;
        let upload = |bytes: &[u8]| lab.stream.clone_htod(bytes).unwrap();
        let operation = lab.operation(&case);
        let (mut operands, mut factors) = (Vec::new(), Vec::new());
        for (which, rows) in [m, n].into_iter().enumerate() {
            operands.push(upload(&packed(|i, l| element(which, i, l), [rows, k], k + case.gap)));
            factors.push(upload(&swizzled(|i, block| factor(which, i, block), [rows, k])));
            let (mode, pointer) = (31 + which as i32, 17 + which as i32);
            assert_eq!(lab.set(operation, mode, &VEC16.to_le_bytes()), 0);
            assert_eq!(lab.set(operation, pointer, &lab.address(&factors[which]).to_le_bytes()), 0);
        }
        let kind = case.types[3];
        let elements = |at: usize| lt::encode(lt::value(2, at % (m + case.gap), at / (m + case.gap)), kind);
        let c: Vec<u8> = (0..(m + case.gap) * n).flat_map(elements).collect();
        let bias = case.bias.map(|kind| {
            let bias = upload(&(0..m).flat_map(|i| lt::encode(lt::value(3, i, 0), kind)).collect::<Vec<_>>());
            assert_eq!(lab.set(operation, 8, &lab.address(&bias).to_le_bytes()), 0);
            bias
        });
        let d = upload(&vec![0xee; c.len()]);
        let [a, b] = operands.try_into().unwrap();
        let matrices = [a, b, upload(&c), d];
        Self { lab, case, operation, matrices, _factors: factors.try_into().unwrap(), _bias: bias }
    }

    fn places(&self) -> [u64; 4] {
        self.matrices.each_ref().map(|matrix| self.lab.address(matrix))
    }

    /// With alpha 1.
    fn run(&self) -> i32 {
        self.lab.multiply(self.operation, self.case.layouts(), self.places(), self.case.beta, None, (0, 0))
    }

    fn run_with(&self, scalars: [u64; 2]) -> i32 {
        assert_eq!(self.lab.set(self.operation, 2, &1i32.to_le_bytes()), 0);
        self.lab.multiply_on_device(self.operation, self.case.layouts(), self.places(), scalars)
    }

    /// D without its gaps, column by column.
    fn output(&self) -> Vec<f64> {
        let ([m, ..], kind) = (self.case.sizes, self.case.types[3]);
        let bytes = self.lab.stream.clone_dtoh(&self.matrices[3]).unwrap();
        let elements: Vec<f64> =
            bytes.chunks(if kind == F32 { 4 } else { 2 }).map(|e| lt::decode(e, kind)).collect();
        elements.chunks(m + self.case.gap).flat_map(|column| column[..m].to_vec()).collect()
    }

    fn expect_right(&self, [alpha, beta]: [f64; 2]) {
        let [m, n, k] = self.case.sizes;
        let kind = self.case.types[3];
        let mut wanted = Vec::new();
        for (i, j) in (0..n).flat_map(|j| (0..m).map(move |i| (i, j))) {
            let bias = self.case.bias.map_or(0.0, |_| lt::value(3, i, 0));
            wanted.push(lt::round(alpha * sum([i, j], k) + beta * lt::value(2, i, j) + bias, kind));
        }
        assert!(wanted.iter().any(|value| *value != 0.0));
        assert_eq!(self.output(), wanted, "{:?}", self.case);
    }
}

#[test]
fn fp4_products_are_right() {
    let rig = device("100", "120800");
    let lab = Lab::new(&rig);
    for sizes in SIZES {
        for (kind, bias) in [(BF16, BF16), (F32, BF16)] {
            let plain = case(sizes, kind);
            for case in [plain, Case { gap: 32, beta: 1.0, bias: Some(bias), ..plain }] {
                let product = Product::new(&lab, case);
                assert_eq!(product.run(), 0, "{case:?}");
                product.expect_right([1.0, f64::from(case.beta)]);
            }
        }
    }
    drop(lab);
    rig.finish();
}

#[test]
fn alpha_and_beta_on_the_device_are_read_when_the_product_runs() {
    let rig = device("120", "130100");
    let lab = Lab::new(&rig);
    let product = Product::new(&lab, case(SIZES[1], F32));
    let mut scalars = lab.stream.clone_htod(&[0.25f32, 2.0]).unwrap();
    let at = lab.address_f32(&scalars);
    assert_eq!(product.run_with([at, at + 4]), 0);
    product.expect_right([0.25, 2.0]);
    lab.stream.memcpy_htod(&[-2.0, 0.0], &mut scalars).unwrap();
    assert_eq!(product.run_with([at, at + 4]), 0);
    product.expect_right([-2.0, 0.0]);
    // One of them for both.
    assert_eq!(product.run_with([at; 2]), 0);
    product.expect_right([-2.0, -2.0]);
    drop((product, scalars));
    drop(lab);
    rig.finish();
}

#[test]
fn every_product_takes_alpha_from_the_device() {
    let rig = rig::rig();
    let lab = Lab::new(&rig);
    let one = lt::encode(1.0, E4M3)[0];
    let matrices = lab.stream.clone_htod(&[one; 2048]).unwrap();
    let scalars = lab.stream.clone_htod(&[0.125f32, 0.0]).unwrap();
    let (at, scalars_at) = (lab.address(&matrices), lab.address_f32(&scalars));
    let case = Case::default();
    let operation = lab.operation(&case);
    assert_eq!(lab.set(operation, 2, &1i32.to_le_bytes()), 0);
    let places = [at, at, at + 1024, at + 1024];
    assert_eq!(lab.multiply_on_device(operation, case.layouts(), places, [scalars_at, scalars_at + 4]), 0);
    let found = lab.stream.clone_dtoh(&matrices).unwrap();
    assert_eq!(lt::decode(&found[1024..1026], BF16), 4.0, "32 ones, an eighth of it");
    lab.destroy_operation(operation);
    drop((matrices, scalars, lab));
    rig.finish();
}

#[test]
fn a_kernel_is_for_one_pointer_mode() {
    let rig = device("100", "130100");
    let lab = Lab::new(&rig);
    let product = Product::new(&lab, case(SIZES[0], BF16));
    let (operation, case) = (product.operation, &product.case);
    let found = lab.heuristics_of(operation, case).unwrap();
    let check = || lab.check_of(operation, case, &found[0].algo).err();
    assert_eq!(check(), None);
    assert_eq!(lab.set(operation, 2, &1i32.to_le_bytes()), 0);
    assert_eq!(check(), Some(NOT_SUPPORTED));
    drop(product);
    drop(lab);
    rig.finish();
}

#[test]
fn places_of_alpha_and_beta_are_checked() {
    let rig = device("100", "130100");
    let lab = Lab::new(&rig);
    let product = Product::new(&lab, case(SIZES[0], BF16));
    let scalars = lab.stream.clone_htod(&[1.0f32, 0.0]).unwrap();
    let at = lab.address_f32(&scalars);
    for wrong in [0, at + 2, at + 8] {
        assert_eq!(
            (product.run_with([wrong, at]), product.run_with([at, wrong])),
            (INVALID, INVALID),
            "{wrong:x}"
        );
    }
    // Whether C is read, only the device knows: it is a matrix in any case.
    let [a, b, _, d] = product.places();
    let multiply =
        |c| lab.multiply_on_device(product.operation, product.case.layouts(), [a, b, c, d], [at, at + 4]);
    assert_eq!((multiply(0), multiply(d)), (INVALID, 0));
    drop((product, scalars));
    drop(lab);
    rig.finish();
}

#[test]
fn only_what_is_read_must_be_written() {
    // Beta is 0, and C nobody wrote.
    let rig = device("100", "130100");
    let lab = Lab::new(&rig);
    let mut product = Product::new(&lab, case(SIZES[0], BF16));
    let scalars = lab.stream.clone_htod(&[0.5f32, 0.0]).unwrap();
    let at = lab.address_f32(&scalars);
    // SAFETY: the memory is unwritten; that is what the test is about.
    product.matrices[2] = unsafe { lab.stream.alloc::<u8>(512) }.unwrap();
    assert_eq!(product.run_with([at, at + 4]), 0);
    product.expect_right([0.5, 0.0]);
    drop((product, scalars));
    drop(lab);
    rig.finish();
    // Operands and alpha nobody wrote.
    for which in [0, 1, 4] {
        let rig = device("100", "130100");
        let lab = Lab::new(&rig);
        let mut product = Product::new(&lab, case(SIZES[0], BF16));
        // SAFETY: as above.
        let unwritten = unsafe { lab.stream.alloc::<u8>(512) }.unwrap();
        let alpha = lab.address(&unwritten);
        let status = match product.matrices.get_mut(which) {
            Some(matrix) => {
                *matrix = unwritten.clone();
                product.run()
            }
            None => product.run_with([alpha; 2]),
        };
        assert_eq!(status, 0);
        assert_eq!(rig::code(lab.stream.synchronize()), 719, "{which}");
        assert!(rig.control.reports().contains("never written"), "{}", rig.control.reports());
        drop((product, unwritten));
        drop(lab);
        rig.finish_dead();
    }
}

#[test]
fn blocks_are_exact_and_added_in_f32() {
    let rig = device("100", "130100");
    let lab = Lab::new(&rig);
    // 16 times 36 with the largest factors, an eighth, and the first once more with the other sign.
    let element = |which: usize, _: usize, l: usize| match (l / 16, which) {
        (0, _) | (2, 0) => 0x7,
        (2, _) => 0xf,
        (1, _) if l.is_multiple_of(16) => 0x1,
        _ => 0,
    };
    let factor = |which: usize, _: usize, block: usize| if block == 1 { [0x38, 0x30][which] } else { 0x7e };
    let product = Product::with(&lab, case([8, 1, 64], F32), element, factor);
    assert_eq!(product.run(), 0);
    assert_eq!(product.output(), [0.0; 8]);
    drop(product);
    // Without the small one's neighbours it is there.
    let factor = |which: usize, _: usize, block: usize| if block == 1 { [0x38, 0x30][which] } else { 0 };
    let product = Product::with(&lab, case([8, 1, 64], F32), element, factor);
    assert_eq!(product.run(), 0);
    assert_eq!(product.output(), [0.125; 8]);
    drop(product);
    drop(lab);
    rig.finish();
}

#[test]
fn the_nan_of_a_factor_is_the_results() {
    let rig = device("100", "130100");
    let lab = Lab::new(&rig);
    let nan = |which: usize, i: usize, block: usize| match (which, i, block) {
        (0, 3, 1) => 0x7f,
        _ => 0x38,
    };
    let product = Product::with(&lab, case([8, 2, 32], BF16), |_, _, _| 0, nan);
    assert_eq!(product.run(), 0);
    let is_nan: Vec<usize> =
        product.output().iter().enumerate().filter(|(_, value)| value.is_nan()).map(|(at, _)| at).collect();
    assert_eq!(is_nan, [3, 11], "row 3 of both columns, although the codes are 0");
    drop(product);
    drop(lab);
    rig.finish();
}

#[test]
fn fp4_belongs_to_gpus_and_to_versions() {
    for (arch, version, expected) in [
        ("100", "130100", 0),
        ("100", "120800", 0),
        ("120", "130100", 0),
        ("90", "130100", NOT_SUPPORTED),
        ("89", "130100", NOT_SUPPORTED),
        ("100", "120600", INVALID),
    ] {
        let rig = device(arch, version);
        let lab = Lab::new(&rig);
        assert_eq!(code(&lab, &case([32, 16, 128], BF16), [VEC16; 2]), expected, "sm_{arch} {version}");
        drop(lab);
        rig.finish();
    }
}

#[test]
fn fp4_products_outside_the_tables_are_refused() {
    let rig = device("100", "130100");
    let lab = Lab::new(&rig);
    let base = case([32, 16, 128], BF16);
    let types = |types| Case { types, ..base };
    let sizes = |sizes| Case { sizes, ..base };
    for modes in [[SCALAR; 2], [VEC32; 2], [VEC16, SCALAR], [SCALAR, VEC16], [VEC16, VEC32], [VEC32, VEC16]] {
        assert_eq!(code(&lab, &base, modes), NOT_SUPPORTED, "{modes:?}");
    }
    let refused = [
        ("FP8", types([E4M3, E4M3, BF16, BF16])),
        ("bf16", types([BF16; 4])),
        ("FP4 × FP8", types([E2M1, E4M3, BF16, BF16])),
        ("FP8 × FP4", types([E4M3, E2M1, BF16, BF16])),
        ("an FP4 output", types([E2M1, E2M1, BF16, E2M1])),
        ("an FP8 output", types([E2M1, E2M1, BF16, E4M3])),
        ("an f16 output", types([E2M1, E2M1, F16, F16])),
        ("C and D apart", types([E2M1, E2M1, BF16, F32])),
        ("k = 48", sizes([32, 16, 48])),
        ("k = 16", sizes([32, 16, 16])),
        ("m = 12", sizes([12, 16, 128])),
        ("m = 4 in f32", Case { types: [E2M1, E2M1, F32, F32], ..sizes([4, 16, 128]) }),
        ("a leading dimension", Case { gap: 16, ..base }),
        ("fast accumulation", Case { fast: true, ..base }),
        ("no transposes", Case { transposed: [false, false], ..base }),
        ("both transposed", Case { transposed: [true, true], ..base }),
        ("B alone transposed", Case { transposed: [false, true], ..base }),
        ("an f32 bias", Case { bias: Some(F32), ..base }),
        ("an f16 bias of bf16", Case { bias: Some(F16), ..base }),
        ("an f32 bias of f32", Case { types: [E2M1, E2M1, F32, F32], bias: Some(F32), ..base }),
    ];
    for (what, case) in refused {
        assert_eq!(code(&lab, &case, [VEC16; 2]), NOT_SUPPORTED, "{what}");
    }
    for n in [1, 3, 128] {
        assert_eq!(code(&lab, &sizes([32, n, 128]), [VEC16; 2]), 0, "n = {n}");
    }
    drop(lab);
    rig.finish();
}

#[test]
fn a_bias_of_fp4_products_can_be_refused() {
    let rig = device("100", "130100");
    let lab = Lab::new(&rig);
    let base = case([32, 16, 128], BF16);
    let with_bias = Case { bias: Some(BF16), ..base };
    let codes = || {
        let products = [base, with_bias].map(|case| Product::new(&lab, case));
        products.map(|product| {
            (lab.heuristics_of(product.operation, &product.case).err().unwrap_or(0), product.run())
        })
    };
    assert_eq!(codes(), [(0, 0); 2]);
    rig.control.set("fp4_bias", "0").unwrap();
    assert_eq!(codes(), [(0, 0), (NOT_SUPPORTED, NOT_SUPPORTED)]);
    rig.control.set("fp4_bias", "1").unwrap();
    drop(lab);
    rig.finish();
}

#[test]
fn places_of_fp4_matrices_and_factors_are_checked() {
    let rig = device("100", "130100");
    let lab = Lab::new(&rig);
    let product = Product::new(&lab, case([8, 8, 32], BF16));
    let (operation, layouts) = (product.operation, product.case.layouts());
    let buffer = lab.stream.alloc_zeros::<u8>(1024).unwrap();
    let at = lab.address(&buffer);
    let multiply = |places| lab.multiply(operation, layouts, places, 0.0, None, (0, 0));
    // Operands have half a byte an element: 128 bytes.
    assert_eq!(multiply([at + 896, at + 896, 0, at]), 0);
    for which in [0, 1, 3] {
        for wrong in [at + 8, 0, at + 912] {
            let mut places = [at; 4];
            places[which] = wrong;
            assert_eq!(multiply(places), INVALID, "matrix {which} at {wrong:x}");
        }
    }
    // Factors: 512 bytes at a multiple of 16, which cannot be left out.
    for (place, expected) in [(at + 512, 0), (at + 8, INVALID), (at + 528, INVALID), (0, INVALID)] {
        assert_eq!(lab.set(operation, 18, &place.to_le_bytes()), 0);
        assert_eq!(multiply([at; 4]), expected, "{place:x}");
    }
    assert_eq!(lab.heuristics_of(operation, &product.case).err(), Some(INVALID));
    drop((product, buffer));
    drop(lab);
    rig.finish();
}
