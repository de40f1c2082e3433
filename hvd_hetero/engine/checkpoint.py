"""Checkpoints of a job in one file: the state that all ranks share, once, and each rank's own; saved also at SIGTERM.

It works for any framework: the job's `State` returns what has to be saved as bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Protocol

import numpy as np

from hvd_hetero.policy.rank_words import by_rank, ranks_text

from .checkpoint_file import CheckpointError, CheckpointFile, Content
from .environment import is_elastic
from .payload import broadcast_bytes, gather_bytes, gather_text, scatter_bytes
from .port import Engine, Handle
from .stderr import tell
from .termination import EXIT_STATUS_LEFT, TerminationHandler


class State(Protocol):
    """What `Checkpoint` needs of the state of a job; `hvd.elastic.TorchState` and `KerasState` have it."""

    at_end: Callable[[], object] | None
    """Called on every rank at a commit at which all ranks of an elastic job leave (SIGTERM): saves a checkpoint.
    `Checkpoint` sets it; None: there is no checkpoint."""

    at_end_alone: Callable[[], object] | None
    """Called on a rank that was told to end, after the other ranks were lost: saves a checkpoint without them.
    `Checkpoint` sets it together with `at_end`."""

    read_late: Callable[[], object] | None
    """Called in the first `sync` of a process that joined a running elastic job, if no rank is left that had the job's
    state: loads it from the checkpoint file. `Checkpoint.restore` sets it instead of reading the file at once."""

    @property
    def synced(self) -> bool:
        """Whether this process holds the job's state: it has completed a `sync` with the other ranks."""

    @property
    def leaving(self) -> Sequence[int] | None:
        """The ranks that were told to end (SIGTERM), the same on all ranks; None if the state cannot exchange that."""

    def leave(self) -> None:
        """Tells all ranks that this one was told to end."""

    def merge_models(self) -> None:
        """Makes the model the same on all ranks, with a local strategy. A collective call."""

    def shared_content(self) -> bytes:
        """Returns the part of the state that is the same on all ranks, as bytes."""

    def own_content(self) -> bytes:
        """Returns the part of the state that belongs to this rank, as bytes."""

    def load_shared_content(self, content: bytes) -> None:
        """Loads what `shared_content` returned."""

    def load_own_content(self, content: bytes) -> None:
        """Loads what `own_content` returned on the rank of this number in a job of as many ranks."""


