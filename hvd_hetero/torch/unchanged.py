"""Whether parameters change between the passes of a step that ranks make apart and its update: by nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FOREIGN = (
    "Expected step() of the hvd.DistributedOptimizer after each backward() of a local strategy, or none. Received: "
    "parameters that something else has changed, such as step() of the optimizer that it was made of, so that what "
    "this rank did is in no merge. Step, and give to scalers and schedulers, what hvd.DistributedOptimizer returned."
)


class Unchanged:
    """Holds parameters against what they were.

    Args:
        parameters: there may come more.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions: int | None = None

    def _now(self) -> int:
        return sum(parameter._version for parameter in self._parameters)

    def keep(self) -> None:
        """From here on they are to be what they are."""
        self._versions = self._now()

    def release(self) -> None:
        """From here on they may change."""
        self._versions = None

    def check(self) -> None:
        """Raises RuntimeError where they have changed; what follows may change them."""
        if self._versions not in (None, self._now()):
            raise RuntimeError(FOREIGN)
        self.release()
