"""gloo's side of the benchmark, by PyTorch, timed as in open_mpi.c.

gloo.py OPERATION MIN MAX FACTOR ITERATIONS WARMUP, with torch.distributed's variables; rank 0 prints
"BYTES MEAN_US MEDIAN_US WRONG" for each size.
"""
import sys
import time

import torch
import torch.distributed as dist

operation = sys.argv[1]
least, most, factor, iterations, warmup = map(int, sys.argv[2:7])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def elements(of, count):
    return ((torch.arange(count) + 7 * of) % 31).float()


size = least
while size <= most:
    count = size // 4
    block = count // ranks
    if operation == "all_gather":
        source = elements(rank, block)
        target = torch.empty(block * ranks)
        parts = list(target.split(block)) if block else []
        expected = torch.cat([elements(of, block) for of in range(ranks)])

        def call():
            if parts:
                dist.all_gather(parts, source)
    else:
        expected = sum(elements(of, count) for of in range(ranks))
        target = elements(rank, count)

        # It has no form with an output of its own.
        def call():
            dist.all_reduce(target)

    for _ in range(warmup):
        call()
    target.copy_(torch.zeros_like(target))
    dist.barrier()
    times = []
    start = before = time.perf_counter()
    for _ in range(iterations):
        call()
        now = time.perf_counter()
        times.append(now - before)
        before = now
    times.append((before - start) / iterations)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean = slowest[-1].item()
    median = slowest[:-1].sort().values[iterations // 2].item()
    if operation != "all_gather":
        target.copy_(elements(rank, count))
    call()
    wrong = torch.tensor([(target != expected).sum().item()])
    dist.all_reduce(wrong)
    if rank == 0:
        print(f"{size} {mean * 1e6:.3f} {median * 1e6:.3f} {wrong.item()}", flush=True)
    size *= factor
