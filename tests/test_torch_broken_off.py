"""A backward pass that an exception ends, and an optimizer that trains nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers.equal_weights import EqualWeights

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Failing(torch.autograd.Function):
    """Raises when gradients flow back."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("it does not fit")


def _fail_once() -> Any:
    """A hook that raises when it is called first."""
    calls: list[Any] = []

    def hook(gradient: Any) -> None:
        calls.append(gradient)
        if len(calls) == 1:
            raise ValueError("it does not fit")

    return hook


def _train(engine: Any, *, fails: tuple[int, ...], bucket_bytes: int | None, told: bool) -> list[torch.Tensor]:
    model = copy.deepcopy(MODEL)
    balancer = hvd.Balancer(4, engine=engine, adaptive=False) if told else EqualWeights(engine)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, bucket_bytes=bucket_bytes
    )
    for step in range(5):
        if told:
            balancer.begin(2)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + engine.rank)
        hidden = model[1](model[0](torch.randn(2, 4, generator=generator).double()))
        try:
            model[2](Failing.apply(hidden) if step in fails else hidden).sum().backward()
        except ValueError:
            continue
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _without(*, steps: tuple[int, ...]) -> list[torch.Tensor]:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        generators = [torch.Generator().manual_seed(10 * step + rank) for rank in range(2)]
        rows = torch.cat([torch.randn(2, 4, generator=generator).double() for generator in generators])
        (model(rows).sum() / 2).backward()  # the mean of two ranks' sums
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("bucket_bytes", [None, 64])
def test_a_pass_that_all_ranks_break_off_leaves_no_trace(bucket_bytes: int | None, told: bool) -> None:
    """As with one process, which leaves the step out."""
    trained = World(2).run(
        lambda engine: _train(engine, fails=(2, 3), bucket_bytes=bucket_bytes, told=told), timeout_s=30
    )
    for ours in trained:
        for found, wanted in zip(ours, _without(steps=(0, 1, 4)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def _backward_in_a_thread(loss: torch.Tensor) -> None:
    """As a GPU's autograd runs hooks: in a thread of the device's; what they raise comes to the caller."""
    with ThreadPoolExecutor(1) as device:
        device.submit(loss.backward).result()


def test_loading_goes_on_after_a_pass_that_all_ranks_break_off_in_the_thread_of_a_device() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)).double())

    def program(engine: Any, backward: Any) -> tuple[torch.Tensor, int]:
        model = copy.deepcopy(MODEL)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, bucket_bytes=64
        )
        for (rows,) in hvd.BalancedDataLoader(data, balancer=balancer):
            optimizer.zero_grad()
            hidden = model[1](model[0](rows))
            with contextlib.suppress(ValueError):
                backward(model[2](Failing.apply(hidden) if balancer.step in (1, 2) else hidden).square().mean())
                optimizer.step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]), balancer.step

    found, wanted = (
        World(2).run(lambda engine, backward=backward: program(engine, backward), timeout_s=20)
        for backward in (_backward_in_a_thread, torch.Tensor.backward)
    )
    for (ours, steps), (theirs, _) in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs) and steps == 5


def _leaves_out_the_second_step(program: Callable[[Any, tuple[int, ...]], list[torch.Tensor]]) -> None:
    found = World(2).run(lambda engine: program(engine, (0, 1, 2)), timeout_s=20)
    wanted = World(2).run(lambda engine: program(engine, (0, 2)), timeout_s=20)
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_a_pass_that_all_ranks_break_off_one_of_them_without_a_sample() -> None:
    def program(engine: Any, steps: tuple[int, ...]) -> list[torch.Tensor]:
        model = copy.deepcopy(MODEL)
        balancer = hvd.Balancer(4, engine=engine, min_share=0, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, bucket_bytes=64
        )
        for step in steps:
            rows = torch.full((0 if (step, engine.rank) == (1, 1) else 2, 4), 0.1 * step + engine.rank).double()
            balancer.begin(len(rows))
            optimizer.zero_grad()
            hidden = model[1](model[0](rows))
            with contextlib.suppress(ValueError):
                model[2](Failing.apply(hidden) if step == 1 else hidden).square().sum().backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    _leaves_out_the_second_step(program)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_last_pass_that_all_ranks_break_off_one_of_them_without_a_sample(sparse: bool) -> None:
    """That rank waits with what an earlier pass has left, and still knows what the others have sent."""
    prototype = nn.ModuleList([nn.EmbeddingBag(5, 4, sparse=sparse, mode="sum").double(), *MODEL])

    def program(engine: Any, steps: tuple[int, ...]) -> list[torch.Tensor]:
        model = copy.deepcopy(prototype)  # threads share torch's generator
        table = model[0]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=10_000 if sparse else 64,
            balancer=hvd.Balancer(4, engine=engine, min_share=0, adaptive=False), backward_passes_per_step=2,
        )  # fmt: skip
        for step in steps:
            optimizer.zero_grad()
            with contextlib.suppress(ValueError):
                for part in range(2):
                    fails = (step, part) == (1, 1)
                    rows = 0 if fails and engine.rank == 1 else 2
                    optimizer._balancer.begin(rows)
                    looked_up = table(torch.full((rows, 2), step))  # its gradient comes last
                    hidden = model[1](torch.full((rows, 4), 0.1 * step + part).double() + looked_up)
                    if fails and sparse:
                        table.weight.register_post_accumulate_grad_hook(_fail_once())
                    elif fails:
                        hidden = Failing.apply(hidden)
                    model[3](model[2](hidden)).square().sum().backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    _leaves_out_the_second_step(program)


