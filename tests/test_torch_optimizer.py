"""A wrapped PyTorch optimizer's life: parameters added and frozen, states loaded, one that replaces another."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from torch_task import SHARES, WHOLE, Data, GlobalBatches, adamw, make_model, sgd, train

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.torch import reducer


def test_two_optimizers_share_a_balancer():
    torch.set_num_threads(1)
    data = Data()

    def losses(first, second, x, y):
        hidden = torch.tanh(first(x))
        return nn.functional.cross_entropy(second(hidden), y), second(hidden.detach()).square().mean()

    def make():
        torch.manual_seed(0)
        return nn.Linear(4, 6).double(), nn.Linear(6, 3).double()

    def alternate(first, second, one, two, batches):
        for x, y, _ in batches:
            one.zero_grad()
            losses(first, second, x, y)[0].backward()
            one.step()
            two.zero_grad()
            losses(first, second, x, y)[1].backward()
            two.step()
        return [p.detach().clone() for p in [*first.parameters(), *second.parameters()]]

    first, second = make()
    expected = alternate(first, second, sgd(first), sgd(second), GlobalBatches(data))
    prototype = make()  # threads share torch's generator, so none of them may draw from it

    def program(engine):
        first, second = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        one = hvd.DistributedOptimizer(sgd(first), balancer=balancer)
        two = hvd.DistributedOptimizer(sgd(second), balancer=balancer)
        return alternate(first, second, one, two, hvd.BalancedDataLoader(data, balancer=balancer))

    for found in World(3).run(program, timeout_s=30):
        assert max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)) <= 1e-12


def test_a_loaded_state_survives_wrapping_and_a_wrapped_optimizer_pickles():
    model = make_model()
    optimizer = adamw(model)
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()

    def program(engine):
        wrapped = hvd.DistributedOptimizer(optimizer, balancer=hvd.Balancer(2, engine=engine))
        copied = pickle.loads(pickle.dumps(wrapped))
        saved = io.BytesIO()
        torch.save(wrapped.state_dict(), saved)
        return len(wrapped.state), type(copied), len(copied.state_dict()["state"])

    assert World(1).run(program) == [(4, torch.optim.AdamW, 4)]


def test_parameters_added_later_are_reduced():
    torch.set_num_threads(1)

    prototype = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()

    def program(engine):
        old, new = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(old.parameters(), lr=0.1), balancer=balancer)
        optimizer.add_param_group({"params": new.parameters()})
        balancer.begin(3 if engine.rank == 0 else 1)
        x = torch.full((1, 2), float(engine.rank), dtype=torch.float64)
        (old(x) + new(x)).sum().backward()
        return old.weight.grad.tolist(), new.weight.grad.tolist()

    assert World(2).run(program) == [([[0.25, 0.25]], [[0.25, 0.25]])] * 2


def test_parameters_added_between_backward_and_step_are_told():
    """Their gradients would be each rank's own."""
    prototype = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()

    def program(engine, how):
        old, new = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(old.parameters(), lr=0.1), balancer=balancer)
        balancer.begin(3 if engine.rank == 0 else 1)
        x = torch.full((1, 2), float(engine.rank), dtype=torch.float64)
        (old(x) + new(x)).sum().backward()
        if how == "forgotten":
            new.zero_grad()
        if how == "kept":
            for _ in range(2):  # and then nothing of them is in the optimizer
                with pytest.raises(RuntimeError, match="before backward.. or after step"):
                    optimizer.add_param_group({"params": new.parameters()})
            odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
            with pytest.raises(TypeError, match="real floating type"):
                optimizer.add_param_group({"params": [odd]})
            optimizer.step()
            assert len(optimizer.param_groups) == 1
            optimizer.zero_grad(), new.zero_grad()
        optimizer.add_param_group({"params": new.parameters()})
        if how == "kept":
            balancer.begin(3 if engine.rank == 0 else 1)
            (old(x) + new(x)).sum().backward()
        optimizer.step()
        return None if new.weight.grad is None else new.weight.grad.tolist()

    assert World(2).run(lambda engine: program(engine, "kept")) == [[[0.25, 0.25]]] * 2
    World(2).run(lambda engine: program(engine, "forgotten"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda rank: {"global_batch_size": 8 + rank}, r"global_batch_size.*rank 0: 8; rank 1: 9"),
        (lambda rank: {"global_batch_size": 1}, "at least 2"),
        (lambda rank: {"global_batch_size": 0}, "at least 1"),
        (lambda rank: {"global_batch_size": 8.0} if rank else {"global_batch_size": 8}, "rank 1|integer"),
        (lambda rank: {"global_batch_size": 8, "shares": (6, 1)}, "sum of 8"),
        (lambda rank: {"global_batch_size": 8, "shares": (7, 1), "max_share": 6}, "memory"),
        (lambda rank: {"global_batch_size": 8, "max_share": 3}, "hold"),
        (lambda rank: {"global_batch_size": 8, "shares": (4, 4) if rank else (6, 2)}, "same on every rank"),
        (lambda rank: {"global_batch_size": 8, "shares": (float("nan"), 4) if rank else (4, 4)}, "rank 1|integers"),
        (lambda rank: {"global_batch_size": 8, "shares": (2**70, 4) if rank else (4, 4)}, "rank 1|integers"),
        (lambda rank: {"global_batch_size": 8, "shares": 4 if rank else (4, 4)}, "rank 1|one share for each"),
        (lambda rank: {"global_batch_size": 2**70 if rank else 8}, "rank 1|at most"),
        (lambda rank: {"global_batch_size": 8, "max_share": 2**70 if rank else 8}, "rank 1|at most"),
        (lambda rank: {"global_batch_size": 8, "adaptive": "no" if rank else False}, "rank 1|adaptive: expected True"),
        (lambda rank: {"global_batch_size": 8, "adaptive": bool(rank)}, "adaptive: expected the same"),
    ],
)
def test_bad_arguments_raise_on_every_rank(arguments, message):
    def program(engine):
        with pytest.raises(ValueError, match=message):
            hvd.Balancer(engine=engine, **arguments(engine.rank))
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]


