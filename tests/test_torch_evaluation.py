"""Validation over unlike ranks: each sample on one rank, as many as its share says."""

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers.dealer import evaluation_part

hvd = pytest.importorskip("hvd_hetero.torch")


def seen(engine, samples, shares, **arguments):
    balancer = hvd.Balancer(sum(shares), engine=engine, shares=shares, min_share=0, adaptive=False)
    loader = hvd.EvaluationDataLoader(TensorDataset(torch.arange(samples)), balancer=balancer, **arguments)
    batches = [x.tolist() for (x,) in loader]
    assert len(batches) == len(loader) and [x.tolist() for (x,) in loader] == batches, "again, the same"
    return batches


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("samples", "shares", "expected"), [
    (24, (6, 3, 3), [12, 6, 6]),
    (25, (6, 3, 3), [13, 6, 6]),
    (10, (7, 0, 5), [6, 0, 4]),
    (1, (4, 4), [1, 0]),
])  # fmt: skip
def test_each_sample_is_on_one_rank_and_shares_say_on_which(samples, shares, expected, workers):
    found = World(len(shares)).run(lambda engine: seen(engine, samples, shares, num_workers=workers))
    parts = [sum(batches, []) for batches in found]
    assert sum(parts, []) == list(range(samples)) and [len(part) for part in parts] == expected
    assert all(len(batch) <= share for batches, share in zip(found, shares, strict=True) for batch in batches)


@pytest.mark.parametrize("length", [3, 4, 17, 100])
def test_every_rank_has_as_many_as_it_has_to(length):
    parts = [evaluation_part(length, (50, 1, 1), rank, least=1) for rank in range(3)]
    assert [i for part in parts for i in part] == list(range(length)) and min(map(len, parts)) >= 1


def test_the_mean_is_that_of_one_process():
    x = torch.randn(37, 4, generator=torch.Generator().manual_seed(0)).double()

    def program(engine):
        torch.set_num_threads(1)
        balancer = hvd.Balancer(8, engine=engine, shares=(5, 2, 1), adaptive=False)
        total = torch.zeros(2, dtype=torch.float64)
        for (part,) in hvd.EvaluationDataLoader(TensorDataset(x), balancer=balancer):
            total += torch.tensor([part.square().mean() * len(part), len(part)])
        return engine.allreduce_async(total, name="validation").wait()

    for loss, count in World(3).run(program):
        assert count == 37 and loss / count == pytest.approx(float(x.square().mean()), rel=1e-12)


class Stream(IterableDataset):
    """Numbers; each of two processes that load gives every other one, shuffled. Threads share random numbers."""

    def __iter__(self):
        worker = get_worker_info()
        if worker is None:
            return iter(range(100))
        return iter((2 * torch.randperm(50) + worker.id).tolist())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shares", [(6, 3, 3), (7, 0, 5)])
def test_a_stream_is_dealt_as_well(shares, workers):
    def program(engine):
        balancer = hvd.Balancer(12, engine=engine, shares=shares, min_share=0, adaptive=False)
        loader = hvd.EvaluationDataLoader(Stream(), balancer=balancer, num_workers=workers)
        first, again = ([batch.tolist() for batch in loader] for _ in range(2))
        assert first == again and all(len(batch) <= max(1, shares[engine.rank]) for batch in first)
        return sum(first, [])

    parts = World(3).run(program)
    assert sorted(sum(parts, [])) == list(range(100))
    assert [len(part) for part in parts] == pytest.approx([100 * share / 12 for share in shares], abs=2 * (1 + workers))


def test_a_pipe_is_parted_between_loading_processes_and_ranks():
    def program(engine):
        balancer = hvd.Balancer(12, engine=engine, shares=(9, 3), adaptive=False)
        pipe = IterableWrapper(range(50)).shuffle().sharding_filter()
        loader = hvd.EvaluationDataLoader(pipe, balancer=balancer, num_workers=2)
        return [int(x) for batch in loader for x in batch]

    assert sorted(sum(World(2).run(program), [])) == list(range(50))


class Endless:
    def __getitem__(self, index):
        return index


def test_wrong_arguments_say_what_was_expected():
    def program(engine):
        balancer = hvd.Balancer(4, engine=engine)
        with pytest.raises(TypeError, match="map-style"):
            hvd.EvaluationDataLoader(Endless(), balancer=balancer)
        with pytest.raises(TypeError, match="shuffle: expected none"):
            hvd.EvaluationDataLoader(TensorDataset(torch.arange(3)), balancer=balancer, shuffle=True)

    World(1).run(program)


def test_nothing_is_left_out():
    balancer = hvd.Balancer(4, engine=SoloEngine())
    data = TensorDataset(torch.arange(7))
    with pytest.raises(TypeError, match="drop_last: expected False, because every sample is looked at once"):
        hvd.EvaluationDataLoader(data, balancer=balancer, drop_last=True)
    with pytest.raises(TypeError, match="balancer: expected an hvd.Balancer. Received: 4."):
        hvd.EvaluationDataLoader(data, balancer=4)
