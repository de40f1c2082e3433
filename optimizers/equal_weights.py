"""The balancer of optimizers and tapes that are made without one: all ranks count alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvd_hetero.engine.port import Engine

from .balancer import Balancer
from .unused_balancer import UnusedBalancerCheck


class EqualWeights(Balancer):
    """Gives each rank the same weight: one loss term per backward pass, as Horovod does. Its shares never change.

    Constructing one is a collective call.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, global_batch_size=engine.size, adaptive=False)
        self._unused_check = UnusedBalancerCheck()

    @property
    def batch(self) -> None:
        """None, as there is no numbering of batches that is the same on all ranks."""
        return None

    def rebuild(self) -> None:
        """Goes on with the ranks that there are now, with one loss term for each. A collective call."""
        self._asked = replace(self._asked, global_batch_size=self.engine.size)
        super().rebuild()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, but not with its plan: the global batch size is the number of ranks there are now."""
        self.step = int(state["step"])
        self.strategies.load_state_dict(state["strategies"])

    def begin_if_unannounced(self) -> bool:
        """Begins a batch when a gradient comes that no data loader has announced; returns True.

        Raises:
            RuntimeError: a data loader has a balancer that was not passed to the optimizer: see `UnusedBalancerCheck`.
        """
        self._unused_check.check()
        self.begin(1)
        return True
