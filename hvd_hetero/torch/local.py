"""Local SGD behind `DistributedOptimizer(strategy=…)`: which steps ranks make apart, and parameters as fragments."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.agreement import agree_text
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.fragment import fragments_of
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.rounds import Rounds, control_length
from hvd_hetero.optimizers.weighted import WeightedExchange

from .buffers import average_buffers
from .checksum import check_alike
from .layout import WIRE
from .ways import Ways


def strategy_of(strategy: LocalSGD | str) -> LocalSGD | None:
    """The local strategy that a user's argument names; None for synchronous training."""
    if isinstance(strategy, LocalSGD):
        return strategy
    if strategy not in ("synchronous", "local"):
        raise ValueError(
            f'strategy: expected "synchronous", "local" or an hvd.LocalSGD. Received: {strategy!r}.'
        )
    return LocalSGD() if strategy == "local" else None


class ParameterStore:
    """A rank's parameters, flat, by fragment; each fragment is of one type and device, and wholly lossy or not."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], count: int, lossy: Callable[..., bool]) -> None:
        kinds: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((WIRE[parameter.dtype], parameter.device, lossy(parameter)), []).append(parameter)
        self.members: list[list[torch.nn.Parameter]] = []
        self.lossy: list[bool] = []
        for (_, _, through), members in kinds.items():
            for chosen in fragments_of([p.numel() for p in members], count):
                self.members.append([members[index] for index in chosen])
                self.lossy.append(through)

    def empty(self, index: int, tail: int) -> torch.Tensor:
        """An array as long as fragment `index` and `tail` more."""
        first = self.members[index][0]
        length = sum(p.numel() for p in self.members[index])
        return torch.zeros(length + tail, dtype=WIRE[first.dtype], device=first.device)

    @torch.no_grad()
    def read(self, index: int) -> torch.Tensor:
        members = self.members[index]
        return torch.cat([p.detach().reshape(-1) for p in members]).to(WIRE[members[0].dtype])

    @torch.no_grad()
    def write(self, index: int, flat: torch.Tensor) -> None:
        members = self.members[index]
        parts = flat.split([p.numel() for p in members])
        torch._foreach_copy_(list(members), [part.view(p.shape) for part, p in zip(parts, members, strict=True)])


class LocalSteps:
    """The strategy of one optimizer: synchronous steps first, and then steps that ranks make apart.

    Args:
        parameters: those that are trained, in the same order on all ranks.
        ways: how progress travels.
    """

    def __init__(
        self,
        rule: LocalSGD,
        parameters: Sequence[torch.nn.Parameter],
        *,
        engine: Engine,
        balancer: Balancer,
        ways: Ways,
    ) -> None:
        self.rule, self._engine, self._balancer, self._ways = rule, engine, balancer, ways
        self._store = ParameterStore(parameters, rule.fragments, ways.takes)
        agree_text(engine, lambda: str(rule), title="strategy", name=engine.unique("hvd_hetero.strategy."))
        self._name = f"hvd_hetero.{balancer.name}.{engine.unique('local.')}"
        self.rounds = Rounds(
            rule, balancer=balancer, store=self._store, exchanges=self._exchanges, on_merge=self._record
        )
        self._bytes = [f.buffer.numel() * f.buffer.element_size() for f in self.rounds.fragments]
        self._begun = False
        self._samples = 0.0  # since the buffers were averaged
        atexit.register(self._warn_at_exit)

    def _exchanges(self, outgoing: Callable[[int], list[float]]) -> list[tuple[WeightedExchange, torch.Tensor]]:
        made, tail = [], control_length(self._engine.size)
        for index, (members, lossy) in enumerate(zip(self._store.members, self._store.lossy, strict=True)):
            buffer = self._store.empty(index, 0 if lossy else tail)
            name = f"{self._name}.fragment.{index}"
            exchange = WeightedExchange(
                self._engine,
                [buffer],
                torch.zeros(tail, dtype=torch.float64) if lossy else buffer[-tail:],
                routes=[self._ways.way(name, buffer, [tuple(p.shape) for p in members], lossy)],
                rides_in=None if lossy else 0,
                outgoing=lambda index=index: outgoing(index),  # type: ignore[misc]
                name=name,
                keeps=self._ways.keeps,
                write=lambda view, values: view.copy_(torch.tensor(values, dtype=view.dtype)),
            )
            made.append((exchange, buffer))
        return made

    def _record(self, fields: dict[str, Any]) -> None:
        if self._balancer.trace is not None:
            self._balancer.trace.event("merge", **fields)

    def _warn_at_exit(self) -> None:
        """Says so where a job ends between merges – unless it ended in an error, which says enough."""
        if self._begun and not hasattr(sys, "last_value"):
            warnings.warn(
                "Expected optimizer.merge() after the last step of a local strategy. Received: the end of the job. "
                "What ranks did since the last merge is on each of them alone.",
                RuntimeWarning,
                stacklevel=1,
            )

    def apart(self) -> bool:
        """Whether the batch begun last is one that ranks take apart."""
        return self._balancer.step >= self.rule.warmup_steps

    def before_step(self) -> None:
        """Before an update that ranks make apart. The first one is a collective call."""
        if not self._begun:
            for index, members in enumerate(self._store.members):
                check_alike(members, engine=self._engine, name=f"{self._name}.alike.{index}")
            self.rounds.begin()
            self._begun = True

    def after_step(self, samples: float, *, lr: float) -> int:
        """The bytes that this rank has sent after an update over `samples`."""
        self._samples += samples
        before = [fragment.sends for fragment in self.rounds.fragments]
        self.rounds.after_step(samples, lr=lr, compute=self._balancer.reported)
        sends = [fragment.sends - first for fragment, first in zip(self.rounds.fragments, before, strict=True)]
        return sum(number * size for number, size in zip(sends, self._bytes, strict=True))

    def withdraw(self) -> Callable[[], bool]:
        """See `Rounds.withdraw`; others may be about to take their first step apart."""
        self.before_step()
        self._begun = False
        return self.rounds.withdraw()

    def merge(self, model: torch.nn.Module | None = None) -> None:
        """Returns when all ranks hold one model, with every step of every rank in it. A collective call."""
        if self._begun:
            self.rounds.finish()
            self._begun = False
        if model is not None:
            average_buffers(model, weight=self._samples, engine=self._engine, name=f"{self._name}.buffers")
            self._samples = 0.0
