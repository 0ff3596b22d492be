"""What gpu_bench measures, as calls of Transformer Engine's core library on torch's buffers.

A section is a generator of cases: name, by whom, and a function that makes the case's Work. Work knows how it is launched and
how what it left is compared with what torch computes: a function that is called wrongly must not have a time.
"""

import functools

import bench_peers
from te_core import BFLOAT16, BYTE, E4M3, E5M2, FLOAT32, INT32, Buffer, Lists, Vector

BY = "TE core"
SCALE, FP8_MAX = bench_peers.SCALE, bench_peers.FP8_MAX
EPSILON = 1e-5
# Of the codes of what is computed in another order before it is rounded: neighbours, and this many at most.
OTHER_CODES = 0.02
# What TE itself gives cuBLASLt on Hopper.
GEMM_WORKSPACE = 32 << 20


class Differs(Exception):
    """What the library computed is not what torch does."""


class Env:
    """The library, the clock, and buffers for both."""

    def __init__(self, torch, core, bench):
        self.torch, self.core, self.bench = torch, core, bench
        self.dtypes = {
            torch.float32: FLOAT32,
            torch.bfloat16: BFLOAT16,
            torch.float8_e4m3fn: E4M3,
            torch.float8_e5m2: E5M2,
            torch.uint8: BYTE,
            torch.int32: INT32,
        }
        properties = None if bench.dry else torch.cuda.get_device_properties(0)
        self.processors = properties.multi_processor_count if properties else 1

    def buffer(self, tensor):
        return Buffer(tensor.data_ptr(), self.dtypes[tensor.dtype], tuple(tensor.shape), tensor)

    def plain(self, tensor):
        return self.core.tensor(self.buffer(tensor))

    def empty(self, *shape, dtype=None):
        return self.torch.empty(*shape, dtype=dtype or self.torch.bfloat16, device=self.bench.device)

    def zeros(self, *shape, dtype=None):
        return self.torch.zeros(*shape, dtype=dtype or self.torch.float32, device=self.bench.device)

    def full(self, value):
        return self.torch.full((1,), value, device=self.bench.device)

    def allocate(self, dtype, shape):
        """For a workspace: bytes or floats."""
        return self.buffer(self.zeros(*shape, dtype=self.torch.float32 if dtype == FLOAT32 else self.torch.uint8))

    def workspace(self, name, arguments, at):
        """For a function that has one as argument `at`: the arguments with it."""

        def query(empty):
            self.call(name, *arguments[:at], empty, *arguments[at:])

        return [*arguments[:at], self.core.workspace(query, self.allocate), *arguments[at:]]

    def call(self, name, *arguments):
        """On torch's current stream."""
        stream = None if self.bench.dry else self.torch.cuda.current_stream().cuda_stream
        self.core.call(name, *arguments, stream)


