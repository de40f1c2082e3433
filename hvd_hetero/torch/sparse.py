"""Sparse gradients, as of `nn.Embedding(sparse=True)`: what travels are the rows that a batch has touched.

No rank knows from the parameters whose gradients will be sparse, and one without a sample has none to look at. So the
first sparse gradient of a parameter travels as a dense one; with it its rank asks, in the control vector, for another
layout, and all ranks tell each other which parameters it is about. The next batch begins with that layout: where there
are several optimizers, ranks may come to their exchanges in unlike orders, and none may wait for all in between. What
`SparseAdam` updates is known beforehand: it refuses dense gradients, also where a rank's batch has used no row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.port import Engine, Handle

from .layout import WIRE


class SparseParameters:
    """Whose gradients are sparse.

    Args:
        parameters: all, in the same order on all ranks; may grow.
        known: whether all of them have sparse gradients, by row.

    Attributes:
        seen: as far as this rank knows: sparse dimensions of their gradients.
        dimensions: as far as all ranks know.
        changed: is called, on all ranks, when there are others of these.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, known: bool) -> None:
        self._parameters, self._known = parameters, known
        self.seen: dict[torch.nn.Parameter, int] = {}
        self.dimensions: dict[torch.nn.Parameter, int] = {}
        self.changed: Callable[[], None] = lambda: None
        self._told: Handle | None = None
        self._heard: dict[torch.nn.Parameter, int] | None = None
        self.grow()

    def grow(self) -> None:
        """Takes in parameters that are new, where it is known of them beforehand."""
        if self._known:
            new = {parameter: 1 for parameter in self._parameters if parameter not in self.dimensions}
            self.seen.update(new)
            self.dimensions.update(new)

    def learn(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at what an optimizer keeps: a momentum that is sparse takes no dense gradient."""
        for parameter in self._parameters:
            for kept in optimizer.state.get(parameter, {}).values():
                if isinstance(kept, torch.Tensor) and kept.is_sparse:
                    self.seen[parameter] = kept.sparse_dim()

    def see(self) -> None:
        """Looks at gradients that stay this rank's own."""
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                self.seen[parameter] = parameter.grad.sparse_dim()

    @property
    def asks(self) -> bool:
        """Whether this rank knows of one that not all ranks know of."""
        return len(self.seen) > len(self.dimensions)

    def tell(self, engine: Engine, *, name: str) -> None:
        """Tells all ranks what this one has seen; they do as well. What others have seen to be sparse is, where this
        rank has not used it – unless one waits for this rank elsewhere before it can tell."""
        if self._told is None:
            line = f"{json.dumps(self._numbered(self.seen))}\n".encode()
            self._told = engine.allgather_async(torch.tensor([*line], dtype=torch.uint8, device="cpu"), name=name)
        # With a second exchange in one batch it is heard already, and Horovod's handle gone.
        if self._heard is not None or engine.wait_unless_awaited(self._told.done, name=name):
            for parameter, dimensions in self.told().items():
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(dimensions)

    def hear(self) -> None:
        """Takes in what all ranks have told, if they have. A batch begins."""
        told, self._told, self._heard = self.told(), None, None
        self._add(told)

    def told(self) -> dict[torch.nn.Parameter, int]:
        """What all ranks have told, if they have, and the next batch begins with: sparse dimensions."""
        if self._heard is None and self._told is not None:
            lines = bytes(self._told.wait().tolist()).decode().splitlines()
            pairs = [pair for line in lines for pair in json.loads(line).items()]
            self._heard = self._of_numbers(dict(pairs))
        return self._heard or {}

    def _of_numbers(self, dimensions: Mapping[str, int]) -> dict[torch.nn.Parameter, int]:
        return {self._parameters[int(number)]: n for number, n in dimensions.items()}

    def _numbered(self, dimensions: Mapping[torch.nn.Parameter, int]) -> dict[str, int]:
        return {str(number): dimensions[p] for number, p in enumerate(self._parameters) if p in dimensions}

    def _add(self, dimensions: Mapping[torch.nn.Parameter, int]) -> None:
        before = len(self.dimensions)
        self.dimensions.update(dimensions)
        self.seen.update(dimensions)
        if len(self.dimensions) > before:
            self.changed()

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Sparse dimensions by the parameter's number. A collective call where ranks are about to tell each other."""
        return {"dimensions": self._numbered(self.dimensions), "told": self._numbered(self.told())}

    def load_state_dict(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Goes on from `state`. All ranks do, or none."""
        self._told, self._heard = None, self._of_numbers(state["told"]) or None
        self._add(self._of_numbers(state["dimensions"]))


class _UnderWay(NamedTuple):
    indices: Handle
    values: Handle


class SparseExchange:
    """Sums sparse gradients over the ranks: all gather all ranks' rows, and add those of one index in rank order.

    Args:
        dimensions: the parameters, and how many dimensions of their gradients are sparse.
        name: prefix of the operations' names, the same on all ranks and different from any other exchange's.
    """

    def __init__(self, engine: Engine, dimensions: Mapping[torch.nn.Parameter, int], *, name: str) -> None:
        self._engine, self._dimensions, self._name = engine, dict(dimensions), name
        self._numbers = {parameter: number for number, parameter in enumerate(self._dimensions)}
        self._under_way: dict[torch.nn.Parameter, _UnderWay] = {}
        self._carried: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._taken: dict[torch.nn.Parameter, torch.Tensor] = {}  # of that, what is under way
        self.bytes_sent = 0  # in this step

    def __contains__(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._dimensions

    @property
    def submitted(self) -> bool:
        """Whether any is under way."""
        return bool(self._under_way)

    def carry(self, parameter: torch.nn.Parameter, kept: torch.Tensor) -> None:
        """Sends with the next sum what a codec had kept back, dense and weighted, before this exchange was made."""
        self._carried[parameter] = kept.to(parameter.device)

    def carried(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """What is yet to be sent of that."""
        return {**self._taken, **self._carried}

    def submit(self, parameter: torch.nn.Parameter, weight: float) -> torch.Tensor:
        """Sends the gradient times `weight`; nothing where there is none, or the weight is 0. Returns the values sent.
        """
        with torch.no_grad():
            mine = self._weighted(parameter, weight)
            if (kept := self._carried.pop(parameter, None)) is not None:
                self._taken[parameter] = kept
                mine = (mine + self._sparse(parameter, kept.view(parameter.shape))).coalesce()
        indices, values = mine.indices().t().contiguous(), mine.values()
        name = f"{self._name}.{self._numbers[parameter]}"
        self._under_way[parameter] = _UnderWay(
            self._engine.allgather_async(indices, name=f"{name}.indices"),
            self._engine.allgather_async(values, name=f"{name}.values"),
        )
        self.bytes_sent += sum(part.numel() * part.element_size() for part in (indices, values))
        return values

    def _weighted(self, parameter: torch.nn.Parameter, weight: float) -> torch.Tensor:
        wire, grad = WIRE[parameter.dtype], parameter.grad
        if grad is None or weight == 0.0:  # nothing counts, not even a NaN
            dimensions = self._dimensions[parameter]
            indices = torch.zeros((dimensions, 0), dtype=torch.int64, device=parameter.device)
            values = torch.zeros((0, *parameter.shape[dimensions:]), dtype=wire, device=parameter.device)
            return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()
        if not grad.is_sparse or grad.sparse_dim() != self._dimensions[parameter]:
            grad = self._sparse(parameter, grad.to_dense())
        grad = grad.to(wire).coalesce()
        return grad if weight == 1.0 else grad * weight

    def _sparse(self, parameter: torch.nn.Parameter, dense: torch.Tensor) -> torch.Tensor:
        return dense.to_sparse(self._dimensions[parameter])

    def done(self) -> bool:
        """True when nothing is under way."""
        return all([part.done() for both in self._under_way.values() for part in both])

    def finish(self, factor: float) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The sums times `factor`, coalesced. Raises the engine's failure when a collective failed."""
        sums = {}
        for parameter, both in self._under_way.items():
            indices, values = both.indices.wait(), both.values.wait()
            whole = torch.sparse_coo_tensor(indices.t(), values, parameter.shape, check_invariants=False).coalesce()
            sums[parameter] = whole if factor == 1.0 else whole * factor
        return sums

    def end_step(self, sums: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Says that a step counts that has these sums: what was carried is in it, unless they are not finite."""
        values = [whole.values() for whole in sums.values()]
        if self._taken and verbs_of(values[0]).all_finite(values):
            self._taken.clear()

    def clear(self) -> None:
        """Begins another step: nothing is under way. What was carried into one that did not count goes with it."""
        self._carried.update(self._taken)
        self._taken.clear()
        self._under_way, self.bytes_sent = {}, 0

    def deliver(self, sums: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Makes what `finish` returned the parameters' gradients; but for those that were frozen since."""
        for parameter, whole in sums.items():
            if parameter.requires_grad:
                parameter.grad = whole.to(parameter.dtype)
