"""Corrects Adam's second moments on a rank in local steps, so that they are as in synchronous training.

For any framework; `policy.second_moments` has the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hvd_hetero.policy.second_moments import Mixture, mixture


class Moments(NamedTuple):
    """The moments that an optimizer of Adam's kind keeps for one parameter.

    Attributes:
        first, second: the moments. `second` must be the same object in every call for this parameter, which it
            identifies.
        betas: the decay rates of the first and the second moment.
        steps: the number of updates that the moments are made of.
    """

    first: Any
    second: Any
    betas: tuple[float, float]
    steps: float


class _Known(NamedTuple):
    """The second moment of a parameter when it was last corrected.

    Attributes:
        second: the second moment itself, which changes with each update.
        before: a copy of its values then.
        steps: the number of updates that it was made of then.
    """

    second: Any
    before: Any
    steps: float


class SecondMoments:
    """Corrects second moments in local steps: replaces what a rank's steps have added to them by what the global
    batch's gradients would have added. This needs no communication: see `policy.second_moments`.

    `LocalTraining` calls it around each local step. Between two corrections it keeps a copy of each second moment.

    Args:
        find: returns the moments that an optimizer keeps; none for an optimizer of another kind, or for None.
        copy: returns a copy of a second moment.
        mix: replaces each second moment by its `Mixture` with the copy from the last correction. Returns copies of the
            new values.
        exchanges: whether second moments are corrected. If not, only the copies are kept, for `before`.
    """

    def __init__(
        self,
        find: Callable[[Any], Iterable[Moments]],
        *,
        copy: Callable[[Any], Any],
        mix: Callable[[Sequence[Moments], Sequence[Any], Sequence[Mixture]], Sequence[Any]],
        exchanges: bool,
    ) -> None:
        self._find, self._copy, self._mix, self._exchanges = find, copy, mix, exchanges
        self._known: dict[int, _Known] = {}  # by id of the second moment
        self._with_samples = 0  # local steps with samples since the last correction
        self._parts = 0.0  # the sum of their fractions of the global batch

    def before_step(self, optimizer: Any) -> None:
        """Is called before the update of a local step. Before the first one, copies the second moments."""
        if not self._known:
            self._catch_up(optimizer)

    def after_step(self, optimizer: Any, part: float, *, sent: bool) -> None:
        """Is called after the update of a local step. Corrects second moments if the rank's progress was sent.

        Args:
            optimizer: the optimizer that made the update.
            part: the fraction of the global batch that this rank's gradient was over.
            sent: whether the progress of local steps so far is being sent to the other ranks.
        """
        self._parts += part
        self._with_samples += part > 0
        if sent or not self._known:
            self._catch_up(optimizer)

    def end(self, optimizer: Any) -> None:
        """Corrects second moments at the end of local steps, and drops the copies. From then on the optimizer's state
        may be read or replaced by others."""
        self._catch_up(optimizer)
        self._known = {}

    def _catch_up(self, optimizer: Any) -> None:
        """Corrects the second moments for all updates since the last correction, and copies the new values."""
        part = self._parts / self._with_samples if self._exchanges and self._with_samples else 1.0
        known: dict[int, _Known] = {}
        mixed: list[Moments] = []
        befores: list[Any] = []
        mixtures: list[Mixture] = []
        recipes: dict[Any, Mixture] = {}  # by betas and steps, which are the same for most parameters
        for moments in self._find(optimizer):
            second = moments.second
            was = self._known.get(id(second))
            new = moments.steps - was.steps if was is not None and was.second is second else 0.0
            if was is not None and new > 0 and part < 1:
                alike = moments.betas, moments.steps, new
                if alike not in recipes:
                    recipes[alike] = mixture(part, betas=moments.betas, steps=moments.steps, new=new)
                mixed.append(moments)
                befores.append(was.before)
                mixtures.append(recipes[alike])
            else:
                known[id(second)] = _Known(second, self._copy(second), moments.steps)
        for moments, before in zip(mixed, self._mix(mixed, befores, mixtures), strict=True):
            known[id(moments.second)] = _Known(moments.second, before, moments.steps)
        self._known = known
        self._with_samples, self._parts = 0, 0.0

    def before(self, moments: Moments) -> Any:
        """Returns the values of a second moment at the last correction; None if there is no copy."""
        was = self._known.get(id(moments.second))
        return was.before if was is not None and was.second is moments.second else None
