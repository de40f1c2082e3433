"""Laws of streams: every sample of an `IterableDataset` on one rank, once, whatever the plan does, and nobody's order
but the stream's own."""

import pickle
import random
import re

import numpy as np
import pytest
import torch
from simulated import Speed
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.dealer import owners
from hvd_hetero.optimizers.parameter_guard import DivergedError
from hvd_hetero.optimizers.stream import StreamSampler

hvd = pytest.importorskip("hvd_hetero.torch")

WHOLE = 16
SECONDS_PER_SAMPLE = (0.1, 0.3, 0.2)  # simulated: so much that what exchanges really take here is little
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Stream(IterableDataset):
    """Numbers, shuffled within a buffer by random numbers of a `kind`; each loading process gives its own."""

    def __init__(self, length, kind=None, buffer=24):
        self.length, self.kind, self.buffer = length, kind, buffer
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        numbers = range(self.length) if worker is None else range(worker.id, self.length, worker.num_workers)
        kept = []
        for number in numbers:
            kept.append(number)
            if len(kept) == self.buffer:
                yield self.form(kept.pop(self.draw(len(kept))))
        while kept:
            yield self.form(kept.pop(self.draw(len(kept))))

    def draw(self, number):
        if self.kind is None:
            return 0
        if self.kind == "torch":
            return int(torch.randint(number, ()))
        return random.randrange(number) if self.kind == "python" else int(np.random.randint(number))

    def form(self, number):
        return torch.tensor([float(number)]), self.epoch


class Sized(Stream):
    def __len__(self):
        return self.length


class Job:
    def __init__(self, engine, data, *, adaptive=False, shares=None, **options):
        self.watch = Speed(SECONDS_PER_SAMPLE[engine.rank])
        self.balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=adaptive, shares=shares)
        self.model = torch.nn.Linear(1, 1).double()
        torch.nn.init.zeros_(self.model.weight)
        torch.nn.init.zeros_(self.model.bias)
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.optimizer = hvd.DistributedOptimizer(inner, balancer=self.balancer)
        self.balancer.step_timer.measure_with(self.watch)
        self.loader = hvd.BalancedDataLoader(data, balancer=self.balancer, **options)

    def epoch(self, stop=None):
        """This rank's samples of each batch, and the epochs that the stream was in."""
        batches = []
        for number, (x, epochs) in enumerate(self.loader):
            batches.append([int(value) for value in x[:, 0]])
            assert len(set(epochs.tolist())) <= 1 and len(x) == self.balancer.samples
            self.watch.samples = len(x)
            self.optimizer.zero_grad()
            (self.model(x.double()) - x).square().mean().backward()
            self.optimizer.step()
            torch.randn(self.balancer.rank + 1)  # ranks draw unlike numbers
            random.random(), np.random.random(self.balancer.rank)
            if number == stop:
                break
        return batches


def together(ranks):
    """The samples of each global batch, sorted."""
    assert len({len(batches) for batches in ranks}) == 1
    return [sorted(sum(parts, [])) for parts in zip(*ranks, strict=True)]


# Threads share their random numbers, so that a stream that draws is read by processes here.
@pytest.mark.parametrize("kind, workers, length, drop_last", [
    (None, 0, WHOLE * 30, False), (None, 0, WHOLE * 30 + 9, False), (None, 0, WHOLE * 30 + 5, True),
    (None, 2, WHOLE * 30 + 9, False), ("torch", 2, WHOLE * 30 + 5, True),
    ("python", 2, WHOLE * 30, False), ("numpy", 2, WHOLE * 30 + 9, False),
])
def test_every_sample_once_in_the_order_of_the_stream_whatever_the_plan_does(workers, kind, length, drop_last):
    def program(engine):
        job = Job(engine, Stream(length, kind), adaptive=True, num_workers=workers, drop_last=drop_last)
        epochs = [job.epoch() for _ in range(2)]
        return epochs, job.balancer.plans, job.model.weight.item()

    ended = World(3).run(program)
    assert len({weight for *_, weight in ended}) == 1
    assert len(ended[0][1]) >= 2, "the plan never changed: the test shows nothing"
    whole = [together(epochs) for epochs in zip(*(epochs for epochs, *_ in ended), strict=True)]
    for batches in whole:
        seen = sorted(sum(batches, []))
        if drop_last:
            assert len(set(seen)) == len(seen) == length // WHOLE * WHOLE
        else:
            assert seen == list(range(length))
        assert all(len(batch) == WHOLE for batch in batches[: -1 - workers])
    if not workers:
        stop = length - length % WHOLE * drop_last
        assert whole[0] == [list(range(at, min(at + WHOLE, stop))) for at in range(0, stop, WHOLE)]
    assert (whole[0] != whole[1]) == (kind is not None)


