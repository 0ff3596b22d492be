"""Transformer Engine's core library by its C API (nvte_*), without its Python packages: finding it, its tensors, its calls.

The API is that of version 2.20: its header transformer_engine.h tells structures and numbers. Nothing here needs torch; a
buffer is an address. A check that fails inside the library is a C++ exception that no Python can catch: the process ends.
"""

import ctypes
import os
import pathlib
import sys
from typing import NamedTuple

# NVTEDType.
BYTE, INT32, FLOAT32, FLOAT16, BFLOAT16, E4M3, E5M2 = 0, 2, 4, 5, 6, 7, 8
# NVTETensorParam.
ROWWISE, COLUMNWISE, SCALE, AMAX, ROWWISE_SCALE_INV, COLUMNWISE_SCALE_INV = range(6)
# NVTEScalingMode: one scale for a tensor, or none.
PER_TENSOR = 0
MAX_DIMS = 15


class Unavailable(Exception):
    """The library, or a function of it, is not there; says which and why."""


class Shape(ctypes.Structure):
    _fields_ = [("data", ctypes.c_size_t * MAX_DIMS), ("ndim", ctypes.c_size_t)]


class BasicTensor(ctypes.Structure):
    _fields_ = [("data_ptr", ctypes.c_void_p), ("dtype", ctypes.c_int), ("shape", Shape)]


class Buffer(NamedTuple):
    """Memory of the device: its address, what it holds. `owner` keeps it alive."""

    address: int
    dtype: int
    shape: tuple
    owner: object = None


class Handle(ctypes.c_void_p):
    """The type NVTETensor of an argument, which is an integer in Python."""


class Stream(ctypes.c_void_p):
    """The type cudaStream_t of an argument, which is an integer or None in Python."""


_HANDLE, _STREAM, _INT, _BOOL, _FLOAT = Handle, Stream, ctypes.c_int, ctypes.c_bool, ctypes.c_float
_LISTS = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
_ADAM = [_INT, _HANDLE, *_LISTS, _FLOAT, _FLOAT, _FLOAT, _FLOAT, _INT, _INT, _INT, _FLOAT]
# The arguments and the result of each function, as its C declaration has them.
SIGNATURES = {
    "nvte_create_tensor": ([_INT], ctypes.c_void_p),
    "nvte_destroy_tensor": ([_HANDLE], None),
    "nvte_set_tensor_param_v2": ([_HANDLE, _INT, ctypes.c_void_p, ctypes.c_size_t], None),
    "nvte_tensor_shape": ([_HANDLE], Shape),
    "nvte_tensor_type": ([_HANDLE], _INT),
    "nvte_quantize": ([_HANDLE, _HANDLE, _STREAM], None),
    "nvte_dequantize": ([_HANDLE, _HANDLE, _STREAM], None),
    "nvte_transpose": ([_HANDLE, _HANDLE, _STREAM], None),
    "nvte_cast_transpose_dbias": ([_HANDLE] * 4 + [_STREAM], None),
    "nvte_cast_transpose_dbias_dgelu": ([_HANDLE] * 5 + [_STREAM], None),
    "nvte_gelu": ([_HANDLE, _HANDLE, _STREAM], None),
    "nvte_swiglu": ([_HANDLE, _HANDLE, _STREAM], None),
    "nvte_dswiglu": ([_HANDLE, _HANDLE, _HANDLE, _STREAM], None),
    "nvte_dswiglu_cast_transpose": ([_HANDLE, _HANDLE, _HANDLE, _STREAM], None),
    "nvte_layernorm_fwd": ([_HANDLE] * 3 + [_FLOAT] + [_HANDLE] * 4 + [_INT, _BOOL, _STREAM], None),
    "nvte_layernorm_bwd": ([_HANDLE] * 9 + [_INT, _BOOL, _STREAM], None),
    "nvte_rmsnorm_fwd": ([_HANDLE] * 2 + [_FLOAT] + [_HANDLE] * 3 + [_INT, _BOOL, _STREAM], None),
    "nvte_cublas_gemm": ([_HANDLE] * 5 + [_BOOL] * 3 + [_HANDLE, _BOOL, _BOOL, _INT, _STREAM], None),
    "nvte_multi_tensor_adam_cuda": ([*_ADAM, _STREAM], None),
    "nvte_multi_tensor_adam_fp8_cuda": ([*_ADAM, _INT, _STREAM], None),
    # Two std::vector by value: the C++ ABI hands over their addresses.
    "nvte_delayed_scaling_recipe_amax_and_scale_update_after_reduction": (
        [_HANDLE, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, _INT, _FLOAT, _STREAM],
        None,
    ),
}


