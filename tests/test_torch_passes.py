"""In how many parts a batch goes changes no gradient, whatever a script does between and around them."""

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World

WHOLE = 9
SHARES = (6, 3)  # with parts of 4 samples, two on one rank and one on the other


def first(weights, part):
    return (part @ weights[0]).square().mean()


def second(weights, part):
    return (part @ weights[0] * weights[1]).sin().mean()


def penalty(weights):
    return 0.1 * sum(weight.square().sum() for weight in weights)


def losses_in_one_loop(weights, parts, x):
    for part in parts():
        first(weights, part).backward()
        second(weights, part).backward()


def loops_one_after_the_other(weights, parts, x):
    for loss in (first, second):
        for part in parts():
            loss(weights, part).backward()


def loops_of_the_first_part_without_a_gradient(weights, parts, x):
    """Of the second weight."""
    for loss in (first, second, first):
        for part in parts():
            loss(weights, part).backward()


def a_penalty_after_the_loop(weights, parts, x):
    for part in parts():
        (first(weights, part) + second(weights, part)).backward()
    penalty(weights).backward()


def a_penalty_before_the_loop(weights, parts, x):
    penalty(weights).backward()
    for part in parts():
        (first(weights, part) + second(weights, part)).backward()


def all_of_the_batch_after_the_loop(weights, parts, x):
    for part in parts():
        first(weights, part).backward()
    second(weights, x).backward()


def what_was_there_before(weights, parts, x):
    for weight in weights:
        weight.grad = torch.full_like(weight, 3.0)
    for part in parts():
        (first(weights, part) + second(weights, part)).backward()


def zeros_that_were_there_before(weights, parts, x):
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    losses_in_one_loop(weights, parts, x)


PROGRAMS = (
    losses_in_one_loop,
    loops_one_after_the_other,
    loops_of_the_first_part_without_a_gradient,
    a_penalty_after_the_loop,
    a_penalty_before_the_loop,
    all_of_the_batch_after_the_loop,
    what_was_there_before,
    zeros_that_were_there_before,
)


def change(engine, program, *, cap, per_weight=False, **options):
    """By what a step changes the weights; on one process without `engine`. `per_weight`: each has an optimizer."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(WHOLE, 3, generator=generator, dtype=torch.float64)
    weights = [nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64)) for shape in ((3,), (1,))]
    before = torch.cat([weight.detach().clone() for weight in weights])
    if engine is None:
        program(weights, lambda: [x], x)
        return torch.cat([weight.grad for weight in weights])
    balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False, max_micro_batch=cap)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(each, lr=1.0), balancer=balancer, **options)
        for each in ([[weight] for weight in weights] if per_weight else [weights])
    ]
    x = x[: SHARES[0]] if engine.rank == 0 else x[SHARES[0] :]
    balancer.begin(len(x))
    program(weights, lambda: balancer.micro_batches(x), x)
    for optimizer in optimizers:
        optimizer.step()
    return before - torch.cat([weight.detach() for weight in weights])


APART = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)  # and merge after each step


@pytest.mark.parametrize("cap", [1, 2, 4, None])
@pytest.mark.parametrize(
    "options", [{}, {"per_weight": True}, {"strategy": APART}], ids=["together", "several optimizers", "apart"]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_parts_change_no_gradient(program, options, cap):
    expected = change(None, program, cap=None)
    for found in World(2).run(lambda engine: change(engine, program, cap=cap, **options), timeout_s=20):
        assert (found - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("cap", [2, None])
def test_a_sum_leaves_what_was_there_before(cap):
    expected = 2 * (change(None, what_was_there_before, cap=None) - 3.0) + 3.0
    for found in World(2).run(lambda engine: change(engine, what_was_there_before, cap=cap, op=hvd.Sum), timeout_s=20):
        assert (found - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["mean", "sum"])
def test_a_sum_over_batches_leaves_what_was_there_before(op):
    """As Horovod's: k batches make k times their mean, beside what was there."""
    x = torch.arange(8.0, dtype=torch.float64)
    batches = [x[:6], x[6:]]

    def program(engine):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        balancer = hvd.Balancer(6, engine=engine, adaptive=False, max_micro_batch=2, min_share=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), balancer=balancer, backward_passes_per_step=2, op=op
        )
        weight.grad = torch.full_like(weight, 3.0)
        for batch in batches:
            mine = batch[:-1] if engine.rank == 0 else batch[-1:]
            balancer.begin(len(mine))
            for part in balancer.micro_batches(mine):
                (weight * part).mean().backward()
        optimizer.step()
        return weight.grad.item()

    expected = (2 if op == hvd.Average else 4) * x.mean().item() + 3.0
    assert World(2).run(program, timeout_s=20) == pytest.approx([expected] * 2, abs=1e-12)


