"""What a job meets as it goes on: shares of other ranks, buffers made meanwhile, forks, loops that were under way."""

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvd_hetero.engine import checkpoint_file, elastic
from hvd_hetero.engine.checkpoint_file import CheckpointFile
from hvd_hetero.engine.local import LocalEngine, World

hvd = pytest.importorskip("hvd_hetero.torch")

WHOLE = 12


@pytest.mark.parametrize(("sizes", "shares", "then"), [((3, 2, 3), (6, 4, 2), (6, 4, 2)), ((2, 3), (8, 4), (4, 4, 4))])
def test_a_rank_may_join_a_job_of_given_shares(sizes, shares, then, monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    world = World(3)

    def program(engine):
        balancer = None
        for size in sizes:
            group, ranks = world.subgroup(tuple(range(size))), tuple(range(size))
            if engine.rank >= size:
                balancer = None
            elif balancer is None:
                engine = LocalEngine(group, engine.rank, ranks)
                balancer = hvd.Balancer(WHOLE, engine=engine, shares=shares, adaptive=False)
            else:
                engine._group, engine._ranks = group, ranks
                engine.rebuild()
        return balancer.plan.shares

    assert world.run(program) == [then] * 3
    others = [size for size in sizes if size != len(shares)]
    told = [line for line in capsys.readouterr().err.splitlines() if "shares= are those" in line]
    assert [f"there are {size}" in line for size, line in zip(others, told, strict=True)] == [True] * len(others)


@pytest.mark.parametrize("first", [None, torch.ones(1)])
def test_buffers_that_a_model_makes_as_it_is_used_are_no_part_of_a_checkpoint(first):
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.ones(3), persistent=False)
    content = hvd.elastic.TorchState(model).own_content()
    again = nn.Linear(2, 1)
    again.register_buffer("mask", first, persistent=False)
    hvd.elastic.TorchState(again).load_own_content(content)
    assert again.mask is first


FORK = """
    import multiprocessing, time
    from hvd_hetero.engine.termination import TerminationHandler

    notice = TerminationHandler(lambda: None, say="so it is.")  # it is what hears SIGTERM
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
    time.sleep(0.3)
"""


def test_a_fork_that_a_rank_ends_by_sigterm_ends():
    """As Python does with daemons at the end of a process, and a pool with its own."""
    subprocess.run([sys.executable, "-c", textwrap.dedent(FORK)], timeout=20, check=True)


def test_a_loop_does_not_go_on_from_where_its_loader_was_before_it_went_back():
    def program(engine, own):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        data = torch.zeros(16, 1)
        if own:
            sampler = hvd.BalancedBatchSampler(16, balancer=balancer)
            loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
        else:
            loader = hvd.BalancedDataLoader(data, balancer=balancer)
        state = hvd.elastic.TorchState(model, optimizer)
        used = 0
        with pytest.raises(RuntimeError, match="Leave the loop"):
            for x in loader:
                if own:
                    balancer.begin(sampler.used())
                model(x).mean().backward()
                optimizer.step()
                used += 1
                if used == 2:
                    state.restore()
        return used == 2

    for own in (False, True):
        assert all(World(2).run(lambda engine, own=own: program(engine, own)))


def test_sigterm_is_heard_by_whichever_balancer_is_in_use():
    def program(engine):
        balancers = [hvd.Balancer(4, engine=engine, adaptive=False) for _ in range(2)]
        weights = [nn.Parameter(torch.ones(1)) for _ in balancers]
        pairs = zip(weights, balancers, strict=True)
        first, second = (hvd.DistributedOptimizer(torch.optim.SGD([w], lr=0.1), balancer=b) for w, b in pairs)
        state = hvd.elastic.TorchState(nn.Linear(1, 1), first, second=second)
        state._horovod = SimpleNamespace(size=lambda: engine.size)
        if engine.rank == 1:
            state.leave()
        balancers[1].begin(2)
        weights[1].sum().backward()
        second.step()
        return list(state.leaving)

    assert World(2).run(program) == [[1], [1]]


def test_a_checkpoint_is_read_while_another_job_replaces_it(tmp_path, monkeypatch):
    file, read = CheckpointFile(tmp_path / "x"), checkpoint_file._read
    for content in (b"first", b"second"):
        file.write([content])

    def meanwhile(path, unpack):
        if path == file.path:
            path.rename(file.previous)
        return read(path, unpack)

    monkeypatch.setattr(checkpoint_file, "_read", meanwhile)
    assert file.read() == (b"second", "")


def test_ranks_that_die_one_after_the_other_while_others_rebuild_end_no_job():
    class State:
        commits, leaving = 0, None

        def __getattr__(self, name):
            return lambda: None

    sizes = [8]

    def restart(waiting):
        sizes.append(sizes[-1] - 1)
        if sizes[-1] > 3:
            raise ConnectionError("another has died")

    def train(state):
        if sizes[-1] == 8:
            raise ConnectionError("one has died")
        return sizes[-1]

    job = elastic.run(train, restart=restart, size=lambda: sizes[-1], recoverable=lambda error: True,
                      explain=lambda: "")  # fmt: skip
    assert job(State()) == 3
