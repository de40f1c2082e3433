"""Gradients added up over several batches: drops those of a plain optimizer that becomes a distributed one; finds those
of variables in a layout, as layers may be frozen or thawed between two updates; weights those that Keras adds up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import keras

from hvd_hetero.optimizers.unsent_state import Count

from .layout import BucketLayout, Spec
from .second_moments import keepers_of


def begin_anew(optimizer: Any, passes: int) -> None:
    """Puts `optimizer` back to its last update, if it was given batches since: the next one is `passes` batches away.

    What was added up of them is each rank's own, and no part of an optimizer that was saved. Keras has no public name
    for what it adds up itself.
    """
    if over := int(keras.ops.convert_to_numpy(optimizer._iterations)) % passes:
        optimizer._iterations.assign(optimizer._iterations - over)
        for sums in sums_of(optimizer):
            sums.assign(keras.ops.zeros_like(sums))


def sums_of(optimizer: Any) -> list[Any]:
    """The variables in which an optimizer, or the one within it, adds up gradients itself; none before it is built."""
    return [sums for sums in getattr(keepers_of(optimizer)[0], "_accumulated_gradients", ()) if sums is not None]


def batches_of(optimizer: Any) -> int:
    """How many batches an optimizer has taken. Keras has no public name for that."""
    return int(keepers_of(optimizer)[0]._iterations)


def places(layout: BucketLayout, specs: Sequence[Spec | None], variables: Sequence[Any]) -> dict[Hashable, Any]:
    """The places in a layout's buckets of each variable's gradient and, if there are any, marks (see `presence`)."""
    parts = iter(layout.parts)
    found: dict[Hashable, Any] = {id(v): next(parts) for v, s in zip(variables, specs, strict=False) if s is not None}
    for marks in parts:
        names = [*(("mark", id(v)) for v in variables), "samples"]
        found.update({name: marks[i : i + 1] for i, name in enumerate(names)})
    return found


class BatchWeights:
    """Weights a rank's own gradients by its share of each batch, in local steps of an optimizer that adds up those of
    several batches itself and divides by their number k, as Keras does with loss scaling.

    The plan, or the density of a mask, may change between the batches of an update. After j of them, with shares n_i
    (in loss terms), what is added up is (1 / s) sum n_i g_i, with s the mean share so far. So what is applied after k
    is sum n_i g_i / sum n_i. While the share stays, nothing is changed. In an update that began with synchronous
    batches, whose gradients are of all ranks, batches count alike.

    Args:
        batches: k.
        optimizer: returns the optimizer.

    Attributes:
        state: the shares of the batches of this update that the optimizer has taken, and s (0: nothing is added up).
    """

    def __init__(self, batches: int, optimizer: Callable[[], Any]) -> None:
        self._batches, self._optimizer = batches, optimizer
        self.state: Count = Count(([], 0.0))
        self._before = 0  # how many batches the optimizer had taken before this one

    def before_batch(self, share: float) -> float:
        """What this batch's gradient is to be multiplied by. May write `sums`.

        Args:
            share: loss terms that this rank would have in a whole batch, by the plan; 0 where it has none.
        """
        self._before = batches_of(self._optimizer())
        if self._mixed:
            return 1.0
        taken, unit = self.state.value
        mean = (sum(taken) + share) / (len(taken) + 1)
        if unit not in (0.0, mean):
            for added in self.sums:
                added.assign(added * (unit / mean))
        self.state.value = taken, mean
        return share / mean if mean else 1.0

    def after_batch(self, share: float) -> float | None:
        """Ends a batch, which the optimizer has skipped if its gradients were not finite.

        Returns:
            Where it has made an update with it, what that counts for (`LocalWork.gradients`); else None.
        """
        taken, unit = self.state.value
        now, mixed = batches_of(self._optimizer()), self._mixed
        if now == self._before:
            self.state.value = taken, unit if taken else 0.0
            return None
        taken = [*taken, share]
        self.state.value = taken, unit
        if now % self._batches:
            return None
        self.begin_anew()
        return sum(each > 0 for each in taken) / len(taken) if mixed else float(any(taken))

    def begin_anew(self) -> None:
        """Forgets the batches of this update: those that come count alike with them, or are of the next one."""
        self.state.value = [], 0.0

    @property
    def sums(self) -> list[Any]:
        """The variables in which the optimizer adds up."""
        return sums_of(self._optimizer())

    @property
    def _mixed(self) -> bool:
        """Whether this update began with other batches than those of local steps."""
        return self._before % self._batches != len(self.state.value[0])