def test_plans_hold_as_soon_where_a_process_has_nothing_to_read():
    class OneShard(Stream):
        def __iter__(self):
            return map(self.form, range(self.length if get_worker_info().id == 0 else 0))

    def program(engine):
        job = Job(engine, OneShard(120 * WHOLE), adaptive=True, num_workers=2)
        before, leads = 0, []
        for number, (x, _) in enumerate(job.loader):
            if number == 80:  # both ranks change their speed
                job.watch.seconds_per_sample, before = SECONDS_PER_SAMPLE[1 - engine.rank], len(job.balancer.plans)
            job.watch.samples = len(x)
            job.model(x.double()).square().mean().backward()
            job.optimizer.step()
            leads.append(job.balancer.plans[-1].step - job.balancer.step)
        return before, len(job.balancer.plans), max(leads), job.balancer.lookahead

    for before, after, lead, lookahead in World(2).run(program):
        assert after > before, "the plan never changed: the test shows nothing"
        assert lead <= lookahead + 2


@WORKERS
@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_its_order_depends_on_seed_and_epoch_alone_and_others_draw_what_they_would(workers, kind):
    orders, drawn = [], []
    for seed, others in ((0, 1), (0, 9), (1, 1)):
        torch.manual_seed(others), random.seed(others), np.random.seed(others)
        job = Job(SoloEngine(), Stream(50, kind), seed=seed, num_workers=workers, collate_fn=drawing)
        orders.append([job.epoch() for _ in range(2)])
        drawn.append((float(torch.rand(())), random.random(), np.random.random()))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] != orders[0][1]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    job = Job(SoloEngine(), Stream(50), num_workers=workers, collate_fn=drawing)
    job.epoch(), job.epoch()
    expected = float(torch.rand(())), random.random(), np.random.random()
    assert drawn[0] == drawn[2] == expected != drawn[1]


def drawing(samples):
    """As a transformation of this rank's samples does."""
    torch.rand(len(samples)), random.random(), np.random.random()
    return torch.utils.data.default_collate(samples)


@WORKERS
@pytest.mark.parametrize("kind", [None, "torch"])
@pytest.mark.parametrize("stop", [0, 4, 6])
def test_it_goes_on_where_it_was_kept_on_other_ranks(workers, kind, stop):
    length, options = WHOLE * 6 + 3, dict(num_workers=workers, seed=3)
    whole = Job(SoloEngine(), Stream(length, kind), **options)
    expected = [together([whole.epoch()]) for _ in range(2)]
    first = Job(SoloEngine(), Stream(length, kind), **options)
    before = together([first.epoch(stop)])
    state = first.loader.state_dict()

    def program(engine):
        job = Job(engine, Stream(length, kind), **options)
        job.loader.load_state_dict(state)
        job.loader.set_epoch(0)
        return [job.epoch(), job.epoch()]

    if kind is None or workers:
        after, second = (together(epochs) for epochs in zip(*World(2).run(program), strict=True))
    else:
        after, second = (together([epoch]) for epoch in program(SoloEngine()))
    assert [before + after, second] == expected


def test_an_epoch_that_was_kept_at_its_end_is_over():
    whole = Job(SoloEngine(), Stream(3 * WHOLE))
    first = whole.epoch()
    again = Job(SoloEngine(), Stream(3 * WHOLE))
    again.loader.load_state_dict(whole.loader.state_dict())
    again.loader.set_epoch(0)  # as a script does that goes on in the epoch it was kept in
    again.loader.load_state_dict(again.loader.state_dict())  # and it is kept there once more
    again.loader.set_epoch(0)
    assert again.epoch() == [] and again.epoch() == first
    again.loader.load_state_dict(whole.loader.state_dict())
    again.loader.set_epoch(5)  # on purpose another one
    assert again.epoch() == first


def test_a_state_of_another_order_is_refused():
    state = Job(SoloEngine(), Stream(40)).loader.state_dict()
    for options in ({"seed": 1}, {"num_workers": 1}):
        with pytest.raises(ValueError, match=f"{[*options][0]} 1. Received: 0"):
            Job(SoloEngine(), Stream(40), **options).loader.load_state_dict(state)