@pytest.mark.parametrize("cap", [1, 2, None])
def test_loops_over_unlike_terms(cap):
    """Each loop is a mean over terms of its own, of which a part, also the last one, may have none."""
    x = torch.arange(1.0, 9.0, dtype=torch.float64)
    masks = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 0], [0, 0, 1, 0, 1, 1, 0, 0]])

    def program(engine):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        balancer = hvd.Balancer(8, engine=engine, adaptive=False, max_micro_batch=cap, shares=(5, 3))
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), balancer=balancer)
        mine = slice(0, 5) if engine.rank == 0 else slice(5, 8)
        balancer.begin(mine.stop - mine.start)
        for mask in masks:
            for values, chosen in balancer.micro_batches((x[mine], mask[mine])):
                balancer.count(int(chosen.sum()))
                (weight * (values * chosen).sum() / chosen.sum()).sum().backward()
        return weight.grad.item()

    expected = sum(((x * mask).sum() / mask.sum()).item() for mask in masks)
    assert World(2).run(program, timeout_s=20) == pytest.approx([expected] * 2, abs=1e-12)


def test_what_was_there_before_stays_where_no_batch_uses_the_parameter():
    def program(engine):
        used, unused = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD([weight], lr=1.0), balancer=balancer, backward_passes_per_step=2, op=hvd.Sum
            )
            for weight in (used, unused)
        ]
        unused.grad = torch.full_like(unused, 3.0)
        for _ in range(2):
            balancer.begin(2)
            (2.0 * used).backward()
        for optimizer in optimizers:
            optimizer.step()
        return used.grad.item(), unused.grad.item()

    assert World(2).run(program, timeout_s=20) == [(8.0, 3.0)] * 2


def sum_over_batches(engine, program, *, batches, cap, per_weight=False):
    """The gradients of steps over so many batches of one size, added up."""
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(WHOLE, 3, generator=generator, dtype=torch.float64) for _ in range(batches)]
    weights = [nn.Parameter(torch.full((size,), 0.5, dtype=torch.float64)) for size in (3, 1)]
    balancer, optimizers = None, []
    if engine is not None:
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False, max_micro_batch=cap)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(each, lr=0.0), balancer=balancer, backward_passes_per_step=2)
            for each in ([[weight] for weight in weights] if per_weight else [weights])
        ]
    for x in xs:
        if balancer is not None:
            x = x[: SHARES[0]] if engine.rank == 0 else x[SHARES[0] :]
            balancer.begin(len(x))
        program(weights, lambda x=x: [x] if balancer is None else balancer.micro_batches(x), x)
    for optimizer in optimizers:
        optimizer.step()
    return torch.cat([weight.grad for weight in weights])


@pytest.mark.parametrize("cap", [1, 4, None])
@pytest.mark.parametrize("per_weight", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS[:6])
def test_the_samples_of_a_batch_count_once(program, batches, per_weight, cap):
    """However many loops go over it before the exchange."""
    expected = sum_over_batches(None, program, batches=batches, cap=None)

    def gradient(engine):
        return sum_over_batches(engine, program, batches=batches, cap=cap, per_weight=per_weight)

    for found in World(2).run(gradient, timeout_s=20):
        assert (found - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("cap", [1, 2, None])
def test_two_losses_of_a_part_without_a_term(cap):
    """Both are means over nothing, NaN."""
    x, mask = torch.arange(1.0, 9.0, dtype=torch.float64), torch.tensor([1, 0, 0, 0, 1, 1, 1, 1])

    def program(engine):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        balancer = hvd.Balancer(8, engine=engine, adaptive=False, max_micro_batch=cap, shares=(5, 3))
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), balancer=balancer)
        mine = slice(0, 5) if engine.rank == 0 else slice(5, 8)
        balancer.begin(mine.stop - mine.start)
        for values, chosen in balancer.micro_batches((x[mine], mask[mine])):
            balancer.count(int(chosen.sum()))
            for factor in (1.0, 2.0):
                (weight * (factor * values * chosen).sum() / chosen.sum()).sum().backward()
        return weight.grad.item()

    expected = 3.0 * ((x * mask).sum() / mask.sum()).item()
    assert World(2).run(program, timeout_s=20) == pytest.approx([expected] * 2, abs=1e-12)


