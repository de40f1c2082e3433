"""Chooses the algorithm that all-reduces a bucket fastest, from measured times.

First from times of each route at a few sizes (`choose`); then, where two are near each other, from a trial on the
running job (`rivals`, `confirm`). What the links of a cluster make one expect is in `policy.cost_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .link import Link


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The route that was chosen for a bucket, and why."""

    route: str  # the title of the route: its algorithm and codecs
    predicted_s: float  # predicted or measured seconds of the bucket's sum
    reason: str


MARGIN = 0.1  # a route replaces the default only if it takes less time by this fraction: timing has errors


def _clearly_fastest(seconds: Mapping[str, float], default: str) -> str:
    """The route that takes the least time, if that is less by `MARGIN` than `default` takes; else `default`."""
    best = min(seconds, key=lambda route: (seconds[route], route))
    return best if seconds[best] <= (1 - MARGIN) * seconds[default] else default


def choose(size_bytes: float, timed: Mapping[str, Link], *, default: str) -> Choice:
    """The route that should be fastest for a bucket of `size_bytes`.

    Args:
        size_bytes: size of the bucket.
        timed: maps each route to its time as a function of size, fitted to timings.
        default: the route that is chosen unless another one is faster by `MARGIN`.

    Raises:
        ValueError: `default` was not timed.
    """
    if default not in timed:
        raise ValueError(f"default: expected one of {', '.join(timed)}. Received: {default!r}.")
    predicted = {route: line.time_s(size_bytes) for route, line in timed.items()}
    best = _clearly_fastest(predicted, default)
    others = sorted((seconds, route) for route, seconds in predicted.items() if route != best)
    against = f"; next {others[0][1]} {1e3 * others[0][0]:.1f} ms" if others else ""
    return Choice(
        route=best,
        predicted_s=predicted[best],
        reason=f"{size_bytes / 2**20:.2f} MiB: {best} {1e3 * predicted[best]:.1f} ms predicted{against}",
    )


def rivals(size_bytes: float, timed: Mapping[str, Link], chosen: str, *, within: float = 1.5) -> Sequence[str]:
    """The routes that a trial on the running job should compare, see `router.Trial`.

    Args:
        size_bytes: size of the bucket.
        timed: as for `choose`.
        chosen: the route that `choose` returned.
        within: the next best route is compared too if it should take at most so many times as long as `chosen`.
    """
    predicted = sorted((line.time_s(size_bytes), route) for route, line in timed.items() if route != chosen)
    near = [route for seconds, route in predicted[:1] if seconds <= within * timed[chosen].time_s(size_bytes)]
    return (chosen, *near)


def confirm(measured_s: Mapping[str, Sequence[float]], chosen: str, size_bytes: float) -> Choice:
    """The result of a trial on the running job: `chosen`, unless another route has a smaller median by `MARGIN`.

    Args:
        measured_s: maps each route to its measured seconds.
        chosen: the route that `choose` returned.
        size_bytes: size of the bucket, for the reason.
    """
    medians = {route: sorted(times)[len(times) // 2] for route, times in measured_s.items()}
    best = _clearly_fastest(medians, chosen)
    listed = ", ".join(f"{route} {1e3 * seconds:.1f} ms" for route, seconds in sorted(medians.items()))
    return Choice(
        route=best, predicted_s=medians[best], reason=f"{size_bytes / 2**20:.2f} MiB: {best}; measured {listed}"
    )
