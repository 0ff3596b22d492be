use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, refused_on, same, same_numbers};
use super::data::{AROUND_2_16, FLOATS, Random, f64s, normal, specials, tensor, tolerance};
use super::threads::same_bits;
use fp8_kernels::{DType, Device, Result, Shape, Tensor, ops};

cases![
    looks_up_rows,
    backward_adds_up,
    backward_adds_in_order,
    around_2_16: Dtypes,
    special_values: Dtypes,
    keeps_what_was_there,
    same_for_any_threads,
    an_error_changes_nothing,
    refuses,
];

/// `[number of ids, vocabulary, hidden]`.
const SIZES: [[usize; 3]; 16] = [
    [64, 5, 16],
    [64, 5, 32],
    [256, 5, 1],
    [256, 5, 2],
    [256, 5, 4],
    [9, 7, 2],
    [9, 7, 4],
    [70, 5, 6],
    [0, 5, 4],
    [1, 1, 1],
    [15, 7, 16],
    [16, 3, 15],
    [17, 101, 17],
    [1009, 2, 33],
    [997, 1500, 31],
    [12, 5, 20_000],
];

fn ids(len: usize, vocabulary: usize, device: &Device) -> Result<Tensor> {
    let mut random = Random::new(len as u64);
    let ids = (0..len).map(|_| (random.bits() % vocabulary as u64) as i32).collect();
    Tensor::from_vec(ids, [len], device)
}

fn looks_up_rows(device: &Device) -> Outcome {
    for [len, vocabulary, hidden] in SIZES {
        let ids = ids(len, vocabulary, device)?;
        for dtype in FLOATS {
            let table = normal([vocabulary, hidden], dtype, 1, device)?;
            let y = ops::embedding(&ids, &table)?;
            let rows = table.to_f32_vec()?;
            let row = |&id: &i32| rows[id as usize * hidden..][..hidden].to_vec();
            let want: Vec<f32> = ids.to_vec::<i32>()?.iter().flat_map(row).collect();
            equal("dtype", y.dtype(), dtype)?;
            same(&format!("{dtype} {len} of {vocabulary}"), &y.to_f32_vec()?, &want, hidden)?;
        }
    }
    let ids = Tensor::from_vec(vec![1, 0, 1, 1, 0, 1], [2, 3], device)?;
    let table = normal([2, 4], DType::F32, 1, device)?;
    equal("shape", *ops::embedding(&ids, &table)?.shape(), Shape::from([2, 3, 4]))
}

fn backward_adds_up(device: &Device) -> Outcome {
    for [len, vocabulary, hidden] in SIZES {
        let ids = ids(len, vocabulary, device)?;
        for dtype in FLOATS {
            let dy = normal([len, hidden], dtype, 2, device)?;
            let mut dtable = Tensor::zeros([vocabulary, hidden], DType::F32, device)?;
            ops::embedding_backward(&dy, &ids, &mut dtable, "table.grad")?;
            let mut want = vec![0.0; vocabulary * hidden];
            let values = f64s(&dy)?;
            for (i, id) in ids.to_vec::<i32>()?.into_iter().enumerate() {
                for c in 0..hidden {
                    want[id as usize * hidden + c] += values[i * hidden + c];
                }
            }
            // Hundreds of addends of both signs share a row: what cancels leaves their rounding.
            let [rtol, atol] = tolerance(DType::F32);
            let what = format!("{dtype} {len} of {vocabulary}");
            close(&what, &dtable.to_vec::<f32>()?, &want, hidden, [rtol, atol * (1.0 + len as f64 / 100.0)])?;
        }
    }
    Ok(())
}

