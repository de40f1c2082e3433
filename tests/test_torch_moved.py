"""Models that move, or become of another type, after their optimizer was distributed, as `prepare()` and `.to()` do it.

In host memory another type stands for another device: gradients, buckets, hooks and steps apart meet the same there.
"""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers.equal_weights import EqualWeights

WHOLE, SHARES, STEPS = 8, (5, 2, 1), 6
PROTOTYPE = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS, WHOLE, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (STEPS, WHOLE), generator=generator)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, part=slice(None), balancer=None, passes=1, steps=STEPS):
    x, y = data()
    for step in range(steps):
        if balancer is not None:
            balancer.begin(part.stop - part.start)
        if step % passes == 0:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step, part]), y[step, part]).backward()
        if step % passes == passes - 1:
            optimizer.step()


def part_of(rank):
    begin = sum(SHARES[:rank])
    return slice(begin, begin + SHARES[rank])


@pytest.mark.parametrize(
    "options", [{}, {"backward_passes_per_step": 2}, {"op": hvd.Sum}, {"compression": hvd.Compression.int8}]
)
def test_a_model_becomes_of_another_type_before_the_first_step(options):
    passes = options.get("backward_passes_per_step", 1)

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, **options)
        model.double()
        # The first exchange may round: all ranks have to hear of it. From the second one on nothing does.
        train(model, optimizer, part_of(engine.rank), balancer, passes)
        assert all(flat.dtype == torch.float64 for flat in optimizer._reducer._step.layout.buckets)
        return [p.detach() for p in model.parameters()]

    found = World(3).run(program)
    whole = copy.deepcopy(PROTOTYPE).double()
    optimizer = sgd(whole)
    if options.get("op") is hvd.Sum:
        optimizer.param_groups[0]["lr"] *= 3
    if passes == 2:  # the sum of two batches' means
        train(whole, optimizer, passes=2)
    else:
        train(whole, optimizer)
    bound = 0.05 if "compression" in options else 1e-6
    for rank in found:
        for a, b, c in zip(rank, whole.parameters(), found[0], strict=True):
            assert (a - b).abs().max() <= bound and torch.equal(a, c)


def test_after_the_first_exchange_nothing_is_rounded():
    """What one process computes in double precision, to its last digits."""

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), balancer=balancer)
        model.double()
        train(model, optimizer, part_of(engine.rank), balancer, steps=2)
        return [p.grad for p in model.parameters()]

    whole = copy.deepcopy(PROTOTYPE).double()
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.0), steps=2)
    for rank in World(3).run(program):
        for gradient, parameter in zip(rank, whole.parameters(), strict=True):
            assert (gradient - parameter.grad).abs().max() < 1e-15


@pytest.mark.parametrize("strategy", ["synchronous", hvd.LocalSGD(warmup_steps=2, round_steps=1)])
@pytest.mark.parametrize("which", [(1,), (0, 1, 2)])
def test_a_model_that_moves_on_some_ranks_takes_all_to_another_layout(which, strategy):
    """As from the host to the one GPU that there is. Types of what travels have to be alike, so it only says so."""

    def program(engine):
        model = copy.deepcopy(PROTOTYPE).double()
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, strategy=strategy)
        reducer = optimizer._reducer
        before = reducer._layouts.step
        if engine.rank in which:
            reducer._layouts.parameters_moved()
        train(model, optimizer, part_of(engine.rank), balancer)
        optimizer.merge(model)
        assert reducer._layouts.step is not before
        return [p.detach() for p in model.parameters()]

    found = World(3).run(program)
    for rank in found:
        assert all(map(torch.equal, rank, found[0]))


@pytest.mark.parametrize("strategy", [hvd.LocalSGD(warmup_steps=2, round_steps=1), "auto"])
def test_steps_apart_are_of_the_model_as_it_is(strategy):
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, strategy=strategy)
        model.double()
        train(model, optimizer, part_of(engine.rank), balancer)
        optimizer.merge(model)
        return [p.detach() for p in model.parameters()]

    found = World(3).run(program)
    for rank in found:
        for a, b, before in zip(rank, found[0], PROTOTYPE.parameters(), strict=True):
            assert a.dtype == torch.float64 and torch.equal(a, b) and not torch.equal(a, before.double())


def test_a_model_that_moves_when_steps_are_apart_is_told():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        strategy = hvd.LocalSGD(warmup_steps=0, round_steps=1)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, strategy=strategy)
        model.double()
        with pytest.raises(RuntimeError, match="Move the model before training"):
            train(model, optimizer, part_of(engine.rank), balancer)

    World(3).run(program)


def test_a_type_that_cannot_travel_is_told():
    def program(engine):
        model = nn.Linear(6, 3)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        model.to(torch.complex64)
        with pytest.raises(TypeError, match="Received: torch.complex64.* takes torch.view_as_complex"):
            balancer.begin(SHARES[engine.rank])
        del optimizer

    World(3).run(program)


class ToDouble(nn.Module):
    def forward(self, x):
        return x.double()


PARTED = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), ToDouble(), nn.Linear(40, 3))
OF_PARTS = pytest.mark.parametrize("options", [{}, {"backward_passes_per_step": 2}, {"op": hvd.Sum}])


def equal_to_one_process(prototype, make, whole_steps, options):
    """Whether all ranks end with what one process makes of `whole_steps`; `make`: their program."""
    found = World(3).run(make)
    whole = copy.deepcopy(prototype)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.3 if options.get("op") is hvd.Sum else 0.1)
    whole_steps(whole, optimizer)
    for rank in found:
        for a, b, c in zip(rank, whole.parameters(), found[0], strict=True):
            assert (a - b).abs().max() <= 1e-5 and torch.equal(a, c)


