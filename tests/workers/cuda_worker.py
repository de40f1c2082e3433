"""One real rank of tests/test_cuda_horovod.py: what is particular to a GPU, against one process that computes it whole.

Prints `OK name` for each check that holds.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from typing import Any

import cuda_device
import torch
import torch.nn.functional as F
from checks import run_checks
from torch import nn

import hvd_hetero.torch as hvd
from hvd_hetero.engine.stopwatch import CudaStopwatch

cuda_device.install()

WHOLE, STEPS, WIDTH = 12, 6, 16
SHARES = (7, 5)
DEVICE = torch.device("cuda", torch.cuda.current_device())
DATA = torch.Generator().manual_seed(1)
X, Y = torch.randn(STEPS * WHOLE, WIDTH, generator=DATA), torch.randint(0, 3, (STEPS * WHOLE,), generator=DATA)


class Net(nn.Module):
    """Some layers, one of which looks its input up."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=sparse)
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x + self.table((x[:, 0].abs() * 10).long())))


def mine(step: int) -> slice:
    """This rank's samples of a global batch."""
    first = step * WHOLE + sum(SHARES[: hvd.rank()])
    return slice(first, first + SHARES[hvd.rank()])


def whole(step: int) -> slice:
    return slice(step * WHOLE, (step + 1) * WHOLE)


def steps(model: Any, optimizer: Any, part: Any, balancer: Any = None, scaler: Any = None, autocast: Any = None,
          take: Any = None, clip: bool = False, infinite: bool = False) -> None:  # fmt: skip
    """Trains on a part of each global batch; the last sample of one of them may have an infinite loss."""
    for step in range(STEPS):
        x, y = take(step) if take else (X[part(step)].to(DEVICE), Y[part(step)].to(DEVICE))
        if balancer:
            balancer.begin(len(x))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
            loss = F.cross_entropy(model(x), y)
        if infinite and step == 2 and part(step).stop == whole(step).stop:
            loss = loss * float("inf")
        if scaler is None:
            loss.backward()
            if clip:
                if balancer:
                    optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@contextlib.contextmanager
def on_another_stream() -> Any:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        yield
    torch.cuda.current_stream().wait_stream(aside)


def equals_one_process(
    *, make: Any = None, bound: float = 1e-5, wrap: Any = lambda model: model, scaled: bool = False,
    sparse: bool = False, stream: bool = False, late: bool = False, options: Any = None, **others: Any,
) -> Any:  # fmt: skip
    """A check of law 2: the parameters after some steps are those of one process with all samples."""
    make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))

    def check() -> None:
        torch.manual_seed(0)
        ours = Net(sparse=sparse).to(DEVICE)
        alone = copy.deepcopy(ours)
        start = copy.deepcopy(ours)
        if late:
            ours.cpu()
        balancer = hvd.Balancer(WHOLE, shares=SHARES, adaptive=False)
        optimizer = hvd.DistributedOptimizer(make(ours.parameters()), balancer=balancer, **(options or {}))
        ours.to(DEVICE)
        scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**10) if scaled else None for _ in range(2)]
        with on_another_stream() if stream else contextlib.nullcontext():
            steps(wrap(ours), optimizer, mine, balancer, scalers[0], **others)
        steps(alone, make(alone.parameters()), whole, None, scalers[1],
              **{name: value for name, value in others.items() if name != "take"})  # fmt: skip
        worst = max((a - b).abs().max().item() for a, b in zip(ours.parameters(), alone.parameters(), strict=True))
        moved = max((a - b).abs().max().item() for a, b in zip(start.parameters(), alone.parameters(), strict=True))
        assert worst <= bound < 0.1 * moved, (worst, moved)
        if scaled:
            assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9, "not one step was skipped"

    return check


def prefetched() -> Any:
    """Batches that a stream of their own copies from pinned memory, one ahead."""
    copies = torch.cuda.Stream()

    def fetch(step: int) -> Any:
        with torch.cuda.stream(copies):
            return [each[mine(step)].pin_memory().to(DEVICE, non_blocking=True) for each in (X, Y)]

    ahead = {0: None}

    def take(step: int) -> Any:
        batch = ahead.pop(step) or fetch(step)
        torch.cuda.current_stream().wait_stream(copies)
        for each in batch:
            each.record_stream(torch.cuda.current_stream())
        ahead[step + 1] = fetch(step + 1) if step + 1 < STEPS else None
        return batch

    return take


def with_prefetched() -> None:
    equals_one_process(take=prefetched())()


