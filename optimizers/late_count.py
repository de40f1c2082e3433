"""Whether a script says over how many terms a loss is a mean before its backward pass."""

from __future__ import annotations

import warnings

LATE = (
    "Expected balancer.count() before the backward() of the loss that it is about. Received: it after the last one of "
    "a batch, whose gradients had been weighted by then. Call it before backward()."
)


class LateCount:
    """Warns, once, of a count after which no backward pass of the batch has come, where one had come before."""

    def __init__(self) -> None:
        self._began = 0  # backward passes before the present batch
        self._said: int | None = None  # those before the last count of the batch
        self._told = False

    def said(self, terms: float, passes: int) -> None:
        """A script counts; `passes`: how many backward passes there have been."""
        self._said = passes if terms else None

    def begins(self, passes: int) -> None:
        """The next batch begins."""
        if self._said is not None and self._began < self._said == passes and not self._told:
            self._told = True
            warnings.warn(LATE, stacklevel=4)
        self._began, self._said = passes, None
