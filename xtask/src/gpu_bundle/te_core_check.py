#!/usr/bin/env python3
"""Checks the arguments of all calls of Transformer Engine's core library, without that library, a GPU or torch.

A recorder takes the library's place: it compares the arguments of each call with te_core.SIGNATURES and computes nothing.
Every case of te_core_cases.py is made, launched and checked as bench_te_core.py does it, on tensors that have a type, a
shape and an address but no numbers. Prints a row of JSON for each case.
"""

import collections
import ctypes
import ctypes.util
import itertools
import math
import sys
import types

import bench_peers
import bench_te_core
import te_core
import te_core_cases
from te_core import FLOAT32, SIGNATURES, Buffer, Core, Handle, Lists, Shape, Stream, Unavailable, Vector

# ---- the recorder ----------------------------------------------------------------------------------------------------

# Handles and the addresses of tensors begin here: above all numbers that a call has.
ADDRESSES = itertools.count(1 << 40, 1 << 8)
REFERENCE = type(ctypes.byref(ctypes.c_int()))


class WrongCall(Exception):
    """A call's arguments are not those of the function's declaration."""


class Function:
    """A function of the recorder. `Core` sets the types of its arguments and of its result, as it does for ctypes."""

    def __init__(self, recorder, name):
        self.recorder, self.name, self.argtypes, self.restype = recorder, name, None, None

    def __call__(self, *arguments):
        try:
            self.check(arguments)
        except WrongCall as error:
            self.recorder.wrong.append(error)  # a destructor's exception would go unnoticed
            raise
        return self.recorder.called(self, arguments)

    def check(self, arguments):
        if len(arguments) != len(self.argtypes):
            raise WrongCall(f"{self.name} has {len(self.argtypes)} arguments, not {len(arguments)}")
        for at, (kind, argument) in enumerate(zip(self.argtypes, arguments)):
            if not self.recorder.fits(kind, argument):
                raise WrongCall(f"{self.name}: argument {at} must be a {kind.__name__}, and is {argument!r}")


class Recorder:
    """A library in place of a ctypes.CDLL. It has every function, counts the calls of each, and refuses wrong ones."""

    def __init__(self):
        self.calls, self.wrong, self.handles, self.last = collections.Counter(), [], set(), ()

    def __getattr__(self, name):
        return Function(self, name)

    def fits(self, kind, argument):
        """Tells if an argument is of this type. ctypes is less strict: any number is a pointer to it, anything a bool."""
        given = type(argument)
        if kind is Handle:
            return given is int and argument in self.handles
        if kind is Stream:
            return argument is None  # without a GPU there is no other
        if kind is ctypes.c_void_p:
            return given is REFERENCE or given is int and argument >= 4096 and argument not in self.handles
        if kind is ctypes.c_int:
            return given is int and -(1 << 31) <= argument < 1 << 31
        if kind is ctypes.c_size_t:
            return given is int and 0 <= argument < 1 << 32
        return given is {ctypes.c_bool: bool, ctypes.c_float: float, ctypes.c_char_p: bytes}[kind]

    def called(self, function, arguments):
        self.calls[function.name] += 1
        self.last = arguments
        if function.name == "nvte_destroy_tensor":
            self.handles.remove(arguments[0])
        if function.restype is ctypes.c_void_p:
            handle = next(ADDRESSES)
            self.handles.add(handle)
            return handle
        # Every workspace is to have 1x3 floats.
        if function.restype is Shape:
            return Shape((ctypes.c_size_t * te_core.MAX_DIMS)(1, 3), 2)
        return {ctypes.c_int: FLOAT32, None: None}[function.restype]


# ---- torch without numbers -------------------------------------------------------------------------------------------


class Tensor:
    """A tensor of torch's without numbers. All that is computed from it has its shape, and its type unless another is named."""

    def __init__(self, *shape, dtype="float32", device=None):
        self.shape, self.dtype, self.device, self.address = shape, dtype, device, next(ADDRESSES)

    def data_ptr(self):
        return self.address

    def numel(self):
        return math.prod(self.shape)

    def chunk(self, count, dim):
        return [self] * count

    def like(self, *arguments, dtype=None, **_):
        named = [argument for argument in arguments if isinstance(argument, str)]
        return Tensor(*self.shape, dtype=dtype or (named or [self.dtype])[0])

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **_: self.like(*arguments, dtype={"float": "float32"}.get(name))

    def __float__(self):
        return 0.0

    def __int__(self):
        return 0


for operator in "add radd sub rsub mul rmul truediv rtruediv matmul ne le getitem".split():
    setattr(Tensor, f"__{operator}__", lambda self, _: self.like())


def like(tensor, *_, **__):
    return tensor.like()


DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "int32"]
TORCH = types.SimpleNamespace(
    **{name: name for name in DTYPES},
    **dict.fromkeys(["empty", "zeros", "ones", "rand", "randn"], Tensor),
    **dict.fromkeys(["empty_like", "sigmoid"], like),
    **dict.fromkeys(["allclose", "equal"], lambda *_, **__: True),
    cat=lambda tensors, **_: tensors[0].like(),
    device=str,
    full=lambda shape, _, **options: Tensor(*shape, **options),
    nn=types.SimpleNamespace(
        functional=types.SimpleNamespace(**dict.fromkeys(["gelu", "silu", "layer_norm", "rms_norm"], like))
    ),
    ops=types.SimpleNamespace(aten=types.SimpleNamespace(gelu_backward=like)),
    randint=lambda low, high, shape, **options: Tensor(*shape, **options),
)


