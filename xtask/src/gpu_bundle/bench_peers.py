#!/usr/bin/env python3
"""The cases of gpu_bench, run by other libraries: torch eager, torch.compile, torchao, Transformer Engine.

Prints a row of JSON per measurement, under the section and case names of gpu_bench, so that one table holds both. What is
not installed is skipped by name; a case that fails is a row that says why. Needs torch and a GPU; --list needs neither.

The clock is gpu_bench's: a CUDA graph of 20 launches over buffers of more than three L2 caches, replayed between events,
the median of 15. What cannot be recorded is queued call by call, and its note says why. Each compiled function is compiled
for one shape.

Of Transformer Engine, te.Linear (host) and te.TransformerLayer (layer) are measured here, the functions of its core library
by bench_te_core.py. gpu_bench and these peers run in separate processes, one after the other: clocks and temperature may
differ between them.
"""

import argparse
import contextlib
import functools
import json
import math
import sys
import time

SECTIONS = ["copy", "gemm", "memory", "scales", "adamw", "attention", "host", "layer"]
LAUNCHES, WARM, REPLAYS, PATIENCE = 20, 3, 15, 5.0
FP8_MAX = 448.0
SCALE = 64.0
# The note of a row that has no time.
DRY = "dry run"


# ---- sizes, those of gpu_bench ---------------------------------------------------------------------------------------


def memory_shapes(dry):
    return [(128, 64)] if dry else [(8192, 8192), (16384, 4096), (2048, 2048)]


def scale_shapes(dry):
    """Slots, rows of the history."""
    return [(slots, length) for slots in ([64] if dry else [64, 640, 5000]) for length in (16, 1024)]


def adamw_shape(dry):
    """How many matrices, of which side."""
    return (3, 48) if dry else (64, 2048)


def host_sides(dry):
    return [16] if dry else [16, 256, 1024]


def products(torch, dry):
    """Case, (m, n, k), the left FP8 type, and how sums are kept: fast, split (bf16 knows no such thing) or accumulated."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for side in [16] if dry else [1024, 2048, 4096, 8192]:
        yield f"cube {side}", (side, side, side), e4m3, "fast"
        yield f"cube {side} split", (side, side, side), e4m3, "split"
    tokens, shrink = (32, 128) if dry else (16384, 1)
    for name, n, k in [("qkv", 12288, 4096), ("proj", 4096, 4096), ("fc1", 16384, 4096), ("fc2", 4096, 16384)]:
        n, k = n // shrink, k // shrink
        sizes = f"{name} {tokens}x{n}x{k}"
        yield f"fprop {sizes}", (tokens, n, k), e4m3, "fast"
        yield f"dgrad {sizes}", (tokens, k, n), e5m2, "split-backward"
        yield f"wgrad {sizes}", (n, k, tokens), e5m2, "accumulate"


# ---- the clock -------------------------------------------------------------------------------------------------------


def reason(error):
    """Its type and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def write(row, out):
    """Prints a row, and adds it to a file."""
    line = json.dumps(row)
    print(line, flush=True)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(line + "\n")


