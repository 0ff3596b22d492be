"""Quantization with a scale for each block by torch and torchao, on one thread: a JSON row a line, medians of five.

torchao is measured if it can be imported: its reference functions for CPUs, eager and compiled. "torch" is the same 1 x 128 cast
written out: amax over the last dimension of view(-1, 128), scale, clamp, conversion.
"""

import json
import statistics
import sys
import time

import torch

ROUNDS = 5
ELEMENTS = 64 << 20
SHAPE = [8192, 8192]
E4M3 = torch.float8_e4m3fn
TOP = torch.finfo(E4M3).max
SOURCES = {"f32": (torch.float32, 4), "bf16": (torch.bfloat16, 2)}


def blocks(x):
    v = x.view(-1, 128).float()
    amax = v.abs().amax(-1, keepdim=True).clamp(1e-12)
    scale = TOP / amax
    return (v * scale).clamp(-TOP, TOP).to(E4M3).view(x.shape), scale.reciprocal()


def peers():
    """Name, work, scale, function."""
    torch_name = "torch " + torch.__version__.split("+")[0]
    found = [(torch_name, "quantize_1x128", "any", blocks)]
    try:
        import torchao
        from torchao.prototype.blockwise_fp8_training.kernels import torch_blockwise_scale_act_quant_lhs
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError as error:
        print(f"torchao: {error}", file=sys.stderr)
        return found
    name = "torchao " + torchao.__version__
    found.append((name, "quantize_1x128", "any", lambda x: torch_blockwise_scale_act_quant_lhs(x, 128)))
    found.append((name, "quantize_mx32", "ceil", lambda x: to_mx(x, E4M3, 32, ScaleCalculationMode.RCEIL)))
    return found


def row(work, source, scale, name, call):
    bytes_ = (SOURCES[source][1] + 1) * ELEMENTS
    try:
        call()
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    except Exception as error:  # a library without this conversion
        print(f"{name} {work} {source}: {error}", file=sys.stderr)
        return
    print(json.dumps({
        "work": work, "path": None, "source": source, "format": "e4m3", "scale": scale, "elements": ELEMENTS, "shape": SHAPE,
        "threads": 1, "gb_per_s": bytes_ / statistics.median(times) / 1e9, "ceiling_ratio": None, "peer": name,
    }), flush=True)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = torch.randn(SHAPE)
    only = sys.argv[1:] or list(SOURCES)
    for source, (dtype, _) in SOURCES.items():
        if source not in only:
            continue
        x = data.to(dtype)
        for name, work, scale, function in peers():
            row(work, source, scale, name, lambda: function(x))
            compiled = torch.compile(function, dynamic=False)
            row(work, source, scale, name + " compile", lambda: compiled(x))


main()
