"""The guard of law 5: a rank whose parameters differ is found, and nobody trains on with it."""

import copy
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from hvd_hetero.optimizers.parameter_guard import check_origins

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers import parameter_guard
from hvd_hetero.optimizers.control import BATCHES, ORIGINS, ParameterComparison, pack, unpack
from hvd_hetero.optimizers.dealer import Dealer
from hvd_hetero.optimizers.parameter_guard import DivergedError, ParameterGuard, check_together
from hvd_hetero.optimizers.sampler import ShareSampler
from hvd_hetero.policy import fragments
from hvd_hetero.torch.parameter_store import ParameterStore

torch.manual_seed(0)
PROTOTYPE = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
DATA = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randint(0, 3, (96,)))


class Events:
    """What a trace would keep."""

    def __init__(self):
        self.seen = []

    def event(self, kind, **fields):
        self.seen.append((kind, fields))

    def flush(self): ...

    def plan(self, plan): ...

    def step(self, **fields): ...

    def now(self):
        return 0.0


def program(engine, *, change, at=0, rank=1, **options):
    """Trains, while `change(parameter)` happens on one rank before step `at`; parameters, events, steps made."""
    torch.set_num_threads(1)
    model = copy.deepcopy(PROTOTYPE)
    balancer = hvd.Balancer(8, engine=engine, shares=(4, 3, 1), adaptive=False)
    balancer.trace = events = Events()
    loader = hvd.BalancedDataLoader(DATA, balancer=balancer)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 1e-3), balancer=balancer, **options)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for x, y in loader:
            if balancer.step == at and engine.rank == rank:
                with torch.no_grad():
                    change(model[0].weight)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()], events.seen


def short_of_memory(engine, *, takes_part):
    """Trains, while rank 1 cannot compute its part of batch 3; the parameters."""
    model = copy.deepcopy(PROTOTYPE)
    balancer = hvd.Balancer(8, engine=engine, shares=(4, 3, 1), adaptive=False)
    loader = hvd.BalancedDataLoader(DATA, balancer=balancer)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), balancer=balancer)
    for x, y in loader:
        optimizer.zero_grad()
        if balancer.step == 3 and engine.rank == 1:
            if not takes_part:
                continue
            balancer.count(0)
        else:
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_rank_that_leaves_a_step_out_alone_ends_all_before_gradients_of_two_batches_are_mixed():
    for error in World(3).run(lambda engine: short_of_memory(engine, takes_part=False), errors="return"):
        assert isinstance(error, DivergedError), error
        assert "Received: batch 3 on ranks 0, 2; batch 4 on rank 1." in str(error)
        assert "out of memory" not in str(error), "scripts that catch that would leave out all further steps"


def test_who_says_nothing_of_its_batch_is_at_none():
    check_together((7, -1, 7), (0, 1, 2))
    with pytest.raises(DivergedError, match="batch 7 on ranks 0, 4; batch 8 on rank 3"):
        check_together((7, -1, 8, 7), (0, 1, 3, 4))


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_whose_loaders_are_in_different_epochs_end_before_samples_are_used_twice(shuffle):
    """As where one rank alone knows in which epoch a job goes on. Where all epochs have one order, they may differ."""

    def program(engine):
        model, balancer = copy.deepcopy(PROTOTYPE), hvd.Balancer(8, engine=engine)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        data = torch.utils.data.TensorDataset(torch.ones(40, *model[0].weight.shape[1:]))
        loader = hvd.BalancedDataLoader(data, balancer=balancer, shuffle=shuffle)
        for epoch in (0, 5) if engine.rank >= 2 else (0, 1):
            loader.set_epoch(epoch)
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        return balancer.step

    for outcome in World(4).run(program, errors="return"):
        if shuffle:
            assert isinstance(outcome, DivergedError) and "another one on ranks 2, 3" in str(outcome), outcome
        else:
            assert outcome == 9


def test_places_that_differ_are_told_soon():
    dealers = [Dealer(80, global_batch_size=8, shuffle=True, seed=0, drop_last=False) for _ in range(2)]
    for epoch in range(1, 200):
        samplers = [ShareSampler.__new__(ShareSampler) for _ in dealers]
        for sampler, dealer, its in zip(samplers, dealers, (0, epoch), strict=True):
            sampler.dealer, dealer.epoch = dealer, its
        met = 0
        for position in range(1, 11):
            for sampler in samplers:
                sampler.position = position
            met += samplers[0].origin == samplers[1].origin
        assert met < 6, epoch


def test_a_batch_and_where_it_was_dealt_are_one_number():
    for batch, origin in ((None, None), (0, None), (0, 0), (BATCHES - 1, ORIGINS - 1), (BATCHES + 3, 2)):
        vector = pack(
            ranks=2, rank=1, count=1.0, compute_s=0.0, samples=0.0, failed=False, announcement=None, batch=batch,
            origin=origin,
        )  # fmt: skip
        report = unpack(torch.tensor(vector, dtype=torch.float32).tolist(), ranks=2)
        assert report.batches == (-1, -1 if batch is None else batch % BATCHES)
        assert report.origins == (-1, -1 if origin is None else origin)


def test_a_rank_that_cannot_compute_its_part_takes_part_without_it():
    first, second, third = World(3).run(lambda engine: short_of_memory(engine, takes_part=True))
    assert torch.equal(first, second) and torch.equal(first, third)
    assert not torch.equal(first, torch.cat([p.detach().flatten() for p in PROTOTYPE.parameters()]))