class Tensor:
    """A handle of the library's and what it points to."""

    def __init__(self, core, parameters=None):
        self.core, self.kept = core, {}
        self.handle = core.call("nvte_create_tensor", PER_TENSOR)
        for parameter, buffer in (parameters or {}).items():
            if buffer is not None:
                self.set(parameter, buffer)

    def set(self, parameter, buffer):
        shape = Shape((ctypes.c_size_t * MAX_DIMS)(*buffer.shape), len(buffer.shape))
        basic = BasicTensor(buffer.address, buffer.dtype, shape)
        self.core.call("nvte_set_tensor_param_v2", self, parameter, ctypes.byref(basic), ctypes.sizeof(basic))
        self.kept[parameter] = buffer

    @property
    def shape(self):
        shape = self.core.call("nvte_tensor_shape", self)
        return tuple(shape.data[: shape.ndim])

    @property
    def dtype(self):
        return self.core.call("nvte_tensor_type", self)

    def __del__(self):
        if getattr(self, "handle", None):
            self.core.call("nvte_destroy_tensor", self)
            self.handle = None


class Core:
    """The library's functions."""

    def __init__(self, library):
        self.functions = {}
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, result
                self.functions[name] = function

    def call(self, name, *arguments):
        """Calls a function; tensors go as their handles."""
        function = self.functions.get(name)
        if function is None:
            raise Unavailable(f"this Transformer Engine has no {name}; 2.20 is what is called here")
        return function(*[a.handle if isinstance(a, Tensor) else a for a in arguments])

    def tensor(self, data):
        """A tensor in high precision."""
        return Tensor(self, {ROWWISE: data})

    def quantized(self, rowwise, scale_inv, scale=None, amax=None, columnwise=None):
        """A tensor in FP8 with one scale, and with its transpose if `columnwise` is given."""
        parameters = {ROWWISE: rowwise, ROWWISE_SCALE_INV: scale_inv, SCALE: scale, AMAX: amax}
        if columnwise is not None:
            parameters |= {COLUMNWISE: columnwise, COLUMNWISE_SCALE_INV: scale_inv}
        return Tensor(self, parameters)

    def empty(self):
        """In place of a bias, say, that there is none of."""
        return Tensor(self)

    def workspace(self, query, allocate):
        """What `query(empty tensor)` asks for, from `allocate(dtype, shape) -> Buffer`."""
        tensor = self.empty()
        query(tensor)
        shape = tensor.shape
        if all(shape):
            tensor.set(ROWWISE, allocate(tensor.dtype, shape))
        return tensor


class Vector:
    """std::vector<NVTETensor> as libstdc++ lays it out: where it begins, ends, and where its memory ends."""

    def __init__(self, tensors):
        self.tensors = list(tensors)
        self.handles = (ctypes.c_void_p * len(self.tensors))(*[tensor.handle for tensor in self.tensors])
        begin = ctypes.addressof(self.handles)
        end = begin + ctypes.sizeof(self.handles)
        self.fields = (ctypes.c_void_p * 3)(begin, end, end)

    @property
    def address(self):
        return ctypes.addressof(self.fields)


