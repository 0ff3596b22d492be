"""Matrix products by numpy or torch.

    gemm.py THREADS

Each line on stdin is `CONTENDER LAYOUT M N K SECONDS`: the product of `a` and `b`, `nt` for a[m, k] · b[n, k]ᵀ, `nn` for
a[m, k] · b[k, n] and `tn` for a[k, m]ᵀ · b[k, n], repeated for so many seconds. The answer is the seconds of the fastest one.
"""

import os
import sys
import time

threads = int(sys.argv[1])
os.environ["OPENBLAS_NUM_THREADS"] = str(threads)

import numpy as np  # noqa: E402: it reads the number of threads
import torch  # noqa: E402

TYPES = {"torch-f32": torch.float32, "torch-bf16": torch.bfloat16}


def product(contender, layout, m, n, k):
    """Returns a function that computes the product, and one that returns the result."""
    random = np.random.default_rng(1)
    a = random.uniform(-1, 1, (k, m) if layout == "tn" else (m, k)).astype(np.float32)
    b = random.uniform(-1, 1, (n, k) if layout == "nt" else (k, n)).astype(np.float32)
    left, right = (a.T if layout == "tn" else a), (b.T if layout == "nt" else b)
    expected = left[:2].astype(np.float64) @ right.astype(np.float64)
    if contender == "numpy":
        out = np.empty((m, n), np.float32)
        call = lambda: np.matmul(left, right, out=out)
        rows, tolerance = lambda: out[:2], 1e-4
    else:
        dtype = TYPES[contender]
        a, b, out = torch.from_numpy(a).to(dtype), torch.from_numpy(b).to(dtype), torch.empty((m, n), dtype=dtype)
        left, right = (a.t() if layout == "tn" else a), (b.t() if layout == "nt" else b)
        call = lambda: torch.mm(left, right, out=out)
        rows, tolerance = lambda: out[:2].float().numpy(), 1e-4 if dtype is torch.float32 else 0.05
    call()
    error = np.abs(rows() - expected).max() / np.abs(expected).max()
    assert error < tolerance, f"{contender} {layout} {m} {n} {k}: off by {error}"
    return call


def main():
    torch.set_num_threads(threads)
    print("ready numpy", np.__version__, "torch", torch.__version__, flush=True)
    last, call = None, None
    for line in sys.stdin:
        *key, least = line.split()
        if key != last:
            last, call = key, product(key[0], key[1], *map(int, key[2:]))
        fastest, end = float("inf"), time.perf_counter() + float(least)
        while (before := time.perf_counter()) < end or fastest == float("inf"):
            call()
            fastest = min(fastest, time.perf_counter() - before)
        print(fastest, flush=True)


main()