def test_a_rank_with_other_parameters_ends_all_with_its_name():
    outcome = World(3).run(lambda engine: program(engine, change=lambda p: p.add_(1.0)), errors="return")
    for error in outcome:
        assert isinstance(error, DivergedError) and "on rank 1, by" in str(error), outcome
        assert "(hvd.broadcast_parameters; Keras: hvd.broadcast_variables)" in str(error)


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.int8}])
def test_rounding_is_mended(options, at):
    outcome = World(3).run(lambda engine: program(engine, change=lambda p: p.mul_(1 + 1e-6), at=at, **options))
    first, events = outcome[0]
    (mended,) = [fields for kind, fields in events if kind == "parameters"]
    assert mended["ranks"] == [1] and 0 < mended["off"] < 1e-5
    for parameters, _ in outcome[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, parameters, strict=True)), "law 5 holds again"


def test_mending_takes_copies_of_one_fragment_at_a_time():
    """A model may take most of a GPU's memory."""

    class Fragments(Numbers):
        def __init__(self, off):
            super().__init__([0.0])
            self.lossy = (False,) * 6
            self.flats = [np.full(3, 1.0 + index + off) for index in range(6)]
            self.copies, self.most = [], 0

        def checksum(self, index):
            return hash(self.flats[index].tobytes()) % 1000

        def read(self, index):
            found = self.flats[index].copy()
            self.copies = [ref for ref in self.copies if ref() is not None] + [weakref.ref(found)]
            self.most = max(self.most, len(self.copies))
            return found

        def write(self, index, flat):
            self.flats[index][:] = flat

    def mend(engine):
        fragments, told = Fragments(1e-6 * engine.rank), []
        ParameterGuard(engine, lambda: fragments, name="x", tell=told.append).incoming([1, 2], 16)
        return fragments, told

    (first, told), (second, _) = World(2).run(mend)
    np.testing.assert_array_equal(first.flats, second.flats)
    assert told[0]["ranks"] == [1] and 0 < told[0]["off"] < 1e-5
    assert max(first.most, second.most) == 2, "rank 0's and this rank's own"


@pytest.mark.parametrize("piece", [8, 24, 1 << 22])
def test_fragments_of_no_given_number_are_as_small_as_a_piece(monkeypatch, piece):
    monkeypatch.setattr(fragments, "PIECE", piece)
    store = ParameterStore(list(PROTOTYPE.parameters()))
    sizes = [store.read(index).numel() for index in range(len(store.lossy))]
    assert sum(sizes) == 51 and max(sizes) <= max(24, 2 * piece)
    assert len(sizes) == {8: 4, 24: 3}.get(piece, 1)


def test_nothing_is_said_where_nothing_differs():
    for _, events in World(3).run(lambda engine: program(engine, change=lambda p: None)):
        assert [kind for kind, _ in events if kind == "parameters"] == []


class Numbers:
    """Parameters of one fragment, whose hash costs a second."""

    lossy = (False,)

    def __init__(self, clock, value=1.0, cost_s=1.0):
        self.clock, self.flat, self.cost_s = clock, np.full(3, value), cost_s

    def checksum(self, index):
        self.clock[0] += self.cost_s
        return hash(self.flat.tobytes()) % 1000

    def read(self, index):
        return self.flat.copy()

    def write(self, index, flat):
        self.flat[:] = flat


@pytest.mark.parametrize(("cost_s", "step_s"), [(1e-6, 1.0), (0.01, 0.1), (1.0, 0.1), (100.0, 0.001)])
def test_looks_are_as_rare_as_they_are_dear(cost_s, step_s):
    now = [0.0]
    numbers = Numbers(now, cost_s=cost_s)
    guard = ParameterGuard(None, lambda: numbers, name="x", tell=lambda fields: None, clock=lambda: now[0])
    looks = []
    for exchange in range(300_000):
        said = guard.outgoing()
        if said.hash:
            looks.append(exchange)
        guard.incoming([said.hash] * 2, said.interval)
        now[0] += step_s
        if len(looks) == 4:
            break
    spent = cost_s / ((looks[3] - looks[2]) * step_s)
    longest, shortest = parameter_guard.LONGEST, parameter_guard.SHORTEST
    assert spent <= parameter_guard.BUDGET * 1.01 or looks[3] - looks[2] == longest
    assert spent >= parameter_guard.BUDGET * 0.9 or looks[3] - looks[2] in (shortest, longest)


def test_parameters_that_are_not_known_yet_are_looked_at_later():
    guard = ParameterGuard(None, lambda: None, name="x", tell=lambda fields: None)
    for _ in range(5):
        assert guard.outgoing() == ParameterComparison()
        guard.incoming([0, 0], 0)


def test_not_a_number_on_one_rank_is_an_error():
    def settle(engine):
        numbers = Numbers([0.0], value=1.0 if engine.rank else float("nan"))
        guard = ParameterGuard(engine, lambda: numbers, name="x", tell=lambda fields: None)
        for _ in range(2):
            row = np.zeros(2)
            said = guard.outgoing()
            row[engine.rank] = said.hash
            guard.incoming(engine.allreduce_async(row, name="row").wait().astype(int).tolist(), said.interval or 16)

    assert all(isinstance(error, DivergedError) for error in World(2).run(settle, errors="return"))


def test_a_rank_that_says_no_place_of_the_data_is_at_none():
    check_origins((-1, 3, -1, 3), range(4))
    with pytest.raises(DivergedError, match="on rank 3 than"):
        check_origins((-1, 3, -1, 4), range(4))
