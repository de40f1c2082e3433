"""Checkpoints of a job: what all ranks share, once, and what is each rank's own; and leaving in order.

For any framework: a state says what there is to keep, as bytes.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from .checkpoint_file import CheckpointError, CheckpointFile
from .environment import is_elastic
from .notice import LEFT, Notice
from .port import Engine, Handle, broadcast_bytes, gather_bytes, gather_text, scatter_bytes
from .stderr import tell


class State(Protocol):
    """The state of a job, as `hvd.elastic` has it, and what a checkpoint needs of it."""

    at_end: Callable[[], object] | None
    """Saves a checkpoint, where all ranks of an elastic job leave at a commit."""

    at_end_alone: Callable[[], object] | None
    """Saves one without the other ranks, where this one leaves after they have gone."""

    read_late: Callable[[], object] | None
    """Reads the checkpoint that this process left to those that it joined, where none of them is left."""

    @property
    def synced(self) -> bool:
        """Whether this process has come to what the others of an elastic job hold, or they to what it does."""

    @property
    def leaving(self) -> Sequence[int] | None:
        """Ranks that were told to end, as all ranks have heard it; None where nothing carries that from rank to rank.
        """

    def leave(self) -> None:
        """Tells all ranks that this one was told to end."""

    def merge_models(self) -> None:
        """Comes to what all ranks share. A collective call."""

    def shared_content(self) -> bytes:
        """The part of the state that is the same on all ranks, as bytes."""

    def own_content(self) -> bytes:
        """The part of the state that is this rank's own, as bytes."""

    def load_shared_content(self, content: bytes) -> None:
        """Goes on from what `shared_content` returned."""

    def load_own_content(self, content: bytes) -> None:
        """Goes on from what `own_content` returned on this rank of as many."""


