"""`hvd.Checkpoint`: a job that was stopped goes on where it was."""

from __future__ import annotations

import os

from hvd_hetero.engine import checkpoint

from . import backend
from .elastic import KerasState


class Checkpoint(checkpoint.Checkpoint):
    """A job's checkpoint: one file, written whole or not at all, with the one before it kept.

        state = hvd.elastic.KerasState(model, epoch=0, batch=0)
        checkpoint = hvd.Checkpoint("run/checkpoint", state, every_steps=500)
        checkpoint.restore()
        state.fit(dataset, epochs=EPOCHS, callbacks=[hvd.callbacks.CheckpointCallback(checkpoint)])

    When a rank is told to end (SIGTERM), all ranks save at the same step and end with exit status 75. On other
    hardware, or another number of ranks, a job goes on with the same samples and the same model. Constructing one is a
    collective call.

    Args:
        path: the file. Hosts that share no folder have a file each, of which the newest is used.
        state: what is saved and restored.
        every_steps: `step` saves after every so many steps; None: only when the job has to end.

    Raises:
        ValueError: on every rank, if `every_steps` is not an integer of at least 1, or differs between ranks.
        CheckpointError: on every rank, if `every_steps` is given and rank 0 cannot write to `path`.
    """

    def __init__(self, path: str | os.PathLike[str], state: KerasState, *, every_steps: int | None = None) -> None:
        super().__init__(path, state, engine=backend.engine(), every_steps=every_steps)
