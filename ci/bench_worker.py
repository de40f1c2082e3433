"""One rank of one contender of `ci/bench`: trains the demo's model and prints how fast, as a line of JSON.

Contenders share the model, the data, the loader and the number of threads; they differ in who averages gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from emulation.network import reshape_here
from emulation.worker.emulation_hold import SOCKET_VARIABLE, ask, hold, release
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

ROOT = Path(__file__).resolve().parent.parent


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def forever(loader: Any) -> Iterator[Any]:
    """Batches, epoch after epoch."""
    while True:
        yield from loader


class HandShares:
    """A batch sampler with fixed shares of a common order: what a user would write by hand for DDP."""

    def __init__(self, length: int, shares: list[int], rank: int) -> None:
        self.length, self.shares, self.rank = length, shares, rank

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(0)).tolist()
        whole, start = sum(self.shares), sum(self.shares[: self.rank])
        for first in range(0, self.length - whole + 1, whole):
            yield order[first + start : first + start + self.shares[self.rank]]


class InOrder(IterableDataset[Any]):
    """The samples one after the other, from the `first` on, `step` apart."""

    def __init__(self, samples: Any, first: int, step: int) -> None:
        self.samples, self.first, self.step = samples, first, step

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, of = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(self.first + number * self.step, len(self.samples), of * self.step):
            yield self.samples[index]


class FromDisk(Dataset[Any]):
    """Samples that take so many seconds each to come, and no processor time."""

    def __init__(self, samples: Any, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.samples[index]


class Contender:
    """How one contender sets up and makes a step: `step()` trains on one batch and returns when it is done."""

    loading: dict[str, Any] = {"drop_last": True}  # options of the loaders

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.lm = _load("torch_char_lm", ROOT / "examples" / "torch_char_lm.py")
        self.arguments = arguments
        self.strategy: Any = arguments.strategy
        self.rank = int(os.environ.get("HOROVOD_RANK", os.environ.get("RANK", "0")))
        self.size = int(os.environ.get("HOROVOD_SIZE", os.environ.get("WORLD_SIZE", "1")))
        self.shares = [int(share) for share in arguments.shares.split(":")]
        self.windows: Any = self.data()
        if arguments.load_ms:
            delay_ms = float(arguments.load_ms.split(":")[self.rank if arguments.rank is None else arguments.rank])
            self.windows = FromDisk(self.windows, 1e-3 * delay_ms)
        if arguments.stream:
            own = arguments.stream == "own"
            self.windows = InOrder(self.windows, self.rank if own else 0, self.size if own else 1)
            self.loading = {"num_workers": 0, **({"sharded": True, "steps_per_epoch": 50} if own else {})}
        if arguments.workers:
            self.loading = {**self.loading, "num_workers": arguments.workers}
        torch.manual_seed(0)
        self.model = self.network()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.balancer: Any = None
        self.waits: list[float] = []  # hetero: seconds in each step for the others and the exchange
        self.scale = 1.0
        self.loss_model: Any = self.model
        getattr(self, "set_up_" + arguments.contender.replace("-", "_"))()

    def data(self) -> Any:
        """What is trained on."""
        return self.lm.Windows(self.lm.read_text(2.0), 64)

    def network(self) -> Any:
        """What is trained."""
        return self.lm.CharLM(width=self.arguments.width, layers=self.arguments.layers)

    def set_up_alone(self) -> None:
        batch = self.shares[self.arguments.rank if self.arguments.rank is not None else self.rank]
        self.batches = forever(DataLoader(self.windows, batch_size=batch, shuffle=True, **self.loading))
        self.global_batch = batch

    def _equal(self) -> None:
        self.global_batch = sum(self.shares)
        sampler = DistributedSampler(self.windows, self.size, self.rank, drop_last=True)
        self.batches = forever(
            DataLoader(self.windows, batch_size=self.global_batch // self.size, sampler=sampler, **self.loading)
        )

    def set_up_horovod(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self._equal()
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=hvd.Compression.fp16 if self.arguments.codec == "fp16" else hvd.Compression.none,
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def set_up_ddp(self) -> None:
        torch.distributed.init_process_group("gloo")
        self._equal()
        # Its PowerSGD hook mixes up the collectives of several buckets under Gloo, and aborts: one bucket for it.
        cap = {"bucket_cap_mb": 1000} if self.arguments.codec == "powersgd" else {}
        self.loss_model = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True, **cap)
        if self.arguments.codec == "fp16":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            self.loss_model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.arguments.codec == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=self.arguments.dense_steps
            )
            self.loss_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def set_up_ddp_hand(self) -> None:
        torch.distributed.init_process_group("gloo")
        self.global_batch = sum(self.shares)
        sampler: Any = HandShares(len(self.windows), self.shares, self.rank)
        loading = {name: value for name, value in self.loading.items() if name != "drop_last"}
        self.batches = forever(DataLoader(self.windows, batch_sampler=sampler, **loading))
        # DDP averages over ranks; weighting the loss by share makes that the mean over samples.
        self.scale = self.shares[self.rank] * self.size / self.global_batch
        self.loss_model = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def set_up_hetero(self) -> None:
        hvd: Any = importlib.import_module(f"{self.arguments.package}.torch")
        levels = {"process_sets": "dynamic"} if self.arguments.topology else {}
        hvd.init(**levels)
        dense = self.arguments.dense_steps
        codecs = {
            "none": hvd.Compression.none,
            "fp16": hvd.Compression.fp16,
            "int8": hvd.Compression.int8,
            "int4": hvd.Compression.int4(warmup_steps=dense),
            "auto": hvd.Compression.auto,
            "topk": hvd.Compression.topk(0.01, warmup_steps=dense),
            "powersgd": hvd.Compression.powersgd(4, warmup_steps=dense),
        }
        self.global_batch = sum(self.shares)
        fixed = {"shares": self.shares, "adaptive": False} if self.arguments.fixed else {}
        self.balancer = hvd.Balancer(global_batch_size=self.global_batch, **fixed)
        self.batches = forever(hvd.BalancedDataLoader(self.windows, balancer=self.balancer, **self.loading))
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=self.model.named_parameters(),
            balancer=self.balancer,
            compression=codecs[self.arguments.codec],
            topology=self.arguments.topology,
            strategy=self.strategy,
            **({"bucket_bytes": self.arguments.bucket_bytes} if self.arguments.bucket_bytes else {}),
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.balancer.dialogue.subscribe(lambda: self.waits.append(self.optimizer._reducer.wait_s))

    @property
    def samples(self) -> int:
        """Of this rank in the present step."""
        if self.balancer is not None:
            return int(self.balancer.plan.shares[self.rank])
        if self.arguments.contender == "ddp-hand":
            return self.shares[self.rank]
        return self.global_batch if self.arguments.contender == "alone" else self.global_batch // self.size

    def loss(self) -> Any:
        """Of the next batch."""
        x, y = next(self.batches)
        self.optimizer.zero_grad()
        return self.lm.loss_of(self.loss_model, x, y)

    def step(self) -> None:
        loss = self.loss()
        (loss * self.scale if self.scale != 1.0 else loss).backward()
        self.optimizer.step()


def validation_loss(contender: Contender, windows: Any, *, batches: int) -> float:
    """The loss of the model on the first so many batches of 64 windows, by this rank alone."""
    total, count = contender.lm.validate(contender.model, islice(DataLoader(windows, batch_size=64), batches))
    return float(total / count)


def cpu_by_thread() -> dict[str, float]:
    """CPU milliseconds of each thread of this process so far: "name/id" -> ms."""
    spent = {}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            spent[f"{name}/{task.name}"] = 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def parser() -> argparse.ArgumentParser:
    """What a worker may be told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=["alone", "horovod", "ddp", "ddp-hand", "hetero"])
    parser.add_argument("--shares", default="32:16:8:8", help="sum: the global batch; each: DDP's by hand, alone's")
    parser.add_argument("--rank", type=int, help="of `alone`: which share")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=136)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--fixed", action="store_true", help="hetero: the given shares, never re-planned")
    parser.add_argument("--codec", default="none", help="how gradients travel; DDP: its hook")
    parser.add_argument("--dense-steps", type=int, default=20, help="of codecs that want some first")
    parser.add_argument("--topology", help="hetero: flat, rails, leader or auto")
    parser.add_argument("--strategy", default="synchronous", help="hetero: synchronous, local or auto")
    parser.add_argument("--validate", action="store_true", help="rank 0: the loss on other text, after all steps")
    parser.add_argument("--bucket-bytes", type=int)
    parser.add_argument("--every-step", action="store_true", help="print each step's time and shares")
    parser.add_argument("--slow-at", type=int, default=-1, help="the step at which a rank becomes slower")
    parser.add_argument("--slow-rank", type=int, default=1)
    parser.add_argument("--slow-cores", type=float, default=0.2)
    parser.add_argument("--link-at", type=int, default=-1, help="the step at which the nodes' links become others")
    parser.add_argument("--link-mbit", type=float, default=20.0)
    parser.add_argument("--load-ms", help="of one sample, by rank, as from disks of their own: 1:4")
    parser.add_argument("--workers", type=int, default=0, help="processes of each rank that load")
    parser.add_argument("--stream", choices=["whole", "own"], help="hetero: a rank reads all samples, or its own")
    parser.add_argument("--package", default="hvd_hetero", help="hetero: its name, where there are two versions")
    return parser