# ---- checks ----------------------------------------------------------------------------------------------------------


def equal(what, left, right):
    assert list(left) == list(right), f"{what}: {list(left)}, expected {list(right)}"


class Bench(bench_peers.Bench):
    """The clock of a dry run. It raises the error of which a row would be made."""

    def fail(self, section, case, by, error):
        raise AssertionError(f"{section} {case}, by {by}") from error


def cases():
    """Makes all calls of all cases. Each function of the table has to be among them."""
    recorder = Recorder()
    env = te_core_cases.Env(TORCH, Core(recorder), Bench(TORCH, None, "only", dry=True))
    for section, cases_of in te_core_cases.SECTIONS.items():
        for case, by, make in cases_of(env):
            bench_te_core.measure(env, section, case, by, make)
    assert not recorder.wrong, recorder.wrong[0]
    equal("functions that no case calls", SIGNATURES.keys() - recorder.calls, [])
    return f"{sum(recorder.calls.values())} calls of {len(recorder.calls)} functions"


def refused(error, words, call):
    try:
        call()
    except error as said:
        assert all(word in str(said) for word in words), said
    else:
        raise AssertionError(f"not refused: {words}")


def wrong_calls_are_refused():
    """Calls each function with one argument less, with one more, and with each argument of another type."""
    recorder = Recorder()
    core = Core(recorder)
    samples = {
        Stream: None, ctypes.c_void_p: next(ADDRESSES), ctypes.c_int: 1, ctypes.c_size_t: 1, ctypes.c_bool: True,
        ctypes.c_float: 1.0, ctypes.c_char_p: b"max",
    }  # fmt: skip
    count = 0
    for name, (kinds, _) in SIGNATURES.items():
        samples[Handle] = core.call("nvte_create_tensor", te_core.PER_TENSOR)
        right = [samples[kind] for kind in kinds]
        wrong = [right[:-1], [*right, 1]]
        for at, kind in enumerate(kinds):
            for other in samples.values():
                if (type(other), other) != (type(samples[kind]), samples[kind]):
                    wrong.append([*right[:at], other, *right[at + 1 :]])
        for arguments in wrong:
            refused(WrongCall, [name], lambda name=name, arguments=arguments: core.call(name, *arguments))
        core.call(name, *right)
        count += len(wrong)
    equal("refused calls", [len(recorder.wrong)], [count])
    gone = core.call("nvte_create_tensor", te_core.PER_TENSOR)
    core.call("nvte_destroy_tensor", gone)
    refused(WrongCall, ["nvte_tensor_shape"], lambda: core.call("nvte_tensor_shape", gone))
    return f"{count + 1} wrong calls refused"


def what_pointers_point_to():
    recorder = Recorder()
    core = Core(recorder)
    tensors = [core.tensor(Buffer(next(ADDRESSES), FLOAT32, (2, 16))) for _ in range(6)]
    basic = recorder.last[2]._obj
    equal("basic tensor", [basic.dtype, basic.shape.ndim, *basic.shape.data[:3]], [FLOAT32, 2, 2, 16, 0])
    equal("its size", [recorder.last[3], basic.data_ptr], [144, tensors[-1].kept[te_core.ROWWISE].address])
    handles = [tensor.handle for tensor in tensors]

    def pointers(address, count):
        return list((ctypes.c_void_p * count).from_address(address))

    lists = Lists([tensors[:2], tensors[2:4], tensors[4:]])
    table, rows, columns = lists.arguments
    equal("lists", [pointers(row, columns) for row in pointers(table, rows)], [handles[:2], handles[2:4], handles[4:]])
    vector = Vector(tensors)
    begin, end, capacity = pointers(vector.address, 3)
    equal("vector", [pointers(begin, 6), end - begin, capacity], [handles, 6 * 8, end])


def what_is_not_there_is_named():
    refused(Unavailable, ["nvte_of_tomorrow", "2.20"], lambda: Core(Recorder()).call("nvte_of_tomorrow"))
    refused(Unavailable, ["/nowhere.so", "not a file"], lambda: te_core.find({"FP8_TE_LIBRARY": "/nowhere.so"}))
    refused(Unavailable, ["FP8_TE_LIBRARY"], lambda: te_core.find({}, []))
    refused(Unavailable, ["cannot be loaded"], lambda: te_core.load(__file__, "13", where=[]))
    libc = ctypes.util.find_library("c")
    if libc:
        other = te_core.load(libc, "13", where=[])
        refused(Unavailable, ["nvte_quantize", "2.20"], lambda: other.call("nvte_quantize"))


if __name__ == "__main__":
    for check in [wrong_calls_are_refused, what_pointers_point_to, what_is_not_there_is_named, cases]:
        print(check() or check.__name__.replace("_", " "), file=sys.stderr)
