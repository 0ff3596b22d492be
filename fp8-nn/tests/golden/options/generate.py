"""Layers with options, computed by PyTorch on the CPU in float64 and stored as float32.

    python3 generate.py        # needs torch and safetensors; writes the files beside it

A file holds the inputs, `dy`, the output `y`, the gradients of the inputs as `d<input>`, each parameter under its name and its
gradient as `grad.<name>`. The metadata key `config` is JSON: the layer, its options under the names of fp8-nn, and what is known
of the sequences. Attention is torch's scaled_dot_product_attention with a boolean mask, norms are torch's.
"""

import json
import math
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(20)
HIDDEN, FFN, HEADS, BATCH, SEQ = 32, 48, 4, 2, 8
here = os.path.dirname(os.path.abspath(__file__))


def random(*shape, std=1.0, mean=0.0):
    """Values that f32 holds exactly."""
    values = (mean + std * torch.randn(*shape, dtype=torch.float64)).float().double()
    return values.requires_grad_()


def linear_parameters(path, rows, columns, bias, std):
    p = {f"{path}.weight": random(rows, columns, std=std)}
    if bias:
        p[f"{path}.bias"] = random(rows, std=0.1)
    return p


def norm_parameters(path, o):
    p = {f"{path}.weight": random(HIDDEN, std=0.1, mean=0.0 if o["zero_centered_gamma"] else 1.0)}
    if o["normalization"] == "LayerNorm":
        p[f"{path}.bias"] = random(HIDDEN, std=0.1)
    return p


def linear(p, path, x):
    return F.linear(x, p[f"{path}.weight"], p.get(f"{path}.bias"))


def norm(p, path, x, o):
    weight = p[f"{path}.weight"] + (1.0 if o["zero_centered_gamma"] else 0.0)
    if o["normalization"] == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], weight, o["eps"])
    return F.layer_norm(x, x.shape[-1:], weight, p[f"{path}.bias"], o["eps"])


def activation(h, name):
    if name == "gelu":
        return F.gelu(h, approximate="tanh")
    first, second = h.chunk(2, -1)
    return {"swiglu": F.silu, "geglu": lambda u: F.gelu(u, approximate="tanh")}[name](first) * second


def rotate(t, positions, base):
    """t is [batch, seq, heads, d], positions [batch, seq]."""
    half = t.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones(*positions.shape, half, dtype=torch.float64), positions.double()[..., None] * rates)
    turned = torch.complex(t[..., :half], t[..., half:]) * turns[:, :, None, :]
    return torch.cat([turned.real, turned.imag], -1)


def mask(o, queries, keys, batch):
    """Which keys a query sees, [batch, queries, keys]."""
    spans = [[(0, queries, 0, keys)] for _ in range(batch)]
    if "lengths" in o:
        spans = [[(0, min(n, queries) if queries == keys else queries, 0, n)] for n in o["lengths"]]
    if "packed" in o:
        ends = torch.tensor([0] + o["packed"]).cumsum(0).tolist()
        spans = [[(a, b, a, b) for a, b in zip(ends, ends[1:])]]
    seen = torch.zeros(batch, queries, keys, dtype=torch.bool)
    left, right = o["window"]
    right = 0 if o["causal"] else right
    for entry, entry_spans in enumerate(spans):
        for q0, q1, k0, k1 in entry_spans:
            shift = (k1 - k0) - (q1 - q0) if o["diagonal"] == "BottomRight" else 0
            for i in range(q1 - q0):
                for j in range(k1 - k0):
                    own = i + shift
                    if (left is None or j >= own - left) and (right is None or j <= own + right):
                        seen[entry, q0 + i, k0 + j] = True
    return seen


def attend(q, k, v, o, masks=None):
    """[batch, seq, heads, d]; a query that sees nothing gives 0."""
    if masks and o["attention_dropout"]:
        return attend_dropping(q, k, v, o, masks)
    seen = mask(o, q.shape[1], k.shape[1], q.shape[0])[:, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    some = seen.any(-1, keepdim=True)
    # Rows that see nothing see everything instead, and are cleared afterwards.
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | ~some, scale=o["softmax_scale"])
    out = torch.where(some, out, 0.0)
    return out.transpose(1, 2).flatten(2)


