"""What a script gets wrong without an error: a late count, samples left out, the step of the wrapped optimizer."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    default_collate,
)

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers.rounds import Rounds
from hvd_hetero.torch import optimizer

PROTOTYPE = nn.Linear(2, 1)


def told_of(body):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        body()
    return [str(each.message) for each in caught]


def trains(count, collate_fn=None, engine=None):
    model = nn.Linear(2, 1)
    balancer = hvd.Balancer(4, engine=engine or SoloEngine())
    loader = hvd.BalancedDataLoader(TensorDataset(torch.ones(12, 2)), balancer=balancer, collate_fn=collate_fn)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).mean()
        if count == "before":
            balancer.count(len(x))
        loss.backward()
        if count == "after":
            balancer.count(len(x))
        optimizer.step()


@pytest.mark.parametrize("count", ["before", "after", None])
def test_a_count_after_the_backward_pass_is_told_of(count):
    told = told_of(lambda: trains(count))
    assert any("balancer.count() before" in each for each in told) == (count == "after")


@pytest.mark.parametrize("count", ["before", None])
def test_samples_that_a_collate_fn_leaves_out_are_told_of_unless_they_are_counted(count):
    told = told_of(lambda: trains(count, collate_fn=lambda samples: default_collate(samples[:-1])))
    assert any("as many rows as the loader dealt" in each for each in told) == (count is None)


@pytest.mark.parametrize(("ranks", "optimizer", "grad"), [
    (2, "none", True), (2, "none", False), (2, "distributed", True), (1, "none", True),
])  # fmt: skip
def test_an_epoch_of_training_that_exchanges_nothing_is_told_of(ranks, optimizer, grad):
    def rank(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(4, engine=engine)
        loader = hvd.BalancedDataLoader(TensorDataset(torch.ones(8, 2)), balancer=balancer)
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        if optimizer == "distributed":
            update = hvd.DistributedOptimizer(update, balancer=balancer)
        with torch.set_grad_enabled(grad):
            for (x,) in loader:
                update.zero_grad()
                loss = model(x).mean()
                if grad:
                    loss.backward()
                    update.step()

    told = told_of(lambda: World(ranks).run(rank))
    assert any("each rank has trained a model of its own" in each for each in told) == (
        ranks == 2 and optimizer == "none" and grad
    )


def test_a_loader_is_no_dataset():
    data = DataLoader(TensorDataset(torch.ones(12, 2)))
    for kind in (hvd.BalancedDataLoader, hvd.EvaluationDataLoader):
        with pytest.raises(TypeError, match=r"Give loader\.dataset"):
            kind(data, balancer=hvd.Balancer(4, engine=SoloEngine()))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])


class Unread(TensorDataset):
    def __len__(self):
        raise OSError("no such file")


def optimizer_of(balancer, engine, params=None, **options):
    params = params or copy.deepcopy(PROTOTYPE).parameters()
    given = {"optimizer": torch.optim.SGD(params, lr=0.1), "balancer": balancer, "process_set": engine, **options}
    return hvd.DistributedOptimizer(**{k: v for k, v in given.items() if k != "process_set" or v is not None})


def loader_of(balancer, engine, dataset=None, **options):
    dataset = TensorDataset(torch.ones(12, 2)) if dataset is None else dataset
    return hvd.BalancedDataLoader(dataset, balancer=balancer, **options)


def sampler_of(balancer, engine, **options):
    return hvd.BalancedBatchSampler(12, balancer=balancer, **options)


WRONG = [
    (optimizer_of, {"strategy": "async"}, "strategy: expected"),
    (optimizer_of, {"compression": "int8"}, "hvd.Compression"),
    (optimizer_of, {"op": hvd.Adasum}, "op: expected"),
    (optimizer_of, {"backward_passes_per_step": 0}, "backward_passes_per_step: expected an integer of at least 1"),
    (optimizer_of, {"gradient_predivide_factor": 0.0}, "gradient_predivide_factor: expected"),
    (optimizer_of, {"bucket_bytes": 0}, "bucket_bytes: expected"),
    (optimizer_of, {"num_groups": -1}, "num_groups: expected"),
    (optimizer_of, {"groups": "all"}, "groups: expected"),
    (optimizer_of, {"named_parameters": []}, "named_parameters: expected every parameter"),
    (optimizer_of, {"topology": "star"}, "topology: expected"),
    (optimizer_of, {"optimizer": nn.Linear(2, 1)}, "optimizer: expected"),
    (optimizer_of, {"process_set": object()}, "process_set: expected none"),
    (loader_of, {"batch_size": 4}, "batch_size: expected none"),
    (loader_of, {"sampler": 0}, "sampler: expected an iterable"),
    (loader_of, {"in_order": False}, "in_order: expected True"),
    (loader_of, {"sharded": True}, "sharded: expected an IterableDataset"),
    (loader_of, {"steps_per_epoch": 2}, "steps_per_epoch: expected none"),
    (loader_of, {"dataset": iter([1])}, "dataset: expected a map-style dataset"),
    (loader_of, {"dataset": Stream(), "shuffle": True}, "shuffle: expected False"),
    (loader_of, {"dataset": Unread(torch.ones(12, 2))}, "no such file"),
    (loader_of, {"num_workers": -1}, "num_workers"),
    (loader_of, {"prefetch_factor": 2}, "prefetch_factor"),
    (loader_of, {"works": 2}, "works"),
    (sampler_of, {"lookahead": -1}, "lookahead: expected"),
]


def mistaken(make, wrong, monkeypatch, *, told):
    """What each of three ranks says where the last one alone is `wrong`. Then all make the same, and it is right."""
    monkeypatch.setattr(optimizer, "HorovodEngine", lambda engine: engine)

    def program(engine):
        balancer = hvd.Balancer(4, engine=engine, adaptive=False) if told else None
        right = {} if told else {"topology": "flat"}
        here = None if told else engine  # what an optimizer without a balancer makes its own with
        with pytest.raises((TypeError, ValueError, OSError)) as raised:
            make(balancer, here, **{**right, **(wrong if engine.rank == 2 else {})})
        make(balancer, here, **right)
        return str(raised.value), engine.unique("")

    said, numbers = zip(*World(3).run(program), strict=True)
    assert len(set(numbers)) == 1, "ranks have counted alike"
    return said


@pytest.mark.parametrize(("make", "wrong", "text"), WRONG, ids=[f"{m.__name__}-{list(w)[-1]}" for m, w, _ in WRONG])
def test_a_mistake_on_one_rank_is_an_error_on_all(make, wrong, text, monkeypatch):
    said = mistaken(make, wrong, monkeypatch, told=True)
    assert text in said[2] and "rank 2: " not in said[2]
    assert all("rank 2: wrong arguments (" in each and text in each for each in said[:2])


@pytest.mark.parametrize(("make", "wrong", "text"), [w for w in WRONG[:11] if "topology" not in w[1]])
def test_it_is_without_a_balancer_where_gradients_are_summed_by_us(make, wrong, text, monkeypatch):
    said = mistaken(make, wrong, monkeypatch, told=False)
    assert text in said[2] and all("rank 2: wrong arguments (" in each and text in each for each in said[:2])


@pytest.mark.parametrize(("make", "wrong"), [(optimizer_of, {"bucket_bytes": 0}), (loader_of, {"batch_size": 4})])
def test_in_an_elastic_job_it_is_that_ranks_alone_which_the_others_go_on_without(make, wrong, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")

    def program(engine):
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        if engine.rank == 1:  # one that joins, perhaps: the others made theirs long ago
            with pytest.raises((TypeError, ValueError), match="expected"):
                make(balancer, None, **wrong)
        make(balancer, None)

    World(2).run(program)


def test_a_mistake_of_horovods_own_optimizer_is_one_of_the_rank_that_makes_it(monkeypatch):
    """Without a balancer, and with nothing of ours, nothing is exchanged: not even hvd.init() was called here."""
    monkeypatch.setattr(optimizer, "HorovodEngine", None)
    for wrong in ({"compression": "int8"}, {"optimizer": nn.Linear(2, 1)}):
        with pytest.raises((TypeError, ValueError), match="expected"):
            optimizer_of(None, None, **wrong)


def test_the_step_of_the_wrapped_optimizer_is_an_error_with_a_local_strategy():
    def rank(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(4, engine=engine)
        within = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = hvd.LocalSGD(round_steps=2, warmup_steps=1)
        hvd.DistributedOptimizer(within, balancer=balancer, strategy=strategy)
        with pytest.raises(RuntimeError, match=r"Expected step\(\) of the hvd.DistributedOptimizer"):
            for _ in range(6):
                balancer.begin(2)
                within.zero_grad()
                model(torch.full((2, 2), float(engine.rank + 1))).mean().backward()
                within.step()

    World(2).run(rank)


def test_a_step_left_out_is_none_with_a_local_strategy():
    def rank(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(4, engine=engine)
        strategy = hvd.LocalSGD(round_steps=2, warmup_steps=1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, strategy=strategy
        )
        for step in range(8):
            balancer.begin(2)
            optimizer.zero_grad()
            model(torch.full((2, 2), float(engine.rank + 1))).mean().backward()
            if step < 3 or step % 3 or not engine.rank:
                optimizer.step()
        optimizer.merge()
        return model.weight.detach().clone()

    first, second = World(2).run(rank)
    assert torch.equal(first, second)


def test_rows_along_another_dimension_are_none_that_are_left_out():
    """As of a `collate_fn` that puts time first."""
    told = told_of(lambda: trains(None, collate_fn=lambda samples: (torch.ones(2, len(samples), 2),)))
    assert not any("as many rows as the loader dealt" in each for each in told)


@pytest.mark.parametrize("strategy", ["synchronous", hvd.LocalSGD(warmup_steps=2)])
def test_a_step_that_is_compiled_as_a_whole_is_compiled_no_more_after_its_first_ones(strategy, monkeypatch):
    """As shares come and go, the parts of updates that steps apart make are others."""
    torch._dynamo.reset()
    monkeypatch.setattr(Rounds, "update_fraction", property(lambda rounds: 0.3 + rounds.balancer.step // 3 % 7 / 10))
    model, balancer = nn.Linear(2, 1), hvd.Balancer(4, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, strategy=strategy
    )

    @torch.compile(backend="eager")
    def train(x):
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    frames = []
    for _ in range(30):
        balancer.begin(4)
        train(torch.ones(4, 2))
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    optimizer.merge()
    assert frames[9] == frames[-1], frames


def raises(kind, text, call):
    with pytest.raises(kind, match=text):
        call()


def test_what_takes_the_place_of_another_argument_is_named():
    balancer, data, model = hvd.Balancer(4, engine=SoloEngine()), TensorDataset(torch.ones(8, 2)), nn.Linear(2, 1)
    for progress in (False, True):
        raises(TypeError, "balancer: expected an hvd.Balancer. Received: 8",
               lambda progress=progress: hvd.BalancedDataLoader(data, balancer=8, progress=progress))
    for workers in (-1, 1.5, "2"):
        raises(ValueError, "num_workers: expected an integer of at least 0",
               lambda workers=workers: hvd.BalancedDataLoader(data, balancer=balancer, num_workers=workers))
    raises(ValueError, "prefetch_factor: expected an integer of at least 1 or None",
           lambda: hvd.BalancedDataLoader(data, balancer=balancer, num_workers=1, prefetch_factor=0))
    for named in (model, nn.Sequential(model), 3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for options in ({}, {"balancer": balancer}):
            raises(TypeError, r"named_parameters: expected \(name, parameter\) tuples, as from model.named_parameters",
                   lambda named=named, o=optimizer, options=options: hvd.DistributedOptimizer(o, named, **options))
    raises(TypeError, r"process_set: expected an hvd.ProcessSet.* Received: \[0\]",
           lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=[0]))
    raises(TypeError, "optimizer: expected a torch.optim.Optimizer. Received: a Linear",
           lambda: hvd.broadcast_optimizer_state(model, root_rank=0))
    for wrong, text in ((nn.Linear(2, 1), "a Linear"), (nn.Sequential(model), "a Linear among them"),
                        (optimizer.state_dict(), "a (dict|list) by the name of (state|param_groups)"),
                        ({"w": None}, "a NoneType by the name of w")):
        raises(TypeError, rf"params: expected tensors, as of model.named_parameters.* Received: {text}\.",
               lambda wrong=wrong: hvd.broadcast_parameters(wrong, root_rank=0))
    for wrong in (torch.ones(3), None, [1.0]):
        raises(TypeError, "terms: expected a number, or an array of one element. Received: ",
               lambda wrong=wrong: balancer.count(wrong))
    raises(TypeError, "eps: expected no balancer", lambda: hvd.SyncBatchNorm(2, balancer))
    raises(TypeError, "process_set: expected no balancer",
           lambda: hvd.SyncBatchNorm.convert_sync_batchnorm(model, balancer))
    raises(TypeError, "module: expected a torch.nn.Module. Received: None",
           lambda: hvd.SyncBatchNorm.convert_sync_batchnorm(None))
    raises(TypeError, "state: expected an elastic state.* Received: a Linear",
           lambda: hvd.elastic.run(lambda state: None)(model))
    raises(TypeError, "model: expected a torch.nn.Module. Received: 3", lambda: hvd.elastic.TorchState(3))
    raises(TypeError, "optimizer: expected a torch.optim.Optimizer. Received: 3",
           lambda: hvd.elastic.TorchState(model, 3))


def test_what_is_no_saved_state_is_named():
    balancer = hvd.Balancer(4, engine=SoloEngine())
    loader = hvd.BalancedDataLoader(TensorDataset(torch.ones(8, 2)), balancer=balancer)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), balancer=balancer)
    for one in (balancer, loader, hvd.LatencyAwareLR(optimizer, balancer)):
        raises(TypeError, r"state: expected what state_dict\(\) of .* returned. Received: None",
               lambda one=one: one.load_state_dict(None))
        raises(ValueError, "Received: an empty dict", lambda one=one: one.load_state_dict({}))
        raises(ValueError, "Received: a dict with 'other'", lambda one=one: one.load_state_dict({"other": 1}))
        one.load_state_dict(one.state_dict())
