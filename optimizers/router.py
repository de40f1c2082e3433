"""Chooses how each bucket is summed over the ranks: by an algorithm and a codec (a route).

The routes that the user's arguments allow are timed on the links. If the two fastest are near each other for the size
of a bucket, a `RouteTrial` compares them on the running job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.hierarchy import IN_PARTS, Levels
from hvd_hetero.engine.port import Chain, Engine, Handle, Steps
from hvd_hetero.policy.link import Link
from hvd_hetero.policy.route_choice import RouteChoice, choose_route, confirm_route, rivals

from .codec_spec import CodecSpec, LinkCodecs, Shape
from .route import Candidate, Route
from .timing import LARGE_BYTES, timed_curve
from .weighted_exchange import BucketRoute

ROUNDS = 8  # steps for which a trial times each route, after a first one that is not counted

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
        if levels.nodes == 1 or self._algorithm == "flat":
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


class RouteTrial:
    """The route of one bucket while several are compared: each step sums it by another route, in turn, and times that.

    After `ROUNDS` + 1 steps of each, all ranks choose the fastest route, and the trial sums by that one from then on. A
    route's time in a step is the least over the ranks: that of the rank that began last, and so did not wait for
    others. What a route's codecs keep back (residuals of error feedback) goes over to the next route.

    Args:
        routes: the routes to compare, by title, in the same order on all ranks.
        chosen: the title of the one that timing found fastest; another has to be faster by `MARGIN` of `route_choice`.
        size_bytes: of the bucket.
        engine: all ranks.
        tell: is called with the choice.
        clock: returns seconds.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        chosen: str,
        size_bytes: int,
        engine: Engine,
        tell: Callable[[RouteChoice], None] = lambda choice: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._routes, self._chosen, self._size_bytes = dict(routes), chosen, size_bytes
        self._engine, self._tell, self._clock = engine, tell, clock
        self._titles = list(self._routes)
        # Seconds on this rank, by round and route; infinite where a sum did not end.
        self._times = np.full((ROUNDS + 1, len(self._titles)), np.inf)
        self._step = 0  # sums begun
        self._route = self._routes[self._titles[0]]  # in use
        self._moved: Any = None  # residuals of earlier routes, until they were sent in a step that counts

    @property
    def is_plain(self) -> bool:
        """Always False: a trial needs the stages of a chain to measure times, even where a route is a plain all-reduce.
        """
        return False

    @property
    def title(self) -> str | None:
        """The title of the route that was found fastest; None while routes are compared."""
        return None if self._step <= self._times.size else self._chosen

    def start(self, array: Any, *, name: str) -> Handle:
        """Begins the sum of `array` over all ranks, which may overwrite it: by the route whose turn it is, or by that
        which was chosen."""
        self._step += 1
        if self._step > self._times.size + 1:
            return self._begin(self._chosen, array, name)
        if self._step == self._times.size + 1:
            return Chain(self._decide(array, name))
        turn, index = divmod(self._step - 1, len(self._titles))
        return Chain(self._measure(turn, index, array, name))

    def _begin(self, title: str, array: Any, name: str) -> Handle:
        """Begins a sum by the route of this title, which takes over the residuals of the one used before."""
        route = self._routes[title]
        if route is not self._route:
            if self._route.keeps:
                moved = verbs_of(array).zeros([len(array)], array)
                self.move_residual_to(moved)
                self._moved = moved
            self._route = route
        if self._moved is not None:
            array += self._moved
        return route.start(array, name=f"{name}.{self._titles.index(title)}")

    def _measure(self, turn: int, index: int, array: Any, name: str) -> Steps:
        """Sums by route `index`, and notes the seconds as those of round `turn`."""
        begin = self._clock()
        result = yield self._begin(self._titles[index], array, name)
        self._times[turn, index] = self._clock() - begin
        return result

    def _decide(self, array: Any, name: str) -> Steps:
        """Agrees with all ranks on the fastest route, and then sums by that one."""
        times = yield self._engine.allreduce_async(self._times[1:].copy(), name=f"{name}.trial", op="min")
        measured = {title: times[:, index].tolist() for index, title in enumerate(self._titles)}
        choice = confirm_route(measured, self._chosen, self._size_bytes)
        self._chosen = choice.route
        self._tell(choice)
        return (yield self._begin(self._chosen, array, name))

    def end_step(self, counts: bool) -> None:
        """Ends a step; new residuals are kept only if it `counts`. See `Reduction.end_step`."""
        self._route.end_step(counts)
        if counts:
            self._moved = None

    def move_residual_to(self, array: Any) -> None:
        """Adds the residuals to `array`, and keeps them no longer."""
        self._route.move_residual_to(array)
        if self._moved is not None:
            array += self._moved
            self._moved = None

    def add_residual_to(self, array: Any) -> None:
        """Adds the residuals to `array`, and keeps them as well."""
        self._route.add_residual_to(array)
        if self._moved is not None:
            array += self._moved

    def state_dict(self) -> dict[str, Any]:
        """The residuals of the route in use, and the state of the trial."""
        trial = {
            "titles": self._titles, "step": self._step, "chosen": self._chosen, "times": self._times.tolist(),
            **({} if self._moved is None else {"moved": self._moved}),
        }  # fmt: skip
        return {**self._route.state_dict(), "trial": trial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`: with its trial, if that is one of the same routes; else a new trial begins. Residuals
        are taken over if they are of one of these routes."""
        trial = state.get("trial", {})
        times = np.array(trial.get("times", ()))
        if trial.get("titles") == self._titles and times.shape == self._times.shape:
            self._step, self._chosen, self._times = trial["step"], trial["chosen"], times
        else:
            self._step = 0
        self._moved = trial.get("moved")
        for route in self._routes.values():
            route.load_state_dict(state)
            if route.title == state["title"]:
                self._route = route