@WORKERS
def test_the_stream_is_told_its_epoch(workers):
    class Told(Stream):
        def form(self, number):
            return torch.tensor([float(self.epoch)]), 0

    job = Job(SoloEngine(), Told(WHOLE), num_workers=workers, persistent_workers=workers > 0)
    assert [set(sum(job.epoch(), [])) for _ in range(2)] == [{0}, {1}]
    job.loader.set_epoch(7)
    assert set(sum(job.epoch(), [])) == {7}


@pytest.mark.slow
def test_processes_that_are_not_forked_read_the_same():
    batches = [
        Job(SoloEngine(), Stream(40, "python"), num_workers=2, multiprocessing_context=how).epoch()
        for how in ("fork", "spawn")
    ]
    assert batches[0] == batches[1]


def test_what_reads_can_be_sent_to_another_process():
    loader = Job(SoloEngine(), Stream(40)).loader
    assert isinstance(pickle.loads(pickle.dumps(loader.loader.dataset)).dataset, Stream)


def test_its_length():
    assert len(Job(SoloEngine(), Sized(2 * WHOLE + 1)).loader) == 3
    assert len(Job(SoloEngine(), Sized(2 * WHOLE + 1), drop_last=True).loader) == 2
    with pytest.raises(TypeError, match="without __len__"):
        len(Job(SoloEngine(), Stream(2 * WHOLE + 1)).loader)

    class Unsized(Stream):
        def __len__(self):
            raise NotImplementedError

    assert len(Job(SoloEngine(), Unsized(2 * WHOLE + 1)).epoch()) == 3


@pytest.mark.parametrize("shares", [(12, 3, 1), (16, 0, 0), (5, 6, 5)])
def test_a_batch_that_ends_early_is_split_like_shares(shares):
    places = owners(shares)
    assert np.bincount(places, minlength=3).tolist() == list(shares)
    for length in range(1, WHOLE):
        parts = np.bincount(places[:length], minlength=3)
        assert np.abs(parts - np.array(shares) * length / WHOLE).max() <= 1


@WORKERS
def test_a_rank_without_a_sample_trains_with_none(workers):
    def program(engine):
        job = Job(engine, Stream(2 * WHOLE + 1), shares=(8, 7, 1), num_workers=workers)
        return job.epoch(), job.model.weight.item()

    ended = World(3).run(program)
    assert [[len(batch) for batch in batches] for batches, _ in ended] == [[8, 8, 1], [7, 7, 0], [1, 1, 0]]
    assert len({weight for _, weight in ended}) == 1 and ended[0][1] != 0.0


def by_init(worker):
    """Splits the stream as PyTorch's documentation shows."""
    info = get_worker_info()
    info.dataset.start = worker


def test_a_worker_init_fn_finds_the_dataset():
    class Split(IterableDataset):
        start = None

        def __iter__(self):
            return ((torch.tensor([float(number)]), 0) for number in range(self.start, 40, 2))

    batches = Job(SoloEngine(), Split(), num_workers=2, worker_init_fn=by_init).epoch()
    assert sorted(sum(batches, [])) == list(range(40))
    assert {value % 2 for value in batches[0]} == {0}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_data_pipe_is_parted_and_shuffled_as_a_data_loader_does(workers):
    def program(engine):
        pipe = IterableWrapper(range(50)).shuffle().sharding_filter()
        loader = hvd.BalancedDataLoader(pipe, balancer=hvd.Balancer(WHOLE, engine=engine), num_workers=workers)
        return [[x.tolist() for x in loader] for _ in range(2)]

    first, second = zip(*World(2).run(program), strict=True)
    for ranks in (first, second):
        assert sorted(sum(together(ranks), [])) == list(range(50))
    assert first != second


class Labels(IterableDataset):
    """Samples of a `form`, from `first` on."""

    def __init__(self, form, first=0, step=1, length=6 * WHOLE):
        self.form, self.numbers = form, range(first, first + length * step, step)

    def __iter__(self):
        return (self.form(number) for number in self.numbers)


