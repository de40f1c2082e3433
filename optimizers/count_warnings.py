"""Whether losses are means over as many terms as a script says, or lets be taken: what looks otherwise is told."""

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
    """Warns of a count after which no backward pass of the batch has come, where one had come before; and of a batch of
    fewer rows than samples whose script does not count."""

    def __init__(self) -> None:
        self._began = 0  # backward passes before the present batch
        self._said: int | None = None  # those before the last count of the batch
        self._told_late = self._told_fewer = False
        self._rows: int | None = None

    @property
    def looks_at_rows(self) -> bool:
        """Whether it is of use to say `deals` of a batch: until it is told that one has too few."""
        return not self._told_fewer

    def deals(self, rows: int | None) -> None:
        """A loader has dealt a batch of fewer rows than samples; None: of as many."""
        self._rows = rows

    def said(self, terms: float, passes: int) -> None:
        """A script counts; `passes`: how many backward passes there have been."""
        self._said, self._rows = passes if terms else None, None

    def passes(self, samples: int) -> None:
        """A backward pass over the batch of `samples` begins."""
        if self._rows is not None and not self._told_fewer:
            self._told_fewer = True
            script.warn(FEWER.format(rows=self._rows, samples=samples))

    def begins(self, passes: int) -> None:
        """The next batch begins."""
        if self._said is not None and self._began < self._said == passes and not self._told_late:
            self._told_late = True
            script.warn(LATE)
        self._began, self._said, self._rows = passes, None, None
