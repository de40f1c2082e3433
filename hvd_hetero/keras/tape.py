"""`DistributedGradientTape`, for training loops of one's own with the TensorFlow back end."""

from __future__ import annotations

import functools
from typing import Any

from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.policy.topology import Topology

from . import backend
from .argument import check_unused, op_of
from .compression import Compression
from .optimizer import make_reducer, weights_of
from .reducer import GradientReducer


class _Series:
    """What reduces the gradients of tapes with the same arguments, from step to step: a loop wraps a new tape in every
    step, or in every trace of it. Making one is a collective call."""

    def __init__(self, balancer: Balancer, **arguments: Any) -> None:
        self._reducer_of = functools.partial(make_reducer, balancer=balancer, **arguments)
        self.reducer: GradientReducer = self._reducer_of()
        balancer.engine.remember(self.rebuild)

    def rebuild(self) -> None:
        """Reduces over the ranks that there are now. A collective call."""
        self.reducer.close()
        self.reducer = self._reducer_of()


_SERIES: dict[tuple[Any, ...], _Series] = {}


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient()` is that of the global batch; everything else is the given tape's.

    With a balancer the loop calls `balancer.begin(samples)` for each batch. Tapes with the same arguments are one
    series of exchanges.

    Args:
        gradtape: the tape.
        device_dense, device_sparse, sparse_as_dense, num_groups, groups, scale_local_gradients: Horovod's; of no
            effect.
        compression, op, gradient_predivide_factor, process_set, balancer, topology, bucket_bytes: as of
            `DistributedOptimizer`.
    """

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
        check_unused(device_dense=device_dense, device_sparse=device_sparse)
        self._tape = gradtape
        op_of(op, "Average", "Sum")  # raises what is wrong: as a key, True is hvd.Sum
        key = (str(compression), op, gradient_predivide_factor, process_set, balancer, topology, bucket_bytes)
        if key not in _SERIES:
            _SERIES[key] = _Series(
                weights_of(balancer, process_set),
                compression=compression,
                op=op,
                predivide=gradient_predivide_factor,
                topology=topology,
                bucket_bytes=bucket_bytes,
            )
        self._reducer = _SERIES[key].reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """The gradients of the mean of `target` over all ranks' loss terms, in the structure of `sources`."""
        nest = self._reducer.form.tf.nest
        found = self._tape.gradient(target, sources, *arguments, **options)
        return nest.pack_sequence_as(sources, self._reducer.reduced(nest.flatten(found), nest.flatten(sources), 0))
