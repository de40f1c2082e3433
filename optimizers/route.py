"""The way of one bucket: which algorithm sums it, and how each level does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hvd_hetero.engine.hierarchy import ALGORITHMS, IN_PARTS, Levels, part_of
from hvd_hetero.engine.port import Chain, Handle

from .compressed import Exact, KeepsNothing, Reduction
from .recipe import Recipe, Shape


class Route:
    """Sums one bucket, the same one at every step, over all ranks.

    Args:
        levels: the groups of this rank.
        algorithm: "flat", "rails", "scatter" or "leader".
        cross: how ranks of different nodes sum; with "flat", how all ranks do.
        local: how the ranks of a node do. None: in the way that suits the algorithm.
    """

    def __init__(
        self, levels: Levels, algorithm: str, *, cross: Reduction | None = None, local: Reduction | None = None
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}. Received: {algorithm!r}.")
        self.levels, self.algorithm = levels, algorithm
        self.cross: Reduction = cross if cross is not None else Exact()
        self.local = local
        within = "" if local is None or algorithm == "flat" else f"{local.name} within, "
        self.title = f"{algorithm}, {within}{self.cross.name}{'' if algorithm == 'flat' else ' between'}"
        self.keeps = not all(isinstance(level, KeepsNothing) for level in (self.cross, self.local or self.cross))
        self._new = self.state_dict()

    @property
    def _nodes(self) -> list[list[int]]:
        """The ranks of each node, which decide which part of an array a rank sums, and so what its residuals are of."""
        return [] if self.algorithm == "flat" else [list(node) for node in self.levels.ranks]

    @property
    def is_plain(self) -> bool:
        """Whether a sum is one all-reduce of the array as it is."""
        return self.algorithm == "flat" and type(self.cross) is Exact and self.cross.is_plain

    def start(self, array: Any, *, name: str) -> Handle:
        """Begins a sum of `array`, which it may overwrite."""
        if self.is_plain:
            return self.levels.everyone.allreduce_async(array, name=name)
        local = self.local.steps if self.local is not None else None
        steps: Callable[..., Any] = ALGORITHMS[self.algorithm]
        return Chain(steps(self.levels, array, name=name, local=local, cross=self.cross.steps))

    def end_step(self, counts: bool) -> None:
        """Ends a step; see `Reduction.end_step`."""
        self.cross.end_step(counts)
        if self.local is not None:
            self.local.end_step(counts)

    def release_into(self, array: Any) -> None:
        """Adds what this route has kept back to `array`, which takes another route: nothing is lost."""
        levels = self.levels
        if self.local is not None and levels.local is not None:
            kept = self.local.release(levels.local)
            if kept is not None:
                array += kept
        engine = levels.everyone if self.algorithm == "flat" else levels.cross
        kept = self.cross.release(engine) if engine is not None else None
        if kept is not None:
            part = part_of(levels, len(array)) if self.algorithm in IN_PARTS else None
            array[part if part is not None else slice(None)] += kept

    def kept_into(self, array: Any) -> None:
        """Adds what this route keeps back to `array`, and keeps it."""
        state = self.state_dict()
        self.release_into(array)
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The residuals of both levels, and what they belong to."""
        return {
            "title": self.title,
            "nodes": self._nodes,
            "cross": self.cross.state_dict(),
            "local": self.local.state_dict() if self.local is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, if it is that of the same kind of route over the same nodes; else it begins anew. All
        ranks do, or none."""
        if state["title"] != self.title or state.get("nodes", self._nodes) != self._nodes:
            state = self._new
        self.cross.load_state_dict(state["cross"])
        if self.local is not None:
            self.local.load_state_dict(state["local"])


class Candidate(NamedTuple):
    """A route that a bucket may take: an algorithm, and codecs between nodes and within them."""

    algorithm: str
    cross: Recipe
    local: Recipe

    @property
    def title(self) -> str:
        """The candidate in words, the same on all ranks."""
        return f"{self.algorithm}, {self.cross}{f', {self.local} within' if self._has_local else ''}"

    @property
    def _has_local(self) -> bool:
        return not (self.local.exact or self.algorithm == "flat")

    def route(self, levels: Levels, shapes: Sequence[Shape]) -> Route:
        """Makes the route for a bucket of tensors of these shapes."""
        local = self.local.reduction(shapes) if self._has_local else None
        return Route(levels, self.algorithm, cross=self.cross.reduction(shapes), local=local)
