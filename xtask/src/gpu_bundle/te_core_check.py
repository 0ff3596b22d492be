#!/usr/bin/env python3
"""Calls te_core.py's functions on the library that FP8_TE_LIBRARY names, one that computes in the CPU's memory; no torch.

Every kind of argument is handed over once: tensors with and without transposes and cells, workspaces, numbers, lists,
std::vector. Numbers are such that codes are known: in E4M3, 0x38 is 1, each step up by 8 doubles.
"""

import array
import math

import te_core
from te_core import BYTE, E4M3, FLOAT32, INT32, Buffer, Lists, Unavailable, Vector

CORE = te_core.load(te_core.find(), "13", where=[])


class Memory:
    """Numbers at an address: floats (f), ints (i) or codes (B)."""

    TYPES = {"f": FLOAT32, "i": INT32, "B": E4M3}

    def __init__(self, kind, shape, values):
        self.kind, self.shape = kind, shape
        self.array = array.array(kind, values)
        assert len(self.array) == math.prod(shape)

    @classmethod
    def zeros(cls, kind, *shape):
        return cls(kind, shape, [0] * math.prod(shape))

    @property
    def buffer(self):
        return Buffer(self.array.buffer_info()[0], self.TYPES[self.kind], self.shape, self)

    @property
    def tensor(self):
        return CORE.tensor(self.buffer)


def equal(what, left, right):
    assert list(left) == list(right), f"{what}: {list(left)}, expected {list(right)}"


def allocate(dtype, shape):
    assert dtype in (BYTE, FLOAT32), dtype
    return Memory.zeros("f" if dtype == FLOAT32 else "B", *shape).buffer._replace(dtype=dtype)


class Output:
    def __init__(self, rows, cols):
        self.codes, self.turned = Memory.zeros("B", rows, cols), Memory.zeros("B", cols, rows)
        self.scale, self.amax, self.scale_inv = Memory("f", (1,), [4.0]), Memory.zeros("f", 1), Memory.zeros("f", 1)
        self.tensor = CORE.quantized(
            self.codes.buffer, self.scale_inv.buffer, self.scale.buffer, self.amax.buffer, self.turned.buffer
        )


def tensors():
    x = Memory.zeros("f", 2, 16)
    tensor = x.tensor
    equal("shape", tensor.shape, (2, 16))
    assert tensor.dtype == FLOAT32
    tensor.set(te_core.ROWWISE, x.buffer._replace(shape=(2, 4, 4)))
    equal("another shape", tensor.shape, (2, 4, 4))
    assert CORE.empty().shape == (0,)


def casts():
    x = Memory("f", (2, 3), [1, 2, 4, -1, -2, 8])
    codes = [0x48, 0x50, 0x58, 0xC8, 0xD0, 0x60]
    turned = [codes[0], codes[3], codes[1], codes[4], codes[2], codes[5]]
    for function in ("nvte_quantize", "nvte_cast_transpose_dbias"):
        out, dbias = Output(2, 3), Memory.zeros("f", 3)
        given = [x.tensor, out.tensor]
        if function != "nvte_quantize":
            given.append(dbias.tensor)
            workspace = CORE.workspace(lambda empty, given=given: CORE.call(function, *given, empty, None), allocate)
            equal("workspace", workspace.shape, (1, 3))
            given.append(workspace)
        CORE.call(function, *given, None)
        equal(function, out.codes.array, codes)
        equal(f"{function}, transposed", out.turned.array, turned)
        equal(f"{function}, amax and scale_inv", [out.amax.array[0], out.scale_inv.array[0]], [8.0, 0.25])
        if function != "nvte_quantize":
            equal("dbias", dbias.array, [0, 0, 12])
    back = Memory.zeros("f", 2, 3)
    CORE.call("nvte_dequantize", out.tensor, back.tensor, None)
    equal("back", back.array, x.array)