def main() -> None:
    arguments = parser().parse_args()
    contender = Contender(arguments)
    hold()
    times: list[float] = []
    shares: list[Any] = []
    computes: list[Any] = []
    samples: list[float] = []  # of this rank, in each step that is timed
    ends: list[float] = []  # when such steps ended, and first when the one before them had
    cpu = 0.0
    threads: dict[str, float] = {}
    for step in range(arguments.warmup + arguments.steps):
        if step == arguments.warmup:
            cpu, threads = time.process_time(), cpu_by_thread()
            ends.append(time.perf_counter())
        if step == arguments.slow_at and contender.rank == 0:
            cores = f"cores {arguments.slow_rank} {arguments.slow_cores}"
            if ask(os.environ[SOCKET_VARIABLE], cores) != "ok":
                raise RuntimeError(f"the emulated cluster did not accept {cores!r}")
        if step == arguments.link_at and os.environ.get("HOROVOD_LOCAL_RANK") == "0":
            reshape_here(arguments.link_mbit)
        start = time.perf_counter()
        contender.step()
        end = time.perf_counter()
        times.append(end - start)
        if contender.balancer:
            shares.append(contender.balancer.plan.shares)
            computes.append(contender.balancer.step_timer.reported)
        if ends:
            ends.append(end)
            samples.append(contender.samples)
    seconds, cpu = ends[-1] - ends[0], time.process_time() - cpu
    by_thread = {name: (ms - threads.get(name, 0.0)) / arguments.steps for name, ms in cpu_by_thread().items()}
    release()
    is_local = arguments.strategy != "synchronous"
    if is_local:
        contender.optimizer.merge()
    record = {
        "rank": contender.rank if arguments.rank is None else arguments.rank,
        "samples_per_s": (sum(samples) if is_local else contender.global_batch * arguments.steps) / seconds,
        # then that is what this rank did, and not all of them
        "apart": is_local or arguments.contender == "alone",
        "samples": samples,
        "ends_s": ends,
        "step_ms": 1e3 * seconds / arguments.steps,
        "cpu_ms": 1e3 * cpu / arguments.steps,
        "thread_ms": {name: round(ms, 2) for name, ms in by_thread.items() if ms > 0.05},
        "parameters": sum(p.numel() for p in contender.model.parameters()),
        "shares": shares[-1] if shares else None,
    }
    if contender.waits and not is_local:
        # Without the waits: how long each step kept this rank busy.
        waits = contender.waits[arguments.warmup :]
        record["waits_s"] = waits
        record["busy_s"] = [whole - wait for whole, wait in zip(times[arguments.warmup :], waits, strict=True)]
    if arguments.validate and contender.rank == 0:
        lm = contender.lm
        text = lm.read_text(2.5)
        record["validation_loss"] = validation_loss(contender, lm.Windows(text[2_000_000:], 64), batches=8)
    if arguments.every_step:
        record["times_s"], record["all_shares"], record["computes"] = times, shares, computes
    print("BENCH " + json.dumps(record), flush=True)
    with contextlib.suppress(Exception):
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
