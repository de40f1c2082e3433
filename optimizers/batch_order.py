"""Whether each batch is used before the next one begins, and none after the last."""

from __future__ import annotations

from hvd_hetero.engine import script

UNUSED = (
    "Expected a backward pass for each batch of hvd.BalancedDataLoader before the next one is loaded. Received: none "
    "for a batch of {samples} samples. Gradients are weighted by the samples of the batch loaded last, so a script "
    "that loads batches ahead of their use, or takes those of two loaders into one step, is not exact where sizes "
    "differ: when a plan changes, and in a short last batch. What to do: docs/pytorch.md, \"Data\". A script that "
    "leaves batches out can ignore this."
)
OVER = (
    "Expected each batch of hvd.BalancedDataLoader as the loader hands it out. Received: a backward pass after the "
    "last one, as with itertools.cycle, which hands out the batches of the first epoch for ever. Gradients are "
    "weighted by the samples of the last batch. Iterate over the loader anew for each epoch."
)


class BatchOrder:
    """Warns, once, where a loop has a backward pass after a batch that had none, or after its end.

    Loops without any, as an evaluation's, are nobody's concern.
    """

    def __init__(self) -> None:
        self._samples = 0  # of the batch begun last, while it is unused
        self._unused = 0  # samples of a batch of this loop that was left unused
        self._over = self._told = False

    def begins(self, samples: int, *, first: bool) -> None:
        """A batch of a loop begins, of which this rank has `samples`; `first`: it is the first one of the loop."""
        if first:
            self._unused = 0
        elif self._samples:
            self._unused = self._samples
        self._samples = samples

    @property
    def over(self) -> bool:
        """Whether a loop has ended, and no batch has begun since."""
        return self._over

    def ends(self) -> None:
        """A loop ends."""
        self._over = True

    def leaves(self) -> None:
        """A loop is left in the middle."""
        self._samples = self._unused = 0

    def any_begins(self) -> None:
        """A batch begins, of a loop or of none."""
        if self._over:  # a loop within another, as an evaluation's, used none of its batches if no pass followed
            self.leaves()
        self._over = False

    def passes(self) -> None:
        """A backward pass begins."""
        self.steps()
        if not self._told and (self._unused or self._over):
            self._told = True
            script.warn(UNUSED.format(samples=self._unused) if self._unused else OVER)

    def steps(self) -> None:
        """The present batch has its part in a step."""
        self._samples = 0