def attend_dropping(q, k, v, o, masks):
    """The same with dropout of the probabilities."""
    seen = mask(o, q.shape[1], k.shape[1], q.shape[0])[:, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scale = o["softmax_scale"] or q.shape[-1] ** -0.5
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    probabilities = scores.softmax(-1) * masks.draw(o["attention_dropout"], *scores.shape)
    return (probabilities @ v).transpose(1, 2).flatten(2)


def sizes(o):
    d = o["kv_channels"] or HIDDEN // HEADS
    return o["num_gqa_groups"] or HEADS, d


def self_attention(p, path, x, o, masks=None):
    groups, d = sizes(o)
    n = norm(p, f"{path}.norm", x, o) if f"{path}.norm.weight" in p else x
    q, k, v = linear(p, f"{path}.qkv", n).split([HEADS * d, groups * d, groups * d], -1)
    q, k, v = (t.unflatten(-1, (-1, d)) for t in (q, k, v))
    if o["rope"]:
        positions = torch.arange(x.shape[1]).repeat(x.shape[0], 1)
        if "packed" in o:
            positions = torch.cat([torch.arange(n) for n in o["packed"]])[None]
        if "positions" in o:
            positions = torch.tensor(o["positions"])
        q, k = (rotate(t, positions, o["rope_base"]) for t in (q, k))
    return linear(p, f"{path}.proj", attend(q, k, v, o, masks)), n


def cross_attention(p, path, x, e, o):
    groups, d = sizes(o)
    n = norm(p, f"{path}.norm", x, o) if f"{path}.norm.weight" in p else x
    q = linear(p, f"{path}.q", n).unflatten(-1, (-1, d))
    k, v = (t.unflatten(-1, (-1, d)) for t in linear(p, f"{path}.kv", e).split([groups * d] * 2, -1))
    return linear(p, f"{path}.proj", attend(q, k, v, o))


def mlp(p, path, x, o):
    n = norm(p, f"{path}.norm", x, o)
    return linear(p, f"{path}.fc2", activation(linear(p, f"{path}.fc1", n), o["activation"])), n


def attention_parameters(path, o, has_norm):
    groups, d = sizes(o)
    p = norm_parameters(f"{path}.norm", o) if has_norm else {}
    p |= linear_parameters(f"{path}.qkv", (HEADS + 2 * groups) * d, HIDDEN, o["bias"], 0.15)
    return p | linear_parameters(f"{path}.proj", HIDDEN, HEADS * d, o["bias"], 0.08)


def cross_parameters(path, o, encoder_hidden, has_norm):
    groups, d = sizes(o)
    p = norm_parameters(f"{path}.norm", o) if has_norm else {}
    p |= linear_parameters(f"{path}.q", HEADS * d, HIDDEN, o["bias"], 0.15)
    p |= linear_parameters(f"{path}.kv", 2 * groups * d, encoder_hidden, o["bias"], 0.15)
    return p | linear_parameters(f"{path}.proj", HIDDEN, HEADS * d, o["bias"], 0.08)


def mlp_parameters(path, o):
    rows = 2 * FFN if o["activation"].endswith("glu") else FFN
    p = norm_parameters(f"{path}.norm", o)
    p |= linear_parameters(f"{path}.fc1", rows, HIDDEN, o["bias"], 0.08)
    return p | linear_parameters(f"{path}.fc2", HIDDEN, FFN, o["bias"], 0.08)


def splitmix64(seed, n):
    """Number n of the stream `seed`."""
    mask = (1 << 64) - 1
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def philox(counter, key):
    """Philox4x32-10 (Salmon et al., 2011), with 64 bits of counter."""
    c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second & 0xFFFFFFFF, (first >> 32) ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


class Masks:
    """The masks of one training scope, in the order in which a layer draws them."""

    def __init__(self, o):
        self.key, self.drawn = splitmix64(o.get("seed", 0), 0), 0

    def draw(self, p, *shape):
        """Factors of the elements: 0, or 1 / (1 - p)."""
        if p == 0.0:
            return torch.ones(*shape, dtype=torch.float64)
        first, self.drawn = self.drawn << 44, self.drawn + 1
        p = torch.tensor(p, dtype=torch.float32)
        count = math.prod(shape)
        numbers = [r for i in range((count + 3) // 4) for r in philox(first + i, self.key)][:count]
        kept = torch.tensor(numbers, dtype=torch.float64) >= int(p.double() * 2**32)
        return (kept.double() * (1 / (1 - p)).double()).reshape(shape)

    def branch(self, o, x):
        """What is added of a residual branch."""
        x = x * self.draw(o["hidden_dropout"], *x.shape)
        return x * self.draw(o["drop_path_rate"], x.shape[0])[:, None, None]


DEFAULTS = dict(
    hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS, num_gqa_groups=None, kv_channels=None,
    causal=True, window=[None, None], diagonal="TopLeft", softmax_scale=None, rope=False, rope_base=10000.0,
    activation="gelu", normalization="LayerNorm", eps=1e-5, zero_centered_gamma=False, bias=True,
    attention_dropout=0.0, hidden_dropout=0.0, drop_path_rate=0.0,
    parallel_attention_mlp=False, output_layernorm=False, apply_residual_connection_post_layernorm=False,
)


def store(name, config, inputs, p, outputs):
    """`outputs` are y, and what else is returned."""
    tensors = dict(inputs)
    for output, value in outputs.items():
        tensors[output] = value
        gradient = torch.randn(value.shape, dtype=torch.float64).float().double()
        tensors["d" + output] = gradient
    torch.autograd.backward(list(outputs.values()), [tensors["d" + output] for output in outputs])
    for key, value in inputs.items():
        tensors["d" + key] = value.grad
    for key, value in p.items():
        tensors[key] = value
        tensors["grad." + key] = value.grad
    tensors = {key: value.detach().float().contiguous() for key, value in tensors.items()}
    save_file(tensors, os.path.join(here, f"{name}.safetensors"), metadata={"config": json.dumps(config)})


def block(name, batch=BATCH, **changes):
    o = DEFAULTS | changes
    x = random(batch, SEQ if batch == BATCH else BATCH * SEQ, HIDDEN)
    p = attention_parameters("attention", o, not o["output_layernorm"]) | mlp_parameters("mlp", o)
    if o["output_layernorm"]:
        p |= norm_parameters("norm", o)
    masks = Masks(o)
    a, n1 = self_attention(p, "attention", x, o, masks)
    post = o["apply_residual_connection_post_layernorm"]
    r = (n1 if post else x) + masks.branch(o, a)
    m, n2 = mlp(p, "mlp", x if o["parallel_attention_mlp"] else r, o)
    y = (n2 if post else r) + masks.branch(o, m)
    if o["output_layernorm"]:
        y = norm(p, "norm", y, o)
    store(name, dict(layer="TransformerLayer", **o), {"x": x}, p, {"y": y})


def cross(name, **changes):
    o = DEFAULTS | dict(causal=False) | changes
    x, e = random(BATCH, 3, HIDDEN), random(BATCH, SEQ, 24)
    p = cross_parameters("a", o, 24, True)
    store(name, dict(layer="CrossAttention", encoder_hidden_size=24, **o), {"x": x, "e": e}, p,
          {"y": cross_attention(p, "a", x, e, o)})


def decoder(name, **changes):
    o = DEFAULTS | changes
    x, e = random(BATCH, SEQ, HIDDEN), random(BATCH, 5, HIDDEN)
    p = attention_parameters("attention", o, True) | cross_parameters("cross_attention", o, HIDDEN, True) | mlp_parameters("mlp", o)
    r = x + self_attention(p, "attention", x, o)[0]
    s = r + cross_attention(p, "cross_attention", r, e, o | dict(causal=False, window=[None, None]))
    store(name, dict(layer="TransformerDecoderLayer", encoder_hidden_size=HIDDEN, **o), {"x": x, "e": e}, p,
          {"y": s + mlp(p, "mlp", s, o)[0]})


def returned_norm(name, **changes):
    o = DEFAULTS | changes
    x = random(BATCH, SEQ, HIDDEN)
    p = norm_parameters("norm", o) | linear_parameters("a", 40, HIDDEN, o["bias"], 0.1)
    n = norm(p, "norm", x, o)
    store(name, dict(layer="LayerNormLinear", **o), {"x": x}, p, {"y": linear(p, "a", n), "n": n})


block("window", window=[2, None])
block("window_both_sides", causal=False, window=[2, 1])
block("softmax_scale", softmax_scale=0.6, causal=False)
block("parallel_attention_mlp", parallel_attention_mlp=True)
block("output_layernorm", output_layernorm=True, normalization="RMSNorm")
block("post_layernorm", apply_residual_connection_post_layernorm=True)
block("no_bias_kv_channels", bias=False, kv_channels=12, num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", rope=True, rope_base=500.0)
block("zero_centered_geglu", zero_centered_gamma=True, activation="geglu", eps=0.01)
block("padded", lengths=[8, 5], rope=True)
block("packed", batch=1, packed=[5, 3, 8], rope=True)
block("positions", rope=True, positions=[list(range(8)), [3, 4, 5, 9, 10, 11, 12, 13]])
block("dropout", attention_dropout=0.2, hidden_dropout=0.1, drop_path_rate=0.3, seed=20)
block("dropout_post_layernorm", attention_dropout=0.4, hidden_dropout=0.3, num_gqa_groups=2, rope=True, apply_residual_connection_post_layernorm=True, seed=7)
cross("cross_attention", num_gqa_groups=2)
cross("cross_attention_bottom_right", causal=True, diagonal="BottomRight", lengths=[8, 6])
decoder("decoder", rope=True, num_gqa_groups=2)
returned_norm("return_layernorm_output")
