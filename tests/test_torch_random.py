"""Law 2 for scripts drawn at random: ranks train as one process does on the global batches.

HVD_HETERO_SEEDS=40:2000 draws more than those of every run.
"""

import copy
import os
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World

WIDTH, WORDS = 3, 5
START, END = map(int, os.environ.get("HVD_HETERO_SEEDS", "0:40").split(":"))
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


@dataclass(frozen=True)
class Script:
    """What a training script does, and on which ranks."""

    seed: int
    ranks: int
    whole: int  # samples of a global batch
    most: tuple[int | None, ...]  # max_micro_batch of each rank
    steps: int
    batches: int  # of a step
    optimizers: int
    losses: int
    passes: str  # "one": over the sum of all losses; "each part": one for each loss; "loops": a loop for each loss
    zero_grad: str  # "none", "zeros", "model", "never", "second": before the second step alone
    masked: bool  # losses are means over terms of their own
    unused: bool  # batches decide which parameters they use
    penalty: str | None  # a loss of the whole batch, "before" or "after" its parts
    kind: str
    clip: bool
    sparse: bool
    skips: bool  # a rank without a sample leaves backward() out
    options: dict[str, Any]  # of DistributedOptimizer
    leaves_out: bool = False  # a batch before each step, by zero_grad()

    @property
    def several(self) -> bool:
        """Whether a batch has several exchanges, each of which all ranks have to come to."""
        return self.penalty is not None or (self.losses > 1 and self.passes != "one")

    @property
    def valid(self) -> bool:
        """Whether it says what it means: docs/pytorch.md tells what else to do in the other cases."""
        return not (
            (self.several and (self.skips or (self.masked and self.batches > 1)))
            or (self.several and self.optimizers > 1 and (self.unused or self.penalty))
            or (self.masked and (self.penalty or (self.losses > 1 and self.passes != "loops")))
            or (self.skips and self.optimizers > 1)
            or (self.sparse and (self.kind in ("AdamW", "momentum") or self.clip))
            or ("strategy" in self.options and not self.is_linear)
        )

    @property
    def is_linear(self) -> bool:
        """Whether what ranks do apart, each with what it kept, adds up to what they do together, by one number each."""
        kept = self.kind != "SGD" or self.zero_grad in ("never", "second")
        return not (kept or self.clip or self.sparse or (self.several and (self.masked or self.batches > 1)))

    def shares(self, batch: int) -> list[int]:
        """Of the ranks, of one of its batches."""
        draw = random.Random(self.seed * 1000 + batch)
        cuts = sorted(draw.randint(0, self.whole) for _ in range(self.ranks - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, self.whole], strict=True)]


APART = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)  # and merge after each step


def drawn(seed: int) -> Script:
    draw = random.Random(seed)

    def some(choices: list[Any], likely: Any) -> Any:
        return draw.choice(choices) if draw.random() < 0.5 else likely

    while True:
        ranks = draw.choice([2, 2, 3, 4])
        options = {
            "op": some([hvd.Average, hvd.Sum], hvd.Average),
            "bucket_bytes": some([8, 64, 8 << 20], None),
            "gradient_predivide_factor": some([4.0], 1.0),
            "topology": some(["rails", "leader", "flat"], None),
            **some([{"strategy": APART}, {}], {}),
        }
        script = Script(
            seed=seed,
            ranks=ranks,
            whole=draw.randint(ranks, 4 * ranks),
            most=tuple(draw.choice([None, 1, 2, 3]) for _ in range(ranks)),
            steps=draw.randint(1, 5),
            batches=some([1, 2, 3], 1),
            optimizers=some([1, 2, 3], 1),
            losses=some([1, 2, 3], 2),
            passes=draw.choice(["one", "each part", "loops"]),
            zero_grad=draw.choice(["none", "zeros", "model", "never", "second"]),
            masked=some([True, False], False),
            unused=some([True, False], False),
            penalty=some(["before", "after", None], None),
            kind=draw.choice(list(OPTIMIZERS)),
            clip=some([True, False], False),
            sparse=some([True, False], False),
            skips=some([True, False], False),
            options=options,
        )
        if script.valid:
            whole = script.batches > 1 and not script.several and not script.skips
            return replace(script, leaves_out=whole and random.Random(-seed - 1).random() < 0.5)


