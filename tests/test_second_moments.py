"""Adam's second moments on ranks that step apart: the formula, PyTorch's optimizers, and ranks that are threads."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hvd_hetero.optimizers.second_moments import Moments

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers.second_moments import SecondMoments
from hvd_hetero.policy.second_moments import mixture, window
from hvd_hetero.torch.second_moments import has_second_moments, mix, moments_of

BETAS = 0.9, 0.999
OF_ADAM = {
    "Adam": torch.optim.Adam, "Adam, decay": lambda p, lr: torch.optim.Adam(p, lr=lr, weight_decay=0.1),
    "AdamW": torch.optim.AdamW, "fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
    "NAdam": torch.optim.NAdam, "RAdam": torch.optim.RAdam,
}


# The formula ----------------------------------------------------------------------------------------------------------


def second_moment(gradients, part, *, betas=BETAS, every=1):
    """Of a rank with these gradients, of one step after the other: the recursions of Adam, and mixtures. Unbiased."""
    first, second, before, looked = 0.0, 0.0, 0.0, 0
    for step, gradient in enumerate(gradients, 1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        if step % every == 0:
            numbers = mixture(part, betas=betas, steps=step, new=step - looked)
            second = numbers.after * second + numbers.before * before + numbers.first * first**2
            before, looked = second, step
    return second / (1 - betas[1] ** len(gradients))


@pytest.mark.parametrize("mean", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("every", [1, 2, 8])
@pytest.mark.parametrize("part", [0.06, 0.25, 0.5])
def test_law_the_expectation_is_that_of_the_global_batch(part, every, mean):
    """Means over many parameters alike: mu^2 + s^2 / B, with s^2 / B = 1 here."""
    generator = np.random.default_rng(0)
    gradients = mean + part**-0.5 * generator.standard_normal((2400, 500))
    found = second_moment(gradients, part, every=every).mean()
    alone = second_moment(gradients, 1.0, every=every).mean()
    assert found == pytest.approx(mean**2 + 1.0, rel=0.05)
    assert alone == pytest.approx(mean**2 + 1.0 / part, rel=0.05), "what it is without"


def test_the_law_holds_for_a_first_moment_of_few_gradients_as_well():
    """Of less than two, here, which is enough for a rank that has most of the samples."""
    betas, part = (0.3, 0.999), 0.6
    assert 1 / part < window(0.3, 1000) < 2
    gradients = 0.3 + part**-0.5 * np.random.default_rng(0).standard_normal((2400, 500))
    assert second_moment(gradients, part, betas=betas).mean() == pytest.approx(0.3**2 + 1.0, rel=0.05)


@pytest.mark.parametrize("steps", [1, 2, 5, 60])
def test_the_window_is_of_as_many_gradients_as_the_first_moment_is_a_mean_of(steps):
    weights = 0.9 ** np.arange(steps)
    assert window(0.9, steps) == pytest.approx(weights.sum() ** 2 / (weights**2).sum())


@pytest.mark.parametrize("betas", [BETAS, (0.0, 0.9), (0.95, 0.99)])
@pytest.mark.parametrize("part", [0.01, 0.3, 1.0, 1.5])
def test_gradients_without_noise_leave_second_moments_as_they_are(part, betas):
    found = second_moment(np.full((30, 1), 2.0), part, betas=betas, every=3)
    assert found == pytest.approx(4.0)


def test_no_number_of_a_mixture_is_below_zero():
    for part in (0.0, 1e-9, 0.04, 0.5, 1.0, 2.0):
        for betas in ((0.0, 0.0), (0.0, 0.999), (0.5, 0.5), BETAS, (1 - 1e-12, 0.999)):
            for steps in (1, 2, 1000):
                numbers = mixture(part, betas=betas, steps=steps, new=1)
                assert min(numbers) >= 0 and numbers.after <= 1, (part, betas, steps, numbers)


# PyTorch's optimizers -------------------------------------------------------------------------------------------------


def state_of(optimizer, key="exp_avg_sq"):
    return [optimizer.state[p][key] for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("name", list(OF_ADAM))
@pytest.mark.parametrize("every", [1, 3])
def test_an_optimizers_second_moments_are_those_of_a_slow_reference(name, every):
    """The rates are 0, so that gradients are known: with weight decay, those that the optimizer makes of them."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2, dtype=torch.float64)), nn.Parameter(torch.randn(4).double())]
    optimizer = OF_ADAM[name](parameters, lr=0.0)
    decay = 0.1 if name == "Adam, decay" else 0.0
    moments = SecondMoments(moments_of, copy=torch.clone, mix=mix, exchanges=True)
    gradients = [[], []]
    for number in range(1 + 3 * every):  # what is there after the first step is where mixtures begin
        for parameter, seen in zip(parameters, gradients, strict=True):
            parameter.grad = torch.randn_like(parameter)
            seen.append(parameter.grad + decay * parameter.detach())
        optimizer.step()
        moments.after_step(optimizer, 0.25, sent=number % every == 0)
    for found, seen in zip(state_of(optimizer), gradients, strict=True):
        first, second, before, looked = 0.0, 0.0, None, 0
        for step, gradient in enumerate(seen, 1):
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            if (step - 1) % every == 0:
                if before is not None:
                    numbers = mixture(0.25, betas=BETAS, steps=step, new=step - looked)
                    second = numbers.after * second + numbers.before * before + numbers.first * first**2
                before, looked = second, step
        assert torch.allclose(found, second, rtol=1e-12, atol=0), name