def test_a_scheduler_made_before_wrapping_lives_through_load_state_dict():
    def program(engine):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        wrapped = hvd.DistributedOptimizer(optimizer, balancer=hvd.Balancer(2, engine=engine))
        wrapped.load_state_dict(wrapped.state_dict())
        wrapped.step()
        scheduler.step()
        return wrapped.param_groups[0]["lr"]

    assert World(1).run(program) == [0.5]


TWO_LAYERS = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def test_parameters_that_are_thawed_in_place_are_told():
    """Their gradients would be each rank's own, and no hash would show it. A new optimizer takes them."""

    def program(engine):
        model, balancer = copy.deepcopy(TWO_LAYERS), hvd.Balancer(4, engine=engine)
        model[0].requires_grad_(False)

        def wrapped():
            return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)

        def step(optimizer):
            balancer.begin(2)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        first = wrapped()
        step(first)
        model[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match="Received: 2 that have come to since"):
            step(first)
        step(wrapped())

    World(2).run(program)


def test_a_layer_that_is_frozen_stays_as_it_is():
    """As in one process: not even the optimizer's momentum moves it."""

    def program(engine):
        model, balancer = copy.deepcopy(TWO_LAYERS), hvd.Balancer(4, engine=engine)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
        kept = []
        for step in range(4):
            if step == 2:
                model[0].requires_grad_(False)
                kept = [p.detach().clone() for p in model[0].parameters()]
            optimizer.zero_grad()
            balancer.begin(2)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return all(torch.equal(p, before) for p, before in zip(model[0].parameters(), kept, strict=True))

    assert World(2).run(program) == [True, True]


@pytest.mark.parametrize("how", [lambda grad: grad, lambda grad: grad.view(-1)])
def test_gradients_that_a_script_keeps_stay_as_they_are(how):
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), balancer=balancer
        )
        kept, copies, places = [], [], []
        for step in range(4):
            optimizer.zero_grad()
            balancer.begin(4)
            (model(torch.ones(4, 4).double()) * (step + 1)).sum().backward()
            places.append(model[0].weight.grad.data_ptr())
            if step < 2:
                kept.append([how(p.grad) for p in model.parameters()])
                copies.append([how(p.grad).clone() for p in model.parameters()])
            optimizer.step()
        assert all(torch.equal(a, b) for k, c in zip(kept, copies, strict=True) for a, b in zip(k, c, strict=True))
        assert not torch.equal(kept[0][0], kept[1][0])
        return places

    places = World(1).run(program)[0]
    assert len(set(places)) == 3, "other memory where gradients were kept, the same where they were not"


