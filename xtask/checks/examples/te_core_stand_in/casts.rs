//! Casts, transposes, activations.

use crate::tensors::{
    COLUMNWISE, Handle, ROWWISE_SCALE_INV, cell, column_sums, data, dtype, queried, tensor, transposed, write,
};
use crate::{Stream, check, enter, fail, is_to_be_wrong, result};

/// `out` gets `f` of each element.
fn unary(function: &str, input: Handle, out: Handle, f: impl Fn(f32) -> f32) {
    enter(function);
    check(data(input).dims() == data(out).dims(), "input and output have different shapes");
    write(out, &result(function, data(input).load().into_iter().map(f).collect()));
}

#[unsafe(no_mangle)]
extern "C" fn nvte_quantize(input: Handle, out: Handle, _: Stream) {
    unary("nvte_quantize", input, out, |x| x);
}

#[unsafe(no_mangle)]
extern "C" fn nvte_dequantize(input: Handle, out: Handle, _: Stream) {
    let scale_inv = cell(tensor(input), ROWWISE_SCALE_INV);
    let scale_inv = scale_inv.unwrap_or_else(|| fail("a quantized input has no scale_inv"));
    unary("nvte_dequantize", input, out, |x| x * scale_inv);
}

#[unsafe(no_mangle)]
extern "C" fn nvte_transpose(input: Handle, out: Handle, _: Stream) {
    enter("nvte_transpose");
    let (from, to) = (data(input), data(out));
    let [rows, cols] = from.matrix();
    check(from.dtype == dtype::E4M3 && to.dtype == dtype::E4M3, "not E4M3 to E4M3");
    check(to.dims() == [cols, rows], "the transpose has another shape");
    let mut turned = transposed(from.bytes(), [rows, cols]);
    if is_to_be_wrong("nvte_transpose") {
        turned.reverse();
    }
    to.bytes_mut().copy_from_slice(&turned);
}

fn tanh_of(x: f32) -> f32 {
    ((2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh()
}

fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + tanh_of(x))
}

fn dgelu(x: f32) -> f32 {
    let t = tanh_of(x);
    let inner = (2.0 / std::f32::consts::PI).sqrt() * (1.0 + 3.0 * 0.044_715 * x * x);
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
}

#[unsafe(no_mangle)]
extern "C" fn nvte_gelu(input: Handle, out: Handle, _: Stream) {
    unary("nvte_gelu", input, out, gelu);
}

fn with_dbias(
    function: &str,
    values: &[f32],
    shape: [usize; 2],
    out: Handle,
    dbias: Handle,
    workspace: Handle,
) {
    if !queried(workspace, dtype::F32, &[shape[0].div_ceil(32), shape[1]]) {
        check(data(dbias).dims() == [shape[1]], "dbias has another shape");
        check(tensor(out).0[COLUMNWISE].is_there(), "the transpose is not there");
        write(out, &result(function, values.to_vec()));
        write(dbias, &column_sums(values, shape[1]));
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvte_cast_transpose_dbias(x: Handle, out: Handle, dbias: Handle, workspace: Handle, _: Stream) {
    const NAME: &str = "nvte_cast_transpose_dbias";
    enter(NAME);
    with_dbias(NAME, &data(x).load(), data(x).matrix(), out, dbias, workspace);
}

#[unsafe(no_mangle)]
extern "C" fn nvte_cast_transpose_dbias_dgelu(
    dy: Handle,
    x: Handle,
    out: Handle,
    dbias: Handle,
    workspace: Handle,
    _: Stream,
) {
    const NAME: &str = "nvte_cast_transpose_dbias_dgelu";
    enter(NAME);
    check(data(dy).dims() == data(x).dims(), "gradient and input have different shapes");
    let values: Vec<_> = data(dy).load().iter().zip(data(x).load()).map(|(dy, x)| dy * dgelu(x)).collect();
    with_dbias(NAME, &values, data(x).matrix(), out, dbias, workspace);
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

#[unsafe(no_mangle)]
extern "C" fn nvte_swiglu(input: Handle, out: Handle, _: Stream) {
    enter("nvte_swiglu");
    let [rows, wide] = data(input).matrix();
    check(data(out).dims() == [rows, wide / 2], "the output has another shape");
    let values = data(input).load();
    let rows = values.chunks(wide).map(|row| row.split_at(wide / 2));
    let values = rows.flat_map(|(gate, up)| gate.iter().zip(up).map(|(g, u)| g * sigmoid(*g) * u)).collect();
    write(out, &result("nvte_swiglu", values));
}

fn dswiglu(function: &str, dy: Handle, input: Handle, out: Handle) {
    enter(function);
    let [rows, wide] = data(input).matrix();
    check(data(dy).dims() == [rows, wide / 2], "the gradient has another shape");
    check(data(out).dims() == [rows, wide], "the output has another shape");
    let (dy, h) = (data(dy).load(), data(input).load());
    let mut values = vec![0.0; h.len()];
    for (row, out) in values.chunks_mut(wide).enumerate() {
        for column in 0..wide / 2 {
            let (gate, up) = (h[row * wide + column], h[row * wide + wide / 2 + column]);
            let (dy, s) = (dy[row * (wide / 2) + column], sigmoid(gate));
            out[column] = dy * up * (s + gate * s * (1.0 - s));
            out[wide / 2 + column] = dy * gate * s;
        }
    }
    write(out, &result(function, values));
}

#[unsafe(no_mangle)]
extern "C" fn nvte_dswiglu(dy: Handle, input: Handle, out: Handle, _: Stream) {
    dswiglu("nvte_dswiglu", dy, input, out);
}

#[unsafe(no_mangle)]
extern "C" fn nvte_dswiglu_cast_transpose(dy: Handle, input: Handle, out: Handle, _: Stream) {
    check(tensor(out).0[COLUMNWISE].is_there(), "the transpose is not there");
    dswiglu("nvte_dswiglu_cast_transpose", dy, input, out);
}
