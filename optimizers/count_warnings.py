"""Warns of scripts whose gradients are weighted by a wrong number of loss terms."""

from __future__ import annotations

from hvd_hetero.engine import script

LATE = (
    "Expected balancer.count() before the backward() of the loss that it is about. Received: it after the last one of "
    "a batch, whose gradients had been weighted by then. Call it before backward()."
)
FEWER = (
    "Expected a batch of as many rows as the loader dealt samples, {samples}. Received: {rows}, as of a collate_fn "
    "that leaves samples out: its gradient is weighted by {samples}. Say balancer.count(rows), or over what else the "
    "loss is a mean, before backward()."
)


class CountWarnings:
    """Warns, once each, of a `balancer.count` that comes after the last backward pass of its batch, and of a batch with
    fewer rows than dealt samples for which the script does not call `balancer.count`."""

    def __init__(self) -> None:
        self._began = 0  # backward passes made before the present batch began
        self._said: int | None = None  # backward passes made before the batch's last count; None: no count
        self._told_late = self._told_fewer = False  # whether each warning was given
        self._rows: int | None = None  # rows of the present batch, if it has fewer than samples and no count

    @property
    def looks_at_rows(self) -> bool:
        """Whether `deals` is of any use still: not after the warning of too few rows, which is given once."""
        return not self._told_fewer

    def deals(self, rows: int | None) -> None:
        """Notes the rows of a batch that has fewer rows than the loader dealt samples; None for any other batch."""
        self._rows = rows

    def said(self, terms: float, passes: int) -> None:
        """Notes that the script calls `balancer.count(terms)`, after `passes` backward passes in all."""
        self._said, self._rows = passes if terms else None, None

    def passes(self, samples: int) -> None:
        """Notes that a backward pass begins, and warns if the batch of `samples` has fewer rows and no count."""
        if self._rows is not None and not self._told_fewer:
            self._told_fewer = True
            script.warn(FEWER.format(rows=self._rows, samples=samples))

    def begins(self, passes: int) -> None:
        """Notes that the next batch begins, after `passes` backward passes in all, and warns if the last count of the
        batch before came too late."""
        if self._said is not None and self._began < self._said == passes and not self._told_late:
            self._told_late = True
            script.warn(LATE)
        self._began, self._said, self._rows = passes, None, None
