//! Attention by cuDNN on the simulated GPU: which calls it serves, what happens where it does not, failures, and recording.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod cuda;

use cuda::step::numbers;
use cuda::{Rig, expect_poisoned};
use fp8_kernels::ops::{self, Diagonal, ScoreOptions, Sequences};
use fp8_kernels::{CudaOptions, DType, Device, Error, Result, Tensor};

/// q, k, v and dy.
struct Inputs([Tensor; 4]);

impl Inputs {
    fn new([batch, queries, keys, heads, groups, dim]: [usize; 6], dtype: DType, device: &Device) -> Self {
        let tensor = |seed, shape: [usize; 4]| {
            let values = Tensor::from_vec(numbers(seed, shape.iter().product()), shape, &Device::cpu());
            ops::cast(&values.unwrap(), dtype).unwrap().to_device(device).unwrap()
        };
        let (rows, columns) = ([batch, queries, heads, dim], [batch, keys, groups, dim]);
        Self([tensor(1, rows), tensor(3, columns), tensor(4, columns), tensor(2, rows)])
    }

    fn on(&self, device: &Device) -> Self {
        Self([0, 1, 2, 3].map(|index| self.0[index].to_device(device).unwrap()))
    }

    /// o, dq, dk and dv.
    fn run(&self, sequences: &Sequences, options: ScoreOptions<'_>) -> Result<[Tensor; 4]> {
        let [q, k, v, dy] = &self.0;
        let (o, saved) = ops::attention(q, k, v, sequences, options)?;
        let (dq, dk, dv) = ops::attention_backward(dy, q, k, v, &o, &saved, sequences, options)?;
        Ok([o, dq, dk, dv])
    }
}

fn device(rig: &Rig) -> Device {
    Device::cuda_with_options(&CudaOptions { cudnn: Some(true), ..rig.options() }).unwrap()
}

fn bits(tensors: &[Tensor; 4]) -> Vec<Vec<u32>> {
    let bits = |x: &Tensor| x.to_f32_vec().unwrap().into_iter().map(f32::to_bits).collect();
    tensors.iter().map(bits).collect()
}

/// The results are those of the CPU, within what 16-bit numbers round away.
#[track_caller]
fn expect_close(got: &[Tensor; 4], want: &[Tensor; 4], what: &str) {
    for (name, (got, want)) in ["o", "dq", "dk", "dv"].iter().zip(got.iter().zip(want)) {
        let (got, want) = (got.to_f32_vec().unwrap(), want.to_f32_vec().unwrap());
        let norm =
            |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let distance = norm(&mut got.iter().zip(&want).map(|(x, y)| x - y));
        let size = norm(&mut want.iter().copied());
        assert!(distance <= 0.02 * size, "{what}: {name}: {distance} of {size}");
    }
}

#[test]
fn calls_with_a_kernel_are_served_and_agree_with_the_cpu() {
    let rig = Rig::new();
    let device = device(&rig);
    let causal = ScoreOptions::default();
    let window = |left| ScoreOptions { window: (Some(left), None), ..causal };
    // The kernels are this crate's.
    const NONE: &[&str] = &[];
    let open = ScoreOptions { causal: false, ..causal };
    let cases = [
        ([2, 64, 64, 4, 4, 64], causal, "causal"),
        ([1, 70, 70, 4, 2, 40], causal, "groups"),
        ([1, 128, 128, 2, 2, 128], open, "no mask"),
        ([1, 33, 90, 2, 1, 64], ScoreOptions { diagonal: Diagonal::BottomRight, ..causal }, "bottom right"),
        ([1, 80, 80, 2, 2, 64], window(17), "window"),
        ([1, 40, 81, 2, 2, 64], ScoreOptions { diagonal: Diagonal::BottomRight, ..window(9) }, "both"),
        ([1, 128, 128, 2, 2, 64], ScoreOptions { causal: false, ..window(5) }, "window without causal"),
        ([1, 64, 64, 2, 2, 64], ScoreOptions { softmax_scale: Some(0.3), ..causal }, "scale"),
        ([1, 64, 64, 2, 2, 64], ScoreOptions { deterministic: false, ..causal }, "any order"),
    ];
    for (sizes, options, what) in cases {
        for dtype in [DType::BF16, DType::F16] {
            let inputs = Inputs::new(sizes, dtype, &device);
            let want = inputs.on(&Device::cpu()).run(&Sequences::Full, options).unwrap();
            rig.control.set("reset_calls", "").unwrap();
            let got = inputs.run(&Sequences::Full, options).unwrap();
            let got = got.map(|x| x.to_device(&Device::cpu()).unwrap());
            assert_eq!(rig.calls("cudnnBackendExecute"), 2, "{what} {dtype}");
            assert_eq!(rig.control.kernels(), NONE, "{what} {dtype}");
            expect_close(&got, &want, what);
        }
    }
    drop(device);
    rig.finish();
}

