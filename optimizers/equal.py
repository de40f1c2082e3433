"""A balancer for those who want none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvd_hetero.engine.port import Engine

from .balancer import Balancer
from .forgotten import Forgotten


class EqualWeights(Balancer):
    """One loss term for each rank and pass, as Horovod counts. Constructing one is a collective call."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, global_batch_size=engine.size, adaptive=False)
        self._forgotten = Forgotten()

    @property
    def batch(self) -> None:
        """None, as there is no numbering of batches that is the same on all ranks."""
        return None

    def rebuild(self) -> None:
        """Goes on with one term for each rank that there is now. A collective call."""
        self._asked = replace(self._asked, global_batch_size=self.engine.size)
        super().rebuild()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, but for its plan: the global batch is as many ranks as there are."""
        self.step = int(state["step"])
        self.strategies.load_state_dict(state["strategies"])

    def begin_unseen(self) -> bool:
        """True: a batch that nothing has announced begins.

        Raises:
            RuntimeError: a balancer deals it, which was forgotten.
        """
        self._forgotten.check()
        self.begin(1)
        return True