class Model(nn.Module):
    """Two layers and a table, which losses use in various ways."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=script.sparse, dtype=torch.float64)
        self.script = script

    def groups(self) -> list[list[nn.Parameter]]:
        first, second, table = (list(part.parameters()) for part in (self.first, self.second, self.table))
        return {1: [first + second + table], 2: [first + table, second], 3: [first, second, table]}[
            self.script.optimizers
        ]

    def loss(self, part: tuple[torch.Tensor, ...], number: int) -> tuple[torch.Tensor, float]:
        """A mean, and over how many terms."""
        x, words, mask = part
        hidden = torch.tanh(self.first(x)) if number != 1 else x
        if not self.script.unused:
            hidden = self.second(hidden) + self.table(words)
        elif number == 0 and bool((x[:, 0] > 0.5).any()):
            hidden = hidden + torch.where(x[:, :1] > 0.5, self.second(x), 0.0)
        elif number == 2:
            hidden = hidden + self.table(words)
        values = hidden.sin().sum(1) if number == 1 else hidden.square().sum(1)
        if not self.script.masked:
            return values.mean(), float(len(x))
        terms = mask[:, number].sum()
        return (values * mask[:, number]).sum() / terms, float(terms)

    def penalty(self) -> torch.Tensor:
        return 0.1 * sum(parameter.square().sum() for parameter in self.first.parameters())


def batches_of(script: Script):
    generator = torch.Generator().manual_seed(script.seed)
    while True:
        mask = (torch.rand(script.whole, 3, generator=generator) < 0.6).double()
        mask[0] = 1.0
        x = torch.randn(script.whole, WIDTH, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, WORDS, (script.whole,), generator=generator), mask


def backward(loss: torch.Tensor) -> None:
    if loss.requires_grad:  # of a batch that uses no parameter, it does not
        loss.backward()


def taken_by_one(model: Model, batches, script: Script) -> None:
    """Leaves in `p.grad` what one process takes: a sum over batches is that of one mean over all of their terms."""
    before = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    gain = script.batches * (script.ranks if script.options["op"] == hvd.Sum else 1)
    for number in range(script.losses):
        means = [model.loss(batch, number) for batch in batches]
        backward(gain * sum(mean * terms for mean, terms in means) / sum(terms for _, terms in means))
    if script.penalty:
        backward(gain * model.penalty())
    for parameter, kept in zip(model.parameters(), before, strict=True):
        added = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        parameter.grad = added if kept is None else added + kept.to_dense()


def passes_of_a_rank(model: Model, batch, script: Script, balancer: hvd.Balancer) -> None:
    def losses(part, numbers):
        for number in numbers:
            mean, terms = model.loss(part, number)
            if script.masked:
                balancer.count(terms)
            backward(mean)

    balancer.begin(len(batch[0]))
    if script.skips and not len(batch[0]):
        return
    if script.penalty == "before":
        backward(model.penalty())
    numbers = list(range(script.losses))
    for loop in [[number] for number in numbers] if script.passes == "loops" else [numbers]:
        for part in balancer.micro_batches(batch):
            if script.passes == "one" and not script.masked:
                backward(sum(model.loss(part, number)[0] for number in numbers))
            else:
                losses(part, loop)
    if script.penalty == "after":
        backward(model.penalty())


def trained(engine, script: Script, prototype: Model) -> torch.Tensor:
    """The parameters in the end; of one process without `engine`."""
    model, data = copy.deepcopy(prototype), batches_of(script)
    optimizers = [OPTIMIZERS[script.kind](group) for group in model.groups()]
    if engine is not None:
        balancer = hvd.Balancer(
            script.whole, engine=engine, adaptive=False, min_share=0, max_micro_batch=script.most[engine.rank]
        )
        optimizers = [
            hvd.DistributedOptimizer(
                each, balancer=balancer, backward_passes_per_step=script.batches, **script.options
            )
            for each in optimizers
        ]
    for step in range(script.steps):
        if script.zero_grad == "model":
            model.zero_grad()
        elif script.zero_grad != "never" and (script.zero_grad != "second" or step == 1):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=script.zero_grad != "zeros")
        batches = [next(data) for _ in range(script.batches + script.leaves_out)]
        if engine is None:
            if script.leaves_out:
                model.zero_grad()
            taken_by_one(model, batches[script.leaves_out :], script)
        else:
            for number, batch in enumerate(batches, start=-script.leaves_out):
                shares = script.shares(step * script.batches + number)
                mine = slice(sum(shares[: engine.rank]), sum(shares[: engine.rank + 1]))
                passes_of_a_rank(model, tuple(part[mine] for part in batch), script, balancer)
                if number < 0:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
            for optimizer in optimizers:
                optimizer.synchronize()
        if script.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
    if engine is not None:
        for optimizer in optimizers:
            optimizer.merge()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("seed", range(START, END))
def test_ranks_train_as_one_process_does(seed):
    torch.set_num_threads(1)
    script = drawn(seed)
    torch.manual_seed(seed)
    prototype = Model(script)
    expected = trained(None, script, prototype)
    for found in World(script.ranks).run(lambda engine: trained(engine, script, prototype), timeout_s=20):
        assert (found - expected).abs().max() <= 1e-10, script
