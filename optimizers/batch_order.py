"""Whether each batch is used before the next one begins."""

from __future__ import annotations

import warnings

UNUSED = (
    "Expected a backward pass for each batch of hvd.BalancedDataLoader before the next one is loaded. Received: none "
    "for a batch of {} samples. Gradients are weighted by the samples of the batch loaded last, so a script that loads "
    "batches ahead of their use, or takes those of two loaders into one step, is not exact where sizes differ: when a "
    "plan changes, and in a short last batch. What to do: docs/pytorch.md, \"Data\". A script that leaves batches out "
    "can ignore this."
)


class BatchOrder:
    """Warns, once, where a loop has a backward pass after a batch that had none.

    Loops without any, as an evaluation's, are nobody's concern.
    """

    def __init__(self) -> None:
        self._samples = 0  # of the batch begun last, while it is unused
        self._unused = 0  # samples of a batch of this loop that was left unused
        self._told = False

    def begins(self, samples: int, *, first: bool) -> None:
        """A batch of a loop begins, of which this rank has `samples`; `first`: it is the first one of the loop."""
        if first:
            self._unused = 0
        elif self._samples:
            self._unused = self._samples
        self._samples = samples

    def passes(self) -> None:
        """A backward pass begins, or a step is made without one."""
        self._samples = 0
        if self._unused and not self._told:
            self._told = True
            warnings.warn(UNUSED.format(self._unused), stacklevel=2)
