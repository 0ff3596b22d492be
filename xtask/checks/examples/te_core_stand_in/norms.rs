//! LayerNorm and RMSNorm.

use std::ffi::{c_float, c_int};

use crate::tensors::{Handle, column_sums, data, dtype, queried, write};
use crate::{Stream, check, enter, result};

/// Each row with `mean` taken off, times what makes its mean square 1, times gamma, plus beta.
fn norm(function: &str, [x, gamma, z, rsigma]: [Handle; 4], layer: Option<[Handle; 2]>, epsilon: f32) {
    let [rows, cols] = data(x).matrix();
    check(data(gamma).dims() == [cols] && data(rsigma).dims() == [rows], "gamma or rsigma has another shape");
    let gamma = data(gamma).load();
    let beta = layer.map_or(vec![0.0; cols], |[beta, _]| data(beta).load());
    let (mut values, mut means, mut rstds) = (Vec::new(), Vec::new(), Vec::new());
    for row in data(x).load().chunks(cols) {
        let mean = if layer.is_some() { row.iter().sum::<f32>() / cols as f32 } else { 0.0 };
        let square = row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / cols as f32;
        let rstd = 1.0 / (square + epsilon).sqrt();
        values.extend((0..cols).map(|c| (row[c] - mean) * rstd * gamma[c] + beta[c]));
        means.push(mean);
        rstds.push(rstd);
    }
    write(z, &result(function, values));
    write(rsigma, &rstds);
    if let Some([_, mu]) = layer {
        write(mu, &means);
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvte_layernorm_fwd(
    x: Handle,
    gamma: Handle,
    beta: Handle,
    epsilon: c_float,
    z: Handle,
    mu: Handle,
    rsigma: Handle,
    workspace: Handle,
    processors: c_int,
    zero_centered: bool,
    _: Stream,
) {
    enter("nvte_layernorm_fwd");
    check(processors > 0 && !zero_centered, "no processors, or another gamma");
    if !queried(workspace, dtype::BYTE, &[data(x).matrix()[0]]) {
        norm("nvte_layernorm_fwd", [x, gamma, z, rsigma], Some([beta, mu]), epsilon);
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvte_rmsnorm_fwd(
    x: Handle,
    gamma: Handle,
    epsilon: c_float,
    z: Handle,
    rsigma: Handle,
    workspace: Handle,
    processors: c_int,
    zero_centered: bool,
    _: Stream,
) {
    enter("nvte_rmsnorm_fwd");
    check(processors > 0 && !zero_centered, "no processors, or another gamma");
    if !queried(workspace, dtype::BYTE, &[data(x).matrix()[0]]) {
        norm("nvte_rmsnorm_fwd", [x, gamma, z, rsigma], None, epsilon);
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvte_layernorm_bwd(
    dz: Handle,
    x: Handle,
    mu: Handle,
    rsigma: Handle,
    gamma: Handle,
    dx: Handle,
    dgamma: Handle,
    dbeta: Handle,
    workspace: Handle,
    processors: c_int,
    zero_centered: bool,
    _: Stream,
) {
    enter("nvte_layernorm_bwd");
    check(processors > 0 && !zero_centered, "no processors, or another gamma");
    let [rows, cols] = data(x).matrix();
    if queried(workspace, dtype::BYTE, &[rows, 4]) {
        return;
    }
    check(data(dz).dtype == data(gamma).dtype, "dz and gamma have different types");
    let [dy, x, mu, rsigma, gamma] = [dz, x, mu, rsigma, gamma].map(|handle| data(handle).load());
    let (mut dxs, mut products) = (Vec::new(), Vec::new());
    for row in 0..rows {
        let at = row * cols..(row + 1) * cols;
        let hat: Vec<f32> = x[at.clone()].iter().map(|x| (x - mu[row]) * rsigma[row]).collect();
        let g: Vec<f32> = dy[at.clone()].iter().zip(&gamma).map(|(dy, gamma)| dy * gamma).collect();
        let mean = g.iter().sum::<f32>() / cols as f32;
        let along = g.iter().zip(&hat).map(|(g, hat)| g * hat).sum::<f32>() / cols as f32;
        dxs.extend((0..cols).map(|c| rsigma[row] * (g[c] - mean - hat[c] * along)));
        products.extend(dy[at].iter().zip(&hat).map(|(dy, hat)| dy * hat));
    }
    write(dx, &result("nvte_layernorm_bwd", dxs));
    write(dgamma, &column_sums(&products, cols));
    write(dbeta, &column_sums(&dy, cols));
}