def test_a_gradient_that_a_script_keeps_stays_where_another_stays_in_place():
    def program(engine):
        weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=0.1), balancer=balancer)
        for factor in (1.0, 5.0):
            balancer.begin(2)
            (factor * (weight + bias)).sum().backward()
            if factor == 1.0:
                kept, weight.grad = weight.grad, None  # and not the bias's
            optimizer.step()
        return kept.tolist(), weight.grad.tolist(), bias.grad.tolist()

    assert World(2).run(program) == [([1.0] * 3, [5.0] * 3, [6.0] * 3)] * 2


@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}, {"compression": hvd.Compression.int8}, {"strategy": "local"}])
def test_nothing_outlives_an_optimizer_its_model_and_its_balancer(options):
    """As folds and searches make one after the other."""
    model = make_model()
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, **options)
    for _ in range(2):
        balancer.begin(WHOLE)
        optimizer.zero_grad()
        model(torch.ones(WHOLE, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
    optimizer.merge()
    lives = [weakref.ref(each) for each in (model[0].weight, optimizer, balancer)]
    del model, optimizer, balancer
    gc.collect()
    assert [each() for each in lives] == [None] * 3


def test_an_optimizer_that_another_has_replaced_does_not_live_as_long_as_that_one():
    """Each would keep the memory of all gradients, where layers are thawed one after the other."""
    model, balancer = make_model(), hvd.Balancer(WHOLE, engine=SoloEngine())
    optimizer, lives = sgd(model), []
    for _ in range(3):
        optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
        balancer.begin(WHOLE)
        optimizer.zero_grad()
        model(torch.ones(WHOLE, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        lives.append(weakref.ref(optimizer))
    gc.collect()
    assert [each() for each in lives] == [None, None, optimizer]


def test_a_schedule_goes_on_where_another_optimizer_took_over_and_a_state_was_loaded():
    model = make_model()
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    first = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
    schedule = torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(first, balancer=balancer)  # as when layers were thawed
    rates = []
    for step in range(3):
        balancer.begin(WHOLE)
        model(torch.ones(WHOLE, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.05, 0.025, 0.0125]
    assert len(optimizer.state) == 4 and "momentum_buffer" in optimizer.state[model[0].weight]


@pytest.mark.parametrize("how", ["a type", "a group", "ranks", "memory"])
def test_an_optimizer_that_was_not_made_leaves_the_balancer_as_it_was(how, monkeypatch):
    prototype, make = make_model(), reducer.Layouts

    def out_of_memory(parameters, **options):
        if len(parameters) == 2:
            raise MemoryError
        return make(parameters, **options)

    monkeypatch.setattr(reducer, "Layouts", out_of_memory if how == "memory" else make)

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64 if how == "a type" else torch.float32))
        parameters = [nn.Parameter(torch.zeros(2).double()), odd]
        wrong = {"a group": {"groups": [parameters]}, "ranks": {"process_set": hvd.ProcessSet([0])}}.get(how, {})
        with pytest.raises((TypeError, ValueError, MemoryError)):
            hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), balancer=balancer, **wrong)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        return train(model, optimizer, hvd.BalancedDataLoader(Data(), balancer=balancer), 1)

    found = World(3).run(program)
    assert all(torch.equal(p, q) for p, q in zip(found[0], found[2], strict=True))


def test_gradients_are_reduced_as_long_as_the_optimizer_that_a_script_made_lives():
    def program(engine):
        weight = nn.Parameter(torch.ones(1))
        plain = torch.optim.SGD([weight], lr=0.1)
        balancer = hvd.Balancer(2, engine=engine)
        hvd.DistributedOptimizer(plain, balancer=balancer)
        gc.collect()
        balancer.begin(1)
        (weight * (1.0 + engine.rank)).sum().backward()
        plain.step()
        return weight.item()

    assert World(2).run(program) == [pytest.approx(0.85)] * 2


def test_a_schedule_of_the_inner_optimizer_goes_on_where_a_state_was_loaded_into_both():
    model = make_model()
    inner = sgd(model)
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
    inner.load_state_dict(inner.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    balancer.begin(WHOLE)
    model(torch.ones(WHOLE, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_group_may_have_a_frozen_parameter_of_another_type():
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double(), requires_grad=False)
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    plain = torch.optim.SGD([weight, frozen], lr=0.1)
    hvd.DistributedOptimizer(plain, balancer=balancer, groups=[[weight, frozen]])


class Holding:
    """An optimizer that holds another one, and is none of PyTorch's."""

    def __init__(self, base):
        self.base = base

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)

    def step(self, closure=None):
        return self.base.step(closure)


def test_an_optimizer_that_holds_another_loads_a_state():
    def program(engine):
        balancer = hvd.Balancer(4, shares=[3, 1], adaptive=False, engine=engine)
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(Holding(inner), model.named_parameters(), balancer=balancer)
        balancer.begin(balancer.share)
        model(torch.ones(balancer.share, 2)).mean().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return optimizer.state is inner.state and len(inner.state) == 2

    assert all(World(2).run(program))


def test_an_optimizer_that_holds_another_makes_local_steps():
    """It need not have PyTorch's attributes for hooks of the step, as schedule-free's wrapper has none."""

    prototype = nn.Linear(2, 1)  # made once, as ranks are threads that share their random numbers

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, shares=[3, 1], adaptive=False, engine=engine)
        optimizer = hvd.DistributedOptimizer(
            Holding(torch.optim.SGD(model.parameters(), lr=0.1)), balancer=balancer,
            strategy=hvd.LocalSGD(warmup_steps=0),
        )  # fmt: skip
        balancer.begin(balancer.share)
        model(torch.full((balancer.samples, 2), 1.0 + engine.rank)).mean().backward()
        optimizer.step()
        optimizer.merge()
        return model.weight.tolist()

    first, second = World(2).run(program)
    assert first == second


def test_a_copy_of_a_model_that_holds_a_balancer_has_the_same_one():
    """As those of weights that are averaged."""

    def program(engine):
        model = nn.Linear(2, 1)
        model.balancer = hvd.Balancer(4, engine=engine)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(model.balancer)
        return copy.deepcopy(model).balancer is model.balancer

    assert all(World(2).run(program))


def test_parameters_that_two_optimizers_share_have_a_third_one():
    """Each parameter is reduced by one optimizer, which is told where two are made for it."""
    shares = (5, 3)
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3

    prototypes = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def sgd(*modules):
        return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)

    def alone():
        encoder, *heads = copy.deepcopy(prototypes)
        for head, optimizer in [(head, sgd(encoder, head)) for head in heads]:
            encoder.zero_grad()
            nn.functional.cross_entropy(head(encoder(x)), y).backward()
            optimizer.step()
        return encoder.weight.detach()

    def program(engine):
        encoder, *heads = copy.deepcopy(prototypes)
        balancer = hvd.Balancer(8, engine=engine, shares=shares)
        mine = slice(5) if engine.rank == 0 else slice(5, 8)

        def wrap(*modules):
            return hvd.DistributedOptimizer(sgd(*modules), balancer=balancer)

        first, _ = (wrap(encoder, head) for head in heads)
        with pytest.raises(RuntimeError, match="give these a third one"):
            first.step()
        shared, *others = (wrap(module) for module in (encoder, *heads))
        balancer.begin(shares[engine.rank])
        for head, optimizer in zip(heads, others, strict=True):
            shared.zero_grad()
            nn.functional.cross_entropy(head(encoder(x[mine])), y[mine]).backward()
            optimizer.step()
            shared.step()
        return encoder.weight.detach()

    for found in World(2).run(program):
        assert (found - alone()).abs().max() <= 1e-6


def test_groups_may_be_of_tensors_that_are_no_parameters():
    """As `torch.func.stack_module_state` makes them; Horovod takes them as well."""
    tensors = [torch.zeros(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    balancer = hvd.Balancer(4, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(tensors, lr=0.1), balancer=balancer, groups=[tensors])
    balancer.begin(4)
    sum(tensor.sum() for tensor in tensors).backward()
    optimizer.step()
    assert torch.allclose(tensors[0], torch.full((3,), -0.1))
