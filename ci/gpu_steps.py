"""What a step takes on a GPU, by how gradients travel: `horovodrun -np 2 python ci/gpu_steps.py [--percents 50:50]`.

For each way: milliseconds of a step, milliseconds of processor time in it (all threads of rank 0), how often the host
waits for the device before a step is over, and the most memory of the GPU that rank 0 had taken. All ranks have equal
shares of random text.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import horovod.torch as plain
from gpu_worker import take_place
from torch_char_lm import CharLM, loss_of

import hvd_hetero.torch as hvd

CONTEXT, WARMUP, STEPS, WATCHED = 256, 10, 30, 10
CODECS: dict[str, Any] = {
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.Compression.bf16,
    "int8": hvd.Compression.int8,
    "int4": hvd.Compression.int4(warmup_steps=1),
    "topk": hvd.Compression.topk(0.01, warmup_steps=1),
    "powersgd": hvd.Compression.powersgd(4, warmup_steps=1),
}
WAYS: dict[str, dict[str, Any]] = {
    "no exchange": {},
    "plain Horovod": {},
    "hvd_hetero": {},
    **{f"hvd_hetero, {name}": {"compression": codec} for name, codec in CODECS.items()},
    "hvd_hetero, local": {"strategy": hvd.LocalSGD(round_steps=4)},
}


def steps(way: str, batch: int) -> Iterator[None]:
    """Trains; each turn is a step."""
    torch.manual_seed(0)
    model = CharLM(CONTEXT, width=384, layers=6, heads=6).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    balancer = None
    if way == "plain Horovod":
        optimizer = plain.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    elif way != "no exchange":
        shares = [batch] * hvd.size()
        balancer = hvd.Balancer(sum(shares), shares=shares, adaptive=False)
        optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer, **WAYS[way])
    text = torch.randint(0, 128, (batch, CONTEXT), device="cuda")
    try:
        while True:
            if balancer:
                balancer.begin(batch)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_of(model, text, text)
            loss.backward()
            optimizer.step()
            yield
    finally:
        if balancer:
            optimizer.merge()


def waits(training: Iterator[None]) -> float:
    """How often the host waits for the device in a step."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(WATCHED):
            next(training)
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(each.message) for each in found) / WATCHED


def measure(way: str, batch: int) -> None:
    gc.collect()  # what the way before has left in cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    training = steps(way, batch)
    for _ in range(WARMUP):
        next(training)
    torch.cuda.synchronize()
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        next(training)
    torch.cuda.synchronize()
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    taken = torch.cuda.max_memory_allocated() / 2**20
    waited = waits(training)
    training.close()
    if hvd.rank() == 0:
        step_ms, cpu_ms = 1e3 * took / STEPS, 1e3 * cpu / STEPS
        print(f"{way:22s} {step_ms:7.2f} ms  {cpu_ms:7.2f} ms CPU  {waited:5.1f} waits  {taken:6.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--percents", default="", help="of one GPU's multiprocessors, by rank, where they share it")
    arguments = parser.parse_args()
    take_place(arguments.percents)  # with percentages NVIDIA's multi-process service has to run: see `ci/gpu`
    torch.set_num_threads(1)
    hvd.init()
    for _ in range(arguments.repeats):
        for way in WAYS:
            measure(way, arguments.batch)
    hvd.shutdown()


if __name__ == "__main__":
    main()
