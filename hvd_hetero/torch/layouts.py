"""Holds the present layout of one optimizer's gradients. Replaces it when parameters are added or moved, or when some
gradients turn out to be sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_hetero.optimizers.gradient_exchange import BUCKET_BYTES, GradientExchange
from hvd_hetero.optimizers.routing import Routing

from .accumulation import GradientAccumulation
from .layout import WIRE, Groups
from .sparse import SparseParameters
from .step import ReducedStep


class Layouts:
    """Lays out the gradients of `parameters` alike on all ranks. Constructing one is a collective call.

    Args:
        parameters: a list that may grow: see `grow`.
        accumulated: the gradients of the step under way.
        sparse_as_dense: whether sparse gradients are summed as dense ones.
        all_sparse: whether the gradients of all parameters are sparse.
        bucket_bytes: at most so many bytes in one operation; None: what suits the links.
        groups: parameters that travel together, instead of buckets by size.

    Attributes:
        step: reduces gradients by the present layout.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        gradient_exchange: GradientExchange,
        routing: Routing,
        accumulated: GradientAccumulation,
        sparse_as_dense: bool,
        all_sparse: bool,
        bucket_bytes: int | None,
        groups: Groups,
    ) -> None:
        self._parameters, self._accumulated = parameters, accumulated
        self._gradient_exchange, self._routing = gradient_exchange, routing
        self._sparse_as_dense, self._bucket_bytes, self._groups = sparse_as_dense, bucket_bytes, groups
        self._sparse = SparseParameters(parameters, known=all_sparse)
        gradient_exchange.unsent_state.put_message("sparse", self._sparse)
        self._agreed = False  # whether a rank has asked for another layout, and all ranks know it
        self.step = self._laid_out()
        if not sparse_as_dense:
            self._sparse.changed = self._lay_out_anew

    def _laid_out(self) -> ReducedStep:
        if self._bucket_bytes is None and self._parameters:
            first = self._parameters[0]
            like = torch.empty(0, dtype=WIRE[first.dtype], device=first.device)
            self._bucket_bytes = self._routing.bucket_bytes(like, most=BUCKET_BYTES)
        return ReducedStep(
            self._parameters,
            gradient_exchange=self._gradient_exchange,
            routing=self._routing,
            accumulated=self._accumulated,
            bucket_bytes=self._bucket_bytes or BUCKET_BYTES,
            groups=self._groups,
            seen=self._sparse.seen,
            rows={} if self._sparse_as_dense else self._sparse.dimensions,
        )

    def _lay_out_anew(self) -> None:
        """Replaces the layout between two steps. What codecs have kept back is sent with the next sums."""
        before, self.step = self.step, self._laid_out()
        self.step.take_over(before)

    def grow(self) -> None:
        """Takes in parameters that are new. A collective call."""
        self._sparse.grow()
        self._lay_out_anew()

    def parameters_moved(self) -> None:
        """Asks for another layout, as parameters have moved to another device or changed their type."""
        self.step.layout.outdated = True

    def learn(self, optimizer: torch.optim.Optimizer) -> None:
        """Learns from an optimizer's state which parameters have sparse gradients."""
        self._sparse.learn(optimizer)

    def see(self) -> None:
        """Notes which gradients of a local step, which are not exchanged, are sparse."""
        self._sparse.see()

    @property
    def asks(self) -> bool:
        """Whether this rank wants another layout."""
        return self._sparse.asks or self.step.layout.outdated

    def take_in(self, hear: Callable[[], None]) -> None:
        """Calls `hear`, which reads what all ranks said in an exchange; then, if a rank asks for another layout, tells
        all ranks which gradients this one has seen to be sparse."""
        hear()
        if self._gradient_exchange.relayout:
            self._agreed = True
            self._sparse.tell(self._gradient_exchange.engine, name=f"{self._gradient_exchange.name}.sparse")

    def renew(self) -> bool:
        """Changes to the layout that all ranks have agreed on, if there is one; is called when a batch begins. Returns
        whether the layout has changed."""
        before, agreed = self.step, self._agreed
        self._agreed = False
        self._sparse.hear()
        if agreed and self.step is before:
            self._lay_out_anew()
        return self.step is not before
