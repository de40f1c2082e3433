"""Sums sparse gradients, as of `nn.Embedding(sparse=True)`, by sending only the rows that a batch has touched.

Parameters do not show whether their gradients will be sparse, and a rank without a sample has no gradient to look at.
So the first sparse gradient of a parameter travels as a dense one. With it, its rank asks in the control vector for
another layout, and all ranks then tell each other which parameters have sparse gradients. The new layout holds from the
next batch on: with several optimizers, ranks may make their exchanges in unlike orders, and no rank may wait for all
others in between. Parameters of `SparseAdam` are known beforehand: it refuses dense gradients, also on a rank whose
batch has used no row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.port import Engine, Handle

from .layout import WIRE, gradient_type


class SparseParameters:
    """Finds out, on all ranks alike, which parameters have sparse gradients.

    Args:
        parameters: all, in the same order on all ranks; may grow.
        known: whether all of them have sparse gradients, by row.

    Attributes:
        seen: parameters whose gradients this rank knows to be sparse, with the number of sparse dimensions.
        dimensions: the same as far as all ranks know it.
        changed: is called, on all ranks, when `dimensions` gets further parameters.
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
        """Takes in new parameters, if all gradients are known to be sparse beforehand."""
        if self._known:
            new = {parameter: 1 for parameter in self._parameters if parameter not in self.dimensions}
            self.seen.update(new)
            self.dimensions.update(new)

    def learn(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes parameters for which the optimizer keeps a sparse tensor: a sparse momentum takes no dense gradient."""
        for parameter in self._parameters:
            for kept in optimizer.state.get(parameter, {}).values():
                if isinstance(kept, torch.Tensor) and kept.is_sparse:
                    self.seen[parameter] = kept.sparse_dim()

    def see(self) -> None:
        """Notes which gradients of a local step, which are not exchanged, are sparse."""
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                self.seen[parameter] = parameter.grad.sparse_dim()

    @property
    def asks(self) -> bool:
        """Whether this rank knows of a parameter with sparse gradients of which not all ranks know."""
        return len(self.seen) > len(self.dimensions)

    def tell(self, engine: Engine, *, name: str) -> None:
        """Tells all ranks what this one has seen, as they all do. Then makes gradients sparse here that other ranks
        have seen to be, unless another rank waits for this one elsewhere before it can tell."""
        if self._told is None:
            line = f"{json.dumps(self._numbered(self.seen))}\n".encode()
            self._told = engine.allgather_async(torch.tensor([*line], dtype=torch.uint8, device="cpu"), name=name)
        # In a second exchange of one batch the answer is known already, and Horovod's handle is gone.
        if self._heard is not None or engine.wait_avoiding_deadlock(self._told.done, name=name):
            for parameter, dimensions in self.told().items():
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(dimensions)

    def hear(self) -> None:
        """Takes in what all ranks have told, if they have; is called when a batch begins."""
        told, self._told, self._heard = self.told(), None, None
        self._add(told)

    def told(self) -> dict[torch.nn.Parameter, int]:
        """The sparse dimensions that all ranks have told, with which the next batch begins; empty if none were told.
        A collective call if ranks are about to tell each other."""
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
        """Sparse dimensions by the parameter's number. A collective call if ranks are about to tell each other."""
        return {"dimensions": self._numbered(self.dimensions), "told": self._numbered(self.told())}

    def load_state_dict(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Goes on from `state`. Either all ranks call it or none."""
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
        self._taken: dict[torch.nn.Parameter, torch.Tensor] = {}  # what was carried and is under way now
        self.bytes_sent = 0  # in this step

    def __contains__(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._dimensions

    @property
    def submitted(self) -> bool:
        """Whether any gradient is under way."""
        return bool(self._under_way)

    def carry(self, parameter: torch.nn.Parameter, kept: torch.Tensor) -> None:
        """Sends `kept` with the next sum: dense and weighted, kept back by a codec before this exchange was made."""
        self._carried[parameter] = kept.to(parameter.device)

    def carried(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """What was given to `carry` and is not in a sum that counts yet."""
        return {**self._taken, **self._carried}

    def submit(self, parameter: torch.nn.Parameter, weight: float) -> torch.Tensor:
        """Sends the gradient times `weight`; no rows if there is no gradient, or the weight is 0. Returns the values
        sent."""
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
        """Ends a step that counts, with these sums: forgets what was carried, which is in them, unless they hold an
        infinity or a NaN."""
        values = [whole.values() for whole in sums.values()]
        if self._taken and verbs_of(values[0]).all_finite(values):
            self._taken.clear()

    def clear(self) -> None:
        """Begins another step, with nothing under way. What was carried into a step that did not count goes with it."""
        self._carried.update(self._taken)
        self._taken.clear()
        self._under_way, self.bytes_sent = {}, 0

    def deliver(self, sums: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Makes what `finish` returned the parameters' gradients, except for parameters that were frozen since."""
        for parameter, whole in sums.items():
            if parameter.requires_grad:
                parameter.grad = whole.to(gradient_type(parameter))