class Checkpoint:
    """A job's checkpoint file, written by rank 0. Constructing one is a collective call.

    Args:
        path: of the file. Hosts that share no folder have one each, of which the newest is used.
        state: what is kept: an `hvd.elastic.TorchState` or `KerasState`.
        engine: the ranks.
        every_steps: `step` saves after so many steps; None: only when the job has to end.

    Raises:
        ValueError, TypeError: on every rank, where `every_steps` is no such number, or differs between ranks, or
            `state` is none.
    """

    def __init__(
        self, path: str | os.PathLike[str], state: State, *, engine: Engine, every_steps: int | None
    ) -> None:
        self._file, self._state, self._engine, self._every = CheckpointFile(path), state, engine, every_steps
        self._steps = 0
        self._number = 0  # of checkpoints that this job has written; a newer one has a greater
        self._joins = self._agree(goes_on=False)
        engine.remember(self._rebuild)
        self._asking: Handle | None = None
        state.at_end, state.at_end_alone = self.save, self._save_alone
        self._notice = Notice(state.leave, say="this rank leaves once a checkpoint is written.")

    def _rebuild(self) -> None:
        """Goes on with the ranks that there are now. A collective call."""
        self._agree(goes_on=True)

    def _agree(self, *, goes_on: bool) -> bool:
        """Returns where all ranks save at the same steps: whether any of them has trained before, of which one is that
        `goes_on`. A collective call."""
        self._asks = self._engine.unique("hvd_hetero.checkpoint.leaving.")  # a script may have several checkpoints
        wrong = "" if hasattr(self._state, "shared_content") else type(self._state).__name__
        mine = json.dumps([repr(self._every), self._steps, goes_on, wrong, max(self._number, self._file.number())])
        said = list(map(json.loads, gather_text(self._engine, mine, name="hvd_hetero.checkpoint.every_steps")))
        intervals, steps, going_on, kinds, numbers = zip(*said, strict=True)
        if any(kinds):
            received = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds) if kind)
            raise TypeError(f"state: expected an hvd.elastic.TorchState or KerasState. Received: {received}.")
        if len(set(intervals)) > 1:
            received = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(intervals))
            raise ValueError(f"every_steps: expected the same on every rank. Received: {received}.")
        if self._every is not None and (not isinstance(self._every, int) or self._every < 1):
            raise ValueError(f"every_steps: expected an integer of at least 1, or None. Received: {self._every!r}.")
        self._number = max(numbers)
        self._steps = max(steps)  # of ranks that have joined, or that broke off in unlike steps
        return any(going_on)

    def close(self) -> None:
        """Leaves SIGTERM to others again, and the end of the job."""
        self._notice.close()
        if self._state.at_end == self.save:
            self._state.at_end = self._state.at_end_alone = None

    # Leaving --------------------------------------------------------------------------------------------------------

    def step(self, steps: int = 1) -> None:
        """To be called after each optimizer step, or after so many, on all ranks: saves when it is due, and where a
        rank was told to end (SIGTERM) saves and ends the job, with exit status 75 – not an elastic one, where that rank
        leaves at the next commit. A collective call when it saves."""
        before, self._steps = self._steps, self._steps + steps
        leaving = () if is_elastic() else self._leaving()
        if leaving or (self._every and self._steps // self._every > before // self._every):
            self.save()
        if leaving:
            ranks = ", ".join(map(str, leaving))
            tell(f"hvd_hetero: rank {ranks} was told to end: saved to {self._file.path}.")
            raise SystemExit(LEFT)

    def _leaving(self) -> Sequence[int]:
        """The ranks that were told to end, the same on all ranks."""
        if (known := self._state.leaving) is not None:
            return known
        # Asked in one step and heard in the next, so that nobody waits.
        engine = self._engine
        told = np.zeros(0) if self._asking is None else np.asarray(self._asking.wait())
        mine = np.zeros(engine.size)
        mine[engine.rank] = self._notice.told
        self._asking = engine.allreduce_async(mine, name=self._asks)
        return np.flatnonzero(told).tolist()

    # Saving and restoring -------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes the checkpoint. A collective call.

        Raises:
            CheckpointError: on every rank, where it cannot be written, or something of it is no data.
        """
        engine = self._engine
        self._state.merge_models()
        own, problem = b"", ""
        try:
            own = self._state.own_content()
        except Exception as error:  # the others wait to hear of it
            problem = f"{type(error).__name__} on rank {engine.rank}: {error}"
        self._check(problem, name="own")  # before anything is written
        owns, problem = gather_bytes(engine, own, name="hvd_hetero.checkpoint.own", root=0), ""
        if engine.rank == 0:
            try:
                self._look_for_others()
                self._file.write(_packed([self._state.shared_content(), *owns]), number=self._number + 1)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                self._number = max(self._number, self._file.number())  # it may be there all the same
        self._check(problem, name="saved")
        self._number += 1

    def _look_for_others(self) -> None:
        """Says so where another job has written there. In an elastic one it may have been a rank that left alone."""
        newest = self._file.number()
        if newest > self._number and not is_elastic():
            before = f"checkpoint {self._number}" if self._number else "none"
            self._number = newest
            tell(
                f"hvd_hetero: {self._file.path}: expected {before} as the newest, as this job left or found it. "
                f"Received: checkpoint {newest}. Another job writes there: give each a path of its own. This one's is "
                f"written now; what it replaces is kept at {self._file.previous.name} until the next."
            )

    def _save_alone(self) -> None:
        """Writes one without what is each rank's own, as for other ranks; not over a newer one."""
        if self._file.number() > self._number:
            return
        try:
            self._file.write(_packed([self._state.shared_content()]), number=self._number + 1)
        except Exception as error:  # it ends all the same
            tell(f"hvd_hetero: {type(error).__name__}: {error}: nothing was saved to {self._file.path}.")
        else:
            tell(f"hvd_hetero: the last commit is saved to {self._file.path}.")

    def _check(self, problem: str, *, name: str) -> None:
        """Raises CheckpointError on every rank, where one has a problem with saving."""
        if problem := self._first_of_all(problem, name=name):
            kept = "A whole one is kept, that before or this one." if self._number else "There is none before it."
            raise CheckpointError(f"Expected to write a checkpoint to {self._file.path}. Received: {problem}. {kept}")

    def restore(self) -> bool:
        """Goes on from the newest whole checkpoint; whether there is one. A collective call.

        On another number of ranks what was each rank's own begins anew. A rank that joins an elastic job reads none,
        and gets what the others hold when training begins: True.

        Raises:
            CheckpointError: on every rank, where the file is there and is no whole checkpoint, and none before it is;
                or where it is one of another job.
        """
        if self._joins and not self._state.synced:
            self._state.read_late = self._read
            return True
        return self._read()

    def _read(self) -> bool:
        """See `restore`."""
        engine, content, problem, parts = self._engine, None, "", []
        # Where hosts share no folder, it is on that of an earlier job's rank 0, or, elastic, of several.
        texts = gather_text(engine, str(self._file.number()), name="hvd_hetero.checkpoint.newest")
        numbers = list(map(int, texts))
        root = numbers.index(max(numbers))
        self._number = numbers[root]
        if engine.rank == root:
            if root:
                place = f"the newest checkpoint at {self._file.path} is on the host of rank {root}"
                tell(f"hvd_hetero: {place}: it is used.")
            try:
                content, problem = self._file.read()
                parts = [] if content is None else _unpacked(content)
                said = {"error": "", "parts": len(parts)}
            except (CheckpointError, OSError) as error:
                said = {"error": str(error), "parts": 0}
            if problem:
                tell(f"hvd_hetero: {problem}: the checkpoint before it is used.")
        else:
            said = {}
        said = json.loads(gather_text(engine, json.dumps(said), name="hvd_hetero.checkpoint.found")[root])
        if said["error"]:
            raise CheckpointError(said["error"])
        if not said["parts"]:
            return False
        self._state.merge_models()
        shared = broadcast_bytes(engine, parts[0] if parts else b"", root=root, name="hvd_hetero.checkpoint.shared")
        self._load(self._state.load_shared_content, shared)
        if said["parts"] == 1 + engine.size:
            mine = scatter_bytes(engine, parts[1:], root=root, name="hvd_hetero.checkpoint.own")
            self._load(self._state.load_own_content, mine)
        return True

    def _load(self, load: Callable[[bytes], None], content: bytes) -> None:
        """Loads on all ranks. Raises CheckpointError on every rank, where it cannot be loaded on one."""
        problem = ""
        try:
            load(content)
        except Exception as error:  # the others wait to hear of it
            problem = f"{type(error).__name__}: {error}"
        if problem := self._first_of_all(problem, name="loaded"):
            raise CheckpointError(f"Expected a checkpoint of this job in {self._file.path}. Received: {problem}.")

    def _first_of_all(self, problem: str, *, name: str) -> str:
        """The first of all ranks' problems, "" where there is none. A collective call."""
        problems = gather_text(self._engine, problem, name=f"hvd_hetero.checkpoint.{name}")
        return next(filter(None, problems), "").removesuffix(".")


def _packed(parts: Sequence[bytes]) -> list[bytes]:
    """What to write, piece by piece: a line with the lengths of the parts, and the parts."""
    return [json.dumps([len(part) for part in parts]).encode() + b"\n", *parts]


def _unpacked(content: bytes) -> list[bytes]:
    stream = io.BytesIO(content)
    return [stream.read(length) for length in json.loads(stream.readline())]
