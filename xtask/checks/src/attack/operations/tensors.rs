//! Tensors, cells, FP8 tensors and devices themselves.

use fp8_kernels::{Cell, Counters, DType, Device, Encoding, Fp8Tensor, Shape, Tensor, TransposePolicy};

use super::super::case::Case;
use super::super::draw::Kind;

/// Constructors with extents that memory has and that it has not, and views of what they made.
pub(super) fn tensors(case: &mut Case<'_>) -> Option<()> {
    let rank = case.draw.below(7);
    let mut extents = case.draw.extents(rank, 2048);
    if rank > 0 && case.draw.once_in(12) {
        let at = case.draw.below(rank);
        extents[at] = case.draw.huge();
    }
    let shape = Shape::from_slice(&extents)?;
    case.say(|| format!("{shape}"));
    let (dtype, device) = (case.draw.dtype(), case.device);
    let value = case.draw.option(2.5);
    let x = match case.draw.below(4) {
        0 => case.call("zeros", || Tensor::zeros(shape, dtype, device))?,
        1 => case.call("full", || Tensor::full(value, shape, dtype, device))?,
        2 => case.call("scalar", || Tensor::scalar(value, device))?,
        _ => {
            let len = case.draw.below(30);
            let bytes = (0..len).map(|i| i as u8).collect();
            let len = if case.draw.flip() { Shape::from([len]) } else { shape };
            case.call("from_vec", || Tensor::from_vec::<u8>(bytes, len, device))?
        }
    };
    if x.numel() > 1 << 16 {
        return None; // It was made: reading it would cost more than it says.
    }
    case.exact("x", &x);
    let mut other = case.draw.extents(rank, 2048);
    if case.draw.flip() {
        other = x.shape().to_vec();
        other.reverse();
    }
    let other = Shape::from_slice(&other)?;
    if let Some(view) = case.call("reshape", || x.reshape(other)) {
        case.exact("view", &view);
        case.text("holders", view.holders());
    }
    if case.call("item", || x.item()).is_some() {
        case.exact("item", &x);
    }
    if let Some(values) = case.call("to_f32_vec", || x.to_f32_vec()) {
        case.numbers("values", values);
    }
    if let Some(values) = case.call("to_vec", || x.to_vec::<i32>()) {
        case.text("values", values);
    }
    let moved = case.call("to_device", || x.to_device(&Device::cpu()))?;
    case.exact("moved", &moved);
    let back = case.call("to_device", || moved.to_device(device))?;
    case.exact("back", &back);
    let _ = case.call("as_slice", || moved.as_slice::<f32>().map(<[f32]>::len));
    Some(())
}

/// `write`, `copy_from`, `set_zero`, `as_mut_slice`, with storage that is shared or is not.
pub(super) fn changes(case: &mut Case<'_>) -> Option<()> {
    let (rank, kind) = (case.draw.below(4), case.draw.kind());
    let shape = case.draw.extents(rank, 1024);
    let dtype = case.draw.dtype();
    let mut x = case.tensor(&shape, dtype, kind)?.tensor;
    let shared = case.draw.once_in(4).then(|| x.clone());
    for _ in 0..3 {
        match case.draw.below(4) {
            0 => {
                let like = case.draw.mostly(&shape);
                let of = case.draw.dtype_like(dtype);
                let other = case.tensor(&like, of, kind)?;
                let _ = case.call("copy_from", || x.copy_from(&other, "x"));
            }
            1 => {
                let _ = case.call("set_zero", || x.set_zero("x"));
            }
            2 => {
                let len = if case.draw.once_in(6) { case.draw.below(40) } else { x.numel() };
                let values = case.draw.floats(kind, len);
                let _ = case.call("write", || x.write(&values, "x"));
            }
            _ => {
                let len = if case.draw.once_in(6) { case.draw.below(40) } else { x.numel() };
                let values: Vec<u8> = (0..len).map(|i| i as u8).collect();
                let _ = case.call("write", || x.write(&values, "x"));
            }
        }
        case.run("after", || ());
        case.exact("x", &x);
    }
    if let Some(shared) = &shared {
        case.exact("shared", shared);
    }
    Some(())
}

pub(super) fn cells(case: &mut Case<'_>) -> Option<()> {
    let device = case.device;
    let mut value = case.draw.option(1.5);
    let cell = case.call("Cell::new", || Cell::new(value, device))?;
    let twin = cell.clone();
    for _ in 0..4 {
        value = case.draw.option(3.0).abs();
        match case.draw.below(3) {
            0 => case.call("write", || cell.write(value))?,
            1 => case.call("merge_max", || twin.merge_max(value))?,
            _ => {}
        }
        let read = case.call("read", || twin.read())?;
        case.numbers("cell", vec![read]);
    }
    let counters = case.call("Counters::new", || Counters::new(device))?;
    case.call("reset", || counters.reset())?;
    let read = case.call("read", || counters.read())?;
    case.text("counters", read);
    Some(())
}

