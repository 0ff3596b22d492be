"""Two language models, their gradients and 20 steps of training, computed by PyTorch on the CPU in float64.

    python3 generate.py            # needs torch and safetensors; writes gpt.safetensors and llama.safetensors beside it
    python3 generate.py --check    # writes nothing: compares with finite differences, ../nn and ../options

README.md describes the files. They have no weights: `initial` computes these from the numbers of parameter and element.
"""

import argparse
import json
import os
import struct

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
BATCH, SEQ, STEPS, MAX_NORM, IGNORED = 4, 8, 20, 1.0, -100
SIZES = {"vocab_size": 50, "num_layers": 2, "hidden_size": 32, "max_seq_length": SEQ}
MODELS = {
    "gpt": SIZES
    | {
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_gqa_groups": 4,
        "kv_channels": 8,
        "normalization": "LayerNorm",
        "activation": "gelu",
        "bias": True,
        "rope": False,
        "learned_positions": True,
        "qk_norm": False,
        "tie_word_embeddings": False,
    },
    "llama": SIZES
    | {
        "ffn_hidden_size": 48,
        "num_attention_heads": 8,
        "num_gqa_groups": 4,
        "kv_channels": 8,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "bias": False,
        "rope": True,
        "learned_positions": False,
        "qk_norm": True,
        "tie_word_embeddings": True,
    },
}


def f32(value):
    """The nearest number that f32 holds: options of fp8-nn are f32."""
    return struct.unpack("f", struct.pack("f", value))[0]


EPS = f32(1e-5)


def splitmix64(x):
    """The output of SplitMix64 for the state `x`."""
    mask = (1 << 64) - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def center_and_bound(name, dimensions):
    if dimensions == 2:
        return 0.0, 0.25
    return (0.0, 0.05) if name.endswith(".bias") else (1.0, 0.2)


def initial(number, name, shape):
    """The values of a parameter, which has this number in the order of the model. f32 holds them exactly."""
    center, bound = center_and_bound(name, len(shape))

    def value(i):
        unit = (splitmix64(number << 32 | i) >> 11) * 2.0**-53
        return center + bound * (2.0 * unit - 1.0)

    values = torch.tensor([value(i) for i in range(torch.Size(shape).numel())], dtype=torch.float64)
    return values.float().double().reshape(shape)


def shapes(o):
    """The shape of each parameter, in the order in which the model visits them."""
    hidden, ffn, d = o["hidden_size"], o["ffn_hidden_size"], o["kv_channels"]
    q, kv = o["num_attention_heads"] * d, o["num_gqa_groups"] * d
    fc1 = 2 * ffn if o["activation"] == "swiglu" else ffn

    def linear(path, rows, columns):
        return {f"{path}.weight": [rows, columns]} | ({f"{path}.bias": [rows]} if o["bias"] else {})

    def norm(path, size):
        has_bias = o["normalization"] == "LayerNorm"
        return {f"{path}.weight": [size]} | ({f"{path}.bias": [size]} if has_bias else {})

    all_shapes = {"gpt.embedding.weight": [o["vocab_size"], hidden]}
    if o["learned_positions"]:
        all_shapes["gpt.position.weight"] = [o["max_seq_length"], hidden]
    for i in range(o["num_layers"]):
        attention, mlp = f"gpt.blocks.{i}.attention", f"gpt.blocks.{i}.mlp"
        all_shapes |= norm(f"{attention}.norm", hidden) | linear(f"{attention}.qkv", q + 2 * kv, hidden)
        if o["qk_norm"]:
            all_shapes |= norm(f"{attention}.q_norm", d) | norm(f"{attention}.k_norm", d)
        all_shapes |= linear(f"{attention}.proj", hidden, q)
        all_shapes |= norm(f"{mlp}.norm", hidden)
        all_shapes |= linear(f"{mlp}.fc1", fc1, hidden) | linear(f"{mlp}.fc2", hidden, ffn)
    all_shapes |= norm("gpt.norm", hidden)
    if not o["tie_word_embeddings"]:
        all_shapes["gpt.head.weight"] = [o["vocab_size"], hidden]
    return all_shapes


def weights(o, dtype=torch.float64):
    numbered = enumerate(shapes(o).items())
    return {name: initial(number, name, shape).to(dtype).requires_grad_() for number, (name, shape) in numbered}


