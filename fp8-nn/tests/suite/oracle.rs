//! Layers in f64, written down from their formulas as plainly as possible. Shares nothing with the crate but the names of
//! parameters.

use std::collections::BTreeMap;

/// Parameters by name, row-major.
pub(crate) type Weights = BTreeMap<String, Vec<f64>>;

/// The options of a transformer layer that change what it computes. Whether there are biases is seen from the parameters.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) heads: usize,
    pub(crate) groups: usize,
    pub(crate) head_dim: usize,
    pub(crate) causal: bool,
    /// Positions to the left and to the right.
    pub(crate) window: (Option<usize>, Option<usize>),
    /// `None`: 1/√head_dim.
    pub(crate) softmax_scale: Option<f64>,
    /// RoPE's base; `None`: no RoPE.
    pub(crate) rope_base: Option<f64>,
    /// As `Activation::name` gives it.
    pub(crate) activation: &'static str,
    pub(crate) rms_norm: bool,
    pub(crate) eps: f64,
    pub(crate) zero_centered_gamma: bool,
    /// Whether a block's MLP reads what its attention reads.
    pub(crate) is_parallel: bool,
    /// Whether a block's residual connections take the outputs of its norms.
    pub(crate) adds_normed: bool,
    /// Whether the last query stands at the last key.
    pub(crate) bottom_right: bool,
}

