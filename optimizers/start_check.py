"""Checks that all ranks hold the same parameters before they make local steps."""

from __future__ import annotations

import numpy as np

from hvd_hetero.engine.port import Engine, Handle
from hvd_hetero.policy.rank_words import ranks_text

from .parameter_store import ParameterStore


class StartCheck:
    """Compares checksums of all ranks' parameters, each time that local steps of one optimizer begin.

    Args:
        name: of the engine's operation; the same on all ranks.
    """

    def __init__(self, engine: Engine, store: ParameterStore, *, name: str) -> None:
        self._engine, self._store, self._name = engine, store, name
        self._under_way: Handle | None = None  # the checksums of all ranks, which have not been compared yet

    def send(self) -> Handle:
        """Sends this rank's checksums. The handle returns those of all ranks: int64 of shape [ranks, fragments]."""
        row = np.array([[self._store.checksum(index) for index in range(len(self._store.lossy))]], dtype=np.int64)
        return self._engine.allgather_async(row, name=self._name)

    def begin(self) -> None:
        """Begins to compare, before this rank's first local step. A collective call.

        Waits for all ranks' checksums, unless one waits for this rank elsewhere: it may have left out its first step,
        and be in a validation, or in a merge of another optimizer. They are compared as they come then: see `hear`.

        Raises:
            RuntimeError: on every rank, if parameters differ between ranks. `hear` and `end` raise it as well.
        """
        self._under_way = self.send()
        if self._engine.wait_avoiding_deadlock(self._under_way.done, name=self._name):
            self.end()

    def hear(self) -> None:
        """Compares the checksums that were waited for, if they have come."""
        if self._under_way is not None and self._under_way.done():
            self.end()

    def end(self) -> None:
        """Waits for checksums that have not been compared yet, if there are any, and compares them."""
        if self._under_way is None:
            return
        handle, self._under_way = self._under_way, None
        found = np.asarray(handle.wait()).tolist()
        ranks = self._engine.ranks
        if others := [rank for rank, value in zip(ranks, found, strict=True) if value != found[0]]:
            raise RuntimeError(
                "Expected the same parameters on every rank before local steps begin. Received: others than rank "
                f"{ranks[0]}'s on {ranks_text(others)}. Broadcast the parameters from rank {ranks[0]} after making the "
                "optimizer, and load checkpoints on all ranks or before it. Where another optimizer has made local "
                "steps with them, call its merge() before making this one, or what ranks did is lost. What moves them "
                "within a step and back, as SAM does, has to go back to a copy. A Keras model that is built by its "
                "first step is broadcast after that: begin it with keras.Input(...)."
            )

    def forget(self) -> None:
        """Forgets checksums that will not come, as the other ranks are gone."""
        self._under_way = None