class Bench:
    """A device and the rows measured on it."""

    def __init__(self, torch, out, compiled, dry=False):
        self.torch, self.out, self.dry = torch, out, dry
        self.eager, self.compiled = compiled != "only", compiled != "no"
        self.failures = 0
        self.device = torch.device("cpu" if dry else "cuda")
        properties = None if dry else torch.cuda.get_device_properties(0)
        self.cache = getattr(properties, "L2_cache_size", 64 << 20)
        self.copy = None

    def normal(self, *shape, dtype=None, scale=1.0):
        torch = self.torch
        return (torch.randn(*shape, device=self.device) * scale).to(dtype or torch.bfloat16)

    def fp8(self, *shape, dtype=None):
        return self.normal(*shape, scale=SCALE).clamp(-FP8_MAX, FP8_MAX).to(dtype or self.torch.float8_e4m3fn)

    def sets(self, size):
        return 2 if self.dry else max(2, min(LAUNCHES, math.ceil(3 * self.cache / size)))

    def record(self, section, case, by, us, us_min, size=None, flops=None, note=""):
        if self.dry:
            write({"section": section, "case": case, "by": by, "note": DRY}, self.out)
            return
        row = {"section": section, "case": case, "by": by, "us": us, "us_min": us_min, "note": note}
        if size:
            row["gb_per_s"] = size / us * 1e-3
            if self.copy:
                row["ratio_to_copy"] = size / (us * 1e-6) / self.copy
        if flops:
            row["tflops"] = flops / us * 1e-6
        write(row, self.out)

    def fail(self, section, case, by, error):
        self.failures += 1
        write({"section": section, "case": case, "by": by, "note": f"failed: {reason(error)}"[:300]}, self.out)
        with contextlib.suppress(Exception):  # of a device that does not recover
            self.torch.cuda.empty_cache()

    def synchronize(self):
        if not self.dry:
            self.torch.cuda.synchronize()

    def replay(self, sets, launch, graph):
        torch = self.torch
        if self.dry:
            for index in range(sets):
                launch(index)
            return None, None, DRY
        kept = [None] * sets

        def queue(launches):
            for index in range(launches):
                kept[index % sets] = None
                kept[index % sets] = launch(index % sets)

        stream = torch.cuda.Stream()
        torch.cuda.synchronize()  # inputs were made on another stream
        with torch.cuda.stream(stream):
            queue(sets)
            torch.cuda.synchronize()
            start = time.perf_counter()
            queue(sets)
            torch.cuda.synchronize()
            one = max((time.perf_counter() - start) / sets, 1e-7)
            launches = max(1, min(LAUNCHES, int(PATIENCE / ((WARM + REPLAYS) * one))))
            run, note = (lambda: queue(launches)), "queued"
            if graph:
                cause = None
                try:
                    recorded = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(recorded, stream=stream):
                        try:
                            queue(launches)
                        except Exception as error:  # the end of the recording then fails too, and says less
                            cause = reason(error)
                            raise
                    run, note = recorded.replay, "graph"
                except Exception as error:  # what cannot be recorded is queued
                    note = f"queued: {cause or reason(error)}"[:200]
                    self.after_failed_recording()
            times = []
            for index in range(WARM + REPLAYS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                run()
                end.record(stream)
                end.synchronize()
                if index >= WARM:
                    times.append(begin.elapsed_time(end) * 1e3 / launches)
        times.sort()
        return times[len(times) // 2], times[0], note

    def after_failed_recording(self):
        """Torch's generator still takes the stream for one that records, and would refuse the next random numbers."""
        torch = self.torch
        with contextlib.suppress(Exception):
            fresh = torch.Generator(device=self.device).graphsafe_get_state()
            torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh)
        torch.cuda.synchronize()

    def time(self, section, case, by, sets, launch, size=None, flops=None, graph=True):
        try:
            us, us_min, note = self.replay(sets, launch, graph)
            self.record(section, case, by, us, us_min, size, flops, note)
        except Exception as error:
            self.fail(section, case, by, error)

    def both(self, section, case, sets, function, inputs, size):
        """Eager, then compiled; `inputs(set)` are the arguments."""
        torch = self.torch
        if self.eager:
            self.time(section, case, "torch eager", sets, lambda i: function(*inputs(i)), size)
        if not self.compiled:
            return
        try:
            torch._dynamo.reset()
            compiled = torch.compile(function, dynamic=False)
        except Exception as error:
            self.fail(section, case, "torch.compile", error)
            return
        self.time(section, case, "torch.compile", sets, lambda i: compiled(*inputs(i)), size)


# ---- sections --------------------------------------------------------------------------------------------------------


def copy(bench):
    size = 4096 if bench.dry else 512 << 20
    source = bench.torch.randint(0, 255, (size,), dtype=bench.torch.uint8, device=bench.device)
    target = bench.torch.empty_like(source)
    us, us_min, note = bench.replay(2, lambda _: target.copy_(source), False)
    bench.copy = 2 * size / (us * 1e-6) if us else None
    if bench.eager:
        bench.record("copy", "512 MiB", "torch", us, us_min, 2 * size, note=note)


def activations(torch):
    """GELU, SwiGLU and the gradients of their inputs, in f32."""
    functional = torch.nn.functional

    def gelu(h):
        return functional.gelu(h.float(), approximate="tanh")

    def swiglu(h):
        gate, up = h.float().chunk(2, dim=-1)
        return functional.silu(gate) * up

    def dgelu(dy, h):
        return torch.ops.aten.gelu_backward(dy.float(), h.float(), approximate="tanh")

    def dswiglu(dy, h):
        gate, up = h.float().chunk(2, dim=-1)
        dy, sigma = dy.float(), torch.sigmoid(gate)
        return torch.cat([dy * up * sigma * (1 + gate * (1 - sigma)), dy * gate * sigma], dim=-1)

    return gelu, swiglu, dgelu, dswiglu


def memory(bench):
    torch = bench.torch
    functional = torch.nn.functional
    copy(bench)

    def quantize(x):
        amax = x.abs().amax().float()
        return (x.float() * SCALE).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), amax

    def transposed(codes):
        return codes.view(torch.uint8).t().contiguous()

    def quantize_transpose(x):
        codes, amax = quantize(x)
        return codes, transposed(codes), amax

    gelu, swiglu, dgelu, dswiglu = activations(torch)

    def with_dbias(derivative):
        def function(dy, h):
            dh = derivative(dy, h)
            return (*quantize_transpose(dh), dh.sum(0))

        return function

    for rows, cols in memory_shapes(bench.dry):
        n, shape = rows * cols, f"{rows}x{cols}"
        sets = bench.sets(3 * n)
        make = functools.partial(bench.normal, rows, cols)
        x, dy = [make() for _ in range(sets)], [make() for _ in range(sets)]
        wide = [bench.normal(rows, 2 * cols) for _ in range(sets)]
        single = [make(dtype=torch.float32) for _ in range(sets)]
        gamma, beta = bench.normal(cols), bench.normal(cols)
        codes = [bench.fp8(rows, cols) for _ in range(sets)]
        scale_inv = torch.tensor(1 / SCALE, device=bench.device)
        stats = [torch.ops.aten.native_layer_norm(t, [cols], gamma, beta, 1e-5)[1:] for t in x]

        def backward(dy, x, mean, rstd):
            mask = [True, True, True]
            return torch.ops.aten.native_layer_norm_backward(dy, x, [cols], mean, rstd, gamma, beta, mask)

        def layernorm(x):
            return functional.layer_norm(x.float(), (cols,), gamma.float(), beta.float())

        def rmsnorm(x):
            return functional.rms_norm(x.float(), (cols,), gamma.float())

        cases = [
            ("cast", 3, quantize, lambda i: (x[i],)),
            ("cast+T", 4, quantize_transpose, lambda i: (x[i],)),
            ("cast+T+dbias", 4, lambda x: (*quantize_transpose(x), x.sum(0)), lambda i: (x[i],)),
            ("cast f32", 5, quantize, lambda i: (single[i],)),
            ("gelu+cast", 3, lambda h: quantize(gelu(h)), lambda i: (x[i],)),
            ("gelu+cast+T", 4, lambda h: quantize_transpose(gelu(h)), lambda i: (x[i],)),
            ("dgelu+cast+T+dbias", 6, with_dbias(dgelu), lambda i: (dy[i], x[i])),
            ("swiglu+cast", 5, lambda h: quantize(swiglu(h)), lambda i: (wide[i],)),
            ("swiglu+cast+T", 6, lambda h: quantize_transpose(swiglu(h)), lambda i: (wide[i],)),
            ("dswiglu+cast+T+dbias", 10, with_dbias(dswiglu), lambda i: (dy[i], wide[i])),
            ("layernorm+cast", 3, lambda x: quantize(layernorm(x)), lambda i: (x[i],)),
            ("layernorm+cast+T", 4, lambda x: quantize_transpose(layernorm(x)), lambda i: (x[i],)),
            ("rmsnorm+cast", 3, lambda x: quantize(rmsnorm(x)), lambda i: (x[i],)),
            ("layernorm backward", 6, backward, lambda i: (dy[i], x[i], *stats[i])),
            ("dequantize", 3, lambda q: (q.float() * scale_inv).bfloat16(), lambda i: (codes[i],)),
            ("transpose", 2, transposed, lambda i: (codes[i],)),
        ]
        for name, size, function, inputs in cases:
            bench.both("memory", f"{name} {shape}", sets, function, inputs, size * n)


