"""Trains the GPT that fp8-nn trains, in PyTorch.

    train.py CONTENDER THREADS HEADS FILE

FILE has the initial weights, the batches and the learning rates. Each line on stdin is a number of steps to do. The answer is
one line, `seconds loss` of each step.
"""

import math
import sys
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x, cos, sin):
        batch, seq, hidden = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, hidden))


class Mlp(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.fc1 = nn.Linear(hidden, 4 * hidden)
        self.fc2 = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(self.norm(x)), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.mlp = Mlp(hidden)

    def forward(self, x, cos, sin):
        x = x + self.attention(x, cos, sin)
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Its parameters have the names of fp8-nn's `Gpt`, without the leading `gpt.`."""

    def __init__(self, vocabulary, layers, hidden, heads, seq):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        pairs = hidden // heads // 2
        frequencies = [10000.0 ** (-j / pairs) for j in range(pairs)]
        angles = [[position * frequency for frequency in frequencies] for position in range(seq)]
        for name, function in ("cos", math.cos), ("sin", math.sin):
            table = torch.tensor([[function(angle) for angle in row] for row in angles])
            self.register_buffer(name, table, persistent=False)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def rope(x, cos, sin):
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def main():
    contender, threads, heads, file = sys.argv[1:]
    torch.set_num_threads(int(threads))
    data = load_file(file)
    ids, targets, rates = data.pop("ids").long(), data.pop("targets").long(), data.pop("lr").tolist()
    weights = {name.removeprefix("gpt."): value for name, value in data.items()}
    layers = sum(name.endswith("fc1.weight") for name in weights)
    model = Gpt(*weights["head.weight"].shape[:1], layers, weights["head.weight"].shape[1], int(heads), ids.shape[-1])
    model.load_state_dict(weights)
    if contender == "torch-f64":
        model = model.double()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    if "compile" in contender:
        model = torch.compile(model, dynamic=False)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=contender.endswith("bf16"))

    def step(index):
        for group in optimizer.param_groups:
            group["lr"] = rates[min(index, len(rates) - 1)]
        with autocast:
            loss = model(ids[index % len(ids)], targets[index % len(ids)])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    print("ready torch", torch.__version__, flush=True)
    index = 0
    for line in sys.stdin:
        answer = []
        for _ in range(int(line)):
            start = time.perf_counter()
            loss = step(index)
            answer.append(f"{time.perf_counter() - start!r} {loss!r}")
            index += 1
        print(*answer, flush=True)


main()