def stepped(parameters, optimizer, moments, times=1, part=0.25):
    for _ in range(times):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        moments.after_step(optimizer, part, sent=True)


def fresh(optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))]
    made = optimizer(parameters, lr=0.1)
    return parameters, made, SecondMoments(moments_of, copy=torch.clone, mix=mix, exchanges=True)


def test_a_state_that_is_another_one_is_not_mixed_with_what_was_before():
    """A state that was loaded, and one that begins anew: what comes out is what comes out without a past."""
    for change in (lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())), lambda o: o.state.clear()):
        parameters, optimizer, moments = fresh()
        stepped(parameters, optimizer, moments, 5)
        change(optimizer)
        twin = copy.deepcopy(optimizer)
        torch.manual_seed(1)
        stepped(parameters, optimizer, moments)
        torch.manual_seed(1)
        for group, other in zip(optimizer.param_groups, twin.param_groups, strict=True):
            for p, q in zip(group["params"], other["params"], strict=True):
                q.grad = torch.randn_like(p)
        twin.step()
        assert all(map(torch.equal, state_of(optimizer), state_of(twin)))


def test_a_parameter_without_a_gradient_keeps_what_it_has():
    parameters, optimizer, moments = fresh()
    stepped(parameters, optimizer, moments, 5)
    parameters[0].requires_grad_(False)
    before = [each.clone() for each in state_of(optimizer)]
    stepped(parameters, optimizer, moments, 5)
    after = state_of(optimizer)
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


def test_steps_without_samples_change_nothing():
    parameters, optimizer, moments = fresh()
    stepped(parameters, optimizer, moments, 2)
    alone = copy.deepcopy(optimizer)
    torch.manual_seed(5)
    stepped(parameters, optimizer, moments, 3, part=0.0)
    torch.manual_seed(5)
    nothing = SecondMoments(moments_of, copy=torch.clone, mix=mix, exchanges=False)
    stepped([p for group in alone.param_groups for p in group["params"]], alone, nothing, 3)
    for found, expected in zip(state_of(optimizer), state_of(alone), strict=True):
        assert torch.allclose(found, expected, rtol=1e-6)


def test_who_is_of_adams_kind():
    parameters = [nn.Parameter(torch.randn(3))]
    for name, make in OF_ADAM.items():
        assert has_second_moments(make(parameters, lr=0.1)), name
    class OneForAll(torch.optim.Optimizer):
        """As NovoGrad: a second moment of the same name that is one number."""

        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1, "betas": BETAS})

        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"step": 1, "exp_avg": p.grad.clone(), "exp_avg_sq": (p.grad**2).sum()}

    for other in (
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9), torch.optim.RMSprop(parameters, lr=0.1),
        torch.optim.Adamax(parameters, lr=0.1), torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
        torch.optim.SparseAdam(parameters, lr=0.1), OneForAll(parameters),
    ):  # fmt: skip
        parameters[0].grad = torch.ones(3).to_sparse() if isinstance(other, torch.optim.SparseAdam) else torch.ones(3)
        other.step()
        assert not has_second_moments(other) and not list(moments_of(other)), other
    assert not list(moments_of(None)), "an optimizer that is gone"
    other = nn.Parameter(torch.randn(2))
    both = torch.optim.Adam([{"params": parameters, "amsgrad": True}, {"params": [other]}], lr=0.1)
    parameters[0].grad, other.grad = torch.ones(3), torch.ones(2)
    both.step()
    assert [each.second for each in moments_of(both)] == [both.state[other]["exp_avg_sq"]]


# The strategy ---------------------------------------------------------------------------------------------------------


WHOLE, SHARES = 32, (20, 8, 4)