def scales(bench):
    torch = bench.torch

    def update(history, scale, staged):
        history.copy_(torch.cat([history[1:], staged[None]]))
        amax = history.amax(0)
        new = FP8_MAX / amax
        scale.copy_(torch.where(amax > 0, new, scale))
        staged.zero_()
        return scale

    for slots, length in scale_shapes(bench.dry):
        states = [
            (
                torch.rand(length, slots, device=bench.device),
                torch.ones(slots, device=bench.device),
                torch.rand(slots, device=bench.device),
            )
            for _ in range(LAUNCHES)
        ]
        bench.both("scales", f"{slots} slots x {length}", LAUNCHES, update, lambda i: states[i], None)


def adamw(bench):
    torch = bench.torch
    copy(bench)
    count, side = adamw_shape(bench.dry)
    parameters = [torch.nn.Parameter(bench.normal(side, side, dtype=torch.float32)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = bench.normal(side, side, dtype=torch.float32)
    optimizer = torch.optim.AdamW(parameters, fused=True, capturable=True)

    def step(_):
        optimizer.step()
        made = []
        for parameter in parameters:
            weight = parameter.detach().bfloat16()
            codes = (weight.float() * SCALE).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
            made.append((weight, codes, codes.view(torch.uint8).t().contiguous()))
        return made

    case = f"{count} tensors of {side}x{side}, FP8+T"
    bench.time("adamw", case, "torch fused AdamW + casts", 1, step, 32 * count * side * side)


def gemm(bench):
    torch = bench.torch
    one = torch.ones((), device=bench.device)
    accumulates = addmm_accumulates(bench)

    def product(case, m, n, k, left, kind):
        add = " + add" if kind == "accumulate" else ""
        sets, flops = bench.sets(m * k + n * k + 2 * m * n), 2.0 * m * n * k
        try:
            a = [bench.fp8(m, k, dtype=left) for _ in range(sets)]
            b = [bench.fp8(n, k) for _ in range(sets)]
            out = [torch.zeros(m, n, device=bench.device) for _ in range(sets)] if kind == "accumulate" else None
        except Exception as error:
            bench.fail("gemm", f"{case} fp8", f"torch._scaled_mm{add}", error)
            return

        def scaled(i):
            dtype = torch.float32 if out else torch.bfloat16
            y = torch._scaled_mm(
                a[i], b[i].t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=kind == "fast"
            )
            return out[i].add_(y) if out else y

        bench.time("gemm", f"{case} fp8", f"torch._scaled_mm{add}", sets, scaled, flops=flops)
        if case.endswith("split"):
            return
        del a, b
        a, b = [bench.normal(m, k) for _ in range(sets)], [bench.normal(n, k) for _ in range(sets)]

        def high(i):
            if out and accumulates:
                return torch.addmm(out[i], a[i], b[i].t(), out_dtype=torch.float32, out=out[i])
            y = a[i] @ b[i].t()
            return out[i].add_(y) if out else y

        by = "torch.addmm" if out and accumulates else f"torch{add}"
        bench.time("gemm", f"{case} bf16", by, sets, high, flops=flops)

    for case, (m, n, k), left, kind in products(torch, bench.dry):
        product(case, m, n, k, left, kind)


def addmm_accumulates(bench):
    """Whether torch.addmm adds a product of bf16 matrices to an f32 matrix in place."""
    torch = bench.torch
    try:
        a, y = torch.ones(16, 16, dtype=torch.bfloat16, device=bench.device), torch.ones(16, 16, device=bench.device)
        torch.addmm(y, a, a.t(), out_dtype=torch.float32, out=y)
        return bool((y == 17).all())
    except Exception:
        return False


@contextlib.contextmanager
def deterministic(torch):
    """Lets torch use deterministic algorithms alone, without filling new tensors, which would be timed, too."""
    modes = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), modes.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    modes.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        modes.fill_uninitialized_memory = before[1]


def attention(bench):
    torch = bench.torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shapes = [(8, 2048, 32, 32, 128), (2, 8192, 32, 32, 128), (8, 2048, 32, 8, 128)]
    backends = [("torch cuDNN", SDPBackend.CUDNN_ATTENTION), ("torch flash", SDPBackend.FLASH_ATTENTION)]
    if bench.dry:
        shapes, backends = [(1, 24, 2, 2, 128), (1, 24, 4, 2, 16)], [("torch", SDPBackend.MATH)]
    for batch, length, heads, groups, dim in shapes:
        case = f"b{batch} s{length} h{heads}/{groups} d{dim}"
        flops = 2.0 * batch * heads * length * length * dim

        def inputs():
            made = [bench.normal(batch, length, h, dim).transpose(1, 2) for h in (heads, groups, groups)]
            return [tensor.requires_grad_() for tensor in made]

        for by, backend in backends:

            def forward(q, k, v, backend=backend):
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=heads != groups
                    )

            sets = [inputs() for _ in range(2)]

            def infer(i):
                with torch.no_grad():
                    return forward(*sets[i])

            bench.time("attention", f"{case} forward", by, 2, infer, flops=flops)
            try:
                outputs = [forward(*s) for s in sets]
                dy = torch.randn_like(outputs[0])
            except Exception as error:
                bench.fail("attention", f"{case} backward", by, error)
                continue
            grads = lambda i: torch.autograd.grad(outputs[i], sets[i], dy, retain_graph=True)
            bench.time("attention", f"{case} backward", by, 2, grads, flops=2.5 * flops, graph=False)
            # torch then refuses a backend that cannot, or makes it add in a fixed order.
            with deterministic(torch):
                bench.time(
                    "attention", f"{case} backward", f"{by}, deterministic", 2, grads, flops=2.5 * flops, graph=False
                )


