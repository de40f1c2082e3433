"""Ranks of tests/test_checkpoint_horovod.py: stopped by SIGTERM at random steps and resumed, against an uninterrupted
run, with one codec after the other, in turn on shared data, on streams of the ranks' own, and on such as know their
place. Arguments: a folder, and how often."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import hvd_hetero.torch as hvd

SAMPLES, WHOLE, EPOCHS = 140, 16, 3
STEPS = EPOCHS * -(-SAMPLES // WHOLE)
HIDDEN = 200  # matrices of less than 1024 values go through no codec
CODECS = (
    hvd.Compression.none, hvd.Compression.int8, hvd.Compression.powersgd(2, warmup_steps=4), hvd.Compression.fp16,
    hvd.Compression.topk(0.1, warmup_steps=4), hvd.Compression.int4(warmup_steps=4),
)  # fmt: skip


class Stream(torch.utils.data.IterableDataset):
    """Samples of a rank's own, in an order that is drawn while they are read."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        left = list(range(hvd.rank(), SAMPLES, hvd.size()))
        while left:
            yield self.data[left.pop(int(torch.randint(len(left), ())))]


class Resumable(Stream):
    """The same samples, from a stream that goes on where it was without reading them again."""

    start = None

    def __iter__(self):
        whole = list(range(hvd.rank(), SAMPLES, hvd.size()))
        self.left, self.start = whole if self.start is None else self.start, None
        while self.left:
            yield self.data[self.left.pop(int(torch.randint(len(self.left), ())))]

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.start = state["left"]


STREAMS = (None, Stream, Resumable)


def loader_of(data, balancer, stream):
    if stream:  # ranks of unlike shares come to the ends of their passes at different steps
        resumes = "state" if stream is Resumable else True
        own = dict(sharded=True, steps_per_epoch=STEPS // EPOCHS, resumes=resumes)
        return hvd.BalancedDataLoader(stream(data), balancer=balancer, seed=5, **own)
    return hvd.BalancedDataLoader(data, balancer=balancer, seed=5, num_workers=0)


def make(path, codec, stream):
    """A new job, as a new process would make it."""
    torch.manual_seed(hvd.rank())  # dropout draws other numbers on each rank
    model = nn.Sequential(nn.Linear(6, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Dropout(0.3), nn.Linear(HIDDEN, 3))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    data = torch.utils.data.TensorDataset(x, (x @ torch.randn(6, 3, generator=generator)).argmax(1))
    shares = {2: (11, 5), 3: (8, 5, 3)}[hvd.size()]
    balancer = hvd.Balancer(WHOLE, shares=shares, adaptive=False)
    loader = loader_of(data, balancer, stream)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer, compression=codec)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, epoch=0)
    return model, loader, optimizer, schedule, state, hvd.Checkpoint(path, state, every_steps=7)


def train(path, codec, stream, stop_at=None, who=0):
    """The parameters at the end, or None where SIGTERM came first; and the indices of the steps made."""
    model, loader, optimizer, schedule, state, checkpoint = make(path, codec, stream)
    if checkpoint.restore():
        own = state.own_content()
        state.sync()  # as an elastic job begins: what is each rank's own becomes rank 0's, and nothing else changes
        state.load_own_content(own)
    first = last = loader.batch_sampler.balancer.step + 1
    try:
        for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020
            loader.set_epoch(state.epoch)
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if last == stop_at and hvd.rank() == who:
                    os.kill(os.getpid(), signal.SIGTERM)
                last += 1
                checkpoint.step()
            if state.epoch < EPOCHS - 1:
                schedule.step()
        return torch.cat([v.double().reshape(-1) for v in model.state_dict().values()]), (first, last)
    except SystemExit as left:
        assert left.code == 75
        return None, (first, last)
    finally:
        checkpoint.close()


def main(folder, times):
    hvd.init()
    torch.set_num_threads(1)
    kinds = list(zip(CODECS, itertools.cycle(STREAMS), strict=False))
    expected = [train(folder / f"whole.{number}", *kind)[0] for number, kind in enumerate(kinds)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(expected, 2)), "a codec is not used"
    draw = random.Random(7)
    for number in range(times):
        (codec, stream), whole = kinds[number % len(kinds)], expected[number % len(kinds)]
        path, stop_at, who = folder / f"run.{number}", draw.randrange(STEPS - 2), draw.randrange(hvd.size())
        nothing, (_, left) = train(path, codec, stream, stop_at, who)
        assert nothing is None and left - stop_at in (1, 2), (stop_at, left)
        found, (first, _) = train(path, codec, stream)
        assert first == left, "it goes on where it was"
        off = (found - whole).abs().max()
        assert torch.equal(found, whole), f"{codec}, {stream}: stopped after step {stop_at}: off by {off}"
    hvd.barrier()
    if hvd.rank() == 0:
        print(f"OK {times}", flush=True)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    main(Path(sys.argv[1]), int(sys.argv[2]))
