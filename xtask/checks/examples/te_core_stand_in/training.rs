//! Products, the optimizer, the update of scales.

use std::ffi::{CStr, c_char, c_float, c_int};
use std::slice;

use fp8_format::E4M3;

use crate::tensors::{Handle, ROWWISE_SCALE_INV, cell, data, dtype, tensor, write};
use crate::{Stream, check, enter, fail, result};

/// By columns, as cuBLAS counts: D^T = A B^T by rows.
#[unsafe(no_mangle)]
extern "C" fn nvte_cublas_gemm(
    a: Handle,
    b: Handle,
    d: Handle,
    bias: Handle,
    pre_gelu: Handle,
    transa: bool,
    transb: bool,
    grad: bool,
    workspace: Handle,
    accumulate: bool,
    _split: bool,
    _sm_count: c_int,
    _: Stream,
) {
    enter("nvte_cublas_gemm");
    check(transa && !transb && !grad, "only A transposed");
    check(!data(bias).is_there() && !data(pre_gelu).is_there(), "neither bias nor GELU");
    check(data(workspace).dtype == dtype::BYTE && data(workspace).len() >= 1 << 20, "no workspace");
    let ([n, k], [m, other]) = (data(a).matrix(), data(b).matrix());
    check(k == other && data(d).dims() == [m, n], "the matrices do not fit");
    let factor = |of: Handle| match data(of).dtype {
        dtype::E4M3 | dtype::E5M2 => {
            check(k.is_multiple_of(16), "FP8 needs multiples of 16");
            cell(tensor(of), ROWWISE_SCALE_INV).unwrap_or_else(|| fail("FP8 input without scale_inv"))
        }
        _ => 1.0,
    };
    let scale = factor(a) * factor(b);
    let (left, right) = (data(b).load(), data(a).load());
    let mut out = if accumulate { data(d).load() } else { vec![0.0; m * n] };
    for (row, out) in left.chunks(k).zip(out.chunks_mut(n)) {
        for (column, out) in right.chunks(k).zip(out) {
            *out += scale * row.iter().zip(column).map(|(x, y)| x * y).sum::<f32>();
        }
    }
    write(d, &result("nvte_cublas_gemm", out));
}

/// Tensor `index` of each of `count` lists of `length` tensors.
fn of_lists(lists: *const *const Handle, count: usize, length: usize, index: usize) -> Vec<Handle> {
    // SAFETY: the caller vouches for `count` lists.
    let lists = unsafe { slice::from_raw_parts(lists, count) };
    // SAFETY: and for `length` tensors in each.
    lists.iter().map(|&list| unsafe { slice::from_raw_parts(list, length) }[index]).collect()
}

struct Step {
    lr: f32,
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    step: i32,
    decay: f32,
}

impl Step {
    /// AdamW of gradient, moments and main parameter; the latter.
    fn take(&self, [g, m, v, main]: [Handle; 4]) -> Vec<f32> {
        let (mut ms, mut vs, mut ps) = (data(m).load(), data(v).load(), data(main).load());
        for (i, g) in data(g).load().into_iter().enumerate() {
            ms[i] = self.beta1 * ms[i] + (1.0 - self.beta1) * g;
            vs[i] = self.beta2 * vs[i] + (1.0 - self.beta2) * g * g;
            let m = ms[i] / (1.0 - self.beta1.powi(self.step));
            let v = vs[i] / (1.0 - self.beta2.powi(self.step));
            ps[i] -= self.lr * (m / (v.sqrt() + self.epsilon) + self.decay * ps[i]);
        }
        for (handle, values) in [(m, &ms), (v, &vs), (main, &ps)] {
            write(handle, values);
        }
        ps
    }
}

fn adam_checks(function: &str, chunk: c_int, noop: Handle, mode: c_int, corrected: c_int) {
    enter(function);
    check(data(noop).dtype == dtype::INT32 && data(noop).len() == 1, "the flag is not one int");
    check(chunk > 0 && mode == 1 && corrected == 1, "not AdamW with bias correction");
}