def wall_clock(bench, case, by, call):
    calls = 3 if bench.dry else 1000
    try:
        times = []
        for _ in range(5):
            call()
            bench.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) * 1e6 / calls)
            bench.synchronize()
        times.sort()
        bench.record("host", case, by, times[2], times[0], note="wall clock")
    except Exception as error:
        bench.fail("host", case, by, error)


def host(bench):
    torch = bench.torch
    for side in host_sides(bench.dry):
        model = torch.nn.Linear(side, side, device=bench.device, dtype=torch.bfloat16)
        x = bench.normal(side, side)
        wall_clock(bench, f"linear {side} bf16", "torch", lambda: model(x))
        convert, by = torchao_convert(), "torchao, weight cast each call"
        if convert:
            try:
                ours = convert(torch.nn.Sequential(model))
                wall_clock(bench, f"linear {side} fp8", by, lambda: ours(x))
            except Exception as error:
                bench.fail("host", f"linear {side} fp8", by, error)
        te, recipe = transformer_engine()
        if te:
            try:
                theirs = te.Linear(side, side, params_dtype=torch.bfloat16)
                # One scope, and one cast of the weight, as in ours.
                with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                    theirs(x, is_first_microbatch=True)
                    call = lambda: theirs(x, is_first_microbatch=False)
                    wall_clock(bench, f"linear {side} fp8", "Transformer Engine", call)
            except Exception as error:
                bench.fail("host", f"linear {side} fp8", "Transformer Engine", error)


