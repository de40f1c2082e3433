"""A sampler of the user's: the order of each epoch is its own, and each rank gets its part of that."""

import copy
import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from torch_task import LENGTH, SHARES, WHOLE, Data, make_model, sgd, train

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers.departure import PeerError

WEIGHTS = torch.arange(LENGTH, dtype=torch.float64)
MAKERS = {
    "weights": lambda: WeightedRandomSampler(WEIGHTS, LENGTH),
    "weights, a generator": lambda: WeightedRandomSampler(WEIGHTS, 20, generator=torch.Generator().manual_seed(5)),
    "a subset": lambda: SubsetRandomSampler(range(3, 25)),
    "at random": lambda: RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(5)),
    "in order": lambda: SequentialSampler(range(LENGTH)),
    "a list": lambda: [5, 5, 5, 9, 1, 0, 7, 8, 3],
    "a tensor": lambda: torch.arange(9).flip(0),
    "NumPy's and Python's": lambda: Drawn(lambda: random.randrange(LENGTH)),
    "by epoch": lambda: ByEpoch(),
}


class Drawn:
    def __init__(self, draw, length=15):
        self.draw, self.length = draw, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return (self.draw() for _ in range(15))


class ByEpoch:
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 12

    def __iter__(self):
        return iter([(self.epoch * 7 + place) % LENGTH for place in range(12)])