def norms():
    x, out = Memory("f", (2, 2), [3, 1, -1, 1]), Output(2, 2)
    gamma, beta = Memory("f", (2,), [1, 2]), Memory("f", (2,), [0, 1])
    mean, rstd = Memory.zeros("f", 2), Memory.zeros("f", 2)
    left = [x.tensor, gamma.tensor, beta.tensor, 0.0, out.tensor, mean.tensor, rstd.tensor]

    def normalize(workspace):
        CORE.call("nvte_layernorm_fwd", *left, workspace, 1, False, None)

    normalize(CORE.workspace(normalize, allocate))
    equal("mean", mean.array, [2, 0])
    equal("rstd", rstd.array, [1, 1])
    equal("layernorm", out.codes.array, [0x48, 0xC8, 0xC8, 0x54])  # 1, -1, -1, 3


def products():
    a, b = Memory("B", (1, 16), [0x38] * 16), Memory("B", (2, 16), [0x40] * 16 + [0xB8] * 16)
    one, half = Memory("f", (1,), [1.0]), Memory("f", (1,), [0.5])
    y = Memory("f", (1, 2), [1.0, 0.0])
    left = CORE.quantized(a.buffer, half.buffer)
    right = CORE.quantized(b.buffer, one.buffer)
    workspace = CORE.tensor(allocate(BYTE, (1 << 20,)))
    for expected in ([16, -8], [32, -16]):
        accumulate = expected[0] == 32
        CORE.call(
            "nvte_cublas_gemm", right, left, y.tensor, CORE.empty(), CORE.empty(), True, False, False, workspace,
            accumulate, True, 0, None,
        )  # fmt: skip
        equal("product", y.array, expected)


def optimizers():
    count = 2
    grad, param, exp_avg, exp_avg_sq, main = (
        [Memory("f", (3,), values) for _ in range(count)]
        for values in ([2, -2, 4], [9, 9, 9], [0, 0, 0], [0, 0, 0], [1, 2, 4])
    )
    flag = Memory.zeros("i", 1)
    lists = Lists([[memory.tensor for memory in list_] for list_ in (grad, param, exp_avg, exp_avg_sq, main)])
    # The first step goes by the gradient's sign: 1, with decay 0.5 of the parameter besides.
    settings = [1.0, 0.5, 0.25, 0.0, 1, 1, 1, 0.5]
    CORE.call("nvte_multi_tensor_adam_cuda", 64, flag.tensor, *lists.arguments, *settings, None)
    for index in range(count):
        equal("parameter", param[index].array, [-0.5, 2, 1])
        equal("main parameter", main[index].array, [-0.5, 2, 1])
        equal("first moment", exp_avg[index].array, [1, -1, 2])
        equal("second moment", exp_avg_sq[index].array, [3, 3, 12])


def scales():
    histories = [Memory("f", (3, 2), [0, 0, 7, 1, 2, 2]), Memory("f", (3, 1), [0, 1, 1])]
    factors = [Memory("f", (2,), [1, 1]), Memory("f", (1,), [1])]
    amaxes = Memory("f", (3,), [3.5, 4, 14])
    vectors = [Vector([memory.tensor for memory in memories]) for memories in (histories, factors)]
    CORE.call(
        "nvte_delayed_scaling_recipe_amax_and_scale_update_after_reduction",
        amaxes.tensor, *[vector.address for vector in vectors], b"max", E4M3, 0.0, None,
    )  # fmt: skip
    equal("history", histories[0].array, [0, 0, 2, 2, 3.5, 4])
    equal("history of one", histories[1].array, [0, 1, 14])
    equal("scales", factors[0].array, [64, 112])
    equal("scale of one", factors[1].array, [32])


def what_is_not_there_is_named():
    def refused(call, *words):
        try:
            call()
        except Unavailable as error:
            assert all(word in str(error) for word in words), error
        else:
            raise AssertionError(f"not refused: {words}")

    refused(lambda: CORE.call("nvte_of_tomorrow"), "nvte_of_tomorrow", "2.20")
    refused(lambda: te_core.find({"FP8_TE_LIBRARY": "/nowhere.so"}), "/nowhere.so", "not a file")
    refused(lambda: te_core.find({}, []), "FP8_TE_LIBRARY")
    refused(lambda: te_core.load(__file__, "13", where=[]), "cannot be loaded")


CHECKS = [tensors, casts, norms, products, optimizers, scales, what_is_not_there_is_named]

if __name__ == "__main__":
    for check in CHECKS:
        check()
    print(f"{len(CHECKS)} checks")
