"""Adam's second moments on a rank that steps apart, kept as those of synchronous training. For any framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hvd_hetero.policy.second_moments import Mixture, mixture


class Moments(NamedTuple):
    """What an optimizer of Adam's kind keeps for one parameter.

    Attributes:
        first, second: what it goes on with.
        key: the same for the same `second`, as long as that lives.
        steps: how many it has made; a number, or what `float` makes one.
    """

    first: Any
    second: Any
    key: Any
    betas: tuple[float, float]
    steps: Any


class _Known(NamedTuple):
    """A second moment as it was, `steps` steps after its beginning."""

    key: Any
    before: Any
    steps: float


class SecondMoments:
    """Exchanges what steps apart have added to second moments: see `policy.second_moments`.

    Args:
        find: the moments that an optimizer keeps of the parameters that its last step has moved.
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
        self._known: dict[int, _Known] = {}  # by id of the key
        self._steps = self._with_samples = 0  # since they were known
        self._parts = 0.0

    def after_step(self, optimizer: Any, part: float, *, sent: bool) -> None:
        """After its update over this part of the global batch; `sent`: and what was done until then is sent."""
        self._steps += 1
        self._parts += part
        self._with_samples += part > 0
        if sent or not self._known:
            self.catch_up(optimizer)

    def catch_up(self, optimizer: Any) -> None:
        """Exchanges what was not yet."""
        if not self._steps:
            return
        part = self._parts / self._with_samples if self._exchanges and self._with_samples else 1.0
        known: dict[int, _Known] = {}
        old: list[tuple[Moments, _Known]] = []
        for moments in self._find(optimizer):
            was = self._known.get(id(moments.key))
            if was is None or was.key is not moments.key:
                known[id(moments.key)] = _Known(moments.key, self._copy(moments.second), float(moments.steps))
            else:
                old.append((moments, was._replace(steps=was.steps + self._steps)))
        mixtures = [mixture(part, betas=each.betas, steps=was.steps, new=self._steps) for each, was in old]
        now = self._mix([moments for moments, _ in old], [was.before for _, was in old], mixtures)
        for (_, was), before in zip(old, now, strict=True):
            known[id(was.key)] = was._replace(before=before)
        self._known = known
        self._steps = self._with_samples = 0
        self._parts = 0.0

    def before(self, moments: Moments) -> Any:
        """What a second moment was when progress was last sent; None where that is not known."""
        was = self._known.get(id(moments.key))
        return was.before if was is not None and was.key is moments.key else None

    def end(self) -> None:
        """Ranks step together from now on."""
        self._known = {}
