//! Attention whose weights are rounded to what FP8 codes hold, in f64 with whole matrices.

use super::attention::Attention;
use fp8_kernels::Encoding;

/// The value nearest to `x · scale` among the codes, without the scale.
fn rounded(x: f64, scale: f64, encoding: Encoding) -> f64 {
    f64::from(encoding.to_f32(encoding.from_f32_saturating((x * scale) as f32))) / scale
}

/// Each rounded with one power of two for all, which brings the largest below the largest code, with a binade to spare in E4M3.
fn rounded_together(values: &[f64], encoding: Encoding) -> Vec<f64> {
    let amax = values.iter().fold(0.0f64, |amax, v| amax.max(v.abs()));
    let top = if encoding == Encoding::E4M3 { 7.0 } else { 14.0 };
    let scale = if amax == 0.0 { 1.0 } else { (top - amax.log2().floor()).exp2() };
    values.iter().map(|&v| rounded(v, scale, encoding)).collect()
}

impl Attention {
    /// With probabilities relative to the largest of their row, times 256, in E4M3. The sum is that of the unrounded ones. Those
    /// that dropout keeps are multiplied by its factor afterwards.
    pub(crate) fn forward_fp8(&self, q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
        let mut o = vec![0.0; q.len()];
        for row @ [b, h, i] in self.rows() {
            let p = self.probabilities(q, k, row);
            let largest = p.iter().copied().fold(0.0, f64::max);
            for (j, p) in p.into_iter().enumerate().filter(|&(_, p)| p > 0.0) {
                let weight = rounded(p / largest, 256.0, Encoding::E4M3) * largest * self.factor(row, j);
                for c in 0..self.dim {
                    o[self.q(b, i, h, c)] += weight * v[self.k(b, j, h, c)];
                }
            }
        }
        o
    }

    /// `[dq, dk, dv]`, with the scores' gradients in `encoding` and the probabilities in E4M3: the rows of each product's left
    /// operand are rounded together. `o` is what forward gave.
    pub(crate) fn backward_fp8(&self, encoding: Encoding, [dy, q, k, v, o]: [&[f64]; 5]) -> [Vec<f64>; 3] {
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![0.0; x.len()]);
        let rows: Vec<_> = self.rows().collect();
        // For each row the probabilities and the scores' gradients, of all keys.
        let mut weights = Vec::new();
        for &row in &rows {
            let [b, h, i] = row;
            let p = self.probabilities(q, k, row);
            let mean: f64 = (0..self.dim).map(|c| dy[self.q(b, i, h, c)] * o[self.q(b, i, h, c)]).sum();
            let ds = |j: usize| {
                let dp: f64 = (0..self.dim).map(|c| dy[self.q(b, i, h, c)] * v[self.k(b, j, h, c)]).sum();
                p[j] * (dp * self.factor(row, j) - mean)
            };
            let ds: Vec<f64> = (0..self.keys).map(ds).collect();
            for (j, ds) in rounded_together(&ds, encoding).into_iter().enumerate() {
                for c in 0..self.dim {
                    dq[self.q(b, i, h, c)] += self.scale * ds * k[self.k(b, j, h, c)];
                }
            }
            weights.push([p, ds]);
        }
        for (b, group, j) in (0..self.batch * self.groups * self.keys)
            .map(|n| (n / self.keys / self.groups, n / self.keys % self.groups, n % self.keys))
        {
            let of_group = |[batch, h, _]: [usize; 3]| batch == b && h * self.groups / self.heads == group;
            let own: Vec<usize> = (0..rows.len()).filter(|&n| of_group(rows[n])).collect();
            // Dropout's factor is not rounded, but which of them it keeps decides the scale.
            let factors: Vec<f64> = own.iter().map(|&n| self.factor(rows[n], j)).collect();
            let column = |which: usize| own.iter().map(|&n| weights[n][which][j]).collect::<Vec<f64>>();
            let kept = column(0).into_iter().zip(&factors);
            let kept = kept.map(|(p, &factor)| if factor == 0.0 { 0.0 } else { p }).collect::<Vec<f64>>();
            let p = rounded_together(&kept, Encoding::E4M3);
            let ds = rounded_together(&column(1), encoding);
            for ((&n, factor), (p, ds)) in own.iter().zip(&factors).zip(p.iter().zip(&ds)) {
                let [_, h, i] = rows[n];
                for c in 0..self.dim {
                    let (q_at, k_at) = (self.q(b, i, h, c), self.k(b, j, h, c));
                    dk[k_at] += self.scale * ds * q[q_at];
                    dv[k_at] += p * factor * dy[q_at];
                }
            }
        }
        [dq, dk, dv]
    }
}
