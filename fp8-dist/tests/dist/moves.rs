//! `all_to_all` against a plain computation.

use crate::{LONG, noise, ranks, try_ranks};
use fp8_dist::Failure;
use fp8_kernels::{DType, Device, Element, Shape, Tensor, bf16, f16};

/// Rows of each rank for each other one, from none to many.
fn counts(n: usize, most: usize, seed: u64) -> Vec<Vec<usize>> {
    let all = noise(n * n, seed);
    let of = |x: &f32| if *x < -1.0 { 0 } else { ((x + 1.0) / 3.0 * most as f32) as usize };
    all.chunks(n).map(|counts| counts.iter().map(of).collect()).collect()
}

/// The value that tells rank, row and column.
fn value(rank: usize, index: usize) -> f32 {
    (rank * 64 + index % 61) as f32
}

fn exchange<T: Element + PartialEq>(dtype: DType, of: fn(f32) -> T, dims: &[usize], counts: &[Vec<usize>]) {
    let n = counts.len();
    let row: usize = dims.iter().product();
    let data = |rank: usize| -> Vec<T> {
        (0..counts[rank].iter().sum::<usize>() * row).map(|index| of(value(rank, index))).collect()
    };
    ranks(n, |group| {
        let this = group.rank();
        let shape = |rows: usize| Shape::from_slice(&[&[rows], dims].concat()).unwrap();
        let x = Tensor::from_vec(data(this), shape(counts[this].iter().sum()), &Device::cpu()).unwrap();
        let (found, from) = group.all_to_all("tokens", &x, &counts[this]).unwrap();
        let mut expected = Vec::new();
        for (rank, counts) in counts.iter().enumerate() {
            let start = counts[..this].iter().sum::<usize>() * row;
            expected.extend_from_slice(&data(rank)[start..start + counts[this] * row]);
        }
        let rows: Vec<usize> = counts.iter().map(|counts| counts[this]).collect();
        assert_eq!((&from, found.dtype(), *found.shape()), (&rows, dtype, shape(rows.iter().sum())));
        assert!(found.as_slice::<T>().unwrap() == expected, "{dtype} {dims:?} {counts:?}");
        let sent: usize = counts[this].iter().sum::<usize>() - counts[this][this];
        assert_eq!(group.traffic().moves.bytes, (sent * row * dtype.size()) as u64);
    });
}

#[test]
fn rows_go_to_the_ranks_that_they_are_for() {
    for (seed, n) in [1, 2, 3, 4].into_iter().enumerate() {
        // Small and large ones: some travel with the messages, some directly.
        for (most, dims) in [(3, &[5][..]), (0, &[4]), (40, &[31, 33]), (200, &[]), (3, &[0, 2])] {
            let counts = counts(n, most, seed as u64 + 3);
            exchange(DType::F32, |x| x, dims, &counts);
            exchange(DType::BF16, bf16::from_f32, dims, &counts);
            exchange(DType::F16, f16::from_f32, dims, &counts);
            exchange(DType::I32, |x| x as i32, dims, &counts);
            exchange(DType::U8, |x| x as u8, dims, &counts);
        }
    }
}

#[test]
fn one_rank_has_all_rows_or_gets_them() {
    for n in [2, 3] {
        let none = vec![0; n];
        let mut from_one = vec![none.clone(); n];
        from_one[n - 1] = vec![50_000; n];
        exchange(DType::F32, |x| x, &[3], &from_one);
        let mut to_one = vec![none; n];
        to_one.iter_mut().for_each(|counts| counts[0] = 50_000);
        exchange(DType::F32, |x| x, &[3], &to_one);
    }
}

#[test]
fn exchanges_of_ten_million_elements() {
    exchange(DType::F32, |x| x, &[1000], &[vec![0, 4000, 1], vec![3000, 0, 500], vec![0, 1500, 1000]]);
}

fn zeros(dims: &[usize]) -> Tensor {
    Tensor::zeros(Shape::from_slice(dims).unwrap(), DType::F32, &Device::cpu()).unwrap()
}

#[test]
fn counts_that_do_not_fit_are_an_error_on_all_ranks_and_the_group_lives_on() {
    ranks(2, |group| {
        let cases: [[&[usize]; 2]; 3] = [[&[1, 1], &[1, 2]], [&[2], &[1, 1]], [&[0, 2], &[usize::MAX, 3]]];
        for [first, second] in cases {
            let own = [first, second][group.rank()];
            let error = group.all_to_all("x", &zeros(&[2, 3]), own).unwrap_err().to_string();
            let (rank, wrong) = if first.len() == 2 { (1, second) } else { (0, first) };
            let expected = format!(
                "all_to_all `x`: rank {rank} has 2 rows and counts {wrong:?}: expected one count for each of 2 ranks, which \
                 add up to the rows"
            );
            assert_eq!(error, expected);
        }
        let error = group.all_to_all("x", &zeros(&[]), &[1, 1]).unwrap_err().to_string();
        assert!(error.contains("a scalar has no dimension 0"), "{error}");
        group.barrier().unwrap();
    });
    let errors = try_ranks(2, LONG, |group| {
        let x = [zeros(&[]), zeros(&[2])];
        group.all_to_all("x", &x[group.rank()], &[1, 1]).unwrap_err().to_string()
    });
    for error in errors {
        let error = error.unwrap();
        assert!(error.contains("a scalar of f32 on rank 0"), "{error}");
    }
    // A tensor without elements may have 2⁶¹ − 1 rows: more than there are numbers, all together.
    ranks(9, |group| {
        let many = (1 << 61) - 1;
        let counts = [&[many][..], &[0; 8]].concat();
        let error = group.all_to_all("x", &zeros(&[many, 0]), &counts).unwrap_err().to_string();
        assert!(error.contains("the rows of all ranks together exceed memory"), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn rows_that_differ_end_the_group() {
    let tensors = [
        [zeros(&[2, 3]), zeros(&[2, 4])],
        [zeros(&[2, 3]), Tensor::zeros([2, 3], DType::BF16, &Device::cpu()).unwrap()],
    ];
    for pair in tensors {
        let failures = try_ranks(2, LONG, |group| {
            group.all_to_all("x", &pair[group.rank()], &[1, 1]).unwrap_err().failure().cloned()
        });
        for failure in failures {
            let failure = failure.unwrap();
            let is_shape = matches!(failure, Some(Failure::Disagree { property: "the shape", rank: 1, .. }));
            assert!(is_shape, "{failure:?}");
        }
    }
}

#[test]
fn sub_groups_exchange_at_once() {
    ranks(4, |world| {
        let rank = world.rank();
        let pair = world.split("pair", Some(rank % 2), rank).unwrap().unwrap();
        for round in 0..20 {
            let rows = 1 + (round * 3000) % 20_011; // small and large ones
            let x = Tensor::full(rank as f32, [2 * rows, 3], DType::F32, &Device::cpu()).unwrap();
            let (found, _) = pair.all_to_all("x", &x, &[rows, rows]).unwrap();
            let [first, second] = [rank % 2, rank % 2 + 2].map(|rank| rank as f32);
            let found = found.as_slice::<f32>().unwrap();
            let (head, tail) = found.split_at(3 * rows);
            assert!(head.iter().all(|&x| x == first) && tail.iter().all(|&x| x == second));
        }
    });
}
