"""Chooses how each bucket of gradients is summed over the ranks, from the arguments of `DistributedOptimizer`.

What sums one bucket is a `BucketRoute`: a `Route` (an algorithm, such as a flat or a hierarchical all-reduce, with its
codecs), or a `RouteTrial`, which times several routes on the running job and keeps the fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hvd_hetero.codecs.codec import HorovodCompressor, name_of
from hvd_hetero.engine.hierarchy import ALGORITHMS, IN_PARTS, levels_for, topology_now
from hvd_hetero.engine.port import Engine
from hvd_hetero.policy.buckets import cap_bytes
from hvd_hetero.policy.topology import Topology

from .agreement import agree_text, heard
from .codec_spec import LinkCodecs, Shape
from .reduction import ExactSum
from .route import Route
from .router import Router, Tell
from .weighted_exchange import BucketRoute

CHOICES = ("auto", *ALGORITHMS)


def _name(engine: Engine) -> str:
    """The name of the agreement of a `Routing`, another one each time."""
    return engine.unique("hvd_hetero.routing.")


def arguments_heard(engine: Engine) -> AbstractContextManager[None]:
    """A context for what a rank does before it makes a `Routing`: of an error in it the others hear in theirs, and
    raise. See `heard`."""
    return heard(engine, name=lambda: _name(engine))


class Routing:
    """Makes the route of each bucket, by which it is summed over the ranks. Constructing one is a collective call.

    Args:
        engine: the ranks that train together.
        codecs: the codecs, or a compressor written by the user for Horovod.
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
        codecs: LinkCodecs | HorovodCompressor,
        topology: Topology | str | None,
        alike: Mapping[str, Any] | None = None,
        tell: Tell = lambda name, choice: None,
    ) -> None:
        self._compressor = codecs if isinstance(codecs, HorovodCompressor) else None
        self._codecs = codecs if isinstance(codecs, LinkCodecs) else LinkCodecs()
        self.exact = self._compressor is None and not self._codecs.auto and all(
            spec.exact for spec in (self._codecs.cross, self._codecs.local)
        )
        self.keeps = self._codecs.keeps
        topology = topology_now(engine, topology)
        agree_text(
            engine,
            lambda: _described(engine, topology, codecs, alike or {}),
            title="DistributedOptimizer",
            name=_name(engine),
        )
        self._levels = levels_for(engine, topology)
        algorithm = topology if isinstance(topology, str) else "flat" if topology is None else "auto"
        self._measures = topology not in (None, "flat")
        self._router = None
        if self._compressor is None:
            self._router = Router(self._levels, algorithm=algorithm, codecs=self._codecs, tell=tell)

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
        return max(spec.codec_warmup_steps for spec in self._codecs.specs)

    def time_anew(self) -> None:
        """Times again all routes that were timed before, as links may have changed. A collective call."""
        if self._router is not None:
            self._router.time_anew()

    def takes(self, shape: Shape) -> bool:
        """Whether the gradient of a parameter of this shape goes through a codec."""
        return self._compressor is not None or self._codecs.takes(shape)

    def bucket_bytes(self, like: Any, *, most: int) -> int:
        """Returns the largest bucket size in bytes, at most `most`, that suits the links, for gradients of the type of
        `like`. A collective call. With the user's own compressor it is 1, so that each gradient has its own bucket."""
        if self._compressor is not None:
            return 1  # a user's compressor gets each gradient by itself, as in Horovod
        if self._router is None or not self._measures:
            return most
        return cap_bytes(self._router.line(like, lossy=not self.exact), most=most)

    def routes_for(
        self,
        buckets: Sequence[Any],
        shapes: Sequence[Sequence[Shape]],
        lossy: Sequence[bool],
        name: str,
        before: Sequence[BucketRoute] | None = None,
    ) -> list[BucketRoute]:
        """Returns the route of each bucket of a layout. All ranks call it with the same layout.

        Args:
            buckets: flat arrays.
            shapes: for each bucket, the shapes of the tensors in it.
            lossy: for each bucket, whether it goes through a codec.
            name: prefix of the names under which `tell` hears of the choices.
            before: the present routes; where the same is chosen again, the present object is returned, with its state.
        """
        present = [None] * len(buckets) if before is None else before
        return [
            self.route_for(f"{name}.bucket.{index}", *one)
            for index, one in enumerate(zip(buckets, shapes, lossy, present, strict=True))
        ]

    def route_for(
        self, name: str, bucket: Any, shapes: Sequence[Shape], lossy: bool, before: BucketRoute | None = None
    ) -> BucketRoute:
        """Returns the route of one bucket; for the arguments see `routes_for`. May be a collective call, as routes are
        timed for the first bucket of each dtype."""
        if self._router is None:
            shape = tuple(shapes[0]) if len(shapes) == 1 else None
            return Route(self._levels, "flat", cross=ExactSum(self._compressor, shape=shape) if lossy else None)
        return self._router.route_for(name, bucket, shapes, lossy=lossy, before=before)


def _described(
    engine: Engine, topology: Any, codecs: LinkCodecs | HorovodCompressor, alike: Mapping[str, Any]
) -> str:
    """Returns this rank's arguments as a text, which is compared between ranks. Raises ValueError or TypeError if an
    argument is invalid."""
    if isinstance(topology, str) and topology not in CHOICES:
        raise ValueError(f"topology: expected a Topology or one of {', '.join(CHOICES)}. Received: {topology!r}.")
    if topology is not None and not isinstance(topology, (str, Topology)):
        raise TypeError(f"topology: expected a Topology or one of {', '.join(CHOICES)}. Received: {topology!r}.")
    if isinstance(topology, Topology):
        topology.check_size(engine.size)
    if isinstance(codecs, HorovodCompressor) and topology not in (None, "flat"):
        raise ValueError(
            f"compression: expected one of hvd.Compression with a topology. Received: {codecs.compression!r}, a "
            "compressor of your own, which is made for one level: use topology=\"flat\"."
        )
    if isinstance(codecs, LinkCodecs) and not codecs.local.exact and topology in (None, "flat"):
        raise ValueError(
            f"compression: expected no codec within nodes without a topology. Received: {codecs}. Pass "
            'topology="auto", or one codec for all ranks.'
        )
    if isinstance(codecs, LinkCodecs) and topology in IN_PARTS and all(spec.needs_matrices for spec in codecs.specs):
        raise ValueError(
            f"compression: expected a codec for parts of a bucket with topology={topology!r}. Received: {codecs}, "
            'which takes whole matrices. Pass topology="leader", or "auto".'
        )
    nodes = topology.nodes if isinstance(topology, Topology) else topology
    how = name_of(codecs.compression) if isinstance(codecs, HorovodCompressor) else str(codecs)
    return ", ".join(f"{name}={value}" for name, value in {"topology": nodes, "compression": how, **alike}.items())
