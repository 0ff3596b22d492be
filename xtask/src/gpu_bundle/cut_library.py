#!/usr/bin/env python3
"""Cuts a library's GPU code to one architecture, so that it can be carried to a GPU machine.

    python3 cut_library.py libtransformer_engine.so out/libtransformer_engine.so --arch 90
    xz -9 out/libtransformer_engine.so

The programs for other architectures are overwritten with zeros, which compress to nothing, and so is PTX where there is
machine code. Everything else keeps its place, so that the file stays a valid library: the driver looks for the program of its
GPU, and finds that one.

Containers of programs ("fat binaries") begin with the number 0xBA55ED50, the size of this header and that of what follows:
one entry for each program, with a header that has the kind (1 PTX, 2 machine code), its own size, that of the program, and
the architecture. --self-test checks that on a made-up file.
"""

import argparse
import struct
import sys

MAGIC = struct.pack("<I", 0xBA55ED50)
# magic, version, size of the header, size of what follows
CONTAINER = struct.Struct("<IHHQ")
# kind, version, size of the header, size of the program; and at ARCH the architecture
ENTRY, ARCH, CODE = struct.Struct("<HHIQ"), 28, 2


def containers(data):
    """Where what follows a container's header begins, and where it ends."""
    at = data.find(MAGIC)
    while at >= 0:
        if at + CONTAINER.size <= len(data):
            _, version, header, size = CONTAINER.unpack_from(data, at)
            start = at + header
            if version == 1 and header >= CONTAINER.size and 0 < size <= len(data) - start:
                yield start, start + size
        at = data.find(MAGIC, at + 4)


def entries(data, start, end):
    """Kind, architecture, where the program begins, and where it ends."""
    while start + ARCH + 4 <= end:
        kind, _, header, size = ENTRY.unpack_from(data, start)
        begin = start + header
        if kind not in (1, 2) or header < ARCH + 4 or size == 0 or begin + size > end:
            return
        yield kind, struct.unpack_from("<I", data, start + ARCH)[0], begin, begin + size
        start = begin + size


def is_used(kind, of, arch, has_code):
    """Whether a GPU of this architecture may load a program: machine code for it, or PTX where there is no such code."""
    if kind == CODE:
        return of == arch or (not has_code and of // 10 == arch // 10 and of < arch)
    return not has_code and of <= arch


def cut(data, arch):
    """Overwrites the other programs; how many bytes it kept and how many not."""
    kept = dropped = 0
    for container in list(containers(data)):
        programs = list(entries(data, *container))
        has_code = any(kind == CODE and of == arch for kind, of, _, _ in programs)
        for kind, of, begin, end in programs:
            if is_used(kind, of, arch, has_code):
                kept += end - begin
            else:
                data[begin:end] = bytes(end - begin)
                dropped += end - begin
    return kept, dropped


def self_test():
    def entry(kind, arch, program):
        header = bytearray(64)
        ENTRY.pack_into(header, 0, kind, 0x101, len(header), len(program))
        struct.pack_into("<I", header, ARCH, arch)
        return bytes(header) + program

    def container(*programs):
        body = b"".join(programs)
        return CONTAINER.pack(0xBA55ED50, 1, CONTAINER.size, len(body)) + body

    def file(seventy, ninety, ptx, alone):
        first = container(entry(2, 70, seventy), entry(2, 90, ninety), entry(1, 90, ptx))
        # The number by itself is no container.
        return bytearray(b"ELF" + first + MAGIC + b"text" * 8 + container(entry(1, 70, alone)) + b"end")

    data = file(b"a" * 40, b"b" * 24, b"c" * 16, b"d" * 8)
    assert cut(data, 90) == (24 + 8, 40 + 16)
    assert data == file(bytes(40), b"b" * 24, bytes(16), b"d" * 8)
    again = bytearray(data)
    cut(again, 90)
    assert again == data
    # PTX serves a GPU without machine code of its own, but for a later architecture.
    assert cut(file(b"a" * 40, b"b" * 24, b"c" * 16, b"d" * 8), 100) == (16 + 8, 40 + 24)
    assert cut(file(b"a" * 40, b"b" * 24, b"c" * 16, b"d" * 8), 80) == (8, 40 + 24 + 16)
    assert cut(bytearray(MAGIC), 90) == (0, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", help="the library")
    parser.add_argument("out", nargs="?", help="where the library goes that was cut")
    parser.add_argument("--arch", type=int, default=90, help="the architecture that stays [default: 90]")
    parser.add_argument("--self-test", action="store_true", help="checks a made-up file")
    options = parser.parse_args()
    if options.self_test:
        self_test()
        return 0
    if not options.library or not options.out:
        parser.error("name a library and where the one that was cut goes")
    with open(options.library, "rb") as file:
        data = bytearray(file.read())
    kept, dropped = cut(data, options.arch)
    if dropped == 0:
        sys.exit(f"cut_library.py: {options.library}: nothing to cut for sm_{options.arch}; is it there?")
    with open(options.out, "wb") as file:
        file.write(data)
    print(f"{kept / 2**20:.1f} MiB of programs kept, {dropped / 2**20:.1f} MiB overwritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
