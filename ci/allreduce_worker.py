"""One rank of `ci/bench slowlink`: all-reduces of several sizes, by one contender, as a line of JSON.

A time is from a barrier to the moment in which the slowest rank has the result; the median of the repetitions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from emulation.worker.emulation_hold import hold, release

Reduce = Callable[[torch.Tensor, str], Any]

# What each way is made of: algorithm, codec and its numbers. `hvd_hetero` runs them all in one launch.
WAYS = {
    "flat": ("flat", "none", {}),
    "rails": ("rails", "none", {}),
    "scatter": ("scatter", "none", {}),
    "leader": ("leader", "none", {}),
    "flat, fp16": ("flat", "fp16", {}),
    "rails, fp16 between": ("rails", "fp16", {}),
    "rails, bf16 between": ("rails", "bf16", {}),
    "rails, int8 between": ("rails", "int8", {}),
    "leader, int8 between": ("leader", "int8", {}),
    "rails, int4 between": ("rails", "int4", {"block": 128, "warmup_steps": 0}),
    "rails, top-k 1 % between": ("rails", "topk", {"density": 0.01, "warmup_steps": 0}),
    "leader, PowerSGD rank 4 between": ("leader", "powersgd", {"rank": 4, "warmup_steps": 0}),
    "auto": ("auto", "none", {}),
    "auto, codec auto": ("auto", "auto", {}),
}


class HorovodContender:
    """Plain Horovod's all-reduce."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.rank, self._hvd = hvd.rank(), hvd

    def ways(self) -> dict[str, Reduce]:
        hvd = self._hvd

        def half(array: torch.Tensor, name: str) -> None:
            codecs, context = hvd.Compression.fp16.compress(array)
            hvd.allreduce_(codecs, op=hvd.Sum, name=name)
            hvd.Compression.fp16.decompress(codecs, context)

        return {
            "plain Horovod": lambda array, name: hvd.allreduce_(array, op=hvd.Sum, name=name),
            "plain Horovod, fp16": half,
        }

    def slowest(self, seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64)
        return float(self._hvd.allreduce(value, op=self._hvd.Max, name="slowest"))

    def barrier(self) -> None:
        self._hvd.allreduce(torch.zeros(1), name="barrier")


class TorchContender:
    """torch.distributed's Gloo."""

    def __init__(self) -> None:
        torch.distributed.init_process_group("gloo")
        self.rank = torch.distributed.get_rank()

    def ways(self) -> dict[str, Reduce]:
        def half(array: torch.Tensor, name: str) -> None:
            codecs = array.half()
            torch.distributed.all_reduce(codecs)
            codecs.float()

        return {"torch.distributed": lambda array, name: torch.distributed.all_reduce(array),
                "torch.distributed, fp16": half}

    def slowest(self, seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64)
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
        return float(value)

    def barrier(self) -> None:
        torch.distributed.all_reduce(torch.zeros(1))


class HeteroContender(HorovodContender):
    """Ours: every algorithm and codec."""

    def __init__(self) -> None:
        import hvd_hetero.torch as hvd
        from hvd_hetero.engine.horovod import HorovodEngine
        from hvd_hetero.engine.probe import probe

        hvd.init(process_sets="dynamic")
        self.rank, self._hvd = hvd.rank(), hvd
        self._engine = HorovodEngine()
        begin = time.perf_counter()
        self.topology = probe(self._engine, fresh=True).topology
        self.probe_s = time.perf_counter() - begin
        self.choices: dict[str, list[dict[str, Any]]] = {}

    def ways(self) -> dict[str, Reduce]:
        from dataclasses import asdict

        from hvd_hetero.engine.hierarchy import levels_of
        from hvd_hetero.optimizers.codec_spec import CodecSpec, LinkCodecs
        from hvd_hetero.optimizers.router import Router

        levels = levels_of(self._engine, self.topology)

        def made(title: str, algorithm: str, codec: str, numbers: dict[str, Any]) -> Reduce:
            codecs = LinkCodecs(auto=True) if codec == "auto" else LinkCodecs(cross=CodecSpec(name=codec, **numbers))
            router = Router(levels, algorithm=algorithm, codecs=codecs,
                            tell=lambda name, choice: self.choices.setdefault(name, []).append(asdict(choice)))
            of_size: dict[int, Any] = {}

            def reduce(array: torch.Tensor, name: str) -> None:
                side = int(len(array) ** 0.5)
                if len(array) not in of_size:
                    key = f"{title} {len(array) * 4}"
                    of_size[len(array)] = router.route_for(key, array, [(side, side)], lossy=codec != "none")
                route = of_size[len(array)]
                route.start(array, name=name).wait()
                route.end_step(True)

            return reduce

        return {title: made(title, *how) for title, how in WAYS.items()
                if not (how[0] == "rails" and levels.rails == 1)}


CONTENDERS = {"horovod": HorovodContender, "ddp": TorchContender, "hetero": HeteroContender}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--sizes", default="4096,1048576,16777216", help="bytes, of float32")
    parser.add_argument("--repetitions", default="20,8,3", help="timed, for each size")
    parser.add_argument("--ways", default="", help="only those whose name contains one of these, separated by ;")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contender = CONTENDERS[arguments.contender]()
    hold()
    wanted = [part for part in arguments.ways.split(";") if part]
    times: dict[str, dict[str, float]] = {}
    sizes = [int(size) for size in arguments.sizes.split(",")]
    ways = {title: reduce for title, reduce in contender.ways().items()
            if not wanted or any(part in title for part in wanted)}
    for size, repetitions in zip(sizes, map(int, arguments.repetitions.split(",")), strict=True):
        source = torch.from_numpy(np.random.RandomState(contender.rank).standard_normal(size // 4)).float()
        array = source.clone()
        measured: dict[str, list[float]] = {title: [] for title in ways}
        # A trial of `auto` ends within 20 steps; codecs with a warm-up, and new names, need one or two.
        unseen = {title: 20 if title.startswith("auto") else 2 for title in ways}
        for turn in range(-max(unseen.values()), repetitions):
            for title, reduce in ways.items():
                if turn < -unseen[title]:
                    continue
                array.copy_(source)
                contender.barrier()
                begin = time.perf_counter()
                reduce(array, f"{title}.{size}")
                seconds = contender.slowest(time.perf_counter() - begin)
                if turn >= 0:
                    measured[title].append(seconds)
        for title, seconds in measured.items():
            times.setdefault(title, {})[str(size)] = sorted(seconds)[len(seconds) // 2]
    release()
    record: dict[str, Any] = {"rank": contender.rank, "times_s": times}
    if isinstance(contender, HeteroContender):
        record.update(choices=contender.choices, nodes=contender.topology.nodes, probe_s=contender.probe_s)
    print("BENCH " + json.dumps(record), flush=True)
    if arguments.contender == "ddp":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
