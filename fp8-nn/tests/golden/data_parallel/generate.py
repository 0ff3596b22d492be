"""A GPT's gradients of one batch, computed by PyTorch on the CPU in float64 and stored as float32.

    python3 generate.py        # needs torch and safetensors; writes gpt.safetensors beside it

The file holds the batch (`ids`, `targets`, as floats), each parameter under its name and its gradient as `grad.<name>`. The metadata has the
loss and the L2 norm of all gradients in full precision, and the sizes of the model. Ranks that share the batch must arrive at these.
"""

import json
import math
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

torch.manual_seed(38)
VOCABULARY, LAYERS, HIDDEN, FFN, HEADS, BATCH, SEQ = 24, 2, 16, 64, 2, 8, 12


def random(*shape, std, mean=0.0):
    """Values that f32 holds exactly."""
    values = (mean + std * torch.randn(*shape, dtype=torch.float64)).float().double()
    return values.requires_grad_()


def linear(rows, columns, path):
    return {f"{path}.weight": random(rows, columns, std=0.2), f"{path}.bias": random(rows, std=0.1)}


def layer_norm(path):
    return {f"{path}.weight": random(HIDDEN, std=0.1, mean=1.0), f"{path}.bias": random(HIDDEN, std=0.1)}


p = {"gpt.embedding.weight": random(VOCABULARY, HIDDEN, std=0.5)}
for i in range(LAYERS):
    block = f"gpt.blocks.{i}"
    p |= layer_norm(f"{block}.attention.norm") | linear(3 * HIDDEN, HIDDEN, f"{block}.attention.qkv")
    p |= linear(HIDDEN, HIDDEN, f"{block}.attention.proj")
    p |= layer_norm(f"{block}.mlp.norm") | linear(FFN, HIDDEN, f"{block}.mlp.fc1")
    p |= linear(HIDDEN, FFN, f"{block}.mlp.fc2")
p |= layer_norm("gpt.norm") | {"gpt.head.weight": random(VOCABULARY, HIDDEN, std=0.2)}


def apply(path, x):
    return F.linear(x, p[f"{path}.weight"], p.get(f"{path}.bias"))


def norm(path, x):
    return F.layer_norm(x, (HIDDEN,), p[f"{path}.weight"], p[f"{path}.bias"], 1e-5)


def rotated(x):
    """Rotary positions: element i and element i + half of a head are a pair."""
    half = x.shape[-1] // 2
    angles = torch.outer(
        torch.arange(SEQ, dtype=torch.float64),
        torch.tensor([10000.0 ** (-i / half) for i in range(half)], dtype=torch.float64),
    )
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(path, x):
    heads = (
        part.view(BATCH, SEQ, HEADS, -1).transpose(1, 2)
        for part in apply(f"{path}.qkv", norm(f"{path}.norm", x)).chunk(3, dim=-1)
    )
    q, k, v = heads
    scores = rotated(q) @ rotated(k).transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
    future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return apply(f"{path}.proj", y.transpose(1, 2).reshape(BATCH, SEQ, HIDDEN))


def mlp(path, x):
    return apply(f"{path}.fc2", F.gelu(apply(f"{path}.fc1", norm(f"{path}.norm", x)), approximate="tanh"))


ids, targets = (torch.randint(VOCABULARY, (BATCH, SEQ)) for _ in range(2))
x = p["gpt.embedding.weight"][ids]
for i in range(LAYERS):
    x = x + attention(f"gpt.blocks.{i}.attention", x)
    x = x + mlp(f"gpt.blocks.{i}.mlp", x)
logits = apply("gpt.head", norm("gpt.norm", x))
loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.flatten())
loss.backward()
total = math.sqrt(sum(value.grad.square().sum().item() for value in p.values()))

tensors = {"ids": ids.float(), "targets": targets.float()}
for name, value in p.items():
    tensors |= {name: value.detach().float(), f"grad.{name}": value.grad.float()}
config = {
    "vocab_size": VOCABULARY,
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS,
    "loss": loss.item(),
    "norm": total,
}
here = os.path.dirname(os.path.abspath(__file__))
save_file(tensors, os.path.join(here, "gpt.safetensors"), metadata={"config": json.dumps(config)})
print(config)