/// `x · wᵀ + b` for `x` of rows of `k` values.
pub(crate) fn linear(p: &Weights, path: &str, x: &[f64], k: usize) -> Vec<f64> {
    let w = &p[&format!("{path}.weight")];
    let bias = p.get(&format!("{path}.bias"));
    let mut y = Vec::new();
    for row in x.chunks(k) {
        for (j, w) in w.chunks(k).enumerate() {
            let product: f64 = row.iter().zip(w).map(|(x, w)| x * w).sum();
            y.push(product + bias.map_or(0.0, |bias| bias[j]));
        }
    }
    y
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn curve(name: &str, x: f64) -> f64 {
    match name {
        "gelu" | "geglu" => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        "silu" | "swiglu" => x * sigmoid(x),
        "qgelu" | "qgeglu" => x * sigmoid(1.702 * x),
        "relu" | "reglu" => x.max(0.0),
        "srelu" | "sreglu" => x.max(0.0).powi(2),
        "glu" => sigmoid(x),
        other => panic!("activation {other}"),
    }
}

impl Model {
    pub(crate) fn norm(&self, p: &Weights, path: &str, x: &[f64]) -> Vec<f64> {
        let gamma = &p[&format!("{path}.weight")];
        let beta = p.get(&format!("{path}.bias"));
        assert_eq!(beta.is_none(), self.rms_norm, "{path}: LayerNorm has a bias, RMSNorm has none");
        let mut y = Vec::new();
        for row in x.chunks(gamma.len()) {
            let count = row.len() as f64;
            let mean = if self.rms_norm { 0.0 } else { row.iter().sum::<f64>() / count };
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
            for (j, x) in row.iter().enumerate() {
                let gamma = gamma[j] + if self.zero_centered_gamma { 1.0 } else { 0.0 };
                let normed = (x - mean) / (variance + self.eps).sqrt();
                y.push(normed * gamma + beta.map_or(0.0, |beta| beta[j]));
            }
        }
        y
    }

    pub(crate) fn mlp(&self, p: &Weights, path: &str, x: &[f64], hidden: usize) -> Vec<f64> {
        let normed = self.norm(p, &format!("{path}.norm"), x);
        let h = linear(p, &format!("{path}.fc1"), &normed, hidden);
        let width = h.len() / (x.len() / hidden);
        let mut a = Vec::new();
        for row in h.chunks(width) {
            if self.activation.ends_with("lu") && self.activation.contains("glu") {
                let (first, second) = row.split_at(width / 2);
                a.extend(first.iter().zip(second).map(|(u, v)| curve(self.activation, *u) * v));
            } else {
                a.extend(row.iter().map(|x| curve(self.activation, *x)));
            }
        }
        let ffn = a.len() / (x.len() / hidden);
        linear(p, &format!("{path}.fc2"), &a, ffn)
    }

    /// Rotates one head of the token at `position`: value j pairs with value j + d/2.
    fn rotate(&self, head: &mut [f64], position: usize) {
        let Some(base) = self.rope_base else { return };
        let half = head.len() / 2;
        for j in 0..half {
            let angle = position as f64 * base.powf(-((2 * j) as f64) / (2 * half) as f64);
            let (a, b) = (head[j], head[j + half]);
            head[j] = a * angle.cos() - b * angle.sin();
            head[j + half] = b * angle.cos() + a * angle.sin();
        }
    }

    /// Without a norm in front unless the parameters have one. `x` is `[batch, seq, hidden]`.
    pub(crate) fn attention(
        &self,
        p: &Weights,
        path: &str,
        x: &[f64],
        [seq, hidden]: [usize; 2],
    ) -> Vec<f64> {
        let norm = format!("{path}.norm");
        let normed =
            if p.contains_key(&format!("{norm}.weight")) { self.norm(p, &norm, x) } else { x.to_vec() };
        let (d, heads, groups) = (self.head_dim, self.heads, self.groups);
        let mut qkv = linear(p, &format!("{path}.qkv"), &normed, hidden);
        let width = (heads + 2 * groups) * d;
        for (token, row) in qkv.chunks_mut(width).enumerate() {
            for head in row[..(heads + groups) * d].chunks_mut(d) {
                self.rotate(head, token % seq);
            }
        }
        let columns = |tokens: &[f64], from: usize, to: usize| -> Vec<f64> {
            tokens.chunks(width).flat_map(|row| row[from * d..to * d].to_vec()).collect()
        };
        let mut out = Vec::new();
        for tokens in qkv.chunks(seq * width) {
            let q = columns(tokens, 0, heads);
            let k = columns(tokens, heads, heads + groups);
            out.extend(self.attend(&q, &k, &columns(tokens, heads + groups, heads + 2 * groups)));
        }
        linear(p, &format!("{path}.proj"), &out, heads * d)
    }

    /// Attention of one sequence's queries, rows of all heads, to one sequence's keys and values.
    fn attend(&self, q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
        let (d, heads, groups) = (self.head_dim, self.heads, self.groups);
        let (queries, keys) = (q.len() / (heads * d), k.len() / (groups * d));
        let mut out = Vec::new();
        for i in 0..queries {
            // The key that it stands at.
            let own = i as i64 + if self.bottom_right { keys as i64 - queries as i64 } else { 0 };
            for head in 0..heads {
                let group = head / (heads / groups);
                let sees = |j: usize| {
                    let left = self.window.0.is_none_or(|left| j as i64 + left as i64 >= own);
                    let right = if self.causal { Some(0) } else { self.window.1 };
                    left && right.is_none_or(|right| j as i64 <= own + right as i64)
                };
                let scale = self.softmax_scale.unwrap_or(1.0 / (d as f64).sqrt());
                let score = |j: usize| {
                    let query = &q[(i * heads + head) * d..][..d];
                    let key = &k[(j * groups + group) * d..][..d];
                    let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                    if sees(j) { (dot * scale).exp() } else { 0.0 }
                };
                let scores: Vec<f64> = (0..keys).map(score).collect();
                let sum: f64 = scores.iter().sum();
                for c in 0..d {
                    let value = |j: usize| scores[j] * v[(j * groups + group) * d + c];
                    let total: f64 = (0..keys).map(value).sum();
                    out.push(if sum == 0.0 { 0.0 } else { total / sum });
                }
            }
        }
        out
    }

    /// Cross attention from `x` `[batch, queries, hidden]` to `e` `[batch, keys, encoder_hidden]`.
    pub(crate) fn cross_attention(
        &self,
        p: &Weights,
        path: &str,
        [x, e]: [&[f64]; 2],
        [batch, hidden, encoder_hidden]: [usize; 3],
    ) -> Vec<f64> {
        let norm = format!("{path}.norm");
        let normed =
            if p.contains_key(&format!("{norm}.weight")) { self.norm(p, &norm, x) } else { x.to_vec() };
        let q = linear(p, &format!("{path}.q"), &normed, hidden);
        let kv = linear(p, &format!("{path}.kv"), e, encoder_hidden);
        let half = self.groups * self.head_dim;
        let mut out = Vec::new();
        for (q, kv) in q.chunks(q.len() / batch).zip(kv.chunks(kv.len() / batch)) {
            let part = |from: usize| -> Vec<f64> {
                kv.chunks(2 * half).flat_map(|row| row[from..from + half].to_vec()).collect()
            };
            out.extend(self.attend(q, &part(0), &part(half)));
        }
        linear(p, &format!("{path}.proj"), &out, self.heads * self.head_dim)
    }

    /// A decoder's block, whose cross attention has the heads of its self-attention and no mask.
    pub(crate) fn decoder_block(
        &self,
        p: &Weights,
        path: &str,
        [x, e]: [&[f64]; 2],
        [batch, seq, hidden, encoder_hidden]: [usize; 4],
    ) -> Vec<f64> {
        let add = |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
        let r = add(x, &self.attention(p, &format!("{path}.attention"), x, [seq, hidden]));
        let cross = Self { causal: false, window: (None, None), ..self.clone() };
        let sizes = [batch, hidden, encoder_hidden];
        let s = add(&r, &cross.cross_attention(p, &format!("{path}.cross_attention"), [&r, e], sizes));
        add(&s, &self.mlp(p, &format!("{path}.mlp"), &s, hidden))
    }

    pub(crate) fn block(&self, p: &Weights, path: &str, x: &[f64], [seq, hidden]: [usize; 2]) -> Vec<f64> {
        let attended = self.attention(p, &format!("{path}.attention"), x, [seq, hidden]);
        let residual = |x: &[f64], norm: &str| {
            if self.adds_normed { self.norm(p, &format!("{path}.{norm}.norm"), x) } else { x.to_vec() }
        };
        let r: Vec<f64> = residual(x, "attention").iter().zip(&attended).map(|(x, a)| x + a).collect();
        let m = self.mlp(p, &format!("{path}.mlp"), if self.is_parallel { x } else { &r }, hidden);
        let y: Vec<f64> = residual(&r, "mlp").iter().zip(&m).map(|(r, m)| r + m).collect();
        let norm = format!("{path}.norm");
        if p.contains_key(&format!("{norm}.weight")) { self.norm(p, &norm, &y) } else { y }
    }

    /// The logits of sequences of `seq` ids.
    pub(crate) fn gpt(&self, p: &Weights, path: &str, ids: &[i32], [seq, hidden]: [usize; 2]) -> Vec<f64> {
        let table = &p[&format!("{path}.embedding.weight")];
        let mut x: Vec<f64> =
            ids.iter().flat_map(|&id| &table[id as usize * hidden..][..hidden]).copied().collect();
        for block in 0.. {
            let block = format!("{path}.blocks.{block}");
            if !p.contains_key(&format!("{block}.mlp.fc1.weight")) {
                break;
            }
            x = self.block(p, &block, &x, [seq, hidden]);
        }
        linear(p, &format!("{path}.head"), &self.norm(p, &format!("{path}.norm"), &x), hidden)
    }
}

/// The mean cross entropy of `targets`, in nats.
pub(crate) fn cross_entropy(logits: &[f64], targets: &[i32]) -> f64 {
    let rows = logits.chunks(logits.len() / targets.len());
    let losses = rows.zip(targets).map(|(row, &target)| {
        let sum: f64 = row.iter().map(|logit| logit.exp()).sum();
        sum.ln() - row[target as usize]
    });
    losses.sum::<f64>() / targets.len() as f64
}

/// The slope of `f` along `direction` at `at`, by a central difference.
pub(crate) fn slope(f: impl Fn(&[f64]) -> f64, at: &[f64], direction: &[f64]) -> f64 {
    const STEP: f64 = 1e-5;
    let moved = |by: f64| -> Vec<f64> { at.iter().zip(direction).map(|(x, d)| x + by * d).collect() };
    (f(&moved(STEP)) - f(&moved(-STEP))) / (2.0 * STEP)
}
