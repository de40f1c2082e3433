"""`DistributedGradientTape`, for training loops of one's own with the TensorFlow back end."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from hvd_hetero.codecs.codec import name_of
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.compression import Compression
from hvd_hetero.policy.topology import Topology

from . import backend
from .argument import check_unused
from .optimizer import make_reducer, weights_of
from .reducer import GradientReducer

PLACE = "_hvd_hetero_tapes"  # of a balancer


class _Series:
    """What reduces the gradients of tapes with the same arguments, from step to step: a loop wraps a new tape in every
    step, or in every trace of it."""

    def __init__(self) -> None:
        self._equal: dict[Hashable, Balancer] = {}  # where a tape has no balancer
        self._balancers: weakref.WeakSet[Balancer] = weakref.WeakSet()

    def reducer(self, *, balancer: Balancer | None, process_set: Any, **arguments: Any) -> GradientReducer:
        """As `make_reducer` returns it. The first call with these arguments is a collective one."""
        # As texts: True is no reduction, but equal to hvd.Sum.
        key = tuple(str(value) if name in ("compression", "op") else value for name, value in arguments.items())
        made = self._equal.get((process_set, key)) if balancer is None else None
        weights = made or weights_of(balancer, process_set)
        held: dict[Hashable, GradientReducer] = vars(weights).setdefault(PLACE, {})
        if key not in held:
            # The kind: a resumed job may use tapes first in another order, and their codecs' states are not alike.
            compression = arguments["compression"]
            kind = f"tape {Compression.named(compression) or name_of(compression)}"
            held[key] = make_reducer(balancer=weights, kind=kind, **arguments)
            if balancer is None:
                self._equal[process_set, key] = weights
            self._balancers.add(weights)
            weights.engine.on_reset_begin(self.forget)
        return held[key]

    def forget(self) -> None:
        """Closes all reducers, at an elastic reset; later tapes make new ones."""
        for balancer in self._balancers:
            for reducer in vars(balancer).pop(PLACE).values():
                reducer.close()
        self._balancers.clear()
        self._equal.clear()


_SERIES = _Series()


def reduces_by_tapes() -> bool:
    """Whether there is a tape in this process that reduces gradients."""
    return bool(_SERIES._balancers)


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient()` is that of the global batch; everything else is the given tape's.

    With a balancer the loop calls `balancer.begin(samples)` for each batch, unless it is over a `BalancedDataset`.
    Tapes with the same arguments are one series of exchanges.

    Args:
        gradtape: the tape.
        device_dense, device_sparse, sparse_as_dense, num_groups, groups, scale_local_gradients: Horovod's; of no
            effect.
        compression, op, gradient_predivide_factor, process_set, balancer, topology, bucket_bytes: as of
            `DistributedOptimizer`.
    """

    @backend.as_written
    def __init__(
        self,
        gradtape: Any,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: Any = backend.horovod.Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
        *,
        balancer: Balancer | None = None,
        topology: Topology | str | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        if backend.NAME != "tensorflow":
            raise RuntimeError(
                f'DistributedGradientTape: expected the back end "tensorflow" of Keras. Received: "{backend.NAME}". '
                "Use hvd.DistributedOptimizer."
            )
        if not hasattr(gradtape, "gradient"):
            raise TypeError(f"gradtape: expected a tf.GradientTape. Received: {gradtape!r}.")
        check_unused(device_dense=device_dense, device_sparse=device_sparse)
        self._tape = gradtape
        self._reducer = _SERIES.reducer(
            balancer=balancer,
            process_set=process_set,
            compression=compression,
            op=op,
            predivide=gradient_predivide_factor,
            topology=topology,
            bucket_bytes=bucket_bytes,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    @backend.as_written
    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """The gradients of the mean of `target` over all ranks' loss terms, in the structure of `sources`."""
        nest = self._reducer.form.tf.nest
        found = self._tape.gradient(target, sources, *arguments, **options)
        return nest.pack_sequence_as(sources, self._reducer.reduced(nest.flatten(found), nest.flatten(sources), 0))