class Lists:
    """NVTETensor**: lists of one length, as the multi-tensor functions take them."""

    def __init__(self, lists):
        self.tensors = [list(tensors) for tensors in lists]
        self.rows = [(ctypes.c_void_p * len(row))(*[tensor.handle for tensor in row]) for row in self.tensors]
        self.table = (ctypes.c_void_p * len(self.rows))(*[ctypes.addressof(row) for row in self.rows])

    @property
    def arguments(self):
        return ctypes.addressof(self.table), len(self.rows), len(self.tensors[0])


# ---- finding and loading it -----------------------------------------------------------------------------------------

# What the library needs, what is needed first; {} is the major version of CUDA.
NEEDED = [
    "libnvrtc.so.{}", "libcudart.so.{}", "libcublasLt.so.{}", "libcublas.so.{}", "libnccl.so.2", "libcudnn.so.9",
    "libcudnn_graph.so.9", "libcudnn_ops.so.9", "libcudnn_cnn.so.9", "libcudnn_adv.so.9",
    "libcudnn_engines_runtime_compiled.so.9", "libcudnn_engines_precompiled.so.9", "libcudnn_heuristic.so.9",
]  # fmt: skip


def find(environment=os.environ, path=None):
    """The library's file: what FP8_TE_LIBRARY names, or that of an installed package."""
    named = environment.get("FP8_TE_LIBRARY")
    if named:
        if not os.path.isfile(named):
            raise Unavailable(f"FP8_TE_LIBRARY names {named}, which is not a file")
        return pathlib.Path(named)
    path = sys.path if path is None else path
    # A wheel's, a build's, an editable install's.
    for site in path:
        for folder in ("transformer_engine/wheel_lib", "transformer_engine", "."):
            found = sorted(pathlib.Path(site or ".", folder).glob("libtransformer_engine*.so"))
            if found:
                return found[0]
    raise Unavailable("no libtransformer_engine.so in Python's packages; FP8_TE_LIBRARY can name it")


def folders(environment=os.environ, path=None):
    """Where NVIDIA's libraries may lie: beside those that are loaded, in FP8_CUDA_LIB_DIR, in Python's packages."""
    found = []
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            loaded = (line.split(maxsplit=5)[-1].strip() for line in maps if ".so" in line)
            found += [os.path.dirname(file) for file in loaded if "/libcu" in file or "/libnccl" in file]
    except OSError:
        pass
    found += environment.get("FP8_CUDA_LIB_DIR", "").split(":")
    for site in sys.path if path is None else path:
        for pattern in ("nvidia/*/lib", "torch/lib"):
            found += [str(folder) for folder in sorted(pathlib.Path(site or ".").glob(pattern))]
    found += ["/usr/local/cuda/lib64"]
    return list(dict.fromkeys(folder for folder in found if folder))


def load(file, cuda, where=None):
    """The library, after those that it needs, of this major version of CUDA."""
    # By default there is room for 20 000 handles; twenty sets of 5000 slots, three to a tensor, have 67 000.
    os.environ.setdefault("NVTE_TENSOR_HANDLE_POOL_SIZE_MB", "256")
    for name in (name.format(cuda) for name in NEEDED):
        for folder in folders() if where is None else where:
            if os.path.isfile(os.path.join(folder, name)):
                try:
                    ctypes.CDLL(os.path.join(folder, name), mode=ctypes.RTLD_GLOBAL)
                except OSError:
                    continue  # of another machine, say: the next folder's, or the library says what it lacks
                break
    return Core(_open_lazily(file))


def _open_lazily(file):
    """Functions that the installed cuBLASLt is too old for are looked for when they are called, and are not called."""
    libc = ctypes.CDLL(None)
    libc.dlopen.argtypes, libc.dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    libc.dlerror.restype = ctypes.c_char_p
    handle = libc.dlopen(os.fsencode(str(file)), os.RTLD_LAZY | os.RTLD_GLOBAL)
    if not handle:
        raise Unavailable(f"cannot be loaded: {(libc.dlerror() or b'').decode(errors='replace')}")
    return ctypes.CDLL(str(file), handle=handle)
