"""Where a rank is within the global batch in use: which part of it backward passes are over, and how many terms."""

from __future__ import annotations


class BatchProgress:
    """The global batch in use, on one rank.

    It has one part, or, as micro-batches, several; over each there may be backward passes of several losses.

    Attributes:
        samples: of this rank.
        terms: loss terms of the next backward pass; None before the first batch.
        last_pass: False while further parts of the batch are to follow.
        part: number of the part in use, counted over all batches.
        part_terms: its loss terms.
        loop: number of the last loop over the parts of a batch.
        passed: the part that the last backward pass was over, of whichever optimizer.
        backward_passes: so far, one for each optimizer that a pass has gradients for.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.terms: float | None = None
        self._earlier = 0.0  # terms of the parts before the present one
        self.last_pass = True
        self.part = 0
        self.part_terms = 0.0
        self.loop = 0
        self.passed = -1
        self.backward_passes = 0

    def begin_batch(self, samples: int) -> None:
        """A batch begins, of which this rank has so many samples; `begin_part` and `count` follow."""
        self.samples, self._earlier, self.last_pass = samples, 0.0, True

    def begin_part(self) -> None:
        """The next part begins, of this batch or of another one."""
        self.part += 1

    def count(self, terms: float) -> None:
        """Backward passes from here on are over so many loss terms."""
        self.terms = self.part_terms = terms

    def begin_micro_batch(self, *, first: bool) -> None:
        """A part of this batch begins, of several; `first`: of another loop over them. `count` and `begin_part` follow.
        """
        self._earlier = 0.0 if first else self.batch_terms
        self.loop += first

    def end_micro_batches(self) -> None:
        """The parts of this batch are over: another backward pass would be over all of it."""
        self.terms, self._earlier = self.batch_terms, 0.0

    @property
    def in_parts(self) -> bool:
        """Whether the present part is one of several of this batch, and not the first."""
        return self._earlier > 0

    @property
    def batch_terms(self) -> float:
        """The loss terms of this batch on this rank, in all its parts so far."""
        return self._earlier + (self.terms or 0.0)
