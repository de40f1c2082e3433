"""`hvd.Checkpoint`: a job that was stopped goes on where it was."""

from __future__ import annotations

import os

from hvd_hetero.engine import checkpoint
from hvd_hetero.engine.horovod import HorovodEngine

from .elastic import TorchState


class Checkpoint(checkpoint.Checkpoint):
    """A job's checkpoint: one file, written whole or not at all, with the one before it kept.

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        state = hvd.elastic.TorchState(model, optimizer, epoch=0)
        checkpoint = hvd.Checkpoint("run/checkpoint", state, every_steps=500)
        checkpoint.restore()
        for state.epoch in range(state.epoch, epochs):
            loader.set_epoch(state.epoch)
            for x, y in loader:
                ...
                optimizer.step()
                checkpoint.step()

    A job that is resumed on the same ranks, with fixed shares, computes what it would have computed uninterrupted, bit
    for bit (except for random numbers drawn by the workers of a loader, which start afresh). On other hardware, or
    another number of ranks, it goes on with the same samples and the same model.

    When a rank is told to end (SIGTERM), all ranks save at the same step and end with exit status 75; in an elastic job
    that rank leaves at the next commit instead. Constructing one is a collective call, also for a rank that joins.

    Args:
        path: the file. Hosts that share no folder have a file each, of which the newest is used.
        state: what is saved and restored.
        every_steps: `step` saves after every so many steps; None: only when the job has to end.

    Raises:
        ValueError: on every rank, if `every_steps` is not an integer of at least 1, or differs between ranks.
        CheckpointError: on every rank, if `every_steps` is given and rank 0 cannot write to `path`.
    """

    def __init__(self, path: str | os.PathLike[str], state: TorchState, *, every_steps: int | None = None) -> None:
        super().__init__(path, state, engine=HorovodEngine(), every_steps=every_steps)