/// Backward has lengths that hide what follows the last key of a tile, or kernels of this crate, if no mask does.
#[test]
fn keys_that_end_within_a_tile_are_hidden_from_backward() {
    let rig = Rig::new();
    let device = device(&rig);
    let open = ScoreOptions { causal: false, ..Default::default() };
    let window = ScoreOptions { window: (Some(5), None), ..open };
    let cases: [(_, _, u64, &[&str]); 4] = [
        ([1, 48, 128, 1, 1, 64], open, 2, &["attention_lengths"]),
        ([2, 48, 192, 2, 1, 64], open, 2, &["attention_lengths"]),
        ([1, 64, 48, 2, 1, 64], ScoreOptions::default(), 2, &["attention_lengths"]),
        ([1, 64, 64, 2, 2, 64], window, 1, &[]),
    ];
    for (sizes, options, executions, kernels) in cases {
        let inputs = Inputs::new(sizes, DType::BF16, &device);
        let want = inputs.on(&Device::cpu()).run(&Sequences::Full, options).unwrap();
        rig.control.set("reset_calls", "").unwrap();
        let got = inputs.run(&Sequences::Full, options).unwrap();
        assert_eq!(rig.calls("cudnnBackendExecute"), executions, "{sizes:?}");
        let launched = rig.control.kernels();
        assert!(kernels.iter().all(|kernel| launched.iter().any(|name| name == kernel)), "{launched:?}");
        assert_eq!(launched.len() == kernels.len(), executions == 2, "{launched:?}");
        expect_close(&got.map(|x| x.to_device(&Device::cpu()).unwrap()), &want, &format!("{sizes:?}"));
    }
    drop(device);
    rig.finish();
}

#[test]
fn padded_sequences_are_served() {
    let rig = Rig::new();
    let device = device(&rig);
    let inputs = Inputs::new([3, 40, 56, 4, 2, 64], DType::BF16, &device);
    let lengths = |values: [i32; 3], device: &Device| Tensor::from_vec(values.to_vec(), [3], device).unwrap();
    for (queries, keys) in
        [(None, Some([56, 1, 0])), (Some([40, 7, 0]), Some([20, 56, 3])), (Some([1, 40, 9]), None)]
    {
        let sequences = |device: &Device| Sequences::Padded {
            queries: queries.map(|values| lengths(values, device)),
            keys: keys.map(|values| lengths(values, device)),
        };
        for causal in [true, false] {
            let options = ScoreOptions { causal, ..Default::default() };
            let want = inputs.on(&Device::cpu()).run(&sequences(&Device::cpu()), options).unwrap();
            rig.control.set("reset_calls", "").unwrap();
            let got = inputs.run(&sequences(&device), options).unwrap();
            assert_eq!(rig.calls("cudnnBackendExecute"), 2);
            expect_close(
                &got.map(|x| x.to_device(&Device::cpu()).unwrap()),
                &want,
                &format!("{queries:?} {keys:?}"),
            );
        }
    }
    drop((inputs, device));
    rig.finish();
}

#[test]
fn calls_without_a_kernel_take_this_crates() {
    let rig = Rig::new();
    let device = device(&rig);
    let causal = ScoreOptions::default();
    let cases = [
        ([1, 32, 32, 2, 2, 100], causal, "head size"),
        ([1, 32, 32, 1, 1, 300], causal, "large head"),
        ([1, 15, 64, 2, 2, 64], causal, "few queries"),
        ([1, 64, 32, 2, 2, 64], ScoreOptions { diagonal: Diagonal::BottomRight, ..causal }, "hidden rows"),
        (
            [1, 32, 32, 2, 2, 64],
            ScoreOptions { causal: false, window: (None, Some(3)), ..causal },
            "right window",
        ),
        ([1, 32, 32, 2, 2, 64], ScoreOptions { softmax_scale: Some(0.0), ..causal }, "a factor of 0"),
        ([1, 32, 32, 2, 2, 64], ScoreOptions { softmax_scale: Some(-0.5), ..causal }, "a negative factor"),
    ];
    for (sizes, options, what) in cases {
        let inputs = Inputs::new(sizes, DType::BF16, &device);
        let want = inputs.on(&Device::cpu()).run(&Sequences::Full, options).unwrap();
        rig.control.set("reset_calls", "").unwrap();
        let got = inputs.run(&Sequences::Full, options).unwrap();
        assert_eq!(rig.calls("cudnnBackendExecute"), 0, "{what}");
        expect_close(&got.map(|x| x.to_device(&Device::cpu()).unwrap()), &want, what);
    }
    drop(device);
    rig.finish();
}

