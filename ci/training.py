"""One task, trained by one process together and apart: the same numbers every time.

The ranks' strategies are the torch face's own (`LocalTraining` on `World`), and one loop lets the ranks step in the
order of a clock that is only counted. Synchronous training is one model on whole global batches, which weighted
gradients equal (law 2).
"""

from __future__ import annotations

import copy
import heapq
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from torch_char_lm import CharLM, Windows, read_text

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers.codec_spec import LinkCodecs
from hvd_hetero.optimizers.dealer import Dealer, cut
from hvd_hetero.optimizers.routing import Routing
from hvd_hetero.optimizers.unsent_state import UnsentState
from hvd_hetero.torch.local import LocalTraining

WHOLE = 64
EVEN, UNEVEN = (16, 16, 16, 16), (35, 16, 7, 6)
# Seconds of a step in units of what the shares promise: every step has noise of 30 %, and two ranks are off for good.
PACE, NOISE = (1.0, 0.9, 1.0, 1.1), 0.3
MOMENTS = ("momentum_buffer", "exp_avg")
INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, fused=True),
    "SGD, momentum 0.9": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True),
    "AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train locally: a strategy, and under what circumstances.

    Args:
        shares: of the ranks in a global batch of `WHOLE`.
        uneven: ranks' paces are; else they take turns.
        late: a merge comes so many steps after a rank's contribution, at least.
        reset: a merge sets the inner optimizer's first moments to zero (its second moments stay).
    """

    rule: hvd.LocalSGD = hvd.LocalSGD()
    shares: Sequence[int] = UNEVEN
    uneven: bool = True
    late: int = 0
    reset: bool = False

    def __post_init__(self) -> None:
        if self.rule.most_rounds < 1:
            raise ValueError("bound_rounds: expected at least 1, for one thread steps all ranks and must not wait. "
                             f"Received: {self.rule.most_rounds}.")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data, a model, and each optimizer's rate, for synchronous training: half and twice are worse, but for noise."""

    name: str
    make: Callable[[], nn.Module]
    training: tuple[torch.Tensor, torch.Tensor]
    validation: tuple[torch.Tensor, torch.Tensor]
    steps: int
    rates: dict[str, float]

    def fresh(self, inner: str, seed: int, rate: float | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = self.make()
        return model, INNER[inner](model.parameters(), lr=self.rates[inner] if rate is None else rate)

    def batches(self, seed: int) -> Iterator[tuple[int, np.ndarray, bool]]:
        """Step, indices of its global batch, and whether it is the last of an epoch or of all."""
        length, step = len(self.training[0]), 0
        dealer = Dealer(length, global_batch_size=WHOLE, shuffle=True, seed=seed, drop_last=True)
        while step < self.steps:
            for at, batch in enumerate(dealer.batches()):
                step += 1
                yield step - 1, batch, at + 1 == len(dealer) or step == self.steps
                if step == self.steps:
                    return
            dealer.epoch += 1

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, indices: np.ndarray, step: int) -> float:
        """One step at a rate that falls to 0 in a straight line; returns that rate."""
        first = optimizer.param_groups[0]
        first["lr"] = first.setdefault("initial_lr", first["lr"]) * (1 - step / self.steps)
        x, y = (part[torch.from_numpy(indices)] for part in self.training)
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        return float(first["lr"])

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        x, y = self.validation
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten()).item()


def digits() -> Task:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.RandomState(0).permutation(len(data.target))
    x, y = torch.tensor(data.data[order] / 16 - 0.3, dtype=torch.float32), torch.tensor(data.target[order])
    return Task(
        name="digits",
        make=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        training=(x[600:], y[600:]), validation=(x[:600], y[:600]), steps=360,
        rates={"SGD": 0.8, "SGD, momentum 0.9": 0.1, "AdamW": 0.01},
    )


def characters() -> Task:
    text, context = read_text(1.0), 16
    parts = []
    for piece in (text[:900_000], text[900_000 : 900_000 + 1024 * context + 1]):
        windows = Windows(piece, context)
        parts.append(tuple(torch.stack(rows) for rows in zip(*(windows[i] for i in range(len(windows))), strict=True)))
    return Task(
        name="characters", make=lambda: CharLM(context=context, width=32, layers=1), training=parts[0],
        validation=parts[1], steps=200, rates={"SGD": 1.4, "SGD, momentum 0.9": 0.8, "AdamW": 0.04},
    )


def together(task: Task, inner: str, seed: int, rate: float | None = None) -> float:
    """The final validation loss of synchronous training."""
    model, optimizer = task.fresh(inner, seed, rate)
    for step, batch, _ in task.batches(seed):
        task.update(model, optimizer, batch, step)
    return task.loss(model)


