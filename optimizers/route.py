"""A route: the algorithm that sums one bucket over all ranks, and the codecs that it uses between and within nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvd_hetero.engine.hierarchy import ALGORITHMS, IN_PARTS, Levels, part_of
from hvd_hetero.engine.port import Chain, Handle

from .codec_spec import CodecSpec, Shape
from .reduction import ExactSum, Reduction, WithoutResidual


class Route:
    """Sums one bucket, the same one at every step, over all ranks.

    Args:
        levels: the groups to which this rank belongs: its node, its peers on other nodes, and all ranks.
        algorithm: "flat", "rails", "scatter" or "leader", see `engine.hierarchy`.
        cross: the sum over the ranks of different nodes; with "flat", over all ranks. None: exact.
        local: the sum over the ranks of a node; not used with "flat". None: the exact sum that the algorithm makes.

    Attributes:
        title: the route in words, the same on all ranks.
        keeps: whether its codecs may keep residuals (error feedback).

    Raises:
        ValueError: an unknown algorithm.
    """

    def __init__(
        self, levels: Levels, algorithm: str, *, cross: Reduction | None = None, local: Reduction | None = None
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}. Received: {algorithm!r}.")
        self.levels, self.algorithm = levels, algorithm
        self.cross: Reduction = cross if cross is not None else ExactSum()
        self.local = local
        within = "" if local is None or algorithm == "flat" else f"{local.name} within, "
        self.title = f"{algorithm}, {within}{self.cross.name}{'' if algorithm == 'flat' else ' between'}"
        self.keeps = not all(isinstance(level, WithoutResidual) for level in (self.cross, self.local or self.cross))
        self._new = self.state_dict()

    @property
    def _nodes(self) -> list[list[int]]:
        """The ranks of each node; empty with "flat". They decide which part of an array this rank sums between nodes,
        and so to which part its residuals belong."""
        return [] if self.algorithm == "flat" else [list(node) for node in self.levels.ranks]

    @property
    def is_plain(self) -> bool:
        """Whether a sum is a single all-reduce of the unchanged array."""
        return self.algorithm == "flat" and type(self.cross) is ExactSum and self.cross.is_plain

    def start(self, array: Any, *, name: str) -> Handle:
        """Begins the sum of `array` over all ranks, which may overwrite it. Names of operations begin with `name`."""
        if self.is_plain:
            return self.levels.everyone.allreduce_async(array, name=name)
        local = self.local.steps if self.local is not None else None
        steps = ALGORITHMS[self.algorithm](self.levels, array, name=name, local=local, cross=self.cross.steps)
        return Chain(steps)

    def end_step(self, counts: bool) -> None:
        """Ends a step; new residuals are kept only if it `counts`. See `Reduction.end_step`."""
        self.cross.end_step(counts)
        if self.local is not None:
            self.local.end_step(counts)

    def move_residual_to(self, array: Any) -> None:
        """Adds the residuals of this route to `array`, and keeps them no longer. So nothing is lost when a bucket takes
        another route: `array` is sent by that one."""
        levels = self.levels
        if self.local is not None and levels.local is not None:
            kept = self.local.take_residual(levels.local)
            if kept is not None:
                array += kept
        engine = levels.everyone if self.algorithm == "flat" else levels.cross
        kept = self.cross.take_residual(engine) if engine is not None else None
        if kept is not None:
            part = part_of(levels, len(array)) if self.algorithm in IN_PARTS else None
            array[part if part is not None else slice(None)] += kept

    def add_residual_to(self, array: Any) -> None:
        """Adds the residuals of this route to `array`, and keeps them as well."""
        state = self.state_dict()
        self.move_residual_to(array)
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The residuals of both levels, with the title of the route and the nodes that they belong to."""
        return {
            "title": self.title,
            "nodes": self._nodes,
            "cross": self.cross.state_dict(),
            "local": self.local.state_dict() if self.local is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, if that is of a route of the same title over the same nodes; else begins anew, without
        residuals. All ranks call it, or none."""
        if state["title"] != self.title or state["nodes"] != self._nodes:
            state = self._new
        self.cross.load_state_dict(state["cross"])
        if self.local is not None:
            self.local.load_state_dict(state["local"])


class Candidate(NamedTuple):
    """A route that a bucket may take, not yet made: `route` makes it for the tensors of a bucket."""

    algorithm: str
    cross: CodecSpec  # the codec between nodes; with "flat", between all ranks
    local: CodecSpec  # the codec within nodes; not used with "flat"

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
