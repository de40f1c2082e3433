"""How the buckets of a model travel: from the arguments of `DistributedOptimizer` to a way for each bucket."""

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
    """Makes a way for each bucket. Constructing one is a collective call.

    Args:
        engine: the ranks that train together.
        wire: the codecs, or a compressor of the user's own.
        topology: "flat" (or None): one level. "auto": nodes found and links measured, and the fastest algorithm for
            each bucket. "rails", "scatter", "leader": nodes found, and that algorithm. A `Topology`: its nodes, and the
            fastest algorithm for each bucket; in an elastic job of another number of ranks, as "auto".
        alike: what else ranks must have the same, by name.
        tell: is told what was chosen, and why.

    Raises:
        ValueError: on every rank, when arguments are wrong on one, or differ.
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
        """Whether each bucket is summed as it is, in one all-reduce."""
        return self.exact and not self._measures

    @property
    def chooses(self) -> bool:
        """Whether a way was chosen by timing: another choice may come to be better."""
        return self._router is not None and self._router.chooses

    @property
    def timing_s(self) -> float:
        """Seconds that this rank has timed ways for: see `Router`."""
        return 0.0 if self._router is None else self._router.timing_s

    @property
    def gentle_steps(self) -> int:
        """The number of first steps in which some codec loses less, and takes longer."""
        return max(recipe.gentle_steps for recipe in self._wire.recipes)

    def time_anew(self) -> None:
        """Times again what was timed. A collective call."""
        if self._router is not None:
            self._router.time_anew()

    def takes(self, shape: Shape) -> bool:
        """Whether the gradient of a parameter of this shape goes through a codec."""
        return self._compressor is not None or self._wire.takes(shape)

    def bucket_bytes(self, like: Any, *, most: int) -> int:
        """At most so many bytes of gradients of the type of `like` should travel together. A collective call."""
        if self._compressor is not None:
            return 1  # one of a user's own gets each gradient by itself, as Horovod's do
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
        """A way for each bucket; that of `before` where it is chosen again. All ranks call it with the same layout."""
        ways = [None] * len(buckets) if before is None else before
        return [
            self.way(f"{name}.bucket.{index}", *one)
            for index, one in enumerate(zip(buckets, shapes, lossy, ways, strict=True))
        ]

    def way(self, name: str, bucket: Any, shapes: Sequence[Shape], lossy: bool, before: Way | None = None) -> Way:
        """The way of one bucket, of tensors of these shapes; `lossy`: through the codec. The first one for a type is a
        collective call."""
        if self._router is None:
            shape = tuple(shapes[0]) if len(shapes) == 1 else None
            return Route(self._levels, "flat", cross=Exact(self._compressor, shape=shape))
        return self._router.way(name, bucket, shapes, lossy=lossy, before=before)


def _described(
    engine: Engine, topology: Any, wire: Wire | HorovodCompressor, alike: Mapping[str, Any]
) -> str:
    """This rank's arguments in words. Raises what is wrong with them."""
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