class Checkpoint:
    """A job's checkpoint file, written by rank 0. Constructing one is a collective call.

    It also installs a handler of SIGTERM (`TerminationHandler`): see `step`.

    Args:
        path: path of the file. If the hosts share no folder, each may have a file there; the newest is read.
        state: what is saved: an `hvd.elastic.TorchState` or `KerasState`.
        engine: the engine of all ranks.
        every_steps: the number of steps after which `step` saves; None: only when the job has to end.

    Raises:
        ValueError: on every rank, if `every_steps` is not an integer of at least 1, or differs between ranks.
        TypeError: on every rank, if `state` is of another kind on some rank.
        CheckpointError: on every rank, if `every_steps` is given and rank 0 cannot write to `path`. Without it, rank 0
            prints a warning: a job may only read its checkpoint.
    """

    def __init__(
        self, path: str | os.PathLike[str], state: State, *, engine: Engine, every_steps: int | None
    ) -> None:
        self._file, self._state, self._engine = CheckpointFile(path), state, engine
        self._every = int(every_steps) if isinstance(every_steps, Integral) else every_steps  # of NumPy's as well
        self._steps = 0
        self._number = 0  # the number of the newest checkpoint of this job; each new one gets the next number
        self._joins = self._agree(goes_on=False)
        if not self._joins:
            self._check_place()
        engine.on_reset_end(self._rebuild)
        self._asking: Handle | None = None
        state.at_end, state.at_end_alone = self.save, self._save_alone
        self._termination = TerminationHandler(state.leave, say="this rank leaves once a checkpoint is written.")

    def _rebuild(self) -> None:
        """Adapts to the present ranks after an elastic reset. A collective call."""
        self._agree(goes_on=True)

    def _agree(self, *, goes_on: bool) -> bool:
        """Checks that all ranks save at the same steps, and sets the common step count and checkpoint number.

        A collective call; raises what the constructor raises.

        Args:
            goes_on: whether this rank was in the job before (an elastic reset).

        Returns:
            Whether any rank was in the job before, so that this rank joins a running job.
        """
        self._asks = self._engine.unique("hvd_hetero.checkpoint.leaving.")  # a script may have several checkpoints
        wrong = "" if hasattr(self._state, "shared_content") else type(self._state).__name__
        mine = json.dumps([repr(self._every), self._steps, goes_on, wrong, max(self._number, self._file.number())])
        said = list(map(json.loads, gather_text(self._engine, mine, name="hvd_hetero.checkpoint.every_steps")))
        intervals, steps, going_on, kinds, numbers = zip(*said, strict=True)
        if any(kinds):
            received = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds) if kind)
            raise TypeError(f"state: expected an hvd.elastic.TorchState or KerasState. Received: {received}.")
        if len(set(intervals)) > 1:
            raise ValueError(f"every_steps: expected the same on every rank. Received: {by_rank(intervals)}.")
        if self._every is not None and (not isinstance(self._every, int) or self._every < 1):
            raise ValueError(f"every_steps: expected an integer of at least 1, or None. Received: {self._every!r}.")
        self._number = max(numbers)
        self._steps = max(steps)  # they differ if ranks have joined, or were interrupted in different steps
        return any(going_on)

    def _check_place(self) -> None:
        """Raises or warns as the constructor does if rank 0 cannot write to the path, rather than when the first
        checkpoint is due, which may be when the job has to end. A collective call."""
        mine = self._file.obstacle() if self._engine.rank == 0 else ""
        if obstacle := self._first_of_all(mine, name="place"):
            if self._every is not None:
                raise CheckpointError(
                    f"path: expected one where checkpoints can be written. Received: {self._file.path}, but {obstacle}."
                )
            if self._engine.rank == 0:
                tell(f"hvd_hetero: no checkpoint can be written to {self._file.path}: {obstacle}.")

    def close(self) -> None:
        """Restores the handler of SIGTERM that was there before, and saves no more at the end of the job."""
        self._termination.close()
        if self._state.at_end == self.save:
            self._state.at_end = self._state.at_end_alone = None

    # Leaving --------------------------------------------------------------------------------------------------------

    def step(self, steps: int = 1) -> None:
        """Saves a checkpoint if one is due. All ranks call it after each optimizer step, or once for `steps` of them.

        If a rank was told to end (SIGTERM), it saves and ends the job with exit status 75; but not an elastic job,
        where that rank leaves at the next commit. A collective call when it saves.

        Raises:
            SystemExit: the job ends, as above.
            CheckpointError: see `save`.
        """
        before, self._steps = self._steps, self._steps + steps
        leaving = () if is_elastic() else self._leaving()
        if leaving or (self._every and self._steps // self._every > before // self._every):
            self.save()
        if leaving:
            tell(f"hvd_hetero: told to end: {ranks_text(leaving)}. Saved to {self._file.path}.")
            raise SystemExit(EXIT_STATUS_LEFT)

    def _leaving(self) -> Sequence[int]:
        """Returns the ranks that were told to end (SIGTERM), the same on all ranks. Without a balancer that exchanges
        them, this takes an all-reduce, whose result is used in the next step."""
        if (known := self._state.leaving) is not None:
            return known
        # The all-reduce is started in one step and its result is read in the next, so that no rank waits for it.
        engine = self._engine
        told = np.zeros(0) if self._asking is None else np.asarray(self._asking.wait())
        mine = np.zeros(engine.size)
        mine[engine.rank] = self._termination.told
        self._asking = engine.allreduce_async(mine, name=self._asks)
        return np.flatnonzero(told).tolist()

    # Saving and restoring -------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint, with the state of all ranks. A collective call.

        Raises:
            CheckpointError: on every rank, if the file cannot be written, or some rank's state cannot be serialised.
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
                self._number = max(self._number, self._file.number())  # the file may have been written nevertheless
        self._check(problem, name="saved")
        self._number += 1

    def _look_for_others(self) -> None:
        """Prints a warning if another job has written to the file. Not in an elastic job, where it may have been a rank
        that left alone (`_save_alone`)."""
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
        """Writes a checkpoint without the other ranks: with the shared state only, and not over a newer one.

        Is called on a rank that ends after the others were lost. Raises nothing.
        """
        if self._file.number() > self._number:
            return
        try:
            self._file.write(_packed([self._state.shared_content()]), number=self._number + 1)
        except Exception as error:  # the process ends in any case
            tell(f"hvd_hetero: {type(error).__name__}: {error}: nothing was saved to {self._file.path}.")
        else:
            tell(f"hvd_hetero: the last commit is saved to {self._file.path}.")

    def _check(self, problem: str, *, name: str) -> None:
        """Raises CheckpointError on every rank if any rank has a `problem` with saving. A collective call.

        Args:
            problem: this rank's problem, "" if it has none.
            name: names the exchange.
        """
        if problem := self._first_of_all(problem, name=name):
            kept = "A whole one is kept, that before or this one." if self._number else "There is none before it."
            raise CheckpointError(f"Expected to write a checkpoint to {self._file.path}. Received: {problem}. {kept}")

    def restore(self) -> bool:
        """Loads the newest intact checkpoint. Returns whether there is one. A collective call.

        If the number of ranks has changed, the state that belongs to each rank is not loaded and begins anew. A rank
        that joins an elastic job reads no file, and returns True: it gets the state of the others when training begins.

        Raises:
            CheckpointError: on every rank, if there are files but none is an intact checkpoint, or if the checkpoint is
                of another job.
        """
        if self._joins and not self._state.synced:
            self._state.read_late = self._read
            return True
        return self._read()

    def _read(self) -> bool:
        """See `restore`."""
        engine, parts, problem = self._engine, None, ""
        # Hosts without a shared folder: the file is on the host that had rank 0 in an earlier job; in an elastic job
        # there may be several.
        texts = gather_text(engine, str(self._file.number()), name="hvd_hetero.checkpoint.newest")
        numbers = list(map(int, texts))
        root = numbers.index(max(numbers))
        self._number = numbers[root]
        if engine.rank == root:
            if root:
                place = f"the newest checkpoint at {self._file.path} is on the host of rank {root}"
                tell(f"hvd_hetero: {place}: it is used.")
            try:
                parts, problem = self._file.read(_unpacked)
                said = {"error": "", "parts": len(parts or ())}
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
        shared, *owns = parts or [b""]
        del parts  # here and below, what is not needed any more leaves the memory
        shared = broadcast_bytes(engine, shared, root=root, name="hvd_hetero.checkpoint.shared")
        self._load(self._state.load_shared_content, shared)
        del shared
        if said["parts"] == 1 + engine.size:
            mine = scatter_bytes(engine, owns, root=root, name="hvd_hetero.checkpoint.own")
            self._load(self._state.load_own_content, mine)
        return True

    def _load(self, load: Callable[[bytes], None], content: bytes) -> None:
        """Calls `load(content)` on all ranks. Raises CheckpointError on every rank if it fails on any. A collective
        call."""
        problem = ""
        try:
            load(content)
        except Exception as error:  # the others wait to hear of it
            problem = f"{type(error).__name__}: {error}"
        if problem := self._first_of_all(problem, name="loaded"):
            raise CheckpointError(f"Expected a checkpoint of this job in {self._file.path}. Received: {problem}.")

    def _first_of_all(self, problem: str, *, name: str) -> str:
        """Returns the problem of the first rank that has one; "" if none has. A collective call."""
        problems = gather_text(self._engine, problem, name=f"hvd_hetero.checkpoint.{name}")
        return next(filter(None, problems), "").removesuffix(".")


def _packed(parts: Sequence[bytes]) -> list[bytes]:
    """Returns the pieces of the file's content: a JSON line with the lengths of the parts in bytes, and the parts."""
    return [json.dumps([len(part) for part in parts]).encode() + b"\n", *parts]


def _unpacked(content: Content) -> list[bytes]:
    """Returns the parts of what `_packed` returned. They are all of it that is held in memory."""
    return [content.read(length) for length in json.loads(content.readline())]
