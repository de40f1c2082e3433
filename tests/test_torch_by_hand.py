"""Gradients that no `backward()` has made: `torch.autograd.grad`, `torch.func`, or a method of one's own."""

import copy

import pytest
import torch
from torch import nn

from hvd_hetero.engine.local import World

hvd = pytest.importorskip("hvd_hetero.torch")

WHOLE, STEPS, SHARES = 12, 6, (7, 0, 5)
PROTOTYPE = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
X = torch.randn(STEPS, WHOLE, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def put(model, x):
    """A gradient into each `p.grad`."""
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(model(x).square().mean(), list(model.parameters())), strict=True
    ):
        parameter.grad = gradient


def by_one_process(times=1):
    model = copy.deepcopy(PROTOTYPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in X:
        put(model, x)
        for _ in range(times):
            optimizer.step()
    return flat(model)


def trained(engine, *, backward=False, times=1, **options):
    torch.set_num_threads(1)
    model = copy.deepcopy(PROTOTYPE)
    balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, min_share=0, adaptive=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, **options)
    begin = sum(SHARES[: engine.rank])
    for x in X:
        mine = x[begin : begin + SHARES[engine.rank]]
        balancer.begin(len(mine))
        optimizer.zero_grad()
        if len(mine) and backward:
            model(mine).square().mean().backward()
        elif len(mine):
            put(model, mine)
        for _ in range(times):
            optimizer.step()
    optimizer.merge()
    return flat(model)


@pytest.mark.parametrize("options", [
    {}, {"compression": hvd.Compression.fp16}, {"topology": hvd.Topology(nodes=((0, 1), (2,)))},
    {"strategy": hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)},
])  # fmt: skip
def test_they_are_those_of_the_whole_batch(options):
    for found in World(3).run(lambda engine: trained(engine, **options)):
        assert torch.allclose(found, by_one_process(), rtol=0, atol=1e-3 if "compression" in options else 1e-12)


def test_a_second_step_takes_the_same_gradient_again():
    for found in World(3).run(lambda engine: trained(engine, backward=True, times=2)):
        assert torch.allclose(found, by_one_process(times=2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("clears", [{"set_to_none": True}, {"set_to_none": False}])
def test_samples_whose_gradients_are_zero_count(clears):
    """As those of a hinge loss, where all samples of a rank are on the right side."""
    x = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0], [-5.0, -4.0]], dtype=torch.float64)

    def program(engine, mine):
        parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        if engine is not None:
            balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False)
            optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
            mine = mine[:3] if engine.rank == 0 else mine[3:]
        for _ in range(2):
            if engine is not None:
                balancer.begin(len(mine))
            optimizer.zero_grad(**clears)
            (gradient,) = torch.autograd.grad(torch.relu(mine @ parameter).mean(), parameter)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
            optimizer.step()
        return parameter.detach()

    expected = program(None, x)
    for found in World(2).run(lambda engine: program(engine, x)):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


BATCHES = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def of_masters(engine, passes, strategy="synchronous"):
    """A model in single precision, whose parameters in double precision are what is trained."""
    model = nn.Linear(3, 1, bias=False)
    master = nn.Parameter(torch.ones(1, 3, dtype=torch.float64))
    optimizer = torch.optim.SGD([master], lr=0.01)
    if engine is not None:
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            optimizer, balancer=balancer, backward_passes_per_step=passes, strategy=strategy
        )
    for step in range(0, len(BATCHES), passes):
        model.zero_grad()
        with torch.no_grad():
            model.weight.copy_(master)
        for x in BATCHES[step : step + passes]:
            if engine is not None:
                x = x[:3] if engine.rank == 0 else x[3:]
                balancer.begin(len(x))
            model(x.float()).square().mean().backward()
        master.grad = model.weight.grad.double()
        optimizer.step()
    if engine is not None:
        optimizer.merge()
    return master.detach()


def test_batches_of_which_a_rank_had_no_sample_are_no_part_of_what_it_added_up():
    """As with backward passes."""

    def program(engine, by_hand):
        parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False, min_share=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=0.01), balancer=balancer, backward_passes_per_step=2
        )
        for step in range(2):
            optimizer.zero_grad()
            found = torch.zeros(3, dtype=torch.float64)
            for x in (BATCHES[2 * step], BATCHES[2 * step + 1][:3]):
                mine = x[:3] if engine.rank == 0 else x[3:]
                balancer.begin(len(mine))
                if len(mine) and by_hand:
                    found += torch.autograd.grad((mine @ parameter).square().mean(), parameter)[0]
                elif len(mine):
                    (mine @ parameter).square().mean().backward()
            if by_hand:
                parameter.grad = found
            optimizer.step()
        return parameter.detach()

    expected = World(2).run(lambda engine: program(engine, False))[0]
    for found in World(2).run(lambda engine: program(engine, True)):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["synchronous", hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_what_a_script_has_added_up_over_batches_is_their_sum(passes, strategy):
    expected = of_masters(None, passes)
    for found in World(2).run(lambda engine: of_masters(engine, passes, strategy)):
        assert (found - expected).abs().max() <= 1e-6


def test_two_parameters_with_one_gradient():
    """PyTorch returns one tensor for both, and a sum over batches multiplies it before it leaves."""

    def program(engine):
        first, second = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([first, second], lr=1.0), balancer=balancer, backward_passes_per_step=2
        )
        mine = slice(3) if engine.rank == 0 else slice(3, 4)
        for x in BATCHES[:2]:
            balancer.begin(len(x[mine]))
        rows = torch.stack([x[mine].mean(0) for x in BATCHES[:2]]).sum(0)
        gradients = torch.autograd.grad(((first + second) * rows).sum(), [first, second])
        assert gradients[0] is gradients[1]
        first.grad, second.grad = gradients
        optimizer.step()
        return first.detach(), second.detach()

    expected = 1.0 - torch.stack([x.mean(0) for x in BATCHES[:2]]).sum(0)
    for found in World(2).run(program):
        for parameter in found:
            assert (parameter - expected).abs().max() <= 1e-12
