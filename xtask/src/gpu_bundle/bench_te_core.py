#!/usr/bin/env python3
"""The cases of gpu_bench, run by Transformer Engine's core library: casts, transposes, activations, norms, GEMM, Adam, scales.

Its functions (nvte_*) are called through ctypes, on torch's buffers and with bench_peers.py's clock; Transformer Engine's
Python packages are not needed, only libtransformer_engine.so, which FP8_TE_LIBRARY can name. What a case computes is
compared with what torch computes before it is timed: a case that differs is a row that says so. The library ends the process
if a check of its own fails; cases therefore run in a child, which is started again behind a case that ended it or that took
too long.
"""

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import bench_peers
import te_core
import te_core_cases

# A child ends with this after a case from which the device does not recover.
AGAIN = 75
# Seconds that a case may take.
CASE_LIMIT = 120


def version():
    """Of the package that has the library, if a package has."""
    for name in ("transformer-engine-cu13", "transformer-engine-cu12", "transformer-engine"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def headers(folders):
    """Where the library finds CUDA's headers, for the kernels that it compiles when they are called."""
    for folder in folders:
        include = os.path.join(os.path.dirname(folder), "include")
        if os.path.isfile(os.path.join(include, "cuda_runtime.h")):
            os.environ.setdefault("NVTE_CUDA_INCLUDE_DIR", include)
            return


# ---- the child ------------------------------------------------------------------------------------------------------


def die_with_parent():
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def child(options):
    die_with_parent()
    try:
        import torch
    except ImportError as error:
        sys.exit(f"bench_te_core.py: {error}")
    if not torch.cuda.is_available():
        sys.exit("bench_te_core.py: torch sees no GPU")
    try:
        file = te_core.find()
        where = te_core.folders()
        headers(where)
        core = te_core.load(file, (torch.version.cuda or "13").split(".")[0], where)
    except te_core.Unavailable as error:
        sys.exit(f"bench_te_core.py: Transformer Engine's core library: {error}")
    if options.first == 0:
        print(f"{file}, {version()}", file=sys.stderr, flush=True)
    env = te_core_cases.Env(torch, core, bench_peers.Bench(torch, options.out, "only"))
    index = 0
    for section in options.section:
        for case, by, make in te_core_cases.SECTIONS[section](env):
            if index >= options.first:
                with open(options.progress + ".tmp", "w", encoding="utf-8") as progress:
                    json.dump({"index": index, "section": section, "case": case, "by": by}, progress)
                os.replace(options.progress + ".tmp", options.progress)
                if not measure(env, section, case, by, make):
                    return AGAIN
            index += 1
    print(f"{index} cases", file=sys.stderr)
    return 0


def measure(env, section, case, by, make):
    """False if the device can't go on."""
    bench = env.bench
    try:
        work = make()
        work.launch(0)
        work.check()
        bench.synchronize()
        if work.wall_clock:
            bench_peers.wall_clock(bench, case, by, lambda: work.launch(0))
        else:
            bench.time(section, case, by, work.sets, work.launch, work.size, work.flops)
    except Exception as error:
        bench.fail(section, case, by, error)
    try:
        bench.synchronize()
    except Exception:
        return False
    return True


# ---- the parent -----------------------------------------------------------------------------------------------------


def read_progress(file):
    """The case that a child was last at."""
    with contextlib.suppress(OSError, ValueError), open(file, encoding="utf-8") as progress:
        return json.load(progress)
    return None


def wait(process, first, progress):
    """Its exit code; None if a case took too long, and it was killed."""
    index, since = None, 0.0
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            at = read_progress(progress)
        if not at or at["index"] < first:
            continue
        if at["index"] != index:
            index, since = at["index"], time.monotonic()
        elif time.monotonic() - since > CASE_LIMIT:
            process.kill()
            process.wait()
            return None


def run_child(arguments, first, progress):
    """Its exit code as of `wait`, and why it ended if the library said so."""
    process = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--child", *arguments], stderr=subprocess.PIPE, text=True, errors="replace"
    )
    said = []

    def listen():
        for line in process.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            if "what():" in line:
                said.append(line.split("what():", 1)[1].strip())

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        code = wait(process, first, progress)
    finally:
        process.kill()
        listener.join()
    return code, said[-1] if said else ""


def parent(options):
    # So that what is below ends its child.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        progress = os.path.join(folder, "progress")
        first = 0
        while True:
            arguments = ["--first", str(first), "--progress", progress]
            arguments += [f"--section={section}" for section in options.section]
            arguments += ["--out", options.out] if options.out else []
            code, said = run_child(arguments, first, progress)
            if code == 0:
                return 0
            at = read_progress(progress)
            if at is None:
                return code if code > 0 else 1  # it ended before its first case, and said why
            if at["index"] < first:
                return 1
            if code is None:
                end = f"stopped after {CASE_LIMIT} s"
            elif code < 0:
                end = f"ended by signal {signal.Signals(-code).name}: {said}"
            else:
                end = f"ended by exit code {code}: {said}"
            if code != AGAIN:
                note = f"failed: {end}"[:300]
                bench_peers.write({"section": at["section"], "case": at["case"], "by": at["by"], "note": note}, options.out)
            first = at["index"] + 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(te_core_cases.SECTIONS)
    parser.add_argument("--section", action="append", choices=names, help="what to measure; all unless given")
    parser.add_argument("--out", metavar="FILE", help="add rows to this file")
    parser.add_argument("--list", action="store_true", help="print the sections")
    parser.add_argument("--find", action="store_true", help="print where the library is, or fail and say why it is not")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--progress", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.section = options.section or names
    if options.list:
        print("\n".join(names))
        return 0
    if options.find:
        try:
            print(te_core.find())
        except te_core.Unavailable as error:
            sys.exit(str(error))
        return 0
    if not options.child:
        return parent(options)
    code = child(options)
    # Not by the way of the library's destructors: a crash there is no case's failure.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
