"""A rank of the bench `tcp` that adds with gloo. Prints the medians of the time and the CPU time of a sum, in ms."""

import os
import statistics
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
warm, measured = map(int, os.environ["FP8_BENCH_SUMS"].split())
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
length = int(float(os.environ["FP8_BENCH_MIB"]) * (1 << 18))


def values(rank):
    return ((torch.arange(length) * 7 + rank * 13) % 1000).float()


expected = sum(values(rank) for rank in range(ranks))
data = values(rank)
times = []
for _ in range(warm + measured):
    x = data.clone()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    dist.all_reduce(x)
    times.append((time.perf_counter() - wall, time.process_time() - cpu))
    assert torch.equal(x, expected), "a wrong sum"
wall, cpu = (statistics.median(column) * 1e3 for column in zip(*times[warm:]))
print(wall, cpu)
dist.barrier()
dist.destroy_process_group()