/// The rows of one id one after the other, rounded at each: ids that fill several passes of a sort, rows of several
/// slices, and 1 to 70 rows an id.
fn backward_adds_in_order(device: &Device) -> Outcome {
    let small = [
        [70, 1, 8],
        [97, 2, 9],
        [33, 1, 264],
        [40, 1, 257],
        [37, 1, 520],
        [70, 2, 513],
        [300, 300, 1],
        [4, 1, 40],
        [5, 1, 40],
    ];
    // Ends in each round of a block of the sort; more blocks than half a warp has lanes.
    let ends = [200, 300, 600, 900, 1100, 1400, 1700, 1900].into_iter();
    // In the first pass of a sort, and in a later one.
    let ends = ends.flat_map(|len| [3, 300].map(|vocabulary| [len, vocabulary, 1])).chain([[40_000, 3, 1]]);
    let ends = ends.chain([[527_000, 3, 1]]).map(|size| (size, DType::BF16));
    let large = [[2049, 300, 8], [4100, 70_000, 8], [5000, 70, 3]].map(|size| (size, DType::F32));
    // A last column in each of a lane's eight, of a last row that is one of four, or left over.
    let columns = [5, 37, 70, 101, 133, 165, 197, 229];
    let columns = columns.into_iter().flat_map(|hidden| [[4, 1, hidden], [5, 1, hidden], [9, 2, hidden]]);
    let all = small
        .into_iter()
        .chain(columns)
        .flat_map(|size| FLOATS.map(|dtype| (size, dtype)))
        .chain(large)
        .chain(ends);
    for ([len, vocabulary, hidden], dtype) in all {
        let ids = ids(len, vocabulary, device)?;
        let dy = normal([len, hidden], dtype, 2, device)?;
        let mut dtable = normal([vocabulary, hidden], DType::F32, 3, device)?;
        let (mut want, values) = (dtable.to_vec::<f32>()?, dy.to_f32_vec()?);
        for (id, row) in ids.to_vec::<i32>()?.into_iter().zip(values.chunks(hidden)) {
            let sums = &mut want[id as usize * hidden..][..hidden];
            sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
        }
        ops::embedding_backward(&dy, &ids, &mut dtable, "table.grad")?;
        same(&format!("{dtype} {len} of {vocabulary}"), &dtable.to_vec::<f32>()?, &want, hidden)?;
    }
    Ok(())
}

/// So many ids, of rows of one element and of two; each number of them backward for one of the types.
fn around_2_16(device: &Device, dtype: DType) -> Outcome {
    for ((len, hidden), summed) in AROUND_2_16.into_iter().zip([1, 2, 1]).zip(FLOATS) {
        let (ids, what) = (ids(len, 300, device)?, format!("{len} ids, {hidden} columns"));
        let numbers = ids.to_vec::<i32>()?;
        let table = normal([300, hidden], dtype, 1, device)?;
        let rows = table.to_f32_vec()?;
        let row = |&id: &i32| &rows[id as usize * hidden..][..hidden];
        let want: Vec<f32> = numbers.iter().flat_map(row).copied().collect();
        let y = ops::embedding(&ids, &table)?;
        same(&what, &y.to_f32_vec()?, &want, hidden)?;
        if dtype == summed {
            let mut dtable = Tensor::zeros([300, hidden], DType::F32, device)?;
            ops::embedding_backward(&y, &ids, &mut dtable, "table.grad")?;
            let mut sums = vec![0.0f32; 300 * hidden];
            for (&id, dy) in numbers.iter().zip(want.chunks(hidden)) {
                let sums = &mut sums[id as usize * hidden..][..hidden];
                sums.iter_mut().zip(dy).for_each(|(sum, v)| *sum += v);
            }
            same(&what, &dtable.to_vec::<f32>()?, &sums, hidden)?;
        }
    }
    Ok(())
}

/// Looked up as they are; in a gradient each reaches its own row, once alone and once behind others.
fn special_values(device: &Device, dtype: DType) -> Outcome {
    let specials = specials();
    let vocabulary = specials.len();
    for hidden in [1, 2, 4, 7, 8] {
        let value = |i: usize| specials[(i + i / hidden * 5) % vocabulary];
        let rows =
            tensor((0..vocabulary * hidden).map(value).collect(), [vocabulary, hidden], dtype, device)?;
        let numbers = (0..vocabulary as i32).chain(0..vocabulary as i32 / 2);
        let ids = Tensor::from_vec(numbers.clone().collect(), [numbers.clone().count()], device)?;
        let values = rows.to_f32_vec()?;
        let row = |id: i32| &values[id as usize * hidden..][..hidden];
        let want: Vec<f32> = numbers.clone().flat_map(row).copied().collect();
        let y = ops::embedding(&ids, &rows)?;
        same_numbers(&format!("{hidden} columns"), &y.to_f32_vec()?, &want, hidden)?;
        let mut dtable = normal([vocabulary, hidden], DType::F32, 3, device)?;
        let mut sums = dtable.to_vec::<f32>()?;
        ops::embedding_backward(&y, &ids, &mut dtable, "table.grad")?;
        for (id, dy) in numbers.zip(want.chunks(hidden)) {
            let sums = &mut sums[id as usize * hidden..][..hidden];
            sums.iter_mut().zip(dy).for_each(|(sum, v)| *sum += v);
        }
        same_numbers(&format!("{hidden} columns, backward"), &dtable.to_vec::<f32>()?, &sums, hidden)?;
    }
    Ok(())
}