/// The library that the process opened stays, and says another version where it is asked again.
#[test]
fn before_9_25_backward_in_order_is_this_crates() {
    let rig = Rig::new();
    rig.control.set("cudnn", "91900").unwrap();
    let device = device(&rig);
    let inputs = Inputs::new([1, 64, 64, 2, 1, 64], DType::BF16, &device);
    let lengths = |device: &Device| {
        let lengths = |value| Some(Tensor::from_vec(vec![value], [1], device).unwrap());
        Sequences::Padded { queries: lengths(50), keys: lengths(33) }
    };
    for (deterministic, executions) in [(true, 1), (false, 2)] {
        let options = ScoreOptions { deterministic, ..Default::default() };
        for padded in [false, true] {
            let on = |device: &Device| if padded { lengths(device) } else { Sequences::Full };
            let want = inputs.on(&Device::cpu()).run(&on(&Device::cpu()), options).unwrap();
            rig.control.set("reset_calls", "").unwrap();
            // The log-sum-exp of one is what the other reads.
            let got = inputs.run(&on(&device), options).unwrap();
            // Entries may have no keys, which that version makes NaN.
            let executions = if padded { 0 } else { executions };
            assert_eq!(rig.calls("cudnnBackendExecute"), executions, "{deterministic} {padded}");
            let got = got.map(|x| x.to_device(&Device::cpu()).unwrap());
            expect_close(&got, &want, &format!("deterministic {deterministic}, padded {padded}"));
        }
    }
    drop((inputs, device));
    rig.finish();
}

#[test]
fn a_recorded_step_gives_the_same_bits() {
    let rig = Rig::new();
    let device = device(&rig);
    let inputs = Inputs::new([1, 64, 64, 2, 1, 64], DType::BF16, &device);
    let options = ScoreOptions::default();
    let error = device.capture(|| inputs.run(&Sequences::Full, options).map(drop)).map(drop).unwrap_err();
    assert!(matches!(error, Error::Capture { .. }), "{error}");
    let eager = inputs.run(&Sequences::Full, options).unwrap();
    let (graph, recorded) = device.capture(|| inputs.run(&Sequences::Full, options)).unwrap();
    graph.replay().unwrap();
    assert_eq!(bits(&recorded), bits(&eager));
    drop((graph, recorded, eager, inputs, device));
    rig.finish();
}

/// Planning that fails costs time only; running and memory are errors with a name.
#[test]
fn each_call_fails_once() {
    let rig = Rig::new();
    let mut seen = 0;
    let survey = {
        let device = device(&rig);
        let inputs = Inputs::new([1, 32, 32, 2, 1, 64], DType::BF16, &device);
        rig.control.set("reset_calls", "").unwrap();
        drop(inputs.run(&Sequences::Full, ScoreOptions::default()).unwrap());
        rig.control.calls()
    };
    // What is not given back is lost, and nobody's error.
    let is_tried = |function: &str| function.starts_with("cudnn") && !function.contains("Destroy");
    for (function, count) in survey.iter().filter(|(function, _)| is_tried(function)) {
        // Frequent ones are sampled.
        for call in (1..=*count).step_by((*count as usize / 12).max(1)) {
            let device = device(&rig);
            let inputs = Inputs::new([1, 32, 32, 2, 1, 64], DType::BF16, &device);
            let want = inputs.on(&Device::cpu()).run(&Sequences::Full, ScoreOptions::default()).unwrap();
            rig.control.fail(function, call, 4000).unwrap();
            match inputs.run(&Sequences::Full, ScoreOptions::default()) {
                Ok(got) => {
                    let got = got.map(|x| x.to_device(&Device::cpu()).unwrap());
                    expect_close(&got, &want, &format!("{function} {call}"));
                }
                Err(Error::Cudnn { call: named, code: 4000, .. }) => assert_eq!(named, function),
                Err(other) => panic!("{function} {call}: {other}"),
            }
            rig.control.set("clear_fail", "").unwrap();
            // Afterwards it goes on.
            let got = inputs.run(&Sequences::Full, ScoreOptions::default()).unwrap();
            expect_close(&got.map(|x| x.to_device(&Device::cpu()).unwrap()), &want, function);
            drop((inputs, device));
            seen += 1;
        }
    }
    assert!(seen > 40, "{seen}");
    rig.finish();
}