@OF_PARTS
@pytest.mark.parametrize("within", [False, True])
def test_a_part_of_a_model_moves(options, within):
    """Its first parameter stays; before the first batch, or when that has begun."""
    passes = options.get("backward_passes_per_step", 1)

    def steps(model, optimizer, part=slice(None), balancer=None):
        x, y = data()
        if not within:
            model[3].double()
        for step in range(STEPS):
            if balancer is not None:
                balancer.begin(part.stop - part.start)
            model[3].double()
            if step % passes == 0:
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[step, part].float()), y[step, part]).backward()
            if step % passes == passes - 1:
                optimizer.step()

    def program(engine):
        model = copy.deepcopy(PARTED)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer, **options)
        steps(model, optimizer, part_of(engine.rank), balancer)
        return [p.detach() for p in model.parameters()]

    equal_to_one_process(PARTED, program, steps, options)


@OF_PARTS
def test_a_model_moves_that_no_balancer_is_told_of(options):
    passes = options.get("backward_passes_per_step", 1)

    def steps(model, optimizer, part=slice(0, 6)):
        model.double()
        x, y = data()
        for step in range(STEPS):
            if step % passes == 0:
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[step, part]), y[step, part]).backward()
            if step % passes == passes - 1:
                optimizer.step()

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, balancer=EqualWeights(engine), **options)
        steps(model, optimizer, slice(2 * engine.rank, 2 * engine.rank + 2))
        return [p.detach() for p in model.parameters()]

    equal_to_one_process(PROTOTYPE, program, steps, options)


def test_parameters_are_added_after_a_move():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer, op=hvd.Sum)
        model.double()
        optimizer.add_param_group({"params": list(model[0].parameters())})
        train(model, optimizer, part_of(engine.rank), balancer)
        return [p.detach() for p in model.parameters()]

    equal_to_one_process(copy.deepcopy(PROTOTYPE).double(), program, train, {"op": hvd.Sum})


def test_a_model_that_moves_between_the_passes_of_a_step_is_told():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, backward_passes_per_step=2)
        with pytest.raises(RuntimeError, match="Move the model before"):
            for batch in range(2):
                balancer.begin(SHARES[engine.rank])
                if batch == 1:
                    model.double()
                model(torch.ones(2, 6, dtype=model[0].weight.dtype)).sum().backward()
        del optimizer

    World(3).run(program)


def test_what_codecs_of_merges_have_kept_back_and_samples_outlive_a_move():
    def kept(steps):
        exchanges = [fragment.lanes[0].exchange for fragment in steps.rounds.fragments]
        return sum(float(a.abs().sum()) for one in exchanges for a in one.residuals() if a is not None)

    def program(engine):
        model = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape))
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        strategy = hvd.LocalSGD(warmup_steps=0, round_steps=1)
        optimizer = hvd.DistributedOptimizer(
            sgd(model), balancer=balancer, compression=hvd.Compression.int8, strategy=strategy
        )
        reducer = optimizer._reducer
        first, said = reducer.local, []
        first.steps._phase = lambda step: step < 3  # they come together then
        x, y = data()
        for step in range(STEPS):
            if step == 4:
                model.double()
            balancer.begin(SHARES[engine.rank])
            reducer.local.steps._phase = first.steps._phase
            optimizer.zero_grad()
            part = part_of(engine.rank)
            nn.functional.cross_entropy(model(x[step, part].to(model[0].weight.dtype)), y[step, part]).backward()
            optimizer.step()
            said.append((kept(reducer.local.steps), reducer.local.steps.samples))
        assert reducer.local is not first
        return said

    for said in World(3).run(program):
        assert said[3][0] > 0 and said[5][0] == pytest.approx(said[3][0], rel=1e-5)
        assert said[5][1] == said[3][1] > 0


@pytest.mark.parametrize("options", [
    {}, {"compression": hvd.Compression.int8}, {"compression": hvd.Compression.powersgd(1, warmup_steps=1)},
    {"compression": hvd.Compression.topk(0.1, warmup_steps=1)}, {"strategy": "auto"},
    {"strategy": hvd.LocalSGD(warmup_steps=2, round_steps=1), "compression": hvd.Compression.int8},
])  # fmt: skip
def test_a_scripts_default_device_is_none_of_ours(options):
    """As after `torch.set_default_device("cuda")`. What is made on "meta" has no values."""

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        x, y = data()
        dataset = torch.utils.data.TensorDataset(x.reshape(-1, 6).float(), y.reshape(-1))
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, **options)  # AdamW counts there
        hvd.LatencyAwareLR(optimizer, balancer, rule="adascale", base_batch_size=4)
        with torch.device("meta"):
            loader = hvd.BalancedDataLoader(dataset, balancer=balancer, seed=1)
            seen = 0
            for x, y in loader:
                seen += len(x)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                balancer.mean(loss.detach())
            optimizer.merge(model)
            state = hvd.elastic.TorchState(model, optimizer, balancer=balancer, epoch=0)
            state.save()
            state.restore()
            assert sum(len(x) for x, _ in hvd.EvaluationDataLoader(dataset, balancer=balancer)) > 0
        return seen, [p.detach() for p in model.parameters()]

    found = World(3).run(program)
    assert sum(seen for seen, _ in found) == STEPS * WHOLE
    for _, parameters in found:
        for a, b in zip(parameters, found[0][1], strict=True):
            assert a.device.type == "cpu" and torch.equal(a, b)