def batch():
    """Ids and targets, both with the first and the last id. One to three targets of each half of the batch are ignored."""
    draws = [[splitmix64(stream << 32 | i) for i in range(BATCH * SEQ)] for stream in (1000, 1001)]
    ids, targets = (torch.tensor([x % SIZES["vocab_size"] for x in draw]).reshape(BATCH, SEQ) for draw in draws)
    ids[0, 0], ids[3, 4] = SIZES["vocab_size"] - 1, 0
    targets[1, 2], targets[3, 1] = SIZES["vocab_size"] - 1, 0
    for row, column in [(0, 7), (2, 0), (2, 3), (3, 7)]:
        targets[row, column] = IGNORED
    return ids, targets


def linear(p, path, x):
    return F.linear(x, p[f"{path}.weight"], p.get(f"{path}.bias"))


def norm(p, path, x, o):
    weight, eps = p[f"{path}.weight"], o.get("eps", EPS)
    if o["normalization"] == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, p[f"{path}.bias"], eps)


def rotate(x, base):
    """RoPE of x [batch, heads, seq, d], whose elements i and i + d/2 are the real and imaginary part of a number."""
    seq, d = x.shape[-2:]
    rates = base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), rates)
    turns = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turns.to(torch.complex(x[:0], x[:0]).dtype)
    return torch.cat([turned.real, turned.imag], -1)


def attention(p, path, x, o):
    d, groups = o["kv_channels"], o["num_gqa_groups"]
    widths = [o["num_attention_heads"] * d, groups * d, groups * d]
    parts = linear(p, f"{path}.qkv", norm(p, f"{path}.norm", x, o)).split(widths, -1)
    q, k, v = (part.unflatten(-1, (-1, d)).transpose(1, 2) for part in parts)
    if o["qk_norm"]:
        q, k = norm(p, f"{path}.q_norm", q, o), norm(p, f"{path}.k_norm", k, o)
    if o["rope"]:
        q, k = (rotate(t, o.get("rope_base", 10000.0)) for t in (q, k))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # scale: 1/sqrt(d)
    return linear(p, f"{path}.proj", y.transpose(1, 2).flatten(2))


def mlp(p, path, x, o):
    h = linear(p, f"{path}.fc1", norm(p, f"{path}.norm", x, o))
    if o["activation"] == "swiglu":
        first, second = h.chunk(2, -1)
        return linear(p, f"{path}.fc2", F.silu(first) * second)
    return linear(p, f"{path}.fc2", F.gelu(h, approximate="tanh"))


def block(p, path, x, o):
    x = x + attention(p, f"{path}attention", x, o)
    return x + mlp(p, f"{path}mlp", x, o)


def mean_loss(p, o, ids, targets):
    x = p["gpt.embedding.weight"][ids]
    if o["learned_positions"]:
        x = x + p["gpt.position.weight"]
    for i in range(o["num_layers"]):
        x = block(p, f"gpt.blocks.{i}.", x, o)
    head = p["gpt.embedding.weight" if o["tie_word_embeddings"] else "gpt.head.weight"]
    logits = norm(p, "gpt.norm", x, o) @ head.T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def adamw(p):
    """torch's AdamW with the defaults of fp8-nn: only parameters with two dimensions decay."""
    options = dict(lr=f32(1e-3), betas=(f32(0.9), f32(0.95)), eps=f32(1e-8), foreach=False)
    decay = {True: f32(0.1), False: 0.0}
    groups = [
        {"params": [v for v in p.values() if (v.dim() >= 2) == decays], "weight_decay": decay[decays]}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, **options)


def train(o, dtype=torch.float64):
    """The first step's gradients, and the losses and gradient norms of all steps."""
    p, (ids, targets) = weights(o, dtype), batch()
    optimizer, losses, norms, first = adamw(p), [], [], None
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(p, o, ids, targets)
        loss.backward()
        first = first or {name: value.grad.clone() for name, value in p.items()}
        total = torch.cat([value.grad.double().flatten() for value in p.values()]).square().sum().sqrt()
        if total > MAX_NORM:  # not torch's clip_grad_norm_, which divides by norm + 1e-6
            for value in p.values():
                value.grad *= MAX_NORM / total
        optimizer.step()
        losses.append(loss.item())
        norms.append(total.item())
    return first, losses, norms


