"""Chooses how each bucket is summed over the ranks: by an algorithm and a codec (a route).

The routes that the user's arguments allow are timed on the links. If the two fastest are near each other for the size
of a bucket, a `RouteTrial` compares them on the running job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.hierarchy import IN_PARTS, Levels
from hvd_hetero.policy.link import Link
from hvd_hetero.policy.route_choice import RouteChoice, choose_route, rivals

from .codec_spec import CodecSpec, LinkCodecs, Shape
from .route import Candidate, Route
from .route_trial import RouteTrial
from .timing import LARGE_BYTES, timed_curve
from .weighted_exchange import BucketRoute

EXACT = CodecSpec(name="none")

Tell = Callable[[str, RouteChoice], None]


class Router:
    """Makes the route of each bucket: a `Route`, or a `RouteTrial` of two. Used by `Routing`.

    `line`, `route_for` and `time_anew` are collective calls.

    Args:
        levels: the groups to which this rank belongs: its node, its peers on other nodes, and all ranks.
        algorithm: "flat", "rails", "scatter", "leader", or "auto" to choose by timing.
        codecs: the codecs between nodes and within nodes.
        tell: is called with the bucket's name and the choice, each time that a route was chosen for a bucket.
        clock: returns seconds.

    Attributes:
        timing_s: seconds that this rank has spent on timing; since the last `time_anew`, if there was one.
    """

    def __init__(
        self,
        levels: Levels,
        *,
        algorithm: str,
        codecs: LinkCodecs,
        tell: Tell = lambda name, choice: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._levels, self._algorithm, self._codecs = levels, algorithm, codecs
        self._tell, self._clock = tell, clock
        self.timing_s = 0.0
        # By the candidate's title and the type of elements:
        self._timed: dict[tuple[str, str], Link] = {}
        self._names: dict[tuple[str, str], str] = {}  # of the timed operations: kept, as Horovod's cache is limited
        self._alike: dict[tuple[str, str], tuple[Candidate, Any]] = {}  # what was timed, with an empty array like it

    def line(self, like: Any, *, lossy: bool) -> Link:
        """The time by size of that route which is fastest for large buckets, of elements of the type of `like`.

        Args:
            lossy: whether the buckets go through a codec.
        """
        lines = [self._time(like, candidate) for candidate in self._candidates(lossy)]
        return min(lines, key=lambda line: line.time_s(LARGE_BYTES))

    def _candidates(self, lossy: bool) -> list[Candidate]:
        """The routes that a bucket may take; `lossy`: whether it goes through the codecs."""
        local = self._codecs.local if lossy else EXACT
        return [
            Candidate(algorithm, spec, local)
            for spec in (self._codecs.specs if lossy else (EXACT,))
            for algorithm in self._algorithms(local)
            if not (spec.needs_matrices and algorithm in IN_PARTS)
        ]

    @property
    def chooses(self) -> bool:
        """Whether any route was chosen by timing. A single candidate is timed too, for the size of buckets, but then
        there is no choice."""
        return bool(self._timed) and any(len(self._candidates(lossy)) > 1 for lossy in (False, True))

    def time_anew(self) -> None:
        """Repeats all timings, as links may have changed. A collective call."""
        self._timed, self.timing_s = {}, 0.0
        for candidate, like in self._alike.values():
            self._time(like, candidate)

    def route_for(
        self, name: str, array: Any, shapes: Sequence[Shape], *, lossy: bool, before: BucketRoute | None = None
    ) -> BucketRoute:
        """Chooses the route of one bucket. A collective call.

        Args:
            name: of the bucket; the same on all ranks.
            array: the bucket.
            shapes: of the tensors in it.
            lossy: whether it goes through the codecs.
            before: its present route, if it has one.

        Returns:
            `before` if the same route is chosen again; else a new `Route`, or a new `RouteTrial` of two routes.
        """
        candidates = {candidate.title: candidate for candidate in self._candidates(lossy)}
        if len(candidates) == 1 and self._algorithm != "auto":
            return before or next(iter(candidates.values())).route(self._levels, shapes)
        timed = {title: self._time(array, candidate) for title, candidate in candidates.items()}
        size_bytes = len(array) * array.itemsize
        choice = choose_route(size_bytes, timed, default=next(iter(candidates)))
        self._tell(name, choice)
        if isinstance(before, RouteTrial) and before.title == choice.route:
            return before
        route = candidates[choice.route].route(self._levels, shapes)
        if isinstance(before, Route) and before.title == route.title:
            return before
        near = rivals(size_bytes, timed, choice.route)
        # A codec takes longer in its warm-up steps than later: a trial would mislead, and the choice rests on timing.
        if len(near) == 1 or any(candidates[title].cross.codec_warmup_steps for title in near):
            return route
        return RouteTrial(
            {title: candidates[title].route(self._levels, shapes) for title in near},
            chosen=choice.route,
            size_bytes=size_bytes,
            engine=self._levels.everyone,
            tell=lambda confirmed: self._tell(name, confirmed),
            clock=self._clock,
        )

    def _algorithms(self, local: CodecSpec) -> list[str]:
        """The algorithms that the user's argument and this topology allow, "flat" first if it is among them."""
        levels = self._levels
        if len(levels.ranks) < 2 or self._algorithm == "flat":
            return ["flat"]
        if self._algorithm != "auto":
            return [self._algorithm]
        # A reduce-scatter goes through no codec within nodes: with one, "scatter" would be "rails" once more.
        scatters = levels.even and local.exact
        return ["flat", *(["rails"] if levels.rails > 1 else []), *(["scatter"] if scatters else []), "leader"]

    def _time(self, like: Any, candidate: Candidate) -> Link:
        """The time that a candidate takes by size, for elements of the type of `like`, the same on all ranks. It is
        measured at the first call; later ones return the same."""
        key = (candidate.title, str(like.dtype))
        if key not in self._timed:
            begin = self._clock()
            if key not in self._names:
                self._names[key] = self._levels.everyone.unique("hvd_hetero.timing.")
            self._timed[key] = timed_curve(
                self._levels, candidate, like, name=self._names[key], clock=self._clock
            )
            self.timing_s += self._clock() - begin
        self._alike[key] = candidate, verbs_of(like).zeros([0], like)  # like the last one: models may change device
        return self._timed[key]
