"""Casts and fused quantization by torch and ml_dtypes, a JSON row a line; medians of nine, as for the crate.

The arguments are numbers of threads.
"""

import json
import statistics
import sys
import time

import ml_dtypes
import numpy as np
import torch

ROUNDS = 9
LEAST = 0.5e-3
SIZES = [16 << 10, 1 << 20, 64 << 20]
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SOURCES = {"f32": torch.float32, "bf16": torch.bfloat16}
SCALE = 448.0 / 6.3
BYTES = {"f32": 4, "bf16": 2}


def seconds(call):
    call()
    start = time.perf_counter()
    call()
    calls = max(1, int(LEAST / max(time.perf_counter() - start, 1e-9)))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def row(work, source, form, elements, threads, peer, call, scale=None, out=1, shape=None):
    try:
        took = seconds(call)
    except Exception as error:  # a library without this conversion
        print(f"{peer} {work} {source} {form}: {error}", file=sys.stderr)
        return
    bytes_ = (BYTES[source] + out) * elements
    print(json.dumps({
        "work": work, "path": None, "source": source, "format": form, "scale": scale, "elements": elements,
        "shape": shape, "threads": threads, "gb_per_s": bytes_ / took / 1e9, "ceiling_ratio": None, "peer": peer,
    }), flush=True)


def fused(x, scale, top, dtype):
    v = x.float()
    return v.abs().amax(), (v * scale).clamp(-top, top).to(dtype)


def main():
    torch.manual_seed(0)
    version = "torch " + torch.__version__.split("+")[0]
    for threads in map(int, sys.argv[1:]):
        torch.set_num_threads(threads)
        for elements in SIZES:
            if threads > 1 and elements < SIZES[-1]:
                continue
            data = torch.randn(elements)
            for source, wide in SOURCES.items():
                x = data.to(wide)
                for form, dtype in FORMATS.items():
                    top = torch.finfo(dtype).max
                    out = torch.empty(elements, dtype=dtype)
                    row("convert", source, form, elements, threads, version, lambda: x.to(dtype))
                    row("convert", source, form, elements, threads, version + " copy_", lambda: out.copy_(x))
                    row("quantize", source, form, elements, threads, version,
                        lambda: fused(x, SCALE, top, dtype), "any")
                    held = torch.empty_like(data)

                    def into():
                        torch.mul(x, SCALE, out=held)
                        held.clamp_(-top, top)
                        out.copy_(held)
                        return x.abs().amax()

                    row("quantize", source, form, elements, threads, version + " out=", into, "any")
                    compiled = torch.compile(fused, dynamic=False)
                    row("quantize", source, form, elements, threads, version + " compile",
                        lambda: compiled(x, SCALE, top, dtype), "any")
                    if threads == 1 and source == "f32":
                        side = 1 << (elements.bit_length() - 1) // 2
                        for rows in {side, elements // 64} if elements == SIZES[-1] else {side}:
                            shape = [rows, elements // rows]
                            matrix = x.view(shape)

                            def both():
                                codes = fused(matrix, SCALE, top, dtype)[1]
                                return codes, codes.t().contiguous()

                            row("quantize_transpose", source, form, elements, threads, version,
                                both, None, 2, shape)

                            def both_compiled():
                                codes = compiled(matrix, SCALE, top, dtype)[1]
                                return codes, codes.t().contiguous()

                            row("quantize_transpose", source, form, elements, threads, version + " compile",
                                both_compiled, None, 2, shape)
            if threads == 1 and elements <= 1 << 20:
                x = data.numpy()
                for form, dtype in {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}.items():
                    row("convert", "f32", form, elements, 1, "ml_dtypes " + ml_dtypes.__version__,
                        lambda: x.astype(dtype))


main()
