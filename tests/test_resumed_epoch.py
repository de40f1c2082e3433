"""A job that was kept at the end of an epoch goes on with the next: each sample of an epoch is used once."""

import pytest
import torch
from torch import nn

from hvd_hetero.engine.checkpoint import Checkpoint
from hvd_hetero.engine.local import World

hvd = pytest.importorskip("hvd_hetero.torch")

WHOLE, BATCHES, EPOCHS = 8, 3, 3


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


class Job:
    """A new job, as a new process would make it; `used` is what this rank trained on."""

    def __init__(self, engine, path, *, own_loader):
        self.model = nn.Linear(1, 1)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        self.balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = hvd.DistributedOptimizer(inner, balancer=self.balancer)
        data = torch.arange(float(WHOLE * BATCHES))[:, None]
        if own_loader:
            self.sampler = hvd.BalancedBatchSampler(len(data), balancer=self.balancer)
            self.loader = torch.utils.data.DataLoader(data, batch_sampler=self.sampler)
        else:
            data = Stream(data) if own_loader is None else data
            self.sampler = self.loader = hvd.BalancedDataLoader(data, balancer=self.balancer)
        self.state = hvd.elastic.TorchState(self.model, self.optimizer, epoch=0)
        self.checkpoint = Checkpoint(path, self.state, engine=engine, every_steps=None)
        self.own_loader, self.used = own_loader, []

    def train(self, keep, *, in_loop, until=EPOCHS):
        for epoch in range(self.state.epoch, until):
            self.state.epoch = epoch
            self.sampler.set_epoch(epoch)
            for number, x in enumerate(self.loader, start=1):
                if self.own_loader:
                    self.balancer.begin(self.sampler.used())
                self.optimizer.zero_grad()
                self.model(x / 100).square().mean().backward()
                self.optimizer.step()
                self.used += [(epoch, int(index)) for index in x[:, 0]]
                if in_loop and number == BATCHES:
                    keep()
            if not in_loop:
                keep()


@pytest.mark.parametrize("own_loader", [False, True, None], ids=["loader", "own loader", "stream"])
@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("how", ["elastic", "checkpoint"])
def test_an_epoch_that_was_kept_at_its_end_is_not_trained_again(tmp_path, how, in_loop, own_loader):
    def program(engine):
        job = Job(engine, tmp_path / "x", own_loader=own_loader)
        job.train(job.state.save if how == "elastic" else job.checkpoint.save, in_loop=in_loop, until=2)
        if how == "elastic":
            job.state.restore()
            job.train(job.state.save, in_loop=in_loop)
            return job.used
        again = Job(engine, tmp_path / "x", own_loader=own_loader)
        assert again.checkpoint.restore()
        again.train(again.checkpoint.save, in_loop=in_loop)
        return job.used + again.used

    ranks = World(2).run(program)
    expected = [(epoch, index) for epoch in range(EPOCHS) for index in range(WHOLE * BATCHES)]
    assert sorted(sum(ranks, [])) == expected


@pytest.mark.parametrize("own_loader", [False, True, None], ids=["loader", "own loader", "stream"])
def test_a_loop_that_trains_on_nothing_uses_up_no_epoch(tmp_path, own_loader):
    """As that of `update_bn`: a job that went on with the next epoch found nothing left of it."""

    def program(engine):
        used = []
        for until in range(1, EPOCHS + 1):
            job = Job(engine, tmp_path / "x", own_loader=own_loader)
            assert job.checkpoint.restore() == (until > 1)

            def look_and_keep(job=job):
                with torch.no_grad():
                    assert sum(len(x) > 0 for x in job.loader) == BATCHES
                job.state.epoch += 1
                job.checkpoint.save()

            job.train(look_and_keep, in_loop=False, until=until)
            used += job.used
        return used

    expected = [(epoch, index) for epoch in range(EPOCHS) for index in range(WHOLE * BATCHES)]
    assert sorted(sum(World(2).run(program), [])) == expected


def test_a_loop_that_trains_without_autograd_uses_up_its_epoch(tmp_path):
    def program(engine):
        job = Job(engine, tmp_path / "x", own_loader=False)
        with torch.no_grad():
            for x in job.loader:
                for parameter in job.model.parameters():
                    parameter.grad = x.mean().expand_as(parameter).clone()
                job.optimizer.step()
        return job.loader.state_dict()["epoch"]

    assert World(2).run(program) == [1, 1]


def test_an_epoch_may_be_trained_again_on_purpose(tmp_path):
    def program(engine):
        job = Job(engine, tmp_path / "x", own_loader=False)
        for _ in range(2):
            job.state.epoch = 0
            job.train(job.state.save, in_loop=False, until=1)
        return job.used

    assert sorted(sum(World(2).run(program), [])) == [(0, i) for i in range(WHOLE * BATCHES) for _ in range(2)]


@pytest.mark.parametrize("own_loader", [False, True])
def test_a_resumed_loader_is_as_long_as_an_epoch_and_gives_what_is_left_of_it(own_loader, tmp_path):
    """What runs a loop by itself, as Lightning does, counts the batches of an epoch from its beginning."""

    def program(engine):
        job = Job(engine, tmp_path / "x", own_loader=own_loader)
        job.sampler.load_state_dict({**job.sampler.state_dict(), "position": 2})
        given = []
        for _ in range(2):
            before, count = len(job.loader), 0
            for _ in job.loader:
                if own_loader:
                    job.balancer.begin(job.sampler.used())
                count += 1
                (job.model.weight.sum() * 0).backward()
                job.optimizer.step()
            given.append((before, count))
        return given

    assert World(2).run(program) == [[(BATCHES, 1), (BATCHES, BATCHES)]] * 2