@functools.lru_cache
def torchao_convert():
    try:
        from torchao.float8 import convert_to_float8_training

        return convert_to_float8_training
    except Exception as error:
        print(f"skipped: torchao: {error}", file=sys.stderr)
        return None


@functools.lru_cache
def transformer_engine():
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling

        return te, DelayedScaling()
    except Exception as error:
        print(f"skipped: Transformer Engine: {error}", file=sys.stderr)
        return None, None


def block(torch, hidden, heads, device):
    """A pre-norm transformer layer as plain torch writes it."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(batch, length, hidden))
            return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))

    return Block().to(device=device, dtype=torch.bfloat16)


def layer(bench):
    torch = bench.torch
    layers = [("h1024", 1024, 16, 2048, 1), ("h2048", 2048, 16, 2048, 4), ("h4096", 4096, 32, 2048, 8)]
    for name, hidden, heads, length, batch in [("h32", 32, 2, 16, 1)] if bench.dry else layers:
        tokens = batch * length
        flops = 6.0 * tokens * 12 * hidden * hidden + 7.0 * tokens * length * hidden
        x, dy = bench.normal(batch, length, hidden), bench.normal(batch, length, hidden)
        x.requires_grad_()

        def measure(case, by, model, graph, dy):
            def step(_):
                # Gradients are made before the recording, which adds to them in place.
                model(x).backward(dy)

            bench.time("layer", f"{name} s{length} b{batch} {case}", by, 1, step, flops=flops, graph=graph)
            x.grad = None

        def attempt(case, by, make, graph=False, dy=dy):
            try:
                measure(case, by, make(), graph, dy)
            except Exception as error:
                bench.fail("layer", f"{name} s{length} b{batch} {case}", by, error)

        plain = lambda: block(torch, hidden, heads, bench.device)
        if bench.eager:
            attempt("bf16 eager", "torch eager", plain)
        if bench.compiled:
            attempt("bf16 graph", "torch.compile", lambda: torch.compile(plain(), dynamic=False), graph=True)
        convert = torchao_convert() if bench.compiled else None
        if convert:
            make = lambda: torch.compile(convert(plain()), dynamic=False)
            attempt("fp8 graph", "torchao, compiled", make, graph=True)
        te, recipe = transformer_engine() if bench.eager else (None, None)
        if te:

            def theirs():
                model = te.TransformerLayer(
                    hidden, 4 * hidden, heads, params_dtype=torch.bfloat16, hidden_dropout=0.0,
                    attention_dropout=0.0, attn_input_format="bshd", self_attn_mask_type="causal",
                )

                def run(x):
                    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                        return model(x)

                return run

            attempt("fp8 eager", "Transformer Engine", theirs)
            # What Transformer Engine publishes is the time of `loss = y.sum()`.
            attempt("fp8 eager, dy of ones", "Transformer Engine", theirs, dy=torch.ones_like(dy))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="what to measure; all unless given")
    parser.add_argument("--out", metavar="FILE", help="add rows to this file")
    parser.add_argument(
        "--compiled", choices=["yes", "no", "only"], default="yes",
        help="torch.compile's cases of memory, scales and layer too, not, or these alone [default: yes]",
    )
    parser.add_argument("--list", action="store_true", help="print the sections")
    parser.add_argument("--dry-run", action="store_true", help="run every case once in a small size, on the CPU")
    options = parser.parse_args()
    if options.list:
        print("\n".join(SECTIONS))
        return 0
    try:
        import torch
    except ImportError as error:
        sys.exit(f"bench_peers.py: {error}")
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("bench_peers.py: torch sees no GPU")
    bench = Bench(torch, options.out, options.compiled, options.dry_run)
    sections = options.section or [name for name in SECTIONS if name != "copy"]
    ran = 0
    for name in sections:
        try:
            globals()[name](bench)
            ran += 1
        except Exception as error:
            bench.fail(name, "the section", "torch", error)
    print(f"{ran} sections, {bench.failures} failures", file=sys.stderr)
    # A peer that cannot do a case is a row, not a failure of ours.
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main())