def of_two_parameters(engine, cap, shares, op, *, lr):
    """Two parameters of ones, a balancer and an optimizer of them, and this rank's samples of a global batch of 8."""
    parameters = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2)]
    balancer = hvd.Balancer(8, engine=engine, adaptive=False, min_share=0, max_micro_batch=cap, shares=shares)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=lr), balancer=balancer, op=op)
    x = torch.arange(8.0, dtype=torch.float64)
    return *parameters, balancer, optimizer, x[: shares[0]] if engine.rank == 0 else x[shares[0] :]


@pytest.mark.parametrize(("cap", "shares"), [(None, (8, 0)), (2, (5, 3)), (2, (8, 0))])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["mean", "sum"])
def test_what_a_frozen_parameter_holds_is_left_alone(cap, shares, op):
    """Its optimizer goes on with that, as in one process."""

    def program(engine):
        frozen, trained, balancer, optimizer, x = of_two_parameters(engine, cap, shares, op, lr=1.0)
        frozen.grad = torch.full_like(frozen, 3.0)
        frozen.requires_grad_(False)
        balancer.begin(len(x))
        for part in balancer.micro_batches(x):
            (frozen * trained * part).mean().backward()
        optimizer.step()
        return frozen.grad.item() if frozen.grad is not None else None

    assert World(2).run(program, timeout_s=20) == [3.0, 3.0]


@pytest.mark.parametrize(("cap", "shares"), [(None, (5, 3)), (None, (8, 0)), (2, (5, 3)), (2, (8, 0))])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["mean", "sum"])
def test_the_gradient_with_which_a_parameter_was_frozen_is_left_alone(cap, shares, op):
    """It lies where gradients are summed."""

    def program(engine):
        frozen, trained, balancer, optimizer, x = of_two_parameters(engine, cap, shares, op, lr=0.0)
        found = []
        for _ in range(3):
            balancer.begin(len(x))
            trained.grad = None
            for part in balancer.micro_batches(x):
                (frozen * trained * part).mean().backward()
            optimizer.step()
            frozen.requires_grad_(False)
            found += [frozen.grad.item(), trained.grad.item()]
        return found

    assert World(2).run(program, timeout_s=20) == [pytest.approx([3.5 * (2 if op == hvd.Sum else 1)] * 6)] * 2


def test_zero_grad_between_passes_forgets_what_was_there_before():
    def program(engine):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), balancer=balancer, backward_passes_per_step=2
        )
        weight.grad = torch.full_like(weight, 3.0)
        for factor in (7.0, 5.0):
            balancer.begin(2)
            optimizer.zero_grad()
            (factor * weight).backward()
        optimizer.step()
        return weight.grad.item()

    assert World(2).run(program, timeout_s=20) == [5.0] * 2


@pytest.mark.parametrize("place", ["after the batch", "at the next one", "after the epoch"])
def test_zero_grad_leaves_batches_out_of_a_step(place):
    """As those at the end of an epoch that are too few: the next step is over whole batches again, of any sizes."""

    def program(engine):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False)
        loader = hvd.BalancedDataLoader(torch.arange(1.0, 11.0).double(), balancer=balancer, shuffle=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.0), balancer=balancer, backward_passes_per_step=2
        )
        found = []
        for _ in range(2):
            for index, x in enumerate(loader):
                if place == "at the next one" and index % 2 == 0:
                    optimizer.zero_grad()
                if len(x) or place == "after the batch":  # else a rank without a sample knows as well what is left out
                    (weight * x).mean().backward()
                if index % 2:
                    found.append(weight.grad.item())  # before step(), as clipping sees it
                    optimizer.step()
                    optimizer.zero_grad()
                elif place == "after the batch" and index == 2:
                    optimizer.zero_grad()
            if place == "after the epoch":
                optimizer.zero_grad()
        return found

    assert World(2).run(program, timeout_s=20) == [pytest.approx([9.0, 9.0])] * 2


@pytest.mark.parametrize("synchronizes", [False, True])
def test_what_is_done_to_gradients_before_an_early_exchange_is_warned_of(synchronizes, recwarn):
    """After it, it is as in one process."""

    def program(engine):
        weight, frozen = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False)
        inner = torch.optim.SGD([weight, frozen], lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, balancer=balancer, backward_passes_per_step=2)
        x = torch.arange(1.0, 5.0).double()[slice(0, 3) if engine.rank == 0 else slice(3, 4)]
        balancer.begin(len(x))
        (weight * frozen * x).mean().backward()
        frozen.requires_grad_(False)
        frozen.grad = None
        if synchronizes:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_([weight], 0.5)
        optimizer.step()
        return weight.item()

    found = World(2).run(program, timeout_s=20)
    told = [each for each in recwarn if "optimizer.synchronize()" in str(each.message)]
    assert bool(told) != synchronizes
    assert not synchronizes or found == [pytest.approx(0.5, abs=1e-5)] * 2