#[test]
fn failures_say_what_failed() {
    let rig = Rig::new();
    let opened = device(&rig);
    let inputs = Inputs::new([1, 32, 32, 2, 1, 64], DType::BF16, &opened);
    let run = || inputs.run(&Sequences::Full, ScoreOptions::default());
    let memory = "the host or the device is out of memory: free tensors";
    // Opening, describing, and the last before the call: the compilation of a plan.
    let finalized = {
        let other = device(&rig);
        rig.control.set("reset_calls", "").unwrap();
        let Inputs([q, k, v, _]) = &inputs.on(&other);
        drop(ops::attention(q, k, v, &Sequences::Full, ScoreOptions::default()).unwrap());
        rig.calls("cudnnBackendFinalize")
    };
    for (function, call, status) in [
        ("cudnnCreate", 1, 4003),
        ("cudnnBackendFinalize", 9, 4004),
        ("cudnnBackendFinalize", finalized - 1, 4004),
    ] {
        rig.control.fail(function, call, status).unwrap();
        let text = run().unwrap_err().to_string();
        assert!(text.starts_with(&format!("attention: {function} failed with {status}, ")), "{text}");
        assert!(text.ends_with(memory), "{text}");
    }
    rig.control.fail("cudnnCreate", 1, 5000).unwrap();
    assert_eq!(
        Inputs::new([1, 32, 32, 2, 1, 64], DType::BF16, &device(&rig))
            .run(&Sequences::Full, ScoreOptions::default())
            .unwrap_err()
            .to_string(),
        "attention: cudnnCreate failed with 5000, CUDNN_STATUS_EXECUTION_FAILED: the device failed before: start the process \
         again"
    );
    rig.control.fail("cudnnBackendExecute", 1, 5001).unwrap();
    let text = run().unwrap_err().to_string();
    assert!(
        text.contains("cudnnBackendExecute failed with 5001, CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER"),
        "{text}"
    );
    expect_poisoned(run(), "cudnnBackendExecute");
    drop((inputs, opened));
    rig.finish();
}

/// As cuDNN for a newer driver than the machine has.
#[test]
fn a_library_that_does_not_run_here_is_not_used() {
    let rig = Rig::new();
    let device = device(&rig);
    let inputs = Inputs::new([1, 32, 32, 2, 1, 64], DType::BF16, &device);
    let want = inputs.on(&Device::cpu()).run(&Sequences::Full, ScoreOptions::default()).unwrap();
    rig.control.set("reset_calls", "").unwrap();
    rig.control.fail("cudnnCreate", 1, 1001).unwrap();
    for _ in 0..2 {
        let got = inputs.run(&Sequences::Full, ScoreOptions::default()).unwrap();
        expect_close(&got.map(|x| x.to_device(&Device::cpu()).unwrap()), &want, "without cuDNN");
        assert_eq!((rig.calls("cudnnCreate"), rig.calls("cudnnBackendExecute")), (1, 0));
    }
    drop((inputs, device));
    rig.finish();
}

/// A device keeps 256 plans, and goes on with them when there are that many.
#[test]
fn more_kinds_of_calls_than_plans_are_kept_take_this_crates_kernels() {
    let rig = Rig::new();
    let device = device(&rig);
    let Inputs([q, ..]) = Inputs::new([1, 16, 16, 1, 1, 8], DType::BF16, &device);
    let run = |keys| {
        let Inputs([_, k, v, _]) = Inputs::new([1, 16, keys, 1, 1, 8], DType::BF16, &device);
        rig.control.set("reset_calls", "").unwrap();
        drop(ops::attention(&q, &k, &v, &Sequences::Full, ScoreOptions::default()).unwrap());
        rig.calls("cudnnBackendExecute")
    };
    for i in 0..260 {
        assert_eq!(run(16 + i), u64::from(i < 256), "{i}");
    }
    assert_eq!(run(16), 1);
    drop((q, device));
    rig.finish();
}

#[test]
fn a_length_out_of_range_is_told() {
    let rig = Rig::new();
    let device = device(&rig);
    let Inputs([q, k, v, _]) = Inputs::new([2, 32, 40, 2, 1, 64], DType::BF16, &device);
    let keys = Tensor::from_vec(vec![40, 41], [2], &device).unwrap();
    let options = ScoreOptions::default();
    let _ = ops::attention(&q, &k, &v, &Sequences::padded(&keys), options).unwrap();
    let text = device.synchronize().unwrap_err().to_string();
    assert_eq!(text, "attention: key length 41 at position 1 is out of range 0..41");
    drop((q, k, v, keys, device));
    rig.finish();
}
