"""One rank of one contender of `ci/gpu`: trains a larger model of the demo's kind on its part of a GPU, and prints how
fast, as a line of JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import statistics
import time
from collections import deque
from typing import Any

import torch
from bench_worker import Contender, parser

CONTEXT, STRIDE = 256, 32  # characters of a window, and from one window to the next


class OnGpu(Contender):
    """A contender whose model and gradients are on a GPU, which computes in bfloat16 where autocast says so."""

    loading = {"drop_last": True, "num_workers": 2, "pin_memory": True, "persistent_workers": True}

    def data(self) -> Any:
        class Overlapping(self.lm.Windows):  # type: ignore[name-defined]
            def __len__(self) -> int:
                return (len(self.text) - 1 - self.context) // STRIDE

            def __getitem__(self, index: int) -> Any:
                start = index * STRIDE
                window = self.text[start : start + self.context + 1]
                return window[:-1], window[1:]

        return Overlapping(self.lm.read_text(4.0), CONTEXT)

    def network(self) -> Any:
        heads = self.arguments.width // 64
        model = self.lm.CharLM(CONTEXT, width=self.arguments.width, layers=self.arguments.layers, heads=heads)
        return model.cuda()

    def loss(self) -> Any:
        x, y = (each.cuda(non_blocking=True).long() for each in next(self.batches))
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.lm.loss_of(self.loss_model, x, y)


def take_place(percents: str) -> None:
    """Before CUDA starts: this rank's GPU, or its part of one that ranks share; `percents`: of each, as "75:25"."""
    rank, local_rank = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_LOCAL_RANK"])
    os.environ.update(RANK=str(rank), WORLD_SIZE=os.environ["HOROVOD_SIZE"], LOCAL_RANK=str(local_rank))
    if percents:
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percents.split(":")[rank]
        os.environ["NCCL_HOSTID"] = f"rank{rank}"  # NCCL refuses ranks of one host that share a GPU
        local_rank = 0
    torch.cuda.set_device(local_rank)


def main() -> None:
    options = parser()
    options.add_argument("--percents", default="", help="of the GPU's multiprocessors, by rank, where ranks share one")
    options.add_argument("--dump-after", type=float, default=90.0, help="seconds after which a rank says where it is")
    options.set_defaults(width=384, layers=6)
    arguments = options.parse_args()
    faulthandler.dump_traceback_later(arguments.dump_after)
    take_place(arguments.percents)
    contender = OnGpu(arguments)
    cpu = 0.0
    samples: list[float] = []
    ended: list[float] = []  # as in bench_worker.py
    ends: deque[Any] = deque()
    for step in range(arguments.warmup + arguments.steps):
        if step == arguments.warmup:
            torch.cuda.synchronize()
            cpu = time.process_time()
            ended.append(time.perf_counter())
        contender.step()
        ends.append(torch.cuda.Event())
        ends[-1].record()
        if len(ends) > 2:  # a script that prints a loss now and then does not run further ahead either
            ends.popleft().synchronize()
        if ended:
            ended.append(time.perf_counter())
            samples.append(contender.samples)
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
    ended[-1] = time.perf_counter()
    seconds, cpu = ended[-1] - ended[0], time.process_time() - cpu
    is_local = arguments.strategy != "synchronous"
    if is_local:
        contender.optimizer.merge()
    balancer = contender.balancer
    record = {
        "rank": contender.rank,
        "samples_per_s": (sum(samples) if is_local else contender.global_batch * arguments.steps) / seconds,
        # then that is what this rank did, and not all of them
        "apart": is_local or arguments.contender == "alone",
        "samples": samples,
        "ends_s": ended,
        "step_ms": 1e3 * seconds / arguments.steps,
        "cpu_ms": 1e3 * cpu / arguments.steps,
        "parameters": sum(p.numel() for p in contender.model.parameters()),
        "processors": torch.cuda.get_device_properties(0).multi_processor_count,
        "shares": list(balancer.plan.shares) if balancer else None,
        "compute": balancer.step_timer.reported if balancer else None,
        "wait_ms": 1e3 * statistics.median(contender.waits[-arguments.steps :]) if contender.waits else None,
    }
    print("BENCH " + json.dumps(record), flush=True)
    with contextlib.suppress(Exception):
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
