"""The backward passes of one step, over different numbers of loss terms, added up in `p.grad`."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Passes:
    """Keeps `p.grad` equal to sum(n_j g_j) / n over the passes so far, where pass j's mean over n_j terms is g_j.

    `p.grad` is in units of 1 / n: adding the next pass's mean gradient to it then gives the right sum again, whatever
    the passes' sizes. A pass of which no terms are said is over those of the one before it, as another loss of the same
    batch is: g_j is the sum of their gradients, as without ranks.

    Args:
        parameters: a sequence that may grow.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._counts: list[float] = []
        self._stash: dict[torch.nn.Parameter, torch.Tensor | None] | None = None
        self._said = False  # over how many terms the next pass is
        self._kept = False  # whether gradients have been added since the last exchange
        self.unit = 0.0  # n; 0 while `p.grad` holds nothing
        self._by = 0  # so many of the last passes of this batch left `p.grad` as it was

    @property
    def terms(self) -> float:
        """Loss terms of all passes."""
        return sum(self._counts)

    @property
    def begun(self) -> bool:
        """Whether there was a pass."""
        return bool(self._counts)

    def expect(self, terms: float) -> None:
        """Before a pass over `terms` loss terms."""
        self._said = True
        self.restore()
        if not self._counts or not self.unit:
            return
        if terms == 0:  # what this pass leaves in p.grad counts for nothing, and may be NaN
            self._stash = {p: p.grad for p in self._parameters}
            for parameter in self._parameters:
                parameter.grad = None
        elif self.unit != terms:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.unit / terms)
            self.unit = terms

    def begin(self, terms: float) -> None:
        """At the first gradient of a pass."""
        if self._said or not self._counts:
            self._counts.append(terms)
        self._said, self._by = False, 0

    def pass_by(self, terms: float, *, final: bool) -> None:
        """Counts a pass that leaves `p.grad` as it is; `final`: the exchange follows."""
        by = self._by + 1
        self.begin(terms)
        self.end(final=final)
        self._by = by

    def end_loss(self, *, counts: bool) -> None:
        """The passes of a batch over one loss are over; unless it `counts`, those that left `p.grad` as it was to the
        end are of a loss that is none of these parameters' business."""
        if self._by and not counts:
            del self._counts[-self._by :]
            if not self._counts:
                self.unit = 0.0
        self._by = 0

    def end(self, *, final: bool) -> None:
        """After a pass; `final`: the exchange follows."""
        self.restore()
        if not self.unit:
            self.unit = self._counts[-1]
            if not self.unit and not final:  # nothing counted yet, so nothing may be left, not even a NaN
                for parameter in self._parameters:
                    parameter.grad = None

    def restore(self) -> None:
        """Puts back what a pass without terms must not touch."""
        if self._stash is not None:
            for parameter, grad in self._stash.items():
                parameter.grad = grad
            self._stash = None

    def keep(self, scale: float) -> None:
        """Before gradients are added: what `p.grad` holds before the first one, as of a backward pass that no step has
        followed, stays as it is when means are multiplied by `scale`."""
        if self._kept:
            return
        self._kept = True
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / scale)

    def average(self, scale: float) -> None:
        """Makes `p.grad` the mean over the terms of all passes, times `scale`; None where there were none."""
        factor = scale * self.unit / self.terms if self.terms else 0.0
        for parameter in self._parameters:
            if not self.terms:
                parameter.grad = None
            elif factor != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clear(self) -> None:
        """Starts anew: what `p.grad` holds is the global gradient, or will not count."""
        self._stash = None
        self._counts.clear()
        self._kept, self.unit, self._by = False, 0.0, 0
