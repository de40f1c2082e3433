"""What a change of the ranks finds in a job: a step that broke off, frozen parameters, a fixed topology."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from hvd_hetero.engine.local import LocalEngine, World
from hvd_hetero.optimizers import routing

hvd = pytest.importorskip("hvd_hetero.torch")

WHOLE, STEPS = 12, 8
PROTOTYPE = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


@pytest.mark.parametrize("options", [
    {}, {"op": hvd.Sum}, {"backward_passes_per_step": 2},
    {"strategy": hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)},
])
@pytest.mark.parametrize("passes", [0.5, 1, 2])
def test_gradients_of_a_step_that_broke_off_do_not_count(options, passes):
    """A script that calls zero_grad() after step() has those of the step that another rank's death broke off. Those of
    the first micro-batch, or of one pass of two, are each rank's own yet."""

    def train(engine, breaks_off):
        torch.set_num_threads(1)
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False, max_micro_batch=2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, **options)
        random = torch.Generator().manual_seed(engine.rank)
        x = torch.randn(STEPS, 4, 6, generator=random, dtype=torch.float64)

        def backward(batch, parts=2):
            balancer.begin(4)
            for part in itertools.islice(balancer.micro_batches(x[batch]), parts):
                model(part).square().mean().backward()

        for step in range(0, STEPS, 2):
            if step == 4:
                optimizer.merge()
            if step == 4 and breaks_off:
                for batch in range(step, step + math.ceil(passes)):
                    backward(batch, parts=math.ceil(2 * passes))
                engine.rebuild()
            backward(step)
            if "backward_passes_per_step" in options:
                backward(step + 1)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.merge()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    straight = World(3).run(lambda engine: train(engine, breaks_off=False))
    broken = World(3).run(lambda engine: train(engine, breaks_off=True))
    assert all(torch.allclose(one, straight[0], rtol=0, atol=1e-12) for one in broken)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_what_was_frozen_when_the_ranks_changed_goes_on_learning(op):
    """As a GAN's discriminator, which has to be while the generator learns. What joins makes it unfrozen."""

    def train(engine, rebuilds):
        torch.set_num_threads(1)
        model, balancer = copy.deepcopy(PROTOTYPE), hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        added = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, op=op)
        optimizer.add_param_group({"params": [added]})
        x = torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(engine.rank), dtype=torch.float64)
        for step in range(STEPS):
            frozen = step in (2, 3)
            for parameter in (*model[0].parameters(), added):
                parameter.requires_grad_(not frozen)
            if rebuilds and step == 3:
                engine.rebuild()
                assert not any(parameter.requires_grad for parameter in (*model[0].parameters(), added))
            optimizer.zero_grad()
            balancer.begin(4)
            (model(x[step]) * added).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in (*model.parameters(), added)])

    straight = World(3).run(lambda engine: train(engine, rebuilds=False))
    rebuilt = World(3).run(lambda engine: train(engine, rebuilds=True))
    assert all(torch.allclose(one, straight[0], rtol=0, atol=1e-12) for one in rebuilt)


def test_a_rank_that_joins_trains_what_is_frozen_on_the_others():
    def train(engine):
        model = copy.deepcopy(PROTOTYPE)
        if engine.rank == 0:
            balancer, optimizer = _made(engine, model)
            model.requires_grad_(False)
        else:
            _made(engine, model)
        if engine.rank == 0:
            engine.rebuild()
        else:
            balancer, optimizer = _made(LocalEngine(engine._group, engine.rank, engine.ranks), model)
        model.requires_grad_(True)
        balancer.begin(4)
        model(torch.full((4, 6), engine.rank + 1.0).double()).square().mean().backward()
        optimizer.step()
        return model[0].weight.detach().clone()

    first, second = World(2).run(train)
    assert torch.equal(first, second) and not torch.equal(first, PROTOTYPE[0].weight)


def test_each_of_several_optimizers_keeps_its_place_however_often_ranks_change():
    """By which it finds again what its codecs have kept back, and the momentum of its merges."""
    rule = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0, outer=hvd.Outer(momentum=0.5))
    prototypes = [nn.Linear(2, 1 + number).double() for number in range(3)]

    def train(engine):
        torch.set_num_threads(1)
        models = copy.deepcopy(prototypes)
        balancer = hvd.Balancer(2, engine=engine, adaptive=False)
        optimizers = [_wrapped(model, balancer, strategy=rule) for model in models]
        states = []
        for _ in range(3):
            balancer.begin(1)
            sum(model(torch.ones(1, 2).double()).sum() for model in models).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.merge()
                optimizer.zero_grad()
            before = balancer.state_dict()["strategies"]
            engine.rebuild()
            assert balancer.state_dict()["strategies"].keys() == before.keys()
            assert [optimizer._reducer.at for optimizer in optimizers] == [0, 1, 2]
            states.append([len(state["outer"][0]["momentum"]) for _, state in sorted(before.items())])
        return states

    assert World(2).run(train) == [[[3, 6, 9]] * 3] * 2