def write(name, o):
    (ids, targets), (gradients, losses, norms) = batch(), train(o)
    tensors = {"ids": ids.int(), "targets": targets.int()}
    tensors |= {f"grad.{name}": value.float() for name, value in gradients.items()}
    tensors["loss.0"] = torch.tensor(losses[0], dtype=torch.float64)
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    tensors["norm"] = torch.tensor(norms, dtype=torch.float64)
    config = o | {"parameters": list(gradients)}
    path = os.path.join(HERE, f"{name}.safetensors")
    save_file(tensors, path, metadata={"config": json.dumps(config)})
    os.chmod(path, 0o644)
    print(f"{name}: losses {losses[0]:.6f} to {losses[-1]:.6f}, norms {norms[0]:.4f} to {norms[-1]:.4f}")


def check_differences(name, o):
    """Compares gradients with central differences of the loss, for some elements of each parameter."""
    p, (ids, targets) = weights(o), batch()
    loss = mean_loss(p, o, ids, targets)
    loss.backward()
    worst, step = 0.0, 1e-5
    for number, (path, value) in enumerate(p.items()):
        n = value.numel()
        # The element with the largest gradient, the last one, and four others.
        picks = {value.grad.abs().argmax().item(), n - 1} | {splitmix64(number << 32 | i) % n for i in range(4)}
        scale = value.grad.abs().max().item()
        flat = value.data.view(-1)
        for i in sorted(picks):
            sides = []
            before = flat[i].item()
            for at in (before + step, before - step):
                flat[i] = at
                with torch.no_grad():
                    sides.append(mean_loss(p, o, ids, targets).item())
            flat[i] = before
            error = abs((sides[0] - sides[1]) / (2 * step) - value.grad.view(-1)[i].item())
            worst = max(worst, error / scale)
            assert error < 1e-6 * scale + 1e-10, (path, i, error, scale)
    print(f"{name}: central differences of {len(p)} parameters within {worst:.1e} of their largest gradients")


def check_block(file):
    """Compares `block` with the output and the gradients of a layer that another program recorded."""
    path = os.path.join(HERE, "..", file)
    with safe_open(path, "pt") as opened:
        o = json.loads(opened.metadata()["config"])
    tensors = {name: value.double() for name, value in load_file(path).items()}
    o["qk_norm"] = False
    o["num_gqa_groups"] = o["num_gqa_groups"] or o["num_attention_heads"]
    o["kv_channels"] = o.get("kv_channels") or o["hidden_size"] // o["num_attention_heads"]
    parameters = [name for name in tensors if name.startswith(("attention.", "mlp."))]
    p = {name: tensors[name].requires_grad_() for name in parameters}
    x = tensors["x"].requires_grad_()
    y = block(p, "", x, o)
    y.backward(tensors["dy"])
    found = {"y": y, "dx": x.grad} | {f"grad.{name}": value.grad for name, value in p.items()}
    for name, value in found.items():
        error = (value - tensors[name]).abs().max().item() / tensors[name].abs().max().item()
        assert error < 1e-6, (file, name, error)
    print(f"{file}: {len(found)} tensors agree")


def check_single_precision(name, o):
    """Prints how far rounding to f32 moves the results: tolerances of tests must be larger."""
    exact, rounded = train(o), train(o, torch.float32)
    gradients = max(
        ((rounded[0][path] - value).norm() / value.norm()).item() for path, value in exact[0].items()
    )
    losses, norms = (
        max(abs(found / expected - 1) for found, expected in zip(rounded[i], exact[i])) for i in (1, 2)
    )
    print(
        f"{name} in f32: gradients within {gradients:.1e} of each parameter's norm, losses within {losses:.1e},"
        f" norms within {norms:.1e}"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    torch.set_num_threads(1)
    if not parser.parse_args().check:
        for name, o in MODELS.items():
            write(name, o)
        return
    for name, o in MODELS.items():
        check_differences(name, o)
        check_single_precision(name, o)
    for file in ["nn/transformer_layer", "nn/transformer_layer_llama", "options/no_bias_kv_channels"]:
        check_block(f"{file}.safetensors")


main()