def loader_with_pinned_memory() -> None:
    """Each sample of two epochs once, from processes that load ahead, in pinned memory."""
    data = torch.utils.data.TensorDataset(X, torch.arange(len(X)))
    balancer = hvd.Balancer(WHOLE, shares=SHARES, adaptive=False)
    model = Net().to(DEVICE)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
    loader = hvd.BalancedDataLoader(data, balancer=balancer, num_workers=2, pin_memory=True)
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen = []
        for x, index in loader:
            assert x.is_pinned()
            optimizer.zero_grad()
            model(x.to(DEVICE, non_blocking=True)).square().mean().backward()
            optimizer.step()
            seen += index.tolist()
        everyone = hvd.allgather_object(seen)
        assert sorted(sum(everyone, [])) == list(range(len(X)))


def compute_is_timed_where_it_happens() -> None:
    """What the GPU does after Python has gone on counts, and what Python waits for the others does not."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    asleep_s = start.elapsed_time(end) / 1e3
    hvd.barrier()
    model = Net().to(DEVICE)
    balancer = hvd.Balancer(WHOLE, shares=SHARES, adaptive=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
    launched, computes = [], []
    times = 1 + 3 * hvd.rank()
    for step in range(30):
        x, y = (each[mine(step % STEPS)].to(DEVICE) for each in (X, Y))
        began = time.perf_counter()
        balancer.begin(len(x))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        for _ in range(times):
            torch.cuda._sleep(cycles)
        launched.append(time.perf_counter() - began)
        loss.backward()
        optimizer.step()
        computes.append(balancer.step_timer.reported)
    samples, compute_s = computes[-1]
    assert samples == len(x) and compute_s > 0.8 * asleep_s * times > 2.0 * sorted(launched)[15]


def identical_to_plain_horovod() -> None:
    """Law 1: equal shares, the same parameters as with horovod.torch alone, bit for bit."""
    import horovod.torch as plain

    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = Net().to(DEVICE)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        size = hvd.size()
        if ours:
            balancer = hvd.Balancer(WHOLE, shares=[WHOLE // size] * size, adaptive=False)
            optimizer = hvd.DistributedOptimizer(sgd, balancer=balancer)
        else:
            optimizer = plain.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
        for step in range(STEPS):
            first = step * WHOLE + hvd.rank() * (WHOLE // size)
            part = slice(first, first + WHOLE // size)
            if ours:
                balancer.begin(WHOLE // size)
            optimizer.zero_grad()
            F.cross_entropy(model(X[part].to(DEVICE)), Y[part].to(DEVICE)).backward()
            optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def moved_local() -> None:
    """A model that moves to the GPU once its optimizer is made, and that ranks train apart then."""
    torch.manual_seed(0)
    model = Net()
    balancer = hvd.Balancer(WHOLE, shares=SHARES, adaptive=False)
    strategy = hvd.LocalSGD(warmup_steps=2, round_steps=1)
    optimizer = hvd.DistributedOptimizer(adamw()(model.parameters()), balancer=balancer, strategy=strategy)
    model.to(DEVICE)
    steps(model, optimizer, mine, balancer)
    optimizer.merge()
    layouts = optimizer._reducer._layouts
    assert all(flat.device == DEVICE for flat in layouts.step.layout.buckets), "buckets are where the gradients are"
    assert isinstance(balancer.step_timer._meter.stopwatch, CudaStopwatch), "compute is timed where it happens"
    sums = hvd.allgather(torch.stack([each.detach().double().sum() for each in model.parameters()])[None])
    assert torch.equal(sums[0], sums[1]), "one model on both ranks"


def adamw(**options: Any) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


CHECKS = {
    "sgd": equals_one_process(),
    "clipped": equals_one_process(clip=True),
    "fused_adamw": equals_one_process(make=adamw(fused=True), bound=2e-4),
    "capturable_adamw": equals_one_process(make=adamw(capturable=True), bound=2e-4),
    "scaled": equals_one_process(scaled=True, infinite=True, autocast=torch.float16, bound=1e-3),
    "bfloat16": equals_one_process(autocast=torch.bfloat16, bound=3e-3),
    "sparse": equals_one_process(sparse=True, make=lambda p: torch.optim.SGD(p, lr=0.1)),
    "another_stream": equals_one_process(stream=True),
    "prefetched": with_prefetched,
    "small_buckets": equals_one_process(options={"bucket_bytes": 4096}),
    "one_group": equals_one_process(options={"groups": 1}),
    "compiled": equals_one_process(wrap=torch.compile),
    "cuda_graphs": equals_one_process(wrap=lambda model: torch.compile(model, mode="reduce-overhead")),
    "loader_with_pinned_memory": loader_with_pinned_memory,
    "moved": equals_one_process(late=True, make=adamw(fused=True), bound=2e-4),
    "moved_local": moved_local,
    "compute_is_timed_where_it_happens": compute_is_timed_where_it_happens,
    "identical_to_plain_horovod": identical_to_plain_horovod,
}


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    run_checks(hvd, sys.argv[1:] or CHECKS, CHECKS)
    hvd.shutdown()


if __name__ == "__main__":
    main()