@pytest.mark.parametrize("within", [False, True])
def test_a_rank_that_joins_makes_what_another_optimizer_has_replaced_and_so_do_the_others(within):
    """As where a script makes its optimizer anew for all layers, and keeps both. Of one made `within` train the rank
    that joins knows nothing: then the one before it reduces the gradients again."""
    prototypes = [nn.Linear(4, 2).double() for _ in range(2)]

    def train(engine):
        torch.set_num_threads(1)
        models = copy.deepcopy(prototypes)

        def made(engine):
            balancer = hvd.Balancer(8, engine=engine, adaptive=False)
            return balancer, [_wrapped(model, balancer) for model in models]

        balancer, optimizers = made(engine)
        again = _wrapped(models[0], balancer)
        if engine.rank == 0:
            if within:
                engine._rebuilds._methods.pop()  # see `Rebuilds.agree`
            engine.rebuild()
        else:
            engine = LocalEngine(engine._group, engine.rank, engine.ranks)
            balancer, optimizers = made(engine)
            again = None if within else _wrapped(models[0], balancer)
        used = optimizers if within else [again, optimizers[1]]
        assert [optimizer._reducer.at for optimizer in used] == [0, 1]
        balancer.begin(4)
        sum(model(torch.full((4, 4), engine.rank + 1.0).double()).sum() for model in models).backward()
        for optimizer in used:
            optimizer.step()
        return [p.tolist() for model in models for p in model.parameters()]

    first, second = World(2).run(train, timeout_s=20.0)
    assert first == second


def _wrapped(model, balancer, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, **options)


def _made(engine, model, **options):
    balancer = hvd.Balancer(8, engine=engine, adaptive=False)
    return balancer, _wrapped(model, balancer, **options)


@pytest.mark.parametrize(("sizes", "nodes"), [((3, 2), ((0, 1), (2,))), ((2, 3), ((0,), (1,)))])
def test_a_topology_of_other_ranks_is_found_anew_in_an_elastic_job(sizes, nodes, monkeypatch, tmp_path, capfd):
    """Where it fits, it is used; whoever joins does as the others do."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    world, used, levels_for = World(3), [], routing.levels_for
    monkeypatch.setattr(
        routing, "levels_for", lambda engine, topology: used.append(topology) or levels_for(engine, topology)
    )

    def train(engine, topology):
        torch.set_num_threads(1)
        model, balancer = copy.deepcopy(PROTOTYPE), None
        x = torch.randn(STEPS, WHOLE, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for step in range(STEPS):
            size = sizes[step >= 4]
            if engine.rank >= size:
                continue
            if step in (0, 4):
                engine._group, engine._ranks = world.subgroup(tuple(range(size))), tuple(range(size))
            if step == 4 and balancer is not None:
                engine.rebuild()
            elif balancer is None:
                balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
                inner = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer = hvd.DistributedOptimizer(inner, balancer=balancer, topology=topology)
            if step == 4:
                for parameter in model.parameters():
                    engine.broadcast_async(parameter.detach(), root=0, name="begin").wait()
                balancer.step = step - 1  # as a state of the job has it
            share = WHOLE // size
            optimizer.zero_grad()
            balancer.begin(share)
            model(x[step, engine.rank * share : (engine.rank + 1) * share]).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    straight = world.run(lambda engine: train(engine, None))
    assert "topology" not in capfd.readouterr().err
    used.clear()
    given = hvd.Topology(nodes=nodes)
    found = world.run(lambda engine: train(engine, given))
    for rank in range(sizes[1]):
        assert torch.allclose(found[rank], straight[rank], rtol=0, atol=1e-12)
    assert used.count(given) == sizes[0] and used.count("auto") == sizes[1]
    said = [line for line in capfd.readouterr().err.splitlines() if "topology" in line]
    assert said == [
        f"hvd_hetero: the topology is one of {sizes[0]} ranks, and there are {sizes[1]}: going on as with "
        'topology="auto".'
    ]
    monkeypatch.delenv("HOROVOD_ELASTIC")
    with pytest.raises(ValueError, match="topology: expected one of 3 ranks, those of this job"):
        World(3).run(lambda engine: _made(engine, copy.deepcopy(PROTOTYPE), topology=hvd.Topology(nodes=((0, 1),))))
