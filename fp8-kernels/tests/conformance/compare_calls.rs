use super::case::{Outcome, cases};
use super::compare::{refused, refused_on};
use fp8_kernels::{DType, Device, Result, Tensor, UNSET, ops};

cases![
    ranks_that_agree,
    one_call_that_differs,
    one_scale_that_differs,
    scales_that_are_not_committed,
    each_call_is_named,
    refuses,
];

const RANKS: [usize; 8] = [1, 2, 3, 31, 32, 33, 64, 100];

fn compare(device: &Device, calls: &[i32], scales: Option<&[f32]>) -> Result<()> {
    let len = calls.len();
    let calls = Tensor::from_vec(calls.to_vec(), [len], device)?;
    let scales = scales.map(|scales| Tensor::from_vec(scales.to_vec(), [len], device)).transpose()?;
    ops::compare_calls("gather `w`", &calls, scales.as_ref())
}

fn ranks_that_agree(device: &Device) -> Outcome {
    for ranks in [0].into_iter().chain(RANKS) {
        for scale in [f32::from_bits(1), f32::MIN_POSITIVE, 1.0, 2.5, f32::MAX] {
            for call in [0, -1, i32::MIN, 7] {
                compare(device, &vec![call; ranks], Some(&vec![scale; ranks]))?;
                compare(device, &vec![call; ranks], None)?;
            }
        }
        device.synchronize()?;
    }
    Ok(())
}

/// In each place, and in two: the first one is named. A wrong scale of the same rank counts less.
fn one_call_that_differs(device: &Device) -> Outcome {
    for ranks in RANKS.into_iter().filter(|&ranks| ranks > 1) {
        for odd in [1, ranks / 2, ranks - 1].into_iter().filter(|&odd| odd > 0) {
            let mut calls = vec![5; ranks];
            calls[odd] = -5;
            calls[ranks - 1] = 6;
            let wording = format!("gather `w`: rank {odd} made another call than rank 0: all ranks make");
            refused_on(device, compare(device, &calls, None), &wording)?;
            let mut scales = vec![2.0; ranks];
            scales[odd] = 3.0;
            refused_on(device, compare(device, &calls, Some(&scales)), &wording)?;
        }
    }
    device.synchronize().map_err(Into::into) // told once
}

fn one_scale_that_differs(device: &Device) -> Outcome {
    for ranks in RANKS.into_iter().filter(|&ranks| ranks > 1) {
        for odd in [1, ranks / 2, ranks - 1].into_iter().filter(|&odd| odd > 0) {
            for (value, shown) in [(3.0, "3"), (2.0f32.next_up(), "2.0000002"), (-2.0, "2 (provisional)")] {
                let mut scales = vec![2.0; ranks];
                scales[ranks - 1] = 64.0;
                scales[odd] = value;
                let wording =
                    format!("gather `w`: the scale is {shown} on rank {odd} and 2 on rank 0: shards of");
                refused_on(device, compare(device, &vec![5; ranks], Some(&scales)), &wording)?;
            }
        }
    }
    Ok(())
}

fn scales_that_are_not_committed(device: &Device) -> Outcome {
    for ranks in RANKS {
        for (value, shown) in [
            (UNSET, "unset"),
            (-4.0, "4 (provisional)"),
            (0.0, "0"),
            (f32::INFINITY, "inf"),
            (f32::NAN, "NaN"),
        ] {
            let wording = format!(
                "gather `w`: the scale is {shown} on rank 0: shards of one tensor need one scale; commit the same scopes on \
                 all ranks, with reduce_amax and this group as amax_reduction_group"
            );
            let compared = compare(device, &vec![5; ranks], Some(&vec![value; ranks]));
            refused_on(device, compared, &wording)?;
        }
    }
    Ok(())
}

/// Also by a name that was used before, and where calls of several names are queued.
fn each_call_is_named(device: &Device) -> Outcome {
    let calls = |second: i32| Tensor::from_vec(vec![1, second], [2], device);
    let scales = Tensor::from_vec(vec![2.0f32, 4.0], [2], device)?;
    for name in ["a", "b", "c", "b", "a"] {
        ops::compare_calls("right", &calls(1)?, None)?;
        let compared = ops::compare_calls(name, &calls(2)?, None);
        refused_on(device, compared, &format!("{name}: rank 1 made another call"))?;
        let compared = ops::compare_calls(name, &calls(1)?, Some(&scales));
        refused_on(device, compared, &format!("{name}: the scale is 4 on rank 1 and 2 on rank 0"))?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let calls = Tensor::from_vec(vec![1, 1], [2], device)?;
    let scales = |len: usize| Tensor::full(1.0, [len], DType::F32, device);
    refused(ops::compare_calls("x", &scales(2)?, None), "calls has dtype f32: expected i32")?;
    refused(ops::compare_calls("x", &calls, Some(&calls)), "scales has dtype i32: expected f32")?;
    refused(
        ops::compare_calls("x", &calls, Some(&scales(3)?)),
        "scales and calls: got [3] and [2]: give one scale for each rank's call",
    )?;
    let square = calls.reshape([1, 2])?;
    refused(ops::compare_calls("x", &square, None), "shape [1, 2]: calls are [ranks]")
}
