"""Chooses how each bucket of gradients is summed over the ranks, from the arguments of `DistributedOptimizer`.

A *way* is what sums one bucket: a `Route` (an algorithm, such as a flat or a hierarchical all-reduce, with its codecs),
or a `Trial`, which times several routes on the running job and keeps the fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_hetero.codecs.codec import HorovodCompressor
from hvd_hetero.engine.hierarchy import ALGORITHMS, IN_PARTS, levels_for, topology_now
from hvd_hetero.engine.port import Engine
from hvd_hetero.policy.buckets import cap_bytes
from hvd_hetero.policy.topology import Topology

from .agreement import agree_text
from .compressed import Exact
from .recipe import Shape, Wire
from .route import Route
from .router import Router, Tell
from .weighted import Way

CHOICES = ("auto", *ALGORITHMS)


class Ways:
    """Makes the way of each bucket, that is what sums it over the ranks. Constructing one is a collective call.

    Args:
        engine: the ranks that train together.
        wire: the codecs, or a compressor written by the user for Horovod.
        topology: "flat" (or None): one level. "auto": nodes are detected and links measured, and each bucket gets the
            fastest algorithm. "rails", "scatter", "leader": nodes are detected, and all buckets get that algorithm. A
            `Topology`: its nodes, and the fastest algorithm for each bucket; as "auto" in an elastic job whose number
            of ranks is another one than the topology's.
        alike: further arguments of the caller that must be equal on all ranks, by name.
        tell: is called with the name of a bucket and its `RouteChoice` (the route, and the reason) after each choice.

    Attributes:
        exact: whether gradients are sent without any codec.
        keeps: whether a codec keeps a residual (error feedback) from step to step.

    Raises:
        ValueError: on every rank, if an argument is invalid on one rank, or differs between ranks.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        wire: Wire | HorovodCompressor,
        topology: Topology | str | None,
        alike: Mapping[str, Any] | None = None,
        tell: Tell = lambda name, choice: None,
    ) -> None:
        self._compressor = wire if isinstance(wire, HorovodCompressor) else None
        self._wire = wire if isinstance(wire, Wire) else Wire()
        self.exact = self._compressor is None and not self._wire.auto and all(
            recipe.exact for recipe in (self._wire.cross, self._wire.local)
        )
        self.keeps = self._wire.keeps
        topology = topology_now(engine, topology)
        agree_text(
            engine,
            lambda: _described(engine, topology, wire, alike or {}),
            title="DistributedOptimizer",
            name=engine.unique("hvd_hetero.ways."),
        )
        self._levels = levels_for(engine, topology)
        algorithm = topology if isinstance(topology, str) else "flat" if topology is None else "auto"
        self._measures = topology not in (None, "flat")
        self._router = (
            Router(self._levels, algorithm=algorithm, wire=self._wire, tell=tell) if self._compressor is None else None
        )

    @property
    def plain(self) -> bool:
        """Whether every bucket is summed by one flat all-reduce, without a codec."""
        return self.exact and not self._measures

    @property
    def chooses(self) -> bool:
        """Whether any route was chosen by timing, so that another one may become faster when the links change."""
        return self._router is not None and self._router.chooses

    @property
    def timing_s(self) -> float:
        """Seconds that timing the routes took on this rank, the last time; 0 if none were timed."""
        return 0.0 if self._router is None else self._router.timing_s

    @property
    def codec_warmup_steps(self) -> int:
        """The number of warm-up steps in which a codec sends more precisely, and so more slowly, than afterwards."""
        return max(recipe.codec_warmup_steps for recipe in self._wire.recipes)

    def time_anew(self) -> None:
        """Times again all routes that were timed before, as links may have changed. A collective call."""
        if self._router is not None:
            self._router.time_anew()

    def takes(self, shape: Shape) -> bool:
        """Whether the gradient of a parameter of this shape goes through a codec."""
        return self._compressor is not None or self._wire.takes(shape)

    def bucket_bytes(self, like: Any, *, most: int) -> int:
        """Returns the largest bucket size in bytes, at most `most`, that suits the links, for gradients of the type of
        `like`. A collective call. With the user's own compressor it is 1, so that each gradient has its own bucket."""
        if self._compressor is not None:
            return 1  # a user's compressor gets each gradient by itself, as in Horovod
        if self._router is None or not self._measures:
            return most
        return cap_bytes(self._router.line(like, lossy=not self.exact), most=most)

    def of(
        self,
        buckets: Sequence[Any],
        shapes: Sequence[Sequence[Shape]],
        lossy: Sequence[bool],
        name: str,
        before: Sequence[Way] | None = None,
    ) -> list[Way]:
        """Returns the way of each bucket of a layout. All ranks call it with the same layout.

        Args:
            buckets: flat arrays.
            shapes: for each bucket, the shapes of the tensors in it.
            lossy: for each bucket, whether it goes through a codec.
            name: prefix of the names under which `tell` hears of the choices.
            before: the present ways; where the same route is chosen again, the present way is returned, with its state.
        """
        ways = [None] * len(buckets) if before is None else before
        return [
            self.way(f"{name}.bucket.{index}", *one)
            for index, one in enumerate(zip(buckets, shapes, lossy, ways, strict=True))
        ]

    def way(self, name: str, bucket: Any, shapes: Sequence[Shape], lossy: bool, before: Way | None = None) -> Way:
        """Returns the way of one bucket; for the arguments see `of`. May be a collective call, as routes are timed for
        the first bucket of each dtype."""
        if self._router is None:
            shape = tuple(shapes[0]) if len(shapes) == 1 else None
            return Route(self._levels, "flat", cross=Exact(self._compressor, shape=shape))
        return self._router.way(name, bucket, shapes, lossy=lossy, before=before)


def _described(
    engine: Engine, topology: Any, wire: Wire | HorovodCompressor, alike: Mapping[str, Any]
) -> str:
    """Returns this rank's arguments as a text, which is compared between ranks. Raises ValueError or TypeError if an
    argument is invalid."""
    if isinstance(topology, str) and topology not in CHOICES:
        raise ValueError(f"topology: expected a Topology or one of {', '.join(CHOICES)}. Received: {topology!r}.")
    if topology is not None and not isinstance(topology, (str, Topology)):
        raise TypeError(f"topology: expected a Topology or one of {', '.join(CHOICES)}. Received: {topology!r}.")
    if isinstance(topology, Topology):
        topology.check_size(engine.size)
    if isinstance(wire, HorovodCompressor) and topology not in (None, "flat"):
        raise ValueError(
            f"compression: expected one of hvd.Compression with a topology. Received: {wire.compression!r}, a "
            "compressor of your own, which is made for one level: use topology=\"flat\"."
        )
    if isinstance(wire, Wire) and not wire.local.exact and topology in (None, "flat"):
        raise ValueError(
            f"compression: expected no codec within nodes without a topology. Received: {wire}. Pass "
            'topology="auto", or one codec for all ranks.'
        )
    if isinstance(wire, Wire) and topology in IN_PARTS and all(recipe.whole for recipe in wire.recipes):
        raise ValueError(
            f"compression: expected a codec for parts of a bucket with topology={topology!r}. Received: {wire}, which "
            'takes whole matrices. Pass topology="leader", or "auto".'
        )
    nodes = topology.nodes if isinstance(topology, Topology) else topology
    how = type(wire.compression).__name__ if isinstance(wire, HorovodCompressor) else str(wire)
    return ", ".join(f"{name}={value}" for name, value in {"topology": nodes, "compression": how, **alike}.items())