/// Names, options and errors of devices. Opening a GPU is slow: that is for GPUs alone.
pub(super) fn devices(case: &mut Case<'_>) -> Option<()> {
    let numbers = ["0", "1", "00", "-1", "18446744073709551616", "", " 0", "0x0", "١"];
    let (prefix, number) =
        (case.draw.pick(&["cpu", "cuda", "cuda:", "CUDA:", "", "cpu:"]), case.draw.pick(&numbers));
    let name = format!("{prefix}{number}");
    // Everything but real devices is refused alike.
    if !matches!(&*name, "cuda" | "cuda:0" | "cuda:1" | "cuda:00") {
        let _ = case.call("from_name", || Device::from_name(&name));
    }
    let _ = case.call("DType::from_str", || name.parse::<DType>());
    let _ = case.call("Activation::from_str", || name.parse::<fp8_kernels::ops::Activation>());
    let _ = case.call("Norm::from_str", || name.parse::<fp8_kernels::ops::Norm>());
    case.call("synchronize", || case.device.synchronize())?;
    let (candidates, ordinal) =
        (case.draw.pick(&[0, 1, 3, 1 << 40, usize::MAX]), case.draw.pick(&[0, 0, 0, 7, usize::MAX]));
    if case.device.to_string() != "cpu" {
        open(case, candidates, ordinal)?;
    }
    Some(())
}

/// Opens a second device with options of its own and multiplies on it.
fn open(case: &mut Case<'_>, candidates: usize, ordinal: usize) -> Option<()> {
    use fp8_kernels::{CudaAllocator, CudaOptions, GemmTuning, ops};
    let options = CudaOptions {
        ordinal,
        allocator: case.draw.flip().then_some(CudaAllocator::Exact),
        gemm_tuning: Some(GemmTuning { candidates, file: None }),
        ..CudaOptions::default()
    };
    let opened = Device::cuda_with_options(&options);
    case.say(|| format!("{options:?}: {opened:?}"));
    let device = match opened {
        Ok(device) => device,
        // The options are this run's alone: the CPU has none to compare with.
        Err(_) => return Some(()),
    };
    let multiply = || -> fp8_kernels::Result<f32> {
        let a = Tensor::full(0.5, [16, 16], DType::BF16, &device)?;
        ops::gemm(&a, &a, ops::Layout::Nt, None, DType::F32)?.to_f32_vec().map(|values| values[17])
    };
    match multiply() {
        Ok(4.0) => Some(()),
        Ok(other) => {
            case.fail(format!("a product on a device with {options:?} is {other} instead of 4"));
            None
        }
        Err(error) => {
            case.fail(format!("a product on a device with {options:?}: {error}"));
            None
        }
    }
}

/// Codes and factors that belong together, and others.
pub(super) fn fp8_tensors(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let rank = case.draw.below(4);
    let extents = case.draw.extents(rank, 1024);
    let numel: usize = extents.iter().fold(1, |product: usize, extent| product.saturating_mul(*extent));
    let len = if case.draw.once_in(12) { case.draw.below(50) } else { numel };
    let codes: Vec<u8> = (0..len).map(|_| case.draw.bits() as u8).collect();
    let codes = if case.draw.once_in(20) {
        case.tensor(&[len], DType::F32, Kind::Tame)?.tensor
    } else {
        case.bytes(codes, &[len])?
    };
    let (factor_shape, encoding): (&[usize], Encoding) =
        (case.draw.pick(&[&[] as &[usize], &[1], &[1, 1], &[2], &[0]]), case.draw.encoding());
    let factor = case.tensor(factor_shape, DType::F32, Kind::Tame)?;
    let shape = Shape::from_slice(&extents)?;
    let x = case.call("from_codes", || Fp8Tensor::from_codes(codes, shape, encoding, factor.tensor))?;
    case.codes("x", &x);
    let dtype = case.draw.dtype();
    if let Some(values) = case.call("dequantize", || x.dequantize(dtype)) {
        case.exact("values", &values);
    }
    let x = case.call("with_columnwise", || x.with_columnwise())?;
    case.codes("both", &x);
    let turned = case.call("transposed", || x.transposed())?;
    case.codes("turned", &turned);
    let kept = x.for_backward();
    let again = case.call("transposed", || kept.transposed())?;
    case.codes("again", &again);
    let dtype = case.draw.dtype();
    if let Some(values) = case.call("dequantize", || kept.dequantize(dtype)) {
        case.exact("values", &values);
    }
    Some(())
}

/// Policies draw alike on all devices: results have the same bits under all three.
pub(super) fn policy(case: &mut Case<'_>) -> Device {
    let policies = [TransposePolicy::WithCast, TransposePolicy::OnDemand, TransposePolicy::Never];
    let policy = case.draw.pick(&policies);
    case.device.clone().with_transpose_policy(policy)
}
