//! Attention with the whole matrix of probabilities, in f64.

use super::philox::philox;
use super::softmax;

#[derive(Debug, Clone, Default)]
pub(crate) struct Attention {
    pub(crate) batch: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) heads: usize,
    pub(crate) groups: usize,
    pub(crate) dim: usize,
    pub(crate) causal: bool,
    pub(crate) scale: f64,
    /// The number of real keys in each batch entry.
    pub(crate) lengths: Option<Vec<usize>>,
    pub(crate) query_lengths: Option<Vec<usize>>,
    /// Keys to the left and to the right of a query's own.
    pub(crate) window: [Option<usize>; 2],
    pub(crate) bottom_right: bool,
    /// The probability, the seed and the offset of dropout.
    pub(crate) dropout: Option<(f32, u64, u64)>,
}

impl Attention {
    /// All keys are seen, and scores have the usual scale, 1/√`dim`.
    pub(crate) fn new([batch, queries, keys, heads, groups, dim]: [usize; 6]) -> Self {
        let scale = 1.0 / (dim as f64).sqrt();
        Self { batch, queries, keys, heads, groups, dim, scale, ..Self::default() }
    }

    pub(super) fn q(&self, b: usize, i: usize, h: usize, c: usize) -> usize {
        ((b * self.queries + i) * self.heads + h) * self.dim + c
    }

    /// Returns the index of an element of key `j`, in the group that head `h` reads.
    pub(super) fn k(&self, b: usize, j: usize, h: usize, c: usize) -> usize {
        let group = h * self.groups / self.heads;
        ((b * self.keys + j) * self.groups + group) * self.dim + c
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = [usize; 3]> {
        let (heads, queries) = (self.heads, self.queries);
        (0..self.batch * heads * queries)
            .map(move |r| [r / queries / heads, r / queries % heads, r % queries])
    }

    pub(super) fn probabilities(&self, q: &[f64], k: &[f64], [b, h, i]: [usize; 3]) -> Vec<f64> {
        let score = |j| (0..self.dim).map(|c| q[self.q(b, i, h, c)] * k[self.k(b, j, h, c)]).sum();
        let scores: Vec<f64> = (0..self.keys).map(score).collect();
        softmax::softmax(&scores, self.scale, |j| !self.sees(b, i, j))
    }

    /// Returns the factor that dropout multiplies a probability by.
    pub(crate) fn factor(&self, [b, h, i]: [usize; 3], j: usize) -> f64 {
        let Some((p, seed, offset)) = self.dropout else { return 1.0 };
        let element = (((b * self.heads + h) * self.queries + i) * self.keys + j) as u64;
        let random = philox(offset.wrapping_add(element / 4), seed)[(element % 4) as usize];
        let kept = f64::from(random) >= (f64::from(p) * 2f64.powi(32)).floor();
        if kept { 1.0 / (1.0 - f64::from(p)) } else { 0.0 }
    }

    pub(crate) fn sees(&self, b: usize, i: usize, j: usize) -> bool {
        let length =
            |lengths: &Option<Vec<usize>>, all| lengths.as_ref().map_or(all, |lengths| lengths[b]) as i64;
        let (queries, keys) = (length(&self.query_lengths, self.queries), length(&self.lengths, self.keys));
        let (i, j) = (i as i64, j as i64);
        let own = if self.bottom_right { i - queries + keys } else { i };
        let reach = |keys: usize| i64::try_from(keys).unwrap_or(i64::MAX).min(i64::MAX / 2);
        let [left, right] = self.window.map(|keys| reach(keys.unwrap_or(usize::MAX)));
        let right = if self.causal { 0 } else { right };
        i < queries && j < keys && own - left <= j && j <= own + right
    }

    pub(crate) fn forward(&self, q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
        let mut o = vec![0.0; q.len()];
        for row @ [b, h, i] in self.rows() {
            for (j, p) in self.probabilities(q, k, row).into_iter().enumerate() {
                let p = p * self.factor(row, j);
                for c in 0..self.dim {
                    o[self.q(b, i, h, c)] += p * v[self.k(b, j, h, c)];
                }
            }
        }
        o
    }

    /// `[dq, dk, dv]`.
    pub(crate) fn backward(&self, dy: &[f64], q: &[f64], k: &[f64], v: &[f64]) -> [Vec<f64>; 3] {
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![0.0; x.len()]);
        for row @ [b, h, i] in self.rows() {
            let p = self.probabilities(q, k, row);
            let dp =
                |j| -> f64 { (0..self.dim).map(|c| dy[self.q(b, i, h, c)] * v[self.k(b, j, h, c)]).sum() };
            let dp: Vec<f64> = (0..self.keys).map(|j| dp(j) * self.factor(row, j)).collect();
            let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            for j in 0..self.keys {
                let ds = self.scale * p[j] * (dp[j] - mean);
                for c in 0..self.dim {
                    let (q_at, k_at) = (self.q(b, i, h, c), self.k(b, j, h, c));
                    dv[k_at] += p[j] * self.factor(row, j) * dy[q_at];
                    dq[q_at] += ds * k[k_at];
                    dk[k_at] += ds * q[q_at];
                }
            }
        }
        [dq, dk, dv]
    }
}
