"""Ranks of tests/test_checkpoint_horovod.py: stopped by SIGTERM at random steps and resumed, against an uninterrupted
run. Arguments: a folder, how often, and `NAME=VALUE` options of DistributedOptimizer."""

from __future__ import annotations

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


def make(path, options):
    """A new job, as a new process would make it."""
    torch.manual_seed(hvd.rank())  # dropout draws other numbers on each rank
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    data = torch.utils.data.TensorDataset(x, (x @ torch.randn(6, 3, generator=generator)).argmax(1))
    shares = {2: (11, 5), 3: (8, 5, 3)}[hvd.size()]
    balancer = hvd.Balancer(WHOLE, shares=shares, adaptive=False)
    loader = hvd.BalancedDataLoader(data, balancer=balancer, seed=5, num_workers=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), balancer=balancer, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, epoch=0)
    return model, loader, optimizer, schedule, state, hvd.Checkpoint(path, state, every_steps=7)


def train(path, options, stop_at=None, who=0):
    """The parameters at the end, or None where SIGTERM came first; and the indices of the steps made."""
    model, loader, optimizer, schedule, state, checkpoint = make(path, options)
    checkpoint.restore()
    first = last = loader.batch_sampler.balancer.step + 1
    try:
        for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020
            loader.set_epoch(state.epoch)
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if len(loader) == 0:
                    schedule.step()
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


def main(folder, times, options):
    hvd.init()
    torch.set_num_threads(1)
    expected, _ = train(folder / "uninterrupted", options)
    draw = random.Random(7)
    for number in range(times):
        path, stop_at, who = folder / f"run.{number}", draw.randrange(STEPS - 2), draw.randrange(hvd.size())
        nothing, (_, left) = train(path, options, stop_at, who)
        assert nothing is None and left - stop_at in (1, 2), (stop_at, left)
        found, (first, _) = train(path, options)
        assert first == left, "it goes on where it was"
        assert torch.equal(found, expected), f"stopped after step {stop_at}: off by {(found - expected).abs().max()}"
    hvd.barrier()
    if hvd.rank() == 0:
        print(f"OK {times}", flush=True)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    main(Path(sys.argv[1]), int(sys.argv[2]), dict(word.split("=") for word in sys.argv[3:]))