FORMS = [
    lambda number: (torch.zeros(1), number),
    lambda number: {"x": torch.zeros(1), "ids": torch.tensor([number, 1])},
    lambda number: (torch.zeros(1), f"text {number}"),
    lambda number: (torch.zeros(1), np.int16(number), str(number).encode()),
    lambda number: (torch.zeros(1), np.zeros(number + 1)),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", [{"step": 2}, {"length": 3 * WHOLE}, {"length": 6 * WHOLE - 1}, {"first": 1}])
def test_ranks_with_other_streams_notice(form, other):
    def program(engine):
        data = Labels(form, **other) if engine.rank == 1 else Labels(form)
        balancer = hvd.Balancer(WHOLE, engine=engine)
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        loader = hvd.BalancedDataLoader(data, balancer=balancer, collate_fn=lambda samples: torch.ones(len(samples), 1))
        with pytest.raises(DivergedError, match="IterableDataset"):
            for _ in range(3):
                for x in loader:
                    optimizer.zero_grad()
                    model(x).mean().backward()
                    optimizer.step()

    World(2).run(program)


def test_a_stream_that_raises_on_a_rank_ends_all():
    class Burning(Stream):
        def form(self, number):
            if self.burns and number == 50:
                raise OSError("disk on fire")
            return super().form(number)

    def program(engine):
        data = Burning(100)
        data.burns = engine.rank == 1
        job = Job(engine, data)
        with pytest.raises(OSError if data.burns else hvd.PeerError, match="disk on fire" if data.burns else "rank 1"):
            job.epoch()

    World(2).run(program)


@WORKERS
def test_a_stop_iteration_that_is_not_the_streams_is_an_error(workers):
    def out_of_captions(samples):
        return next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        Job(SoloEngine(), Stream(40), num_workers=workers, collate_fn=out_of_captions).epoch()


@pytest.mark.parametrize("how", ["break", "exception"])
def test_a_stream_is_closed_when_its_loop_is_left(how):
    class Open(Stream):
        opened = 0

        def __iter__(self):
            self.opened += 1
            try:
                yield from super().__iter__()
            finally:
                self.opened -= 1

    data = Open(40)
    loader = Job(SoloEngine(), data).loader
    for _ in range(2):
        try:
            for _ in loader:
                assert data.opened == 1
                if how == "break":
                    break
                raise OSError("rank on fire")
        except OSError:
            pass
        assert data.opened == 0


def test_what_ranks_do_not_agree_about_is_named():
    def program(engine, data, **options):
        balancer = hvd.Balancer(WHOLE, engine=engine)
        hvd.BalancedDataLoader(data, balancer=balancer, **options)

    for first, second, options, named in (
        (Stream(9), [1] * 9, {}, "dataset length"),
        (Sized(9), Sized(10), {}, "dataset length"),
        (Stream(9), Stream(9), {"num_workers": 1}, "num_workers"),
        (Stream(9), Stream(9), {"num_workers": 0, "seed": 1}, "seed"),
    ):
        with pytest.raises(ValueError, match=named):
            World(2).run(lambda engine, first=first, second=second, options=options: program(
                engine, second, **options) if engine.rank else program(engine, first))


def test_what_a_stream_cannot_do_is_refused():
    with pytest.raises(ValueError, match="shuffle: expected False"):
        Job(SoloEngine(), Stream(9), shuffle=True)
    loader = Job(SoloEngine(), Stream(90)).loader
    one, other = iter(loader), iter(loader)
    next(one), next(other)
    with pytest.raises(RuntimeError, match=re.escape("one iteration at a time")):
        next(one)


def sampler_of(length, **options):
    options = {"seed": 5, "drop_last": False, "workers": 1, "lookahead": 2, **options}
    return StreamSampler(length, balancer=Balancer(SoloEngine(), global_batch_size=4), **options)


@pytest.mark.parametrize(("length", "drop_last", "batches", "samples"), [
    (10, False, 3, 10), (10, True, 2, 8), (8, False, 2, 8), (8, True, 2, 8), (3, True, 0, 0), (0, False, 0, 0),
])
def test_what_is_left_of_an_epoch_is_what_was_not_used(length, drop_last, batches, samples):
    sampler = sampler_of(length, drop_last=drop_last)
    for used in range(batches + 2):
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 0, "position": used})
        assert (len(sampler), sampler.left) == (max(0, batches - used), max(0, samples - 4 * used)), used
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 1, "position": 0})
    sampler.set_epoch(0)
    assert (len(sampler), sampler.left) == (0, 0), "it was over"
