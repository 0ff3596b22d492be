use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, refused_on, same, same_numbers};
use super::data::{AROUND_2_16, FLOATS, Random, f64s, normal, specials, tensor, tolerance};
use super::threads::same_bits;
use fp8_kernels::ops::Part;
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
    parts_are_those_of_the_whole: Dtypes,
    parts_of_no_rows,
    refuses_parts,
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

/// Forward and backward of each part are rows of the whole's, and lookups of all parts add up to that of the whole.
fn parts_are_those_of_the_whole(device: &Device, dtype: DType) -> Outcome {
    // One id a row, several passes of the sort, and units of 16 bytes to 2.
    for ([len, vocabulary, hidden], cuts) in [
        ([64, 10, 8], [0, 3, 10]),
        ([70, 300, 1], [0, 299, 300]),
        ([2500, 1000, 2], [0, 600, 1000]),
        ([300, 7, 33], [0, 1, 7]),
        ([65, 5, 4], [0, 5, 5]),
    ] {
        let (ids, dy) = (ids(len, vocabulary, device)?, normal([len, hidden], dtype, 2, device)?);
        let table = normal([vocabulary, hidden], dtype, 1, device)?;
        let start = normal([vocabulary, hidden], DType::F32, 3, device)?;
        let whole = ops::embedding(&ids, &table)?;
        let mut sum = vec![0.0f32; len * hidden];
        let mut dtable = ops::scale(&start, 1.0)?;
        ops::embedding_backward(&dy, &ids, &mut dtable, "table.grad")?;
        for range in [cuts[0]..cuts[1], cuts[1]..cuts[2]] {
            let what = format!("{len} ids, rows {range:?} of {vocabulary}");
            let part = Part { first: range.start, total: vocabulary };
            let y = ops::embedding_part(&ids, &ops::rows(&table, range.clone())?, part)?;
            equal("shape", *y.shape(), *whole.shape())?;
            equal("dtype", y.dtype(), dtype)?;
            let (y, values) = (y.to_f32_vec()?, whole.to_f32_vec()?);
            for (i, id) in ids.to_vec::<i32>()?.into_iter().enumerate() {
                let row = i * hidden..(i + 1) * hidden;
                let is_here = range.contains(&(id as usize));
                let want = if is_here { values[row.clone()].to_vec() } else { vec![0.0; hidden] };
                same(&what, &y[row], &want, hidden)?;
            }
            sum.iter_mut().zip(&y).for_each(|(sum, v)| *sum += v);
            let mut own = ops::rows(&start, range.clone())?;
            ops::embedding_part_backward(&dy, &ids, &mut own, part, "table.grad")?;
            same(&what, &own.to_vec::<f32>()?, &ops::rows(&dtable, range)?.to_vec::<f32>()?, hidden)?;
        }
        same("sum of the parts", &sum, &whole.to_f32_vec()?, hidden)?;
    }
    Ok(())
}

/// Every id is in another part, also at the end of the largest vocabulary.
fn parts_of_no_rows(device: &Device) -> Outcome {
    let ids = Tensor::from_vec(vec![0, 5, i32::MAX], [3], device)?;
    let total = 1 << 31;
    for first in [0, 3, total] {
        let mut table = Tensor::zeros([0, 2], DType::F32, device)?;
        let y = ops::embedding_part(&ids, &table, Part { first, total })?;
        same("y", &y.to_vec::<f32>()?, &[0.0; 6], 2)?;
        ops::embedding_part_backward(&y, &ids, &mut table, Part { first, total }, "table.grad")?;
    }
    let mut last = Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], device)?;
    let part = Part { first: total - 1, total };
    let y = ops::embedding_part(&ids, &last, part)?;
    same("the last row", &y.to_vec::<f32>()?, &[0.0, 0.0, 0.0, 0.0, 1.0, 2.0], 2)?;
    ops::embedding_part_backward(&y, &ids, &mut last, part, "table.grad")?;
    same("its gradient", &last.to_vec::<f32>()?, &[2.0, 4.0], 2)
}

fn refuses_parts(device: &Device) -> Outcome {
    let ids = |values: Vec<i32>| {
        let len = values.len();
        Tensor::from_vec(values, [len], device)
    };
    let mut dtable = Tensor::zeros([3, 2], DType::F32, device)?;
    for (first, total) in [(2, 4), (usize::MAX, 4), (0, 2)] {
        let (part, wording) =
            (Part { first, total }, format!("part = 3 from {first} on, of {total}: a part ends"));
        let call = ops::embedding_part(&ids(vec![0])?, &dtable, part);
        refused(call, &format!("embedding_part: {wording}"))?;
        let dy = Tensor::full(1.0, [1, 2], DType::F32, device)?;
        let call = ops::embedding_part_backward(&dy, &ids(vec![0])?, &mut dtable, part, "table.grad");
        refused(call, &format!("embedding_part_backward: {wording}"))?;
    }
    // An id of another part is none that is out of range, and such an id changes nothing.
    let dy = Tensor::full(1.0, [3, 2], DType::F32, device)?;
    for (first, wrong) in
        [0, 4].into_iter().flat_map(|first| [7, -1, -4, i32::MIN, i32::MAX].map(|id| (first, id)))
    {
        let (part, ids) = (Part { first, total: 7 }, ids(vec![4, 0, wrong])?);
        let wording = format!("id {wrong} at position 2 is out of range 0..7");
        refused_on(device, ops::embedding_part(&ids, &dtable, part), &format!("embedding: {wording}"))?;
        let call = ops::embedding_part_backward(&dy, &ids, &mut dtable, part, "table.grad");
        refused_on(device, call, &format!("embedding_backward: {wording}"))?;
        same("dtable", &dtable.to_vec::<f32>()?, &[0.0; 6], 2)?;
    }
    // Wherever it is among ids that several blocks read.
    let dy = Tensor::full(1.0, [5000, 2], DType::F32, device)?;
    for position in [0, 255, 256, 1000, 2047, 2048, 2304, 4999] {
        let mut all = vec![4; 5000];
        all[position] = 9;
        let part = Part { first: 4, total: 7 };
        let call = ops::embedding_part_backward(&dy, &ids(all)?, &mut dtable, part, "table.grad");
        let wording = format!("embedding_backward: id 9 at position {position} is out of range 0..7");
        refused_on(device, call, &wording)?;
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