def moments_after(engine, strategy, steps=60, *, epoch=60, forgets_after=False):
    """Of a rank, the sum of its second moments; the rate is 0, and the gradient nearly all noise."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(steps * WHOLE, 6, generator=generator), torch.randn(steps * WHOLE, 3, generator=generator)
    model = nn.Linear(6, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
    plain = torch.optim.AdamW(model.parameters(), lr=0.0)
    wrapped = hvd.DistributedOptimizer(plain, balancer=balancer, strategy=strategy)
    begin, mine = sum(SHARES[: engine.rank]), SHARES[engine.rank]
    for step in range(steps):
        if not forgets_after:
            wrapped.zero_grad()
        balancer.begin(mine)
        rows = slice(step * WHOLE + begin, step * WHOLE + begin + mine)
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        wrapped.step()
        if forgets_after:
            wrapped.zero_grad()
        if (step + 1) % epoch == 0:
            wrapped.merge()
    return sum(each.sum().item() for each in state_of(wrapped))


@pytest.mark.parametrize("options", [
    {}, {"round_steps": 8}, {"forgets_after": True}, {"epoch": 3}, {"epoch": 3, "forgets_after": True},
])
def test_ranks_apart_keep_the_second_moments_of_synchronous_training(options):
    rule = {"round_steps": options.pop("round_steps", 2), "warmup_steps": 4}
    together = World(3).run(lambda engine: moments_after(engine, "synchronous"))
    is_local = World(3).run(lambda engine: moments_after(engine, hvd.LocalSGD(**rule), **options))
    own = World(3).run(lambda engine: moments_after(engine, hvd.LocalSGD(**rule, second_moments="own"), **options))
    for share, found, alone in zip(SHARES, is_local, own, strict=True):
        assert found == pytest.approx(together[0], rel=0.25)
        assert alone == pytest.approx(together[0] * WHOLE / share, rel=0.25), "or the law above would say nothing"


def test_what_is_written_into_a_state_after_a_merge_is_what_ranks_go_on_from():
    """In place, as broadcasts of states do."""
    parameters, optimizer, moments = fresh()
    stepped(parameters, optimizer, moments, 5)
    moments.end(optimizer)
    for second in state_of(optimizer):
        second.mul_(100)
    before = [second.clone() for second in state_of(optimizer)]
    moments.before_step(optimizer)
    stepped(parameters, optimizer, moments)
    for found, was in zip(state_of(optimizer), before, strict=True):
        assert torch.allclose(found, was, rtol=0.1)


class Kept:
    """What an optimizer of one parameter keeps, and the mixtures that were made of it."""

    def __init__(self, exchanges=True):
        self.second, self.steps, self.mixed = [0.0], 0, []
        self.moments = SecondMoments(self.find, copy=list, mix=self.mix, exchanges=exchanges)

    def find(self, optimizer):
        return [] if optimizer is None else [Moments(None, self.second, BETAS, self.steps)]

    def mix(self, moments, before, numbers):
        self.mixed += zip(before, numbers, strict=True)
        return [list(each.second) for each in moments]

    def step(self, part, *, sent):
        self.steps += 1
        self.second[0] += 1.0
        self.moments.after_step(self, part, sent=sent)

    @property
    def before(self):
        return self.moments.before(Moments(None, self.second, BETAS, self.steps))


def test_what_is_exchanged_is_of_the_usual_part_of_the_steps_with_samples():
    kept = Kept()
    kept.moments.before_step(kept)
    assert kept.before == [0.0] and not kept.mixed
    for part, sent in ((0.2, False), (0.0, False), (0.4, True)):
        kept.step(part, sent=sent)
    (before, numbers), = kept.mixed
    assert before == [0.0] and numbers == pytest.approx(mixture(0.3, betas=BETAS, steps=3, new=3))
    assert kept.before == [3.0], "from now on"
    kept.step(0.5, sent=True)
    assert kept.mixed[1:] == [([3.0], mixture(0.5, betas=BETAS, steps=4, new=1))]


def test_where_nothing_is_exchanged_it_is_known_what_was_there_when_progress_was_sent():
    for kept, part in ((Kept(exchanges=False), 0.25), (Kept(), 1.0), (Kept(), 1.5)):
        kept.moments.before_step(kept)
        kept.step(part, sent=False)
        assert kept.before == [0.0]
        kept.moments.before_step(kept)  # not the first one
        kept.step(part, sent=True)
        assert kept.before == [2.0] and not kept.mixed
        kept.moments.end(kept)
        assert kept.before is None


def test_a_second_moment_that_is_another_object_is_not_known():
    kept = Kept()
    kept.moments.before_step(kept)
    kept.second = [5.0]
    assert kept.before is None
    kept.step(0.25, sent=True)
    assert not kept.mixed and kept.before == [6.0]
    kept.moments.end(None)  # an optimizer that is gone
    assert kept.before is None and not kept.mixed