#[unsafe(no_mangle)]
extern "C" fn nvte_multi_tensor_adam_cuda(
    chunk: c_int,
    noop: Handle,
    lists: *const *const Handle,
    count: usize,
    length: usize,
    lr: c_float,
    beta1: c_float,
    beta2: c_float,
    epsilon: c_float,
    step: c_int,
    mode: c_int,
    corrected: c_int,
    decay: c_float,
    _: Stream,
) {
    adam_checks("nvte_multi_tensor_adam_cuda", chunk, noop, mode, corrected);
    check(count == 5, "expected gradients, parameters, two moments, main parameters");
    let step = Step { lr, beta1, beta2, epsilon, step, decay };
    for tensors in (0..length).map(|index| of_lists(lists, count, length, index)) {
        let [g, p, m, v, main] = tensors[..] else { fail("not five lists") };
        let values = step.take([g, m, v, main]);
        write(p, &result("nvte_multi_tensor_adam_cuda", values));
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvte_multi_tensor_adam_fp8_cuda(
    chunk: c_int,
    noop: Handle,
    lists: *const *const Handle,
    count: usize,
    length: usize,
    lr: c_float,
    beta1: c_float,
    beta2: c_float,
    epsilon: c_float,
    step: c_int,
    mode: c_int,
    corrected: c_int,
    decay: c_float,
    codes: c_int,
    _: Stream,
) {
    const NAME: &str = "nvte_multi_tensor_adam_fp8_cuda";
    adam_checks(NAME, chunk, noop, mode, corrected);
    check(count == 8 && codes == dtype::E4M3, "expected eight lists, and E4M3");
    let step = Step { lr, beta1, beta2, epsilon, step, decay };
    for tensors in (0..length).map(|index| of_lists(lists, count, length, index)) {
        let [g, p, m, v, main, scale, amax, scale_inv] = tensors[..] else { fail("not eight lists") };
        check(data(p).dtype == codes, "parameters are not codes");
        let values = result(NAME, step.take([g, m, v, main]));
        let factor = data(scale).load()[0];
        let bits = values.iter().map(|x| E4M3::from_f32_saturating(x * factor).to_bits());
        data(p).bytes_mut().iter_mut().zip(bits).for_each(|(code, bits)| *code = bits);
        write(amax, &[values.iter().fold(data(amax).load()[0], |amax, x| amax.max(x.abs()))]);
        write(scale_inv, &[1.0 / factor]);
    }
}

/// `std::vector<NVTETensor>`: begin, end, end of its memory.
type Vector = [*const Handle; 3];

fn handles(&[begin, end, capacity]: &Vector) -> &[Handle] {
    check(begin <= end && end <= capacity, "a vector ends before it begins");
    // SAFETY: the caller vouches for a vector between the two.
    unsafe { slice::from_raw_parts(begin, (end.addr() - begin.addr()) / size_of::<Handle>()) }
}

#[unsafe(no_mangle)]
extern "C" fn nvte_delayed_scaling_recipe_amax_and_scale_update_after_reduction(
    reduced: Handle,
    histories: &Vector,
    scales: &Vector,
    algorithm: *const c_char,
    codes: c_int,
    margin: c_float,
    _: Stream,
) {
    const NAME: &str = "nvte_delayed_scaling_recipe_amax_and_scale_update_after_reduction";
    enter(NAME);
    // SAFETY: the caller vouches for a string.
    check(unsafe { CStr::from_ptr(algorithm) } == c"max", "only max");
    check(codes == dtype::E4M3 && margin == 0.0, "only E4M3 without margin");
    check(handles(histories).len() == handles(scales).len(), "as many histories as scales");
    let amaxes = data(reduced).load();
    let mut slot = 0;
    for (&history, &scale) in handles(histories).iter().zip(handles(scales)) {
        let [length, group] = data(history).matrix();
        check(data(scale).dims() == [group], "scales have another shape");
        let (mut rows, mut factors) = (data(history).load(), data(scale).load());
        for column in 0..group {
            let newest = match amaxes[slot] {
                0.0 => rows[column],
                amax => amax,
            };
            let mut largest = newest;
            for row in 1..length {
                largest = largest.max(rows[row * group + column]);
                rows[row * group + column] =
                    if row + 1 < length { rows[(row + 1) * group + column] } else { newest };
            }
            rows[column] = 0.0;
            if largest > 0.0 && largest.is_finite() {
                factors[column] = (448.0 / largest).min(f32::MAX);
            }
            slot += 1;
        }
        write(history, &rows);
        write(scale, &result(NAME, factors));
    }
    check(slot == amaxes.len(), "as many amaxes as slots");
}
