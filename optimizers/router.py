"""Which way each bucket takes: the candidates, what timing predicts of them, and what a trial on the job says."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.hierarchy import IN_PARTS, Levels
from hvd_hetero.engine.port import Chain, Engine, Handle, Steps
from hvd_hetero.policy.algorithm import Choice, choose, confirm, rivals
from hvd_hetero.policy.link import Link

from .recipe import Recipe, Shape, Wire
from .route import Candidate, Route
from .timing import LARGE_BYTES, timed_curve
from .weighted import Way

ROUNDS = 8  # steps that each route of a trial gets, besides its first one, which is not counted

EXACT = Recipe(name="none")

Tell = Callable[[str, Choice], None]


class Router:
    """Makes the ways of an exchange's buckets. Constructing one and each of its calls are collective calls.

    Args:
        levels: the groups of this rank.
        algorithm: "flat", "rails", "scatter", "leader", or "auto" to choose by timing.
        wire: the codecs.
        tell: is told of each choice, by the bucket's name.
        clock: seconds.

    Attributes:
        timing_s: seconds of timing, of the last time where it was timed anew.
    """

    def __init__(
        self,
        levels: Levels,
        *,
        algorithm: str,
        wire: Wire,
        tell: Tell = lambda name, choice: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._levels, self._algorithm, self._wire = levels, algorithm, wire
        self._tell, self._clock = tell, clock
        self.timing_s = 0.0
        self._timed: dict[tuple[str, str], Link] = {}
        self._names: dict[tuple[str, str], str] = {}  # of operations: Horovod's cache has room for so many
        self._alike: dict[tuple[str, str], tuple[Candidate, Any]] = {}  # of what was timed, and nothing of such a type

    def line(self, like: Any, *, lossy: bool) -> Link:
        """Time over size of the route that is fastest for large buckets of the type of `like`."""
        lines = [self._time(like, candidate) for candidate in self._candidates(lossy)]
        return min(lines, key=lambda line: line.time_s(LARGE_BYTES))

    def _candidates(self, lossy: bool) -> list[Candidate]:
        """The candidates for a bucket; `lossy`: those that go through a codec."""
        local = self._wire.local if lossy else EXACT
        return [
            Candidate(algorithm, recipe, local)
            for recipe in (self._wire.recipes if lossy else (EXACT,))
            for algorithm in self._algorithms(local)
            if not (recipe.whole and algorithm in IN_PARTS)
        ]

    @property
    def chooses(self) -> bool:
        """Whether anything was chosen by timing: what has no other is timed as well, for the size of buckets."""
        return bool(self._timed) and any(len(self._candidates(lossy)) > 1 for lossy in (False, True))

    def time_anew(self) -> None:
        """Times again what was timed: links may have changed."""
        self._timed, self.timing_s = {}, 0.0
        for candidate, like in self._alike.values():
            self._time(like, candidate)

    def way(
        self, name: str, array: Any, shapes: Sequence[Shape], *, lossy: bool, before: Way | None = None
    ) -> Way:
        """The way of the bucket `array`, made of tensors of these shapes; `lossy`: through the codecs. That is `before`
        where the same is chosen again."""
        candidates = {candidate.title: candidate for candidate in self._candidates(lossy)}
        if len(candidates) == 1 and self._algorithm != "auto":
            return before or next(iter(candidates.values())).route(self._levels, shapes)
        timed = {title: self._time(array, candidate) for title, candidate in candidates.items()}
        size_bytes = len(array) * array.itemsize
        choice = choose(size_bytes, timed, default=next(iter(candidates)))
        self._tell(name, choice)
        if isinstance(before, Trial) and before.title == choice.route:
            return before
        route = candidates[choice.route].route(self._levels, shapes)
        if isinstance(before, Route) and before.title == route.title:
            return before
        near = rivals(size_bytes, timed, choice.route)
        # Steps of a warm-up say nothing of what follows: there the choice rests on the timing.
        if len(near) == 1 or any(candidates[title].cross.gentle_steps for title in near):
            return route
        return Trial(
            {title: candidates[title].route(self._levels, shapes) for title in near},
            chosen=choice.route,
            size_bytes=size_bytes,
            engine=self._levels.everyone,
            tell=lambda confirmed: self._tell(name, confirmed),
            clock=self._clock,
        )

    def _algorithms(self, local: Recipe) -> list[str]:
        """The algorithms that this topology allows, "flat" first."""
        levels = self._levels
        if levels.nodes == 1 or self._algorithm == "flat":
            return ["flat"]
        if self._algorithm != "auto":
            return [self._algorithm]
        # What is reduced and scattered goes through no codec: with one it would be "rails" once more.
        scatters = levels.even and local.exact
        return ["flat", *(["rails"] if levels.rails > 1 else []), *(["scatter"] if scatters else []), "leader"]

    def _time(self, like: Any, candidate: Candidate) -> Link:
        """The time that this route takes by size, measured once; the same on all ranks."""
        key = (candidate.title, str(like.dtype))
        if key not in self._timed:
            begin = self._clock()
            if key not in self._names:
                self._names[key] = self._levels.everyone.unique("hvd_hetero.timing.")
            self._timed[key] = timed_curve(
                self._levels, candidate, like, name=self._names[key], clock=self._clock
            )
            self.timing_s += self._clock() - begin
        self._alike[key] = candidate, verbs_of(like).zeros([0], like)  # the last: models may move
        return self._timed[key]


class Trial:
    """Several routes for one bucket, in turn and timed on the running job, until it is known which is fastest.

    A route's time in a step is that of the rank on which it took least: the rank that came last, and so did not wait
    for others. Where a route keeps something back, the next one takes it over.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        chosen: str,
        size_bytes: int,
        engine: Engine,
        tell: Callable[[Choice], None] = lambda choice: None,
        clock: Callable[[], float] = time.perf_counter,
        rounds: int = ROUNDS,
    ) -> None:
        self._routes, self._chosen, self._size_bytes = dict(routes), chosen, size_bytes
        self._engine, self._tell, self._clock = engine, tell, clock
        self._titles = list(self._routes)
        self._times = np.zeros((rounds + 1, len(self._titles)))
        self._step = 0
        self._route = self._routes[self._titles[0]]
        self._moved: Any = None  # what other routes kept back, until a sum has taken it along that counts

    @property
    def is_plain(self) -> bool:
        """Never: a trial measures, in stages."""
        return False

    @property
    def title(self) -> str | None:
        """The route that was found fastest, None while it is not known."""
        return None if self._step <= self._times.size else self._chosen

    def start(self, array: Any, *, name: str) -> Handle:
        """Begins a sum of `array`, which it may overwrite."""
        self._step += 1
        if self._step > self._times.size + 1:
            return self._begin(self._chosen, array, name)
        if self._step == self._times.size + 1:
            return Chain(self._decide(array, name))
        turn, index = divmod(self._step - 1, len(self._titles))
        return Chain(self._measure(turn, index, array, name))

    def _begin(self, title: str, array: Any, name: str) -> Handle:
        route = self._routes[title]
        if route is not self._route:
            if self._route.keeps:
                moved = verbs_of(array).zeros([len(array)], array)
                self.release_into(moved)
                self._moved = moved
            self._route = route
        if self._moved is not None:
            array += self._moved
        return route.start(array, name=f"{name}.{self._titles.index(title)}")

    def _measure(self, turn: int, index: int, array: Any, name: str) -> Steps:
        begin = self._clock()
        result = yield self._begin(self._titles[index], array, name)
        self._times[turn, index] = self._clock() - begin
        return result

    def _decide(self, array: Any, name: str) -> Steps:
        times = yield self._engine.allreduce_async(self._times[1:].copy(), name=f"{name}.trial", op="min")
        measured = {title: times[:, index].tolist() for index, title in enumerate(self._titles)}
        choice = confirm(measured, self._chosen, self._size_bytes)
        self._chosen = choice.route
        self._tell(choice)
        return (yield self._begin(self._chosen, array, name))

    def end_step(self, counts: bool) -> None:
        """Ends a step; see `Reduction.end_step`."""
        self._route.end_step(counts)
        if counts:
            self._moved = None

    def release_into(self, array: Any) -> None:
        """Adds what is kept back to `array`, and keeps it no longer."""
        self._route.release_into(array)
        if self._moved is not None:
            array += self._moved
            self._moved = None

    def kept_into(self, array: Any) -> None:
        """Adds what is kept back to `array`, and keeps it."""
        self._route.kept_into(array)
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
        """Goes on from `state`: with the trial, where it is of the same routes; else with what is kept, where that is
        of one of them."""
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
