"""Accumulates the gradients of one step's backward passes in `p.grad`, where passes have unlike numbers of loss terms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_hetero.engine import script

CHANGED = (
    "Expected the p.grad that backward() left, where a step is over fewer passes than were to come and gradients are "
    "exchanged in step(). Received: others, such as clipped ones, which were each rank's own. Call "
    "optimizer.synchronize() before what changes or looks at p.grad."
)


class GradientAccumulation:
    """Keeps `p.grad` equal to sum(n_j g_j) / n over the passes so far, with g_j pass j's mean gradient over n_j terms.

    `p.grad` is in units of 1 / n, with n the loss terms of the last pass that had any: autograd may then add the next
    pass's mean gradient to it, whatever the passes' sizes. A pass whose number of terms is not given is over the same
    terms as the pass before it (another loss of the same batch): g_j is the sum of their gradients, as in one process.
    What `p.grad` held before the first pass is kept, and added to the gradient in the end, as in one process.

    Args:
        parameters: those whose `p.grad` is kept; a sequence that may grow.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._counts: list[float] = []
        self._stash: dict[torch.nn.Parameter, torch.Tensor | None] | None = None
        self._said = False  # whether the number of terms of the next pass has been given
        self._added = False  # whether there was a pass with gradients since the last exchange
        self._kept = False  # whether what `p.grad` held before the first pass is set aside, or rescaled in place
        self._before: dict[torch.nn.Parameter, torch.Tensor] = {}  # what it held, if further passes follow
        self.unit = 0.0  # n; 0 while `p.grad` holds nothing
        self._by = 0  # how many passes at the end of this batch's left `p.grad` as it was
        self._batch = 0  # how many passes were over batches before the present one
        self._loop = 0  # number of the loop over a batch's parts that the last pass with gradients was in
        self._left: dict[torch.nn.Parameter, tuple[int, int]] = {}  # versions of `p.grad` after a pass, not the last
        self._warned = False

    @property
    def _trained(self) -> list[torch.nn.Parameter]:
        """The parameters that are not frozen for now. No exchange would make the `p.grad` of frozen ones global."""
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    @property
    def terms(self) -> float:
        """Loss terms of all passes."""
        return sum(self._counts)

    @property
    def begun(self) -> bool:
        """Whether there was a pass."""
        return bool(self._counts)

    def expect(self) -> None:
        """Notes that `begin` will be given the number of loss terms of the next pass, as it is over other samples."""
        self._said = True

    def begin(self, terms: float, *, earlier: float = 0.0, loop: int = 0) -> None:
        """Begins a pass over `terms` loss terms: rescales what earlier passes have left in `p.grad` to its units.

        Args:
            earlier: loss terms of this batch's parts before the present one. If those are not among the passes counted
                here, their gradients went with an earlier exchange.
            loop: number of the loop over a batch's parts. Each loop goes over all of the batch, whose terms count once.
        """
        if not earlier:
            self.end_loss()
        elif not self._counts and not self._said:
            self._counts.append(earlier)
        if loop != self._loop:
            del self._counts[self._batch : len(self._counts) - self._by]
        if self._said or not self._added:
            self._counts.append(terms)
        self._said, self._added, self._by, self._loop = False, True, 0, loop
        if not self.unit:
            self.unit = terms
        elif terms == 0:  # what this pass leaves in p.grad counts for nothing, and may be NaN
            self._stash = {p: p.grad for p in self._trained}
            self._forget()
        elif self.unit != terms:
            self._multiply(self.unit / terms)
            self.unit = terms

    def keep(self, *, last: bool, gain: float) -> None:
        """Preserves what `p.grad` held before the step's first gradient; is called before a gradient is added.

        That content must come out unchanged, though the mean over all terms is multiplied by `gain`. It is set aside if
        further passes follow, and rescaled in place if this is the `last` pass before the exchange."""
        counts = self.unit and self._stash is None  # otherwise what this pass leaves in p.grad is thrown away
        if self._kept and last and counts:
            self._add_before(gain)
        elif not self._kept and last and counts:
            self._multiply(self.terms / self.unit / gain)
        elif not self._kept:
            self._before = {p: p.grad for p in self._trained if p.grad is not None and not is_zero(p.grad)}
            for parameter in self._before:
                parameter.grad = None
        self._kept = True

    def count_untouched(self, terms: float) -> None:
        """Counts a pass that had no gradient of these parameters, and left `p.grad` as it was."""
        self._counts.append(terms)
        self._said = False
        self._by += 1

    def put(self, terms: float, *, batches: int = 1) -> None:
        """Counts what a script has put into `p.grad` by hand, without a backward pass: the sum of the mean gradients of
        `batches` batches, over `terms` loss terms in all."""
        self.begin(terms)
        self._multiply(1.0 / batches)
        self._kept = True

    def end_loss(self) -> None:
        """Ends the passes of a batch over one loss. Drops the trailing passes that left `p.grad` as it was: their loss
        does not depend on these parameters."""
        if self._by:
            del self._counts[-self._by :]
        self._by = 0

    def end_batch(self, *, counts: bool, loop: int) -> None:
        """Ends the passes of a batch.

        Args:
            counts: whether passes that left `p.grad` as it was count as well, as gradients of zero.
            loop: number of the last loop over the batch's parts.
        """
        counted = len(self._counts) - self._by > self._batch and loop != self._loop  # by an earlier loop
        if counted or not counts:
            self.end_loss()
        self._by, self._batch = 0, len(self._counts)

    def end(self) -> None:
        """Ends a pass after which others follow before the exchange."""
        self._restore()
        if not self.unit:  # nothing counted yet, so nothing may be left, not even a NaN
            self._forget()
        self._left = {p: _version(p.grad) for p in self._trained}

    def warn_of_changes(self) -> None:
        """Warns, once, if `p.grad` is not what the last pass left. Is called before an exchange that comes in step()
        because there were fewer passes than announced."""
        if not self._warned and any(_version(p.grad) != left for p, left in self._left.items() if p.requires_grad):
            self._warned = True
            script.warn(CHANGED)

    def complete(self, gain: float) -> None:
        """Ends all passes of the step, and adds what `p.grad` held before them. `gain`: see `keep`."""
        self._restore()
        if not self.unit:
            if self._added:
                self._forget()  # as above
            else:
                self._multiply(1.0 / gain)  # p.grad holds only what it held before the step
            self.unit = self.terms
        if self.unit:
            self._add_before(gain)

    def average(self, scale: float) -> None:
        """Makes `p.grad` the mean over the loss terms of all passes, times `scale`; None if there were no terms."""
        if self.terms:
            self._multiply(scale * self.unit / self.terms)
        else:
            self._forget()

    def clear(self) -> None:
        """Forgets all passes: what `p.grad` holds now is the global gradient, or will not count."""
        self._stash = None
        self._counts.clear()
        self._before.clear()
        self._added, self._kept, self.unit, self._by, self._batch = False, False, 0.0, 0, 0
        self._left = {}

    def _restore(self) -> None:
        """Puts back the `p.grad` that was set aside during a pass without loss terms, which must not change it."""
        if self._stash is not None:
            for parameter, grad in self._stash.items():
                parameter.grad = grad
            self._stash = None

    def _forget(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            # Each once: a script may have given two parameters one tensor, as `torch.autograd.grad` does for a sum.
            for grad in {id(p.grad): p.grad for p in self._trained if p.grad is not None}.values():
                grad.mul_(factor)

    def _add_before(self, gain: float) -> None:
        """Adds what `p.grad` held before the first pass, so scaled that the exchange leaves it unchanged."""
        for parameter, before in self._before.items():
            before.mul_(self.terms / self.unit / gain)
            if (added := parameter.grad) is None:
                parameter.grad = before
            else:
                parameter.grad = added + before if before.is_sparse else before.add_(added)
        self._before = {}


def _version(gradient: torch.Tensor | None) -> tuple[int, int]:
    """A mark that changes when `p.grad` becomes another tensor or is written to."""
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def is_zero(gradient: torch.Tensor) -> bool:
    """Whether a gradient, also a sparse one, is zero throughout."""
    return not (gradient._nnz() if gradient.is_sparse else gradient.any())
