"""Adam's second moments on a rank that steps apart, kept as those of synchronous training. For any framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hvd_hetero.policy.second_moments import Mixture, mixture


class Moments(NamedTuple):
    """What an optimizer of Adam's kind keeps for one parameter.

    Attributes:
        first, second: its moments; `second` is the same object as long as it is not another one's.
        steps: how many updates are in them.
    """

    first: Any
    second: Any
    betas: tuple[float, float]
    steps: float


class _Known(NamedTuple):
    """A second moment as it was after `steps` updates."""

    second: Any
    before: Any
    steps: float


class SecondMoments:
    """Exchanges what steps apart have added to second moments: see `policy.second_moments`.

    Args:
        find: the moments that an optimizer keeps; none for None, an optimizer that is gone.
        copy: a copy of a second moment.
        mix: makes second moments their mixtures with copies from before; returns copies of what they are now.
        exchanges: False to leave them as they are, and only know what they were.
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
        self._with_samples = 0  # steps since they were known
        self._parts = 0.0

    def before_step(self, optimizer: Any) -> None:
        """Before an update apart."""
        if not self._known:
            self._catch_up(optimizer)

    def after_step(self, optimizer: Any, part: float, *, sent: bool) -> None:
        """After its update over this part of the global batch; `sent`: and what was done until then is sent."""
        self._parts += part
        self._with_samples += part > 0
        if sent or not self._known:
            self._catch_up(optimizer)

    def end(self, optimizer: Any) -> None:
        """Exchanges the rest, and knows nothing any more: others may look at what the optimizer keeps, or write it."""
        self._catch_up(optimizer)
        self._known = {}

    def _catch_up(self, optimizer: Any) -> None:
        """Exchanges what was not yet."""
        part = self._parts / self._with_samples if self._exchanges and self._with_samples else 1.0
        known: dict[int, _Known] = {}
        mixed: list[Moments] = []
        befores: list[Any] = []
        mixtures: list[Mixture] = []
        recipes: dict[Any, Mixture] = {}  # most parameters have the same
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
        """What a second moment was when progress was last sent; None where that is not known."""
        was = self._known.get(id(moments.second))
        return was.before if was is not None and was.second is moments.second else None
