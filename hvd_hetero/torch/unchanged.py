"""Checks that nothing but its own update changes the parameters after the backward passes of a local step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FOREIGN = (
    "Expected step() of the hvd.DistributedOptimizer after each backward() of a local strategy, or none. Received: "
    "parameters that something else has changed, such as step() of the optimizer that it was made of, so that what "
    "this rank did is in no merge. Step, and give to scalers and schedulers, what hvd.DistributedOptimizer returned."
)


class Unchanged:
    """Compares parameters with what they were, by PyTorch's counts of in-place writes.

    Args:
        parameters: those to compare; the list may grow.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions: int | None = None

    def _now(self) -> int:
        return sum(parameter._version for parameter in self._parameters)

    def keep(self) -> None:
        """Notes the parameters as they are now, which `check` compares with."""
        self._versions = self._now()

    def release(self) -> None:
        """Lets the parameters change from now on."""
        self._versions = None

    def check(self) -> None:
        """Raises RuntimeError if the parameters have changed since `keep`. From then on they may change."""
        if self._versions not in (None, self._now()):
            raise RuntimeError(FOREIGN)
        self.release()
