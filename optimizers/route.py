"""The way of one bucket: which algorithm sums it, and how each level does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvd_hetero.engine.hierarchy import ALGORITHMS, IN_PARTS, Levels, part_of
from hvd_hetero.engine.port import Chain, Handle

from .compressed import Exact, KeepsNothing, Reduction


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

    def settle(self, finite: bool) -> None:
        """Ends a step; see `Reduction.settle`."""
        self.cross.settle(finite)
        if self.local is not None:
            self.local.settle(finite)

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
        """What both levels keep."""
        return {
            "title": self.title,
            "cross": self.cross.state_dict(),
            "local": self.local.state_dict() if self.local is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, if it is that of the same kind of route; else it begins anew."""
        if state["title"] != self.title:
            state = self._new
        self.cross.load_state_dict(state["cross"])
        if self.local is not None:
            self.local.load_state_dict(state["local"])
