"""Warns of a training loop that loads batches ahead of their use, goes on with batches after the loader's last, or
takes them from a loader that the optimizer knows nothing of."""

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
STRANGER = (
    "Where the loss is a mean over the batch loaded last: expected an hvd.BalancedDataLoader with the optimizer's "
    "balancer. Received: one with another balancer, which no optimizer has. Gradients are weighted by the samples that "
    "the optimizer's balancer has dealt, so those of this batch count wrongly where shares differ. What to do: "
    "docs/pytorch.md, \"Prefetchers, and several loaders\"."
)


class BatchOrder:
    """Warns, once, of a backward pass that follows an unused batch in the same loop, the end of a loop, or a batch that
    a balancer without an optimizer has dealt.

    Gradients are weighted by the samples of the batch that the loader handed out last, so each batch needs its backward
    pass before the next one is loaded. A loop without any backward pass, such as an evaluation, is fine. A loop is one
    iteration over `BalancedDataLoader`.

    Attributes:
        used: whether a batch of the loop that began last was used.
        over: whether a loop has ended, and no batch has begun since.
    """

    def __init__(self) -> None:
        self._samples = 0  # samples of the batch begun last, until it is used
        self._unused = 0  # samples of a batch of this loop that was never used; 0: none
        self._told = False  # whether the warning was given
        self.used = self.over = False

    def begins(self, samples: int, *, first: bool) -> None:
        """Notes that a loop gets a batch, of which this rank has `samples`; `first`: the first batch of the loop."""
        if first:
            self._unused, self.used = 0, False
        elif self._samples:
            self._unused = self._samples
        self._samples = samples

    def ends(self) -> None:
        """Notes that a loop has reached the end of its loader."""
        self.over = True

    def leaves(self) -> None:
        """Notes that a loop was left before its end: its batches need no backward pass."""
        self._samples = self._unused = 0

    def any_begins(self) -> None:
        """Notes that a batch begins, from a loader or by `balancer.begin` in a script."""
        if self.over:  # the loop that ended may be an evaluation within a training loop: no pass over it will follow
            self.leaves()
        self.over = False

    def passes(self, *, stranger: bool) -> None:
        """Notes that a backward pass begins, and warns if a batch was left unused before it, the loop has ended, or a
        `stranger`, a balancer that no optimizer has, dealt the last batch."""
        self.steps()
        if not self._told and (self._unused or self.over or stranger):
            self._told = True
            script.warn(UNUSED.format(samples=self._unused) if self._unused else STRANGER if stranger else OVER)

    def steps(self) -> None:
        """Notes that the present batch is used, also where a rank takes a step without a backward pass."""
        self._samples, self.used = 0, True
