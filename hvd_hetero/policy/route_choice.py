"""Chooses the route of a bucket, which is an algorithm of all-reduce with its codecs, from measured times.

Routes are first timed for some sizes (`choose_route`); the fastest ones may then be compared in steps of the running
job (`confirm_route`), where they share links and cores with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .link import Link


@dataclass(frozen=True, kw_only=True)
class RouteChoice:
    """The route that was chosen for a bucket, and why."""

    route: str  # the title of the route: its algorithm and codecs
    predicted_s: float  # predicted or measured seconds of the bucket's sum
    reason: str


MARGIN = 0.1  # a route replaces the default only if it takes less time by this fraction: timing has errors
NEAR = 1.5  # a trial compares the next best route if it should take at most so many times as long as the chosen one


def _fastest(seconds: Mapping[str, float], *, preferred: str) -> str:
    """The route that takes the fewest seconds; `preferred`, if none takes less than that one by `MARGIN`."""
    best = min(seconds, key=lambda route: (seconds[route], route))
    return preferred if seconds[best] > (1 - MARGIN) * seconds[preferred] else best


def choose_route(size_bytes: float, timed: Mapping[str, Link], *, default: str) -> RouteChoice:
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
    best = _fastest(predicted, preferred=default)
    others = sorted((seconds, route) for route, seconds in predicted.items() if route != best)
    against = f"; next {others[0][1]} {1e3 * others[0][0]:.1f} ms" if others else ""
    return RouteChoice(
        route=best,
        predicted_s=predicted[best],
        reason=f"{size_bytes / 2**20:.2f} MiB: {best} {1e3 * predicted[best]:.1f} ms predicted{against}",
    )


def rivals(size_bytes: float, timed: Mapping[str, Link], chosen: str) -> Sequence[str]:
    """The routes that a trial on the running job should compare (`RouteTrial`): the chosen one, and another if it is
    `NEAR`.

    Args:
        size_bytes: size of the bucket.
        timed: as for `choose_route`.
        chosen: the route that `choose_route` returned.
    """
    predicted = sorted((line.time_s(size_bytes), route) for route, line in timed.items() if route != chosen)
    near = [route for seconds, route in predicted[:1] if seconds <= NEAR * timed[chosen].time_s(size_bytes)]
    return (chosen, *near)


def confirm_route(measured_s: Mapping[str, Sequence[float]], chosen: str, size_bytes: float) -> RouteChoice:
    """The result of a trial on the running job: `chosen`, unless another route has a smaller median by `MARGIN`.

    Args:
        measured_s: maps each route to its measured seconds.
        chosen: the route that `choose_route` returned.
        size_bytes: size of the bucket, for the reason.
    """
    medians = {route: sorted(times)[len(times) // 2] for route, times in measured_s.items()}
    best = _fastest(medians, preferred=chosen)
    listed = ", ".join(f"{route} {1e3 * seconds:.1f} ms" for route, seconds in sorted(medians.items()))
    return RouteChoice(
        route=best, predicted_s=medians[best], reason=f"{size_bytes / 2**20:.2f} MiB: {best}; measured {listed}"
    )