class Keyed(Dataset):
    """Whose samples are the keys that they are asked for by."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, key):
        return key


def loader_of(engine, sampler, *, data=None, shares=None, **options):
    balancer = hvd.Balancer(WHOLE, engine=engine, shares=shares, adaptive=False)
    options.setdefault("collate_fn", list)
    return hvd.BalancedDataLoader(Keyed() if data is None else data, balancer=balancer, sampler=sampler, **options)


def drawn(loader, epochs=3):
    return [[key for batch in loader for key in batch] for _ in range(epochs)]


@pytest.mark.parametrize(("made", "workers"), [*((made, 0) for made in MAKERS), ("weights", 2)])
def test_each_epoch_is_what_the_sampler_draws_dealt_over_the_ranks(made, workers):
    torch.set_num_threads(1)
    make = MAKERS[made]
    expected = drawn(loader_of(SoloEngine(), make()))
    length = len(make())
    assert [len(epoch) for epoch in expected] == [length] * 3
    if made in ("in order", "a list", "a tensor"):
        assert expected == [list(make())] * 3
    else:
        assert expected[0] != expected[1]
    if made in ("a subset", "at random"):
        assert {tuple(sorted(epoch)) for epoch in expected} == {tuple(sorted(make()))}

    def program(engine):
        loader = loader_of(engine, make(), shares=SHARES, num_workers=workers)
        assert len(loader) == -(-length // WHOLE)
        return [[list(batch) for batch in loader] for _ in range(3)]

    by_rank = World(3).run(program, timeout_s=60)
    for epoch in range(3):
        batches = zip(*(found[epoch] for found in by_rank), strict=True)
        assert [key for batch in batches for part in batch for key in part] == expected[epoch]


@pytest.mark.parametrize("made", ["weights", "weights, a generator"])
def test_what_is_learned_is_what_one_process_learns(made):
    prototype, make = make_model(), MAKERS[made]

    def program(engine):
        model = copy.deepcopy(prototype)
        shares = SHARES if engine.size > 1 else None
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=shares, adaptive=False)
        loader = hvd.BalancedDataLoader(Data(), balancer=balancer, sampler=make(), seed=3)
        return train(model, hvd.DistributedOptimizer(sgd(model), balancer=balancer), loader, 2)

    expected = program(SoloEngine())
    for found in World(3).run(program, timeout_s=30):
        assert max((p - q).abs().max().item() for p, q in zip(found, expected, strict=True)) <= 1e-12


def test_the_order_follows_from_the_seeds_and_the_epoch_alone():
    def epochs(seed, own, set_epoch=None):
        sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(own))
        loader = loader_of(SoloEngine(), sampler, seed=seed)
        if set_epoch is not None:
            loader.set_epoch(set_epoch)
        return drawn(loader, 2)

    first = epochs(1, 5)
    torch.rand(3), random.random()
    assert epochs(1, 5) == first and epochs(1, 5, set_epoch=1)[0] == first[1]
    assert epochs(2, 5) != first and epochs(1, 6) != first


def test_a_sampler_with_a_generator_gives_a_loader_made_anew_what_the_first_had():
    """As in an elastic job, whose loader is made within `train` and whose sampler is not."""
    generator = torch.Generator().manual_seed(5)
    sampler, before = RandomSampler(range(20), generator=generator), generator.get_state()
    first = drawn(loader_of(SoloEngine(), sampler))
    assert drawn(loader_of(SoloEngine(), sampler)) == first
    assert torch.equal(generator.get_state(), before)


def test_a_sampler_may_read_a_stream_while_it_draws():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.randperm(9).tolist())

    class Hard:
        def __len__(self):
            return 9

        def __iter__(self):
            balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
            return iter(torch.cat(list(hvd.EvaluationDataLoader(Stream(), balancer=balancer))).tolist())

    assert sorted(drawn(loader_of(SoloEngine(), Hard()), 1)[0]) == list(range(9))


def test_a_script_draws_the_random_numbers_that_it_would_without():
    def numbers(sampler):
        torch.manual_seed(1), random.seed(1)
        drawn(loader_of(SoloEngine(), sampler))
        return torch.rand(1).item(), random.random()

    assert numbers(MAKERS["weights"]()) == numbers(MAKERS["NumPy's and Python's"]()) == numbers(range(LENGTH))


@pytest.mark.parametrize("made", ["weights", "weights, a generator", "by epoch"])
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_other_ranks(made):
    make = MAKERS[made]
    expected = drawn(loader_of(SoloEngine(), make()))
    loader = loader_of(SoloEngine(), make())
    drawn(loader, 1)
    iterator = iter(loader)
    used = next(iterator)
    state = loader.state_dict()

    def program(engine):
        resumed = loader_of(engine, make(), shares=SHARES)
        resumed.load_state_dict(state)
        return [list(batch) for batch in resumed]

    batches = zip(*World(3).run(program, timeout_s=30), strict=True)
    assert used + [key for batch in batches for part in batch for key in part] == expected[1]


def test_an_epoch_that_is_begun_again_has_the_same_order():
    loader = loader_of(SoloEngine(), MAKERS["weights"]())
    first = next(iter(loader))
    assert drawn(loader, 1)[0][: len(first)] == first


@pytest.mark.parametrize("keys", [["a", "b", "c", "d"] * 4, [(1, 2), (3, 4)] * 5, [2**70, 5, 6] * 3])
def test_indices_are_of_any_type_that_the_dataset_takes(keys):
    assert drawn(loader_of(SoloEngine(), keys), 1) == [keys]


def test_it_goes_with_a_data_loader_of_ones_own():
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    mine = MAKERS["weights"]()
    sampler = hvd.BalancedBatchSampler(len(mine), balancer=balancer, sampler=mine)
    found = []
    for batch in torch.utils.data.DataLoader(Keyed(), batch_sampler=sampler, collate_fn=list):
        found += batch[: sampler.used()]
    assert found == drawn(loader_of(SoloEngine(), MAKERS["weights"]()), 1)[0]
    with pytest.raises(ValueError, match="length: expected 20, that of the sampler. Received: 21"):
        hvd.BalancedBatchSampler(len(mine) + 1, balancer=balancer, sampler=mine)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda rank: RandomSampler(range(9), generator=torch.Generator().manual_seed(rank)), "sampler: expected"),
        (lambda rank: RandomSampler(range(9)) if rank else None, "sampler: expected the same"),
        (lambda rank: range(9 + rank), "sampler length: expected the same"),
    ],
)
def test_unlike_samplers_are_an_error_on_all_ranks(make, text):
    for error in World(3).run(lambda engine: loader_of(engine, make(engine.rank)), errors="return"):
        assert isinstance(error, ValueError) and text in str(error)


def test_orders_that_differ_are_an_error_on_all_ranks():
    """As of a sampler with random numbers of its own."""
    prototype = make_model()

    def program(engine):
        model, own = copy.deepcopy(prototype), random.Random(engine.rank)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        sampler = Drawn(lambda: own.randrange(LENGTH))
        loader = hvd.BalancedDataLoader(Data(), balancer=balancer, sampler=sampler)
        return train(model, hvd.DistributedOptimizer(sgd(model), balancer=balancer), loader, 5)

    for error in World(3).run(program, timeout_s=30, errors="return"):
        assert isinstance(error, hvd.DivergedError) and "sampler" in str(error)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrong", ["raises", "more", "fewer"])
def test_a_sampler_that_fails_on_one_rank_stops_all(wrong, workers):
    prototype = make_model()

    def program(engine):
        def draw():
            if wrong == "raises" and engine.rank == 1:
                raise OSError("no such file")
            return 3

        actual = {"raises": 15, "more": 12, "fewer": 17}[wrong]
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        loader = hvd.BalancedDataLoader(Data(), balancer=balancer, sampler=Drawn(draw, actual), num_workers=workers)
        return train(model, hvd.DistributedOptimizer(sgd(model), balancer=balancer), loader, 1)

    errors = World(3).run(program, timeout_s=30, errors="return")
    if wrong == "raises":
        assert [type(error) for error in errors] == [PeerError, OSError, PeerError]
    else:
        text = {"more": "expected 12 indices in epoch 0.*more", "fewer": "expected 17 indices.*Received: 15"}[wrong]
        for error in errors:
            with pytest.raises(ValueError, match=text):
                raise error


@pytest.mark.parametrize(
    ("sampler", "options", "text"),
    [
        (range(8), {"shuffle": True}, "shuffle: expected False or none"),
        (BatchSampler(range(8), 2, False), {}, "expected one that gives single indices"),
        (iter(range(8)), {}, "sampler: expected an iterable of indices with a length"),
        (5, {}, "sampler: expected an iterable"),
        (torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=0), {}, "Leave it out"),
        (range(8), {"batch_sampler": range(8)}, "Give what orders the samples as sampler="),
        ([], {}, "at least one sample"),
    ],
)
def test_what_is_no_sampler_is_refused(sampler, options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        loader_of(SoloEngine(), sampler, **options)