class Output:
    """Codes with one scale, their transpose, and the amax, for a function to write."""

    def __init__(self, env, rows, cols, turned):
        torch = env.torch
        self.env = env
        self.codes = env.zeros(rows, cols, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self.turned = env.zeros(cols, rows, dtype=torch.uint8).view(torch.float8_e4m3fn) if turned else None
        self.scale, self.scale_inv, self.amax = env.full(SCALE), env.zeros(1), env.zeros(1)
        columnwise = None if self.turned is None else env.buffer(self.turned)
        self.tensor = env.core.quantized(
            env.buffer(self.codes), env.buffer(self.scale_inv), env.buffer(self.scale), env.buffer(self.amax), columnwise
        )

    def check(self, value, exact=False):
        """`value` is what was quantized, in f32; `exact` if it is the function's input."""
        torch = self.env.torch
        amax = value.abs().max()
        wanted = (value * SCALE).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        other = self.codes.view(torch.uint8) != wanted.view(torch.uint8)
        count, most = int(other.sum()), 0 if exact else OTHER_CODES * value.numel()
        if count > most:
            raise Differs(f"{count} of {value.numel()} codes are not torch's")
        if count:
            left, right = self.codes.float()[other], wanted.float()[other]
            # Neighbours are an eighth apart at most, and below the normal numbers 2^-9.
            if not bool(((left - right).abs() <= left.abs().maximum(right.abs()) * 0.126 + 2**-9).all()):
                raise Differs("codes differ from torch's by more than a step")
        if self.turned is not None and not torch.equal(self.turned.view(torch.uint8), self.codes.view(torch.uint8).t()):
            raise Differs("the transpose is not that of the codes")
        near(self.env, "amax", self.amax, amax.view(1), 0 if exact else 1e-2, 0)
        near(self.env, "scale_inv", self.scale_inv, self.env.full(1 / SCALE), 1e-6, 0)


def near(env, what, left, right, relative, absolute):
    left, right = left.float(), right.float()
    if not env.torch.allclose(left, right, rtol=relative, atol=absolute):
        raise Differs(f"{what}: off by up to {float((left - right).abs().max()):.3g} from torch's")


class Work:
    """What a case does: `launch(set)`, its bytes or operations, and `check()` of what launch(0) left."""

    def __init__(self, sets, launch, check, size=None, flops=None, wall_clock=False):
        self.sets, self.launch, self.check = sets, launch, check
        self.size, self.flops, self.wall_clock = size, flops, wall_clock


# ---- sections: each yields (case, by, a function that makes its work) ------------------------------------------------


class Inputs:
    """Of the cases of a shape; made when a case asks for them."""

    def __init__(self, env, rows, cols):
        self.env, self.rows, self.cols = env, rows, cols
        self.sets = env.bench.sets(3 * rows * cols)

    def normal(self, cols, dtype=None):
        return [self.env.bench.normal(self.rows, cols, dtype=dtype) for _ in range(self.sets)]

    @functools.cached_property
    def x(self):
        return self.normal(self.cols)

    @functools.cached_property
    def dy(self):
        return self.normal(self.cols)

    @functools.cached_property
    def wide(self):
        return self.normal(2 * self.cols)

    @functools.cached_property
    def single(self):
        return self.normal(self.cols, self.env.torch.float32)

    @functools.cached_property
    def weights(self):
        return self.env.bench.normal(self.cols), self.env.bench.normal(self.cols)


def memory(env):
    copied = functools.cache(lambda: bench_peers.copy(env.bench))
    for rows, cols in bench_peers.memory_shapes(env.bench.dry):
        inputs = Inputs(env, rows, cols)
        for name, by, bytes_each, make in memory_cases(env, inputs):

            def work(make=make, size=bytes_each * rows * cols, inputs=inputs):
                copied()
                launch, check = make()
                return Work(inputs.sets, launch, check, size)

            yield f"{name} {rows}x{cols}", by, work


def memory_cases(env, inputs):
    """Name, by, bytes for each element, and a function that makes launch and check."""
    torch, rows, cols = env.torch, inputs.rows, inputs.cols
    functional = torch.nn.functional
    gelu, swiglu, dgelu, dswiglu = bench_peers.activations(torch)

    def outputs(turned, width=cols):
        return [Output(env, rows, width, turned) for _ in range(inputs.sets)]

    def unary(function, source, turned, value, exact=False):
        def make():
            x = source()
            tensors, out = [env.plain(t) for t in x], outputs(turned)
            return (
                lambda i: env.call(function, tensors[i], out[i].tensor),
                lambda: out[0].check(value(x[0]), exact),
            )

        return make

    def with_dbias(function, sources, value, exact=False):
        def make():
            tensors, out, dbias = [source() for source in sources], outputs(True), env.empty(cols)
            given = [[*[env.plain(t[i]) for t in tensors], out[i].tensor, env.plain(dbias)] for i in range(inputs.sets)]
            given = [env.workspace(function, arguments, len(arguments)) for arguments in given]

            def check():
                wanted = value(*[t[0] for t in tensors])
                out[0].check(wanted, exact)
                near(env, "dbias", dbias, wanted.sum(0), 2e-2, 2e-2 * rows**0.5)

            return lambda i: env.call(function, *given[i]), check

        return make

    def dswiglu_then_dbias():
        """As two functions, for the one that does both writes no dbias."""
        dy, h, out = inputs.dy, inputs.wide, outputs(True, 2 * cols)
        dh, dbias = [env.plain(env.empty(rows, 2 * cols)) for _ in h], env.empty(2 * cols)
        first = [[env.plain(dy[i]), env.plain(h[i]), dh[i]] for i in range(inputs.sets)]
        second = [[dh[i], out[i].tensor, env.plain(dbias)] for i in range(inputs.sets)]
        second = [env.workspace("nvte_cast_transpose_dbias", given, 3) for given in second]

        def launch(i):
            env.call("nvte_dswiglu", *first[i])
            env.call("nvte_cast_transpose_dbias", *second[i])

        def check():
            wanted = dswiglu(dy[0], h[0]).bfloat16().float()
            out[0].check(wanted)
            near(env, "dbias", dbias, wanted.sum(0), 2e-2, 2e-2 * rows**0.5)

        return launch, check

    def dswiglu_alone():
        dy, h, out = inputs.dy, inputs.wide, outputs(True, 2 * cols)
        given = [[env.plain(dy[i]), env.plain(h[i]), out[i].tensor] for i in range(inputs.sets)]
        return (
            lambda i: env.call("nvte_dswiglu_cast_transpose", *given[i]),
            lambda: out[0].check(dswiglu(dy[0], h[0])),
        )

    def norm(function, turned, value):
        def make():
            x, out = inputs.x, outputs(turned)
            gamma, beta = inputs.weights
            is_layer = function == "nvte_layernorm_fwd"
            weights = [env.plain(gamma), env.plain(beta)] if is_layer else [env.plain(gamma)]
            stats = [env.zeros(rows) for _ in weights]
            given = []
            for i in range(inputs.sets):
                left = [env.plain(x[i]), *weights, EPSILON, out[i].tensor, *[env.plain(s) for s in stats]]
                given.append(env.workspace(function, [*left, env.processors, False], len(left)))
            return lambda i: env.call(function, *given[i]), lambda: out[0].check(value(x[0], gamma, beta))

        return make

    def layernorm(x, gamma, beta):
        return functional.layer_norm(x.float(), (cols,), gamma.float(), beta.float(), EPSILON)

    def rmsnorm(x, gamma, _):
        return functional.rms_norm(x.float(), (cols,), gamma.float(), EPSILON)

    def layernorm_backward():
        x, dy, (gamma, _) = inputs.x, inputs.dy, inputs.weights
        stats = [(t.float().mean(1), (t.float().var(1, correction=0) + EPSILON).rsqrt()) for t in x]
        dx, dgamma, dbeta = [env.empty(rows, cols) for _ in x], env.empty(cols), env.empty(cols)
        given = []
        for i in range(inputs.sets):
            tensors = [dy[i], x[i], *stats[i], gamma, dx[i], dgamma, dbeta]
            left = [env.plain(t) for t in tensors]
            given.append(env.workspace("nvte_layernorm_bwd", [*left, env.processors, False], len(left)))

        def check():
            mean, rstd = stats[0]
            hat = (x[0].float() - mean[:, None]) * rstd[:, None]
            dyf = dy[0].float()
            g = dyf * gamma.float()
            wanted = rstd[:, None] * (g - g.mean(1, True) - hat * (g * hat).mean(1, True))
            near(env, "dx", dx[0], wanted, 2e-2, 2e-2)
            near(env, "dgamma", dgamma, (dyf * hat).sum(0), 2e-2, 2e-2 * rows**0.5)
            near(env, "dbeta", dbeta, dyf.sum(0), 2e-2, 2e-2 * rows**0.5)

        return lambda i: env.call("nvte_layernorm_bwd", *given[i]), check

    def codes():
        return [env.bench.fp8(rows, cols) for _ in range(inputs.sets)]

    def dequantize():
        codes_, scale_inv = codes(), env.full(1 / SCALE)
        out = [env.empty(rows, cols) for _ in codes_]
        tensors = [env.core.quantized(env.buffer(c), env.buffer(scale_inv)) for c in codes_]
        targets = [env.plain(o) for o in out]
        wanted = lambda: (codes_[0].float() / SCALE).bfloat16()
        return (
            lambda i: env.call("nvte_dequantize", tensors[i], targets[i]),
            lambda: near(env, "the tensor", out[0], wanted(), 0, 0),
        )

    def transpose():
        codes_ = codes()
        out = [env.zeros(cols, rows, dtype=torch.uint8) for _ in codes_]
        given = [(env.plain(c), env.plain(o.view(c.dtype))) for c, o in zip(codes_, out)]
        return (
            lambda i: env.call("nvte_transpose", *given[i]),
            lambda: near(env, "the transpose", out[0], codes_[0].view(torch.uint8).t(), 0, 0),
        )

    x, single, wide, dy = (lambda name=name: getattr(inputs, name) for name in ("x", "single", "wide", "dy"))
    cast = functools.partial(unary, "nvte_quantize", value=lambda t: t.float(), exact=True)
    return [
        ("cast", BY, 3, cast(x, False)),
        ("cast+T", BY, 4, cast(x, True)),
        ("cast+T+dbias", BY, 4, with_dbias("nvte_cast_transpose_dbias", [x], lambda t: t.float(), True)),
        ("cast f32", BY, 5, cast(single, False)),
        ("gelu+cast", BY, 3, unary("nvte_gelu", x, False, gelu)),
        ("gelu+cast+T", BY, 4, unary("nvte_gelu", x, True, gelu)),
        ("dgelu+cast+T+dbias", BY, 6, with_dbias("nvte_cast_transpose_dbias_dgelu", [dy, x], dgelu)),
        ("swiglu+cast", BY, 5, unary("nvte_swiglu", wide, False, swiglu)),
        ("swiglu+cast+T", BY, 6, unary("nvte_swiglu", wide, True, swiglu)),
        ("dswiglu+cast+T+dbias", BY, 10, dswiglu_then_dbias),
        ("dswiglu+cast+T+dbias", f"{BY}, no dbias", 10, dswiglu_alone),
        ("layernorm+cast", BY, 3, norm("nvte_layernorm_fwd", False, layernorm)),
        ("layernorm+cast+T", BY, 4, norm("nvte_layernorm_fwd", True, layernorm)),
        ("rmsnorm+cast", BY, 3, norm("nvte_rmsnorm_fwd", False, rmsnorm)),
        ("layernorm backward", BY, 6, layernorm_backward),
        ("dequantize", BY, 3, dequantize),
        ("transpose", BY, 2, transpose),
    ]


def gemm(env):
    for case, sizes, left, kind in bench_peers.products(env.torch, env.bench.dry):
        yield f"{case} fp8", BY, functools.partial(product, env, sizes, left, kind)
        if kind != "split":
            yield f"{case} bf16", BY, functools.partial(product, env, sizes, None, kind)


def product(env, sizes, left, kind):
    """y[m, n] = a[m, k] b[n, k]^T: `left` is a's FP8 type, b is E4M3; both bf16 without one."""
    torch, bench = env.torch, env.bench
    m, n, k = sizes
    fast, accumulate = kind == "fast", kind == "accumulate"
    sets = bench.sets(m * k + n * k + 2 * m * n)
    one = env.full(1.0)
    if left:
        a, b = [bench.fp8(m, k, dtype=left) for _ in range(sets)], [bench.fp8(n, k) for _ in range(sets)]
        pair = [[env.core.quantized(env.buffer(t[i]), env.buffer(one)) for t in (a, b)] for i in range(sets)]
    else:
        a, b = [bench.normal(m, k) for _ in range(sets)], [bench.normal(n, k) for _ in range(sets)]
        pair = [[env.plain(t[i]) for t in (a, b)] for i in range(sets)]
    y = [env.zeros(m, n, dtype=torch.float32 if accumulate else torch.bfloat16) for _ in range(sets)]
    out = [env.plain(t) for t in y]
    multiply = multiplication(env)

    def launch(i):
        multiply(*pair[i], out[i], split=not fast, accumulate=accumulate)

    def check():
        rows = min(m, 64)
        wanted = a[0][:rows].float() @ b[0].float().t()
        off = float((y[0][:rows].float() - wanted).norm() / wanted.norm())
        if not off < 1e-2:
            raise Differs(f"the product's first rows are off by {off:.3g} of their norm")

    return Work(sets, launch, check, flops=2.0 * m * n * k)


def multiplication(env):
    """The library's product by columns: its A is our b, its D our y, both by rows."""
    workspace = env.plain(env.zeros(GEMM_WORKSPACE, dtype=env.torch.uint8))
    no_bias, no_gelu = env.core.empty(), env.core.empty()

    def multiply(a, b, y, split, accumulate=False):
        env.call(
            "nvte_cublas_gemm", b, a, y, no_bias, no_gelu, True, False, False, workspace, accumulate, split, 0
        )  # fmt: skip

    return multiply


def scales(env):
    for slots, length in bench_peers.scale_shapes(env.bench.dry):
        yield f"{slots} slots x {length}", BY, functools.partial(update, env, slots, length)


def update(env, slots, length):
    """As te.Linear keeps them: histories of up to three slots, for input, weight and output."""
    torch = env.torch
    groups = [min(3, slots - first) for first in range(0, slots, 3)]
    states = []
    for _ in range(bench_peers.LAUNCHES):
        histories = [torch.rand(length, group, device=env.bench.device) for group in groups]
        scale = [torch.ones(group, device=env.bench.device) for group in groups]
        amaxes = torch.rand(slots, device=env.bench.device) + 0.1
        vectors = [Vector([env.plain(t) for t in tensors]) for tensors in (histories, scale)]
        states.append((histories, scale, amaxes, env.plain(amaxes), vectors))
    histories, scale, amaxes = states[0][:3]
    wanted = torch.cat([history[1:].amax(0) for history in histories]).maximum(amaxes)

    def launch(i):
        _, _, _, reduced, vectors = states[i]
        env.call(
            "nvte_delayed_scaling_recipe_amax_and_scale_update_after_reduction",
            reduced, *[vector.address for vector in vectors], b"max", E4M3, 0.0,
        )  # fmt: skip

    def check():
        near(env, "the scales", torch.cat(scale), FP8_MAX / wanted, 1e-6, 0)
        near(env, "the newest rows", torch.cat([history[-1] for history in histories]), amaxes, 0, 0)

    return Work(len(states), launch, check)


class Parameters:
    """f32 main parameters, gradients and moments of `count` matrices."""

    def __init__(self, env, count, side):
        def make():
            return [env.bench.normal(side, side, dtype=env.torch.float32) for _ in range(count)]

        self.main, self.grad = make(), make()
        self.exp_avg, self.exp_avg_sq = ([env.zeros(side, side) for _ in range(count)] for _ in range(2))
        self.before = self.main[0].clone()


LR, BETA1, BETA2, ADAM_EPSILON, STEP, DECAY = 1e-3, 0.9, 0.999, 1e-8, 1, 0.1
# As TE's FusedAdam calls it: elements a block, AdamW, with bias correction.
CHUNK, ADAMW, CORRECTED = 1 << 16, 1, 1
SETTINGS = [LR, BETA1, BETA2, ADAM_EPSILON, STEP, ADAMW, CORRECTED, DECAY]


def adamw(env):
    count, side = bench_peers.adamw_shape(env.bench.dry)
    case, elements = f"{count} tensors of {side}x{side}, FP8+T", count * side * side
    copied = functools.cache(lambda: bench_peers.copy(env.bench))

    def main_is_right(of):
        gradient = of.grad[0]
        wanted = of.before - LR * (gradient / (gradient.abs() + ADAM_EPSILON) + DECAY * of.before)
        near(env, "the main parameter", of.main[0], wanted, 1e-5, 1e-6)
        near(env, "the first moment", of.exp_avg[0], (1 - BETA1) * gradient, 1e-5, 0)

    def tensors(list_):
        return [env.plain(t) for t in list_]

    def master():
        """bf16 parameters by Adam, then codes and transposes of each."""
        copied()
        of = Parameters(env, count, side)
        weights = [env.empty(side, side) for _ in range(count)]
        out = [Output(env, side, side, True) for _ in range(count)]
        noop, weight = env.plain(env.zeros(1, dtype=env.torch.int32)), tensors(weights)
        lists = Lists([tensors(of.grad), weight, tensors(of.exp_avg), tensors(of.exp_avg_sq), tensors(of.main)])

        def launch(_):
            env.call("nvte_multi_tensor_adam_cuda", CHUNK, noop, *lists.arguments, *SETTINGS)
            for tensor, output in zip(weight, out):
                env.call("nvte_quantize", tensor, output.tensor)

        def check():
            main_is_right(of)
            near(env, "the parameter", weights[0], of.main[0].bfloat16(), 0, 0)
            out[0].check(weights[0].float(), exact=True)

        return Work(1, launch, check, 32 * elements)

    def codes():
        """Codes by Adam itself, and no other parameters; then transposes."""
        copied()
        of = Parameters(env, count, side)
        out = [Output(env, side, side, True) for _ in range(count)]
        noop = env.plain(env.zeros(1, dtype=env.torch.int32))
        written, turned = tensors([o.codes for o in out]), tensors([o.turned for o in out])
        cells = [tensors([getattr(o, name) for o in out]) for name in ("scale", "amax", "scale_inv")]
        lists = Lists(
            [tensors(of.grad), written, tensors(of.exp_avg), tensors(of.exp_avg_sq), tensors(of.main), *cells]
        )

        def launch(_):
            env.call("nvte_multi_tensor_adam_fp8_cuda", CHUNK, noop, *lists.arguments, *SETTINGS, E4M3)
            for tensor, target in zip(written, turned):
                env.call("nvte_transpose", tensor, target)

        def check():
            main_is_right(of)
            out[0].check(of.main[0])

        return Work(1, launch, check, 30 * elements)

    yield case, f"{BY}: Adam, cast+T", master
    yield case, f"{BY}: FP8 Adam, transpose", codes


def host(env):
    """A Linear's forward in FP8 as two calls, what ctypes takes included."""
    for side in bench_peers.host_sides(env.bench.dry):

        def work(side=side):
            bench = env.bench
            x, w, y = bench.normal(side, side), bench.fp8(side, side), env.empty(side, side)
            out, one = Output(env, side, side, False), env.full(1.0)
            source, target = env.plain(x), env.plain(y)
            weight = env.core.quantized(env.buffer(w), env.buffer(one))
            multiply = multiplication(env)

            def launch(_):
                env.call("nvte_quantize", source, out.tensor)
                multiply(out.tensor, weight, target, split=False)

            def check():
                out.check(x.float(), exact=True)
                wanted = (out.codes.float() / SCALE) @ w.float().t()
                near(env, "the product", y, wanted, 2e-2, 2e-2 * float(wanted.abs().max()))

            return Work(1, launch, check, wall_clock=True)

        yield f"linear {side} fp8", f"{BY}: cast, GEMM", work


SECTIONS = {"gemm": gemm, "memory": memory, "scales": scales, "adamw": adamw, "host": host}