@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_may_be_tried_again(fails: bool) -> None:
    """In a pass that others follow; `zero_grad()` says that what it has left does not count."""

    def program(engine: Any) -> float:
        weight = nn.Parameter(torch.zeros(1).double())
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), balancer=balancer, backward_passes_per_step=2
        )
        for _ in range(3):
            optimizer.zero_grad()
            for part in range(2):
                balancer.begin(balancer.share)
                if part == 0:
                    with contextlib.suppress(ValueError):
                        hook = weight.register_post_accumulate_grad_hook(_fail_once()) if fails else None
                        weight.sum().backward()
                    if hook is not None:
                        hook.remove()
                    optimizer.zero_grad()
                weight.sum().backward()
            optimizer.step()
        return float(weight.detach())

    assert World(2).run(program, timeout_s=20) == [-6.0, -6.0]


def test_a_batch_that_is_tried_again_counts_also_where_no_sample_reaches_some_parameters() -> None:
    def program(engine: Any) -> list[float]:
        all_use, some_use = (nn.Parameter(torch.zeros(1).double()) for _ in range(2))
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD([each], lr=1.0), balancer=balancer, backward_passes_per_step=2)
            for each in (all_use, some_use)
        ]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in range(2):
                balancer.begin(balancer.share)
                for again in (True, False) if part == 0 else (False,):
                    (all_use + (some_use if engine.rank == 0 else 0.0)).sum().backward()
                    if again:
                        for optimizer in optimizers:
                            optimizer.zero_grad()
            for optimizer in optimizers:
                optimizer.step()
        return [float(all_use.detach()), float(some_use.detach())]

    assert World(2).run(program, timeout_s=20) == [[-6.0, -4.5]] * 2  # the samples of rank 0 are three of four


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_codecs_keep_nothing_of_a_pass_that_all_ranks_break_off(name: str) -> None:
    torch.manual_seed(0)
    prototype = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 50))
    codec = hvd.Compression.topk(warmup_steps=0) if name == "topk" else hvd.Compression.int8

    def program(engine: Any, steps: tuple[int, ...], fails: tuple[int, ...] = ()) -> torch.Tensor:
        model = copy.deepcopy(prototype)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), compression=codec, bucket_bytes=64,
            balancer=hvd.Balancer(4, engine=engine, adaptive=False),
        )  # fmt: skip
        for step in steps:
            optimizer._balancer.begin(2)
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + engine.rank)
            hidden = model[1](model[0](torch.randn(2, 4, generator=generator)))
            with contextlib.suppress(ValueError):
                model[2](Failing.apply(hidden) if step in fails else hidden).square().mean().backward()
                optimizer.step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    found = World(2).run(lambda engine: program(engine, (0, 1, 2, 3, 4), fails=(2, 3)), timeout_s=30)
    wanted = World(2).run(lambda engine: program(engine, (0, 1, 4)), timeout_s=30)
    assert all(map(torch.equal, found, wanted))


def _step_after(engine: Any, bucket_bytes: int | None) -> list[torch.Tensor]:
    """Rank 0 alone breaks off, and makes its step."""
    model = copy.deepcopy(MODEL)
    balancer = hvd.Balancer(4, engine=engine, adaptive=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, bucket_bytes=bucket_bytes
    )
    balancer.begin(2)
    hidden = model[1](model[0](torch.ones(2, 4).double()))
    try:
        model[2](Failing.apply(hidden) if engine.rank == 0 else hidden).mean().backward()
    except ValueError:
        optimizer.zero_grad()
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_a_rank_of_which_nothing_is_sent_takes_part_without_samples() -> None:
    ours, others = World(2).run(lambda engine: _step_after(engine, None), timeout_s=30)
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4).double()).mean().backward()
    optimizer.step()
    for a, b, wanted in zip(ours, others, model.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, wanted.detach(), rtol=1e-12, atol=1e-12)


def test_a_rank_of_which_a_part_is_sent_cannot_step() -> None:
    with pytest.raises(RuntimeError, match="part of its gradients"):
        World(2).run(lambda engine: _step_after(engine, 64), timeout_s=30)


def test_an_optimizer_that_trains_nothing_steps() -> None:
    def program(engine: Any) -> int:
        model = copy.deepcopy(MODEL).requires_grad_(False)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        for _ in range(3):
            balancer.begin(2)
            optimizer.zero_grad()
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), MODEL.parameters(), strict=True))
        return balancer.step

    assert World(2).run(program, timeout_s=30) == [2, 2]


def test_a_rank_that_fails_is_heard_of_where_nothing_is_trained() -> None:
    def program(engine: Any) -> None:
        model = copy.deepcopy(MODEL).requires_grad_(False)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        if engine.rank == 0:
            balancer.fail()
            return
        balancer.begin(2)
        with pytest.raises(hvd.PeerError, match="rank 0"):
            optimizer.step()

    World(2).run(program, timeout_s=20)


@pytest.mark.parametrize("call", ["step", "zero_grad"])
def test_a_step_within_a_backward_pass_says_so(call: str) -> None:
    """As with an optimizer for each parameter that steps in a hook."""

    def program(engine: Any) -> None:
        weight = nn.Parameter(torch.ones(2))
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), balancer=balancer)

        def within(parameter: torch.Tensor) -> None:
            getattr(optimizer, call)()

        weight.register_post_accumulate_grad_hook(within)
        balancer.begin(2)
        weight.sum().backward()

    errors = World(2).run(program, timeout_s=10, errors="return")
    assert any("after backward(). Received: one of them within it" in str(error) for error in errors)
