"""Compares routes of one bucket on the running job, step by step, and keeps the fastest: see `router`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.port import Chain, Engine, Handle, Steps
from hvd_hetero.policy.route_choice import RouteChoice, confirm_route

from .route import Route

ROUNDS = 8  # steps for which a trial times each route, after a first one that is not counted


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
        tell: Callable[[RouteChoice], None],
        clock: Callable[[], float],
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