fn keeps_what_was_there(device: &Device) -> Outcome {
    let ids = Tensor::from_vec(vec![2, 0, 2], [3], device)?;
    let dy = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [3, 2], device)?;
    let mut dtable = Tensor::full(10.0, [3, 2], DType::F32, device)?;
    ops::embedding_backward(&dy, &ids, &mut dtable, "table.grad")?;
    same("dtable", &dtable.to_vec::<f32>()?, &[13.0, 14.0, 10.0, 10.0, 16.0, 18.0], 2)
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let ids = ids(3000, 700, device)?;
    let (table, dy) = (normal([700, 65], DType::F32, 1, device)?, normal([3000, 65], DType::F32, 2, device)?);
    same_bits("embedding", || {
        let mut dtable = Tensor::zeros([700, 65], DType::F32, device)?;
        ops::embedding_backward(&dy, &ids, &mut dtable, "table.grad")?;
        Ok(vec![ops::embedding(&ids, &table)?, dtable])
    })
}

fn an_error_changes_nothing(device: &Device) -> Outcome {
    let ids = Tensor::from_vec(vec![0, 3], [2], device)?;
    let dy = Tensor::full(1.0, [2, 2], DType::F32, device)?;
    let mut dtable = Tensor::zeros([3, 2], DType::F32, device)?;
    // Units of 16, 8, 4 and 2 bytes.
    for (hidden, dtype) in [(8, DType::F32), (2, DType::F32), (1, DType::F32), (1, DType::BF16)] {
        let table = normal([3, hidden], dtype, 1, device)?;
        refused_on(device, ops::embedding(&ids, &table), "id 3 at position 1 is out of range 0..3")?;
    }
    let wording = "id 3 at position 1 is out of range 0..3";
    refused_on(device, ops::embedding_backward(&dy, &ids, &mut dtable, "table.grad"), wording)?;
    same("dtable", &dtable.to_vec::<f32>()?, &[0.0; 6], 2)?;
    // Ids that are wrong by one, or as unsigned numbers; the last one's low bits are those of a right one.
    for (place, wrong) in
        (0..9).map(|round| 288 * round + 5).flat_map(|place| [3, -7, i32::MIN].map(|wrong| (place, wrong)))
    {
        let values = (0..2500).map(|i| if i == place { wrong } else { i % 3 }).collect();
        let ids = Tensor::from_vec(values, [2500], device)?;
        let dy = Tensor::full(1.0, [2500, 2], DType::F32, device)?;
        let wording = format!("id {wrong} at position {place} is out of range 0..3");
        refused_on(device, ops::embedding_backward(&dy, &ids, &mut dtable, "table.grad"), &wording)?;
        same("dtable", &dtable.to_vec::<f32>()?, &[0.0; 6], 2)?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let make = |values: Vec<i32>| {
        let len = values.len();
        Tensor::from_vec(values, [len], device)
    };
    let table = normal([3, 2], DType::F32, 1, device)?;
    refused_on(
        device,
        ops::embedding(&make(vec![0, -1])?, &table),
        "embedding: id -1 at position 1 is out of range 0..3",
    )?;
    // Rows of 16, 8, 4 and 2 bytes; of several ids that are wrong the first in some order is told.
    for (hidden, dtype) in [(4, DType::F32), (2, DType::F32), (1, DType::F32), (1, DType::F16)] {
        let table = normal([3, hidden], dtype, 1, device)?;
        refused_on(
            device,
            ops::embedding(&make(vec![0, 2, 7])?, &table),
            "id 7 at position 2 is out of range 0..3",
        )?;
        refused_on(
            device,
            ops::embedding(&make(vec![-1])?, &table),
            "id -1 at position 0 is out of range 0..3",
        )?;
        refused_on(device, ops::embedding(&make(vec![5; 300])?, &table), "id 5 at position")?;
    }
    refused(ops::embedding(&table, &table), "ids has dtype f32: expected i32")?;
    refused(ops::embedding(&make(vec![0])?, &make(vec![0])?), "table has dtype i32")?;
    let flat = normal([6], DType::F32, 1, device)?;
    refused(ops::embedding(&make(vec![0])?, &flat), "shape [6]: a table is [vocabulary, hidden]")?;
    let deep = Tensor::zeros([1, 1, 1, 1, 1, 1], DType::I32, device)?;
    refused(ops::embedding(&deep, &table), "ids have at most 5 dimensions")?;
    let (ids, mut dtable) = (make(vec![0, 1])?, Tensor::zeros([3, 2], DType::F32, device)?);
    let mut narrow = Tensor::zeros([3, 2], DType::BF16, device)?;
    refused(ops::embedding_backward(&table, &ids, &mut dtable, "w.grad"), "got [3, 2] and [2, 2]")?;
    refused(
        ops::embedding_backward(&table, &ids, &mut narrow, "w.grad"),
        "dtable has dtype bf16: expected f32",
    )?;
    let (dy, held) = (normal([2, 2], DType::F32, 1, device)?, dtable.clone());
    let shared = "w.grad: cannot be changed in place, because 1 other tensor shares its storage";
    refused(ops::embedding_backward(&dy, &ids, &mut dtable, "w.grad"), shared)?;
    equal("holders", held.holders(), 1)
}
