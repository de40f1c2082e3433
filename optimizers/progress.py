"""Where a rank is within the present global batch: its micro-batch, and the loss terms of the next backward pass."""

from __future__ import annotations


class BatchProgress:
    """This rank's samples of the present global batch, as its backward passes go through them. The balancer keeps it.

    The samples are one part, or several where a script divides them into micro-batches. There may be several backward
    passes over the same part, each of another loss.

    Attributes:
        samples: the number of this rank's samples in the batch.
        whole: the number of all ranks' samples in the batch; None: not known.
        terms: the number of loss terms of the next backward pass; None before the first batch.
        last_pass: False while further micro-batches of the batch are to follow; the balancer sets it.
        part: number of the present part, counted over all batches.
        part_terms: the number of loss terms of the present part.
        loop: number of the last loop over the micro-batches of a batch, counted over all batches.
        passed: number of the part that the last backward pass was over, of any optimizer; -1 before the first.
        backward_passes: the number of backward passes so far; one with gradients for two optimizers counts twice.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.whole: int | None = None
        self.terms: float | None = None
        self._earlier = 0.0  # loss terms of the batch's parts before the present one
        self.last_pass = True
        self.part = 0
        self.part_terms = 0.0
        self.loop = 0
        self.passed = -1
        self.backward_passes = 0

    def begin_batch(self, samples: int, whole: int | None) -> None:
        """Begins a batch of which this rank has `samples` samples, of `whole` if that is known. Calls of `begin_part`
        and `count` follow."""
        self.samples, self.whole, self._earlier, self.last_pass = samples, whole, 0.0, True

    def begin_part(self) -> None:
        """Begins the next part, of this batch or of a new one."""
        self.part += 1

    def count(self, terms: float) -> None:
        """Sets the number of loss terms of the backward passes from now on."""
        self.terms = self.part_terms = terms

    def begin_micro_batch(self, *, first: bool) -> None:
        """Begins a micro-batch of this batch. Calls of `count` and `begin_part` follow.

        Args:
            first: whether it is the first of a loop over the micro-batches; there may be several loops over a batch.
        """
        self._earlier = 0.0 if first else self.batch_terms
        self.loop += first

    def end_micro_batches(self) -> None:
        """Ends the micro-batches of this batch: a further backward pass is taken to be over the whole batch."""
        self.terms, self._earlier = self.batch_terms, 0.0

    @property
    def in_parts(self) -> bool:
        """Whether the present part is a micro-batch of this batch after the first one that had loss terms."""
        return self._earlier > 0

    @property
    def batch_terms(self) -> float:
        """The number of loss terms of this batch on this rank, in its parts up to the present one."""
        return self._earlier + (self.terms or 0.0)
