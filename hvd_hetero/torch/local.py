"""Local SGD behind `DistributedOptimizer(strategy=…)`: the strategy that an argument names, parameters as fragments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.fragment import fragments_by_kind
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.local_step import LocalSteps
from hvd_hetero.optimizers.ways import Ways

from .checksum import checksum
from .layout import WIRE


class ParameterStore:
    """A rank's parameters, flat, by fragment; each fragment is of one type and device, and wholly lossy or not."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        count: int = 1,
        lossy: Callable[[torch.nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        kinds = [(WIRE[p.dtype], p.device, lossy(p)) for p in parameters]
        fragments = fragments_by_kind(kinds, [p.numel() for p in parameters], count)
        self._members = [[parameters[index] for index in chosen] for chosen in fragments]
        self.lossy: list[bool] = [kinds[chosen[0]][2] for chosen in fragments]

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        return [tuple(p.shape) for p in self._members[index]]

    def empty(self, index: int, tail: int) -> torch.Tensor:
        first = self._members[index][0]
        length = sum(p.numel() for p in self._members[index])
        return torch.zeros(length + tail, dtype=WIRE[first.dtype], device=first.device)

    def control(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.float64)

    def write_control(self, view: torch.Tensor, values: Sequence[float]) -> None:
        view.copy_(torch.tensor(values, dtype=view.dtype))

    def checksum(self, index: int) -> int:
        return checksum(self._members[index])

    @torch.no_grad()
    def read(self, index: int) -> torch.Tensor:
        members = self._members[index]
        return torch.cat([p.detach().reshape(-1) for p in members]).to(WIRE[members[0].dtype])

    @torch.no_grad()
    def write(self, index: int, flat: torch.Tensor) -> None:
        members = self._members[index]
        parts = flat.split([p.numel() for p in members])
        torch._foreach_copy_(list(members), [part.view(p.shape) for part, p in zip(parts, members, strict=True)])


def local_steps(
    rule: LocalSGD,
    parameters: Sequence[torch.nn.Parameter],
    *,
    engine: Engine,
    balancer: Balancer,
    ways: Ways,
    batches: Callable[[], int] = lambda: 1,
) -> LocalSteps:
    """The strategy of an optimizer of these parameters. A collective call."""
    trained = [p for p in parameters if p.requires_grad]
    store = ParameterStore(trained, rule.fragments, lambda p: ways.takes(tuple(p.shape)))
    return LocalSteps(
        rule, store, engine=engine, balancer=balancer, way=ways.way, keeps=ways.keeps, batches=batches
    )