@dataclass
class Rank:
    """One rank: what it trains, its strategy, and what it was told of merges. It stands in for the balancer's trace."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    balancer: Any = None
    training: Any = None
    sends: int = 0
    merges: list[dict[str, Any]] = field(default_factory=list)

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "merge":
            self.merges.append({**fields, "longest": max(self.local.rounds.lengths.by_rank)})

    def plan(self, plan: Any) -> None:
        """Shares are of no interest here."""

    @property
    def local(self) -> Any:
        return self.training.steps

    @property
    def fragment(self) -> Any:
        return self.local.rounds.fragments[0]

    def delay(self, late: int) -> None:
        """A merge comes `late` steps after the contribution, at least; and contributions are counted once sent."""
        fragment = self.fragment
        done, send = fragment.done, fragment.send

        def counted(weigh: Any) -> bool:
            finite = send(weigh)
            self.sends += 1
            return bool(finite)

        fragment.done, fragment.send = lambda: fragment.work.steps >= late and done(), counted

    def forget(self) -> None:
        """Sets the first moments of its optimizer to zero."""
        for state in self.optimizer.state.values():
            for name in MOMENTS:
                if name in state:
                    state[name].zero_()

    def misses(self, ranks: Sequence[Rank]) -> bool:
        """Whether its merge waits for another rank's contribution."""
        return self.fragment.under_way and self.sends > min(rank.sends for rank in ranks)

    def at_bound(self) -> bool:
        """Whether it may not end another step before the merge comes."""
        return self.fragment.work.steps + 1 >= self.local.rule.most_rounds * self.local.rounds.round_steps


def is_local(task: Task, way: Way, inner: str, seed: int) -> tuple[float, list[dict[str, Any]]]:
    """The final validation loss of local SGD, and what rank 0 was told of its merges."""
    model, optimizer = task.fresh(inner, seed)
    clock, pool, ranks = random.Random(seed), ThreadPoolExecutor(len(way.shares)), []
    epoch: list[tuple[int, np.ndarray]] = []
    for step, batch, last in task.batches(seed):
        if step < way.rule.warmup_steps:
            task.update(model, optimizer, batch, step)
            continue
        if not ranks:
            ranks = _ranks(way, model, optimizer)
        epoch.append((step, batch))
        if last:
            list(pool.map(lambda rank: rank.training.before_step(), ranks))
            _epoch(task, epoch, ranks, way, pool, clock if way.uneven else None)
            epoch = []
    pool.shutdown()
    return task.loss(ranks[0].model), ranks[0].merges


def _ranks(way: Way, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Rank]:
    rule = replace(way.rule, most_missed=0)  # who waits for whom is known here only where all are in each merge

    def program(engine: Any) -> Rank:
        rank = Rank(*copy.deepcopy((model, optimizer)))
        rank.balancer = hvd.Balancer(WHOLE, engine=engine, shares=tuple(way.shares), adaptive=False)
        rank.balancer.trace, rank.balancer.step = rank, way.rule.warmup_steps - 1
        # No gradient is exchanged, and none weighed.
        gradient_exchange = SimpleNamespace(
            engine=engine,
            balancer=rank.balancer,
            passes=1,
            place=lambda: "gradients 0",
            unsent_state=UnsentState(keeps=False),
        )
        routing = Routing(engine, codecs=LinkCodecs(), topology=None)
        rank.training = LocalTraining(rule, list(rank.model.parameters()), gradient_exchange, routing=routing)
        rank.training.follow(rank.optimizer)
        rank.delay(way.late)
        return rank

    return World(len(way.shares)).run(program)


def _epoch(
    task: Task, epoch: Sequence[tuple[int, np.ndarray]], ranks: Sequence[Rank], way: Way,
    pool: ThreadPoolExecutor, clock: random.Random | None,
) -> None:
    """All ranks' steps of one epoch, and the merge at its end, as `BalancedDataLoader` asks for it."""
    ending: dict[int, Future[None]] = {}
    queue = [(0.0 if clock else 1.0, index, 0) for index in range(len(ranks))]
    while queue:
        now, index, at = heapq.heappop(queue)
        rank = ranks[index]
        # Ranks that are at the end send what is left by themselves: all that they can do now is done first.
        while any(not (ranks[i].misses(ranks) or ended.done()) for i, ended in ending.items()):
            time.sleep(1e-5)
        if rank.misses(ranks) and rank.at_bound():
            heapq.heappush(queue, (max(now, queue[0][0]) + 1e-9 if queue else now, index, at))
            continue
        step, batch = epoch[at]
        mine = cut(batch, way.shares, index)
        rank.balancer.begin(len(mine))
        rank.training.before_step()
        lr = task.update(rank.model, rank.optimizer, mine, step)
        seconds = PACE[index] * clock.lognormvariate(0.0, NOISE) if clock else 1.0
        rank.balancer.step_timer.known = (float(len(mine)), seconds)
        merges = rank.local.rounds.merges
        rank.training.after_step(len(mine), lr=lr)
        if way.reset and rank.local.rounds.merges > merges:
            rank.forget()
        if at + 1 < len(epoch):
            heapq.heappush(queue, (now + seconds, index, at + 1))
        else:
            ending[index] = pool.submit(rank.training.merge)
    for ended in ending.values():
        ended.result(60)
