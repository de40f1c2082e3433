"""The backward passes of one step, over different numbers of loss terms, added up in `p.grad`."""

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
    """Keeps `p.grad` equal to sum(n_j g_j) / n over the passes so far, where pass j's mean over n_j terms is g_j.

    `p.grad` is in units of 1 / n: adding the next pass's mean gradient to it then gives the right sum again, whatever
    the passes' sizes. A pass of which no terms are said is over those of the one before it, as another loss of the same
    batch is: g_j is the sum of their gradients, as without ranks. What `p.grad` held before the first pass is in the
    end what it was, beside the gradient, as without ranks.

    Args:
        parameters: a sequence that may grow.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._counts: list[float] = []
        self._stash: dict[torch.nn.Parameter, torch.Tensor | None] | None = None
        self._said = False  # over how many terms the next pass is
        self._added = False  # whether there was a pass with gradients since the last exchange
        self._kept = False  # whether what `p.grad` held before that is seen to
        self._before: dict[torch.nn.Parameter, torch.Tensor] = {}  # that, where further passes follow
        self.unit = 0.0  # n; 0 while `p.grad` holds nothing
        self._by = 0  # so many of the last passes of this batch left `p.grad` as it was
        self._batch = 0  # so many passes were over batches before the present one
        self._loop = 0  # of the last pass with gradients
        self._left: dict[torch.nn.Parameter, tuple[int, int]] = {}  # by the last pass, where others were to follow
        self._warned = False

    @property
    def _trained(self) -> list[torch.nn.Parameter]:
        """But for those that are frozen for now: no exchange would make one of what ranks do to their `p.grad`."""
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
        """It is said over how many loss terms the next pass is."""
        self._said = True

    def begin(self, terms: float, *, earlier: float = 0.0, loop: int = 0) -> None:
        """A pass over `terms` loss terms begins, before it adds to what earlier ones have left.

        Args:
            earlier: those of this batch's parts before the present one, whose gradients went with an exchange if they
                are not among these passes.
            loop: number of the loop over a batch's parts. Each goes over all of the batch, whose terms count once.
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
        """Before a gradient is added: sees to what `p.grad` held before the first one, which is to stay as it is when
        the mean over all terms is multiplied by `gain`. `last`: no pass follows before the exchange."""
        counts = self.unit and self._stash is None  # or what this pass leaves in p.grad is thrown away
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
        """Counts what a script has put into `p.grad`, without a pass, as the sum over so many batches of their mean
        gradients, over `terms` loss terms in all."""
        self.begin(terms)
        self._multiply(1.0 / batches)
        self._kept = True

    def end_loss(self) -> None:
        """The passes of a batch over one loss are over; those that left `p.grad` as it was to the end are of a loss
        that is none of these parameters' business."""
        if self._by:
            del self._counts[-self._by :]
        self._by = 0

    def end_batch(self, *, counts: bool, loop: int) -> None:
        """The passes of a batch are over; `counts`: also where they left `p.grad` as it was. `loop`: the last one."""
        counted = len(self._counts) - self._by > self._batch and loop != self._loop  # by one before that
        if counted or not counts:
            self.end_loss()
        self._by, self._batch = 0, len(self._counts)

    def end(self) -> None:
        """After a pass that others follow before the exchange."""
        self._restore()
        if not self.unit:  # nothing counted yet, so nothing may be left, not even a NaN
            self._forget()
        self._left = {p: _version(p.grad) for p in self._trained}

    def warn_of_changes(self) -> None:
        """Before an exchange that comes early: warns, once, where `p.grad` is not what the last pass left."""
        if not self._warned and any(_version(p.grad) != left for p, left in self._left.items() if p.requires_grad):
            self._warned = True
            script.warn(CHANGED)

    def complete(self, gain: float) -> None:
        """After all passes; `gain`: see `keep`."""
        self._restore()
        if not self.unit:
            if self._added:
                self._forget()  # as above
            else:
                self._multiply(1.0 / gain)  # it holds what it held before
            self.unit = self.terms
        if self.unit:
            self._add_before(gain)

    def average(self, scale: float) -> None:
        """Makes `p.grad` the mean over the terms of all passes, times `scale`; None where there were none."""
        if self.terms:
            self._multiply(scale * self.unit / self.terms)
        else:
            self._forget()

    def clear(self) -> None:
        """Starts anew: what `p.grad` holds is the global gradient, or will not count."""
        self._stash = None
        self._counts.clear()
        self._before.clear()
        self._added, self._kept, self.unit, self._by, self._batch = False, False, 0.0, 0, 0
        self._left = {}

    def _restore(self) -> None:
        """Puts back what a pass without terms must not touch."""
        if self._stash is not None:
            for parameter, grad in self._stash.items():
                parameter.grad = grad
            self._stash = None

    def _forget(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            for parameter in self._trained:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _add_before(self, gain: float) -> None:
        """Adds what `p.grad` held before the first pass, with the weight of all terms."""
        for parameter, before in self._before.items():
            before.mul_(self.terms / self.unit / gain)
            if (added := parameter.grad) is None:
                parameter.grad = before
            else:
                parameter.grad = added + before if before.is_sparse else before.add_(added)
        self._before = {}


def _version(gradient: torch.Tensor | None) -> tuple[int, int]:
    """Another one where `p.grad` is another tensor, or holds something else."""
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def is_zero(gradient: torch.Tensor) -> bool:
    """Whether a gradient, also a sparse one, is zero throughout."""
    return not (gradient._nnz() if gradient.is_sparse else gradient.any())
