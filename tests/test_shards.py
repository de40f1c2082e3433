"""Laws of streams that are each rank's own: a rank takes what its stream yields next, as much as its share says, and
the gradient is that of one process on the same global batch."""

import itertools
import pickle

import pytest
import torch
from simulated import Speed
from torch.utils.data import IterableDataset, get_worker_info

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers.departure import PeerError
from hvd_hetero.optimizers.stream import Order, Start

hvd = pytest.importorskip("hvd_hetero.torch")
content = pytest.importorskip("hvd_hetero.torch.content")

WHOLE = 16
SECONDS_PER_SAMPLE = (0.1, 0.3, 0.2)  # simulated: so much that what exchanges really take here is little
LENGTHS = (100, 37, 61)
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Shard(IterableDataset):
    """Numbers of a rank's own, in their order; each loading process has its own."""

    def __init__(self, rank, length):
        self.numbers = range(1000 * rank, 1000 * rank + length)

    def __iter__(self):
        worker = get_worker_info()
        numbers = self.numbers if worker is None else self.numbers[worker.id :: worker.num_workers]
        return (torch.tensor([float(number)]) for number in numbers)


class Job:
    def __init__(self, engine, data, *, adaptive=False, shares=None, **options):
        self.watch = Speed(SECONDS_PER_SAMPLE[engine.rank])
        self.balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=adaptive, shares=shares, min_share=0)
        self.model = line()
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.optimizer = hvd.DistributedOptimizer(inner, balancer=self.balancer)
        self.balancer.step_timer.measure_with(self.watch)
        self.loader = hvd.BalancedDataLoader(data, balancer=self.balancer, sharded=True, **options)
        meter = self.balancer.step_timer.loading_meter
        tell = meter.will_load
        meter.will_load = lambda **how: tell(**{**how, "in_parts": False})  # the machine's time decides no plan

    def epoch(self, stop=None):
        """This rank's samples of each batch."""
        batches = []
        for number, x in enumerate(self.loader):
            batches.append([int(value) for value in x[:, 0]])
            assert len(x) == self.balancer.samples == self.balancer.plan.shares[self.balancer.rank]
            self.watch.samples = len(x)
            step(self.model, self.optimizer, x)
            if number == stop:
                break
        return batches


def line():
    model = torch.nn.Linear(1, 1).double()
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def step(model, optimizer, x):
    optimizer.zero_grad()
    (model(x.double()) - x).square().mean().backward()
    optimizer.step()


@WORKERS
def test_each_rank_takes_what_its_stream_yields_next_and_learns_what_one_process_would(workers):
    def program(engine):
        data = Shard(engine.rank, LENGTHS[engine.rank])
        job = Job(engine, data, adaptive=True, steps_per_epoch=20, num_workers=workers)
        epochs = [job.epoch() for _ in range(2)]
        return sum(epochs, []), len(job.balancer.plans), (job.model.weight.item(), job.model.bias.item())

    ended = World(3).run(program)
    assert ended[0][1] >= 2, "the plan never changed: the test shows nothing"
    for rank, (batches, *_) in enumerate(ended):
        assert len(batches) == 40
        for process in range(max(1, workers)):  # they take turns, in each epoch from the first on
            mine = [batch for number, batch in enumerate(batches) if number % 20 % max(1, workers) == process]
            own = Shard(rank, LENGTHS[rank]).numbers[process :: max(1, workers)]
            seen = sum(mine, [])
            assert seen == list(itertools.islice(itertools.cycle(own), len(seen)))
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for parts in zip(*(batches for batches, *_ in ended), strict=True):
        assert sum(map(len, parts)) == WHOLE
        step(model, optimizer, torch.tensor(sum(parts, []), dtype=torch.float32)[:, None])
    for *_, parameters in ended:
        assert parameters == pytest.approx((model.weight.item(), model.bias.item()), rel=1e-11)


@WORKERS
def test_a_rank_without_a_share_trains_with_none(workers):
    def program(engine):
        job = Job(engine, Shard(engine.rank, 50), shares=(10, 6, 0), steps_per_epoch=3, num_workers=workers)
        return job.epoch(), job.model.weight.item()

    ended = World(3).run(program)
    assert [list(map(len, batches)) for batches, _ in ended] == [[10] * 3, [6] * 3, [0] * 3]
    assert len({weight for _, weight in ended}) == 1 and ended[0][1] != 0.0


def test_the_sample_that_stands_for_none_is_the_next_one():
    loader = Job(SoloEngine(), Shard(0, 5), steps_per_epoch=1).loader
    reader = loader.loader.dataset
    batches = [reader[Order(1, 0, 0, shares, Start(0, {}))] for shares in ((0, 16), (0, 16), (3, 13), (0, 16), (4, 12))]
    assert [read.batch[:, 0].tolist() for read in batches] == [[0], [0], [0, 1, 2], [3], [3, 4, 0, 1]]
    assert [read.used for read in batches] == [0, 0, 3, 0, 4]


@WORKERS
def test_a_rank_among_others_begins_its_stream_anew(workers):
    """As the streams of an elastic job are others, once its ranks are."""
    resets = []
    engine = SoloEngine()
    engine.on_reset_end = resets.append
    job = Job(engine, Shard(0, 50), steps_per_epoch=1, num_workers=workers)
    first = [job.epoch()[0][0]]
    job.balancer.size = 2
    for reset in resets[1:]:  # the first is the balancer's own
        reset()
    assert first + [job.epoch()[0][0] for _ in range(2)] == [0, 0, WHOLE * max(1, workers)]


def test_loading_processes_are_begun_anew_with_an_elastic_job_and_go_on():
    """They were forked with the ranks of the job as these were."""
    rank = [0]

    class Forked(IterableDataset):
        def __iter__(self):
            return (torch.tensor([float(1000 * rank[0] + number)]) for number in range(50))

    resets = []
    engine = SoloEngine()
    engine.on_reset_end = resets.append
    job = Job(engine, Forked(), steps_per_epoch=1, num_workers=1)
    seen = [job.epoch()[0][0]]
    rank[0] = 1
    seen.append(job.epoch()[0][0])
    resets[-1]()
    seen.append(job.epoch()[0][0])
    assert seen == [0, WHOLE, 1000 + 2 * WHOLE]


class Shuffled(Shard):
    """The numbers in an order that is drawn while they are read, another one in each pass."""

    def __iter__(self):
        left = list(super().__iter__())
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class Left:
    """An iterator over the numbers that are left, in an order that is drawn, which knows its place."""

    def __init__(self, numbers):
        self.numbers, self.given = list(numbers), 0

    def __iter__(self):
        return self

    def __next__(self):
        if not self.numbers:
            raise StopIteration
        self.given += 1
        return self.numbers.pop(int(torch.randint(len(self.numbers), ())))

    def state_dict(self):
        return {"left": self.numbers}

    def load_state_dict(self, state):
        self.numbers = state["left"]


class IteratorKeeps(Shard):
    """A stream with iterators that know their place."""

    def __iter__(self):
        self.iterator = Left(super().__iter__())
        return self.iterator


class DatasetKeeps(Shard):
    """A stream that knows its place itself, as those of Hugging Face's `datasets` do."""

    start = None

    def __iter__(self):
        self.iterator = Left(super().__iter__())
        if self.start is not None:
            self.iterator.load_state_dict(self.start)
            self.start = None
        return map(torch.clone, self.iterator)

    def state_dict(self):
        return self.iterator.state_dict()

    def load_state_dict(self, state):
        self.start = state


def kept(job):
    """What a checkpoint keeps of a loader: what all ranks share, and what is this rank's own."""
    return job.loader.state_dict(), content.loaded(content.saved(job.balancer.stateful_parts.own_state_dict()))


def resume(job, state):
    job.loader.load_state_dict(state[0])
    job.balancer.stateful_parts.load_own_state_dict(state[1])


@pytest.mark.parametrize("form, resumes", [(Shuffled, True), (IteratorKeeps, "state"), (DatasetKeeps, "state")])
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("epochs, stop", [(0, 0), (0, 3), (1, 2), (2, 4)])
def test_a_run_that_goes_on_reads_what_an_uninterrupted_one_would(form, resumes, workers, epochs, stop):
    """In passes of 37 samples over epochs of 5 batches of 16, so that it stops in passes 0 to 6."""
    def job():
        return Job(SoloEngine(), form(0, 37), steps_per_epoch=5, num_workers=workers, resumes=resumes)

    whole = job()
    expected = sum((whole.epoch() for _ in range(epochs + 2)), [])
    first = job()
    before = sum((first.epoch() for _ in range(epochs)), []) + first.epoch(stop=stop)
    again = job()
    resume(again, kept(first))
    after = again.epoch() + again.epoch()
    assert (len(before), len(after)) == (5 * epochs + stop + 1, 2 * 5 - stop - 1)
    assert before + after == expected


@pytest.mark.parametrize("form", [IteratorKeeps, DatasetKeeps])
def test_a_stream_that_knows_its_place_is_not_read_again(form):
    job = Job(SoloEngine(), form(0, 500), steps_per_epoch=6, resumes="state")
    job.epoch(stop=2)
    again = Job(SoloEngine(), data := form(0, 500), steps_per_epoch=6, resumes="state")
    resume(again, kept(job))
    assert len(again.epoch()) == 3 and data.iterator.given == 3 * WHOLE


def test_the_place_that_a_stream_knows_is_before_a_sample_that_waits():
    def program(engine):
        def job():
            data = IteratorKeeps(engine.rank, 100)
            return Job(engine, data, steps_per_epoch=4, shares=[WHOLE, 0], resumes="state")

        whole = job()
        expected = whole.epoch() + whole.epoch()
        first = job()
        first.epoch()
        again = job()
        resume(again, kept(first))
        (name, state), = kept(again)[1].items()
        used, place = state["places"][0][2:]
        return again.epoch() == expected[4:], used, place[0] if place else None

    assert World(2).run(program) == [(True, 4 * WHOLE, 4 * WHOLE), (True, 0, None)]


@pytest.mark.parametrize("saved, loaded", [("state", True), (True, "state")])
def test_a_stream_is_read_again_where_one_run_alone_asks_it_for_its_place(saved, loaded):
    job, whole = (Job(SoloEngine(), IteratorKeeps(0, 100), steps_per_epoch=2, resumes=saved) for _ in range(2))
    expected = whole.epoch() + whole.epoch()
    job.epoch()
    again = Job(SoloEngine(), data := IteratorKeeps(0, 100), steps_per_epoch=2, resumes=loaded)
    resume(again, kept(job))
    assert again.epoch() == expected[2:] and data.iterator.given == 4 * WHOLE


def test_a_stream_is_not_asked_for_its_place_unless_that_is_wanted():
    class Unasked(IteratorKeeps):
        def __iter__(self):
            super().__iter__()
            self.iterator.state_dict = lambda: 1 / 0
            return self.iterator

    Job(SoloEngine(), Unasked(0, 100), steps_per_epoch=2).epoch()
    with pytest.raises(ZeroDivisionError):
        Job(SoloEngine(), Unasked(0, 100), steps_per_epoch=2, resumes="state").epoch()


@WORKERS
def test_a_stream_that_is_to_know_its_place_and_does_not_raises_on_all_ranks(workers):
    def program(engine):
        data = (IteratorKeeps, Shard)[engine.rank](engine.rank, 100)
        job = Job(engine, data, steps_per_epoch=3, num_workers=workers, resumes="state")
        with pytest.raises((TypeError, PeerError)) as raised:
            job.epoch()
        return str(raised.value)

    said = World(2).run(program)
    assert "rank 1" in said[0] and "expected a stream with state_dict() and load_state_dict()" in said[1]


@WORKERS
@pytest.mark.parametrize("form, resumes", [(Shuffled, True), (DatasetKeeps, "state")])
def test_a_rank_that_goes_back_to_a_commit_reads_again_what_came_after_it(form, resumes, workers):
    job = Job(SoloEngine(), form(0, 500), steps_per_epoch=6, num_workers=workers, resumes=resumes)
    job.epoch(stop=1)
    state = kept(job)
    job.loader.set_epoch(0)
    resume(job, state)
    first = job.epoch(stop=2)
    resume(job, state)
    assert job.epoch()[:3] == first


def test_places_are_of_one_rank_among_as_many_with_as_many_processes():
    job = Job(SoloEngine(), Shard(0, 100), steps_per_epoch=2)
    job.epoch()
    shared, own = kept(job)
    (name, places), = own.items()
    for other in ({"ranks": (0, 2)}, {"ranks": (1, 1)}, {"readers": 2}):
        again = Job(SoloEngine(), Shard(0, 100), steps_per_epoch=2)
        resume(again, (shared, {name: {**places, **other}}))
        assert again.epoch()[0][0] == 0
    again = Job(SoloEngine(), Shard(0, 100), steps_per_epoch=2)
    resume(again, (shared, own))
    assert again.epoch()[0][0] == 2 * WHOLE


@pytest.mark.parametrize("resumed_before", [False, True])
def test_a_stream_that_is_not_to_resume_begins_anew(resumed_before):
    job = Job(SoloEngine(), Shard(0, 100), steps_per_epoch=2, resumes=resumed_before)
    job.epoch()
    again = Job(SoloEngine(), Shard(0, 100), steps_per_epoch=2, resumes=False)
    resume(again, kept(job))
    assert again.epoch()[0][0] == 0


def test_a_stream_that_has_become_shorter_is_begun_anew():
    job = Job(SoloEngine(), Shard(0, 100), steps_per_epoch=2)
    job.epoch()
    again = Job(SoloEngine(), Shard(0, 20), steps_per_epoch=2)
    resume(again, kept(job))
    assert again.epoch()[0] == list(range(WHOLE))


@WORKERS
def test_it_goes_on_in_the_middle_of_an_epoch(workers):
    def program(engine):
        options = dict(steps_per_epoch=6, num_workers=workers)
        job = Job(engine, Shard(engine.rank, 200), **options)
        assert len(job.epoch(stop=1)) == 2
        again = Job(engine, Shard(engine.rank, 200), **options)
        again.loader.load_state_dict(job.loader.state_dict())
        left = len(again.loader)
        first, second = again.epoch(), again.epoch()
        for process in range(2):  # nothing is read beyond the end of an epoch, and lost
            taken = [number for batch in first + second for number in batch if number % 2 == process]
            assert [number % 1000 for number in taken] == list(range(process, 2 * len(taken), 2))
        again.loader.load_state_dict(again.loader.state_dict())
        again.loader.set_epoch(1)  # which is over
        return left, len(first), len(second), len(again.epoch()), len(again.epoch())

    assert World(2).run(program) == [(4, 4, 6, 0, 6)] * 2


@WORKERS
def test_a_loop_that_is_left_early_begins_its_epoch_anew_and_the_stream_goes_on(workers):
    job = Job(SoloEngine(), Shard(0, 1000), steps_per_epoch=4, num_workers=workers)
    first, second = job.epoch(stop=1), job.epoch()
    assert (len(first), len(second)) == (2, 4)
    assert set(sum(first, [])).isdisjoint(sum(second, []))


@WORKERS
def test_each_pass_over_a_stream_is_told_and_draws_anew_on_each_rank(workers):
    class Drawing(IterableDataset):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            for _ in range(8):
                yield torch.tensor([float(torch.randint(1 << 20, ())), float(self.epoch)])

    def program(engine):
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        loader = hvd.BalancedDataLoader(
            Drawing(), balancer=balancer, sharded=True, steps_per_epoch=4, num_workers=workers
        )
        loader.set_epoch(3)
        with torch.no_grad():
            return [x.long().tolist() for x in loader]

    if workers:  # threads share their random numbers
        ranks, again = World(2).run(program), World(2).run(program)
        assert ranks == again
    else:
        ranks = [program(SoloEngine())]
    drawn = [number for batches in ranks for number, _ in sum(batches, [])]
    assert len(set(drawn)) > 0.9 * len(drawn)
    for batches in ranks:
        told = sorted({epoch for _, epoch in sum(batches, [])})
        assert told == list(range(3, 3 + len(told))) and len(told) > 1


def test_how_fast_a_rank_reads_is_measured_as_it_reads_its_share_alone():
    job = Job(SoloEngine(), Shard(0, 1000), steps_per_epoch=4, num_workers=1)
    meter, told = job.balancer.step_timer.loading_meter, []
    meter.will_load = lambda **how: (told.append(how), type(meter).will_load(meter, **how))
    job.epoch()
    assert told == [{"beside": True, "in_parts": True, "loaders": 1, "ahead": 2}]


def test_what_reads_can_be_sent_to_another_process():
    loader = Job(SoloEngine(), Shard(0, 40), steps_per_epoch=1).loader
    assert isinstance(pickle.loads(pickle.dumps(loader.loader.dataset)).dataset, Shard)


@pytest.mark.parametrize("options, text", [
    ([{"steps_per_epoch": 3}, {"steps_per_epoch": 4}], "steps_per_epoch: expected the same on every rank. Received: "
     "rank 0: 3; rank 1: 4"),
    ([{"steps_per_epoch": 0}] * 2, "steps_per_epoch: expected an integer of at least 1. Received: 0"),
    ([{"steps_per_epoch": 3, "seed": 1}, {"steps_per_epoch": 3}], "seed: expected the same on every rank"),
    ([{}, {}], "steps_per_epoch: expected the number of global batches of an epoch"),
    ([{"steps_per_epoch": 3, "shuffle": True}] * 2, "shuffle: expected False or none for an IterableDataset"),
    ([{"steps_per_epoch": 3, "sharded": False}] * 2, "steps_per_epoch: expected none"),
    ([{"resumes": False, "sharded": False}] * 2, "resumes: expected True, as a state has the place in the data"),
    ([{"resumes": "state", "sharded": False}] * 2, "resumes: expected True, as a state has the place in the data"),
    ([{"resumes": "exactly"}] * 2, 'resumes: expected True, False or "state". Received: \'exactly\'.'),
])
def test_wrong_arguments_raise_on_all_ranks(options, text):
    def program(engine):
        balancer = hvd.Balancer(WHOLE, engine=engine)
        with pytest.raises((TypeError, ValueError)) as raised:
            given = {"sharded": True, **options[engine.rank]}
            hvd.BalancedDataLoader(Shard(engine.rank, 40), balancer=balancer, **given)
        return str(raised.value)

    for said in World(2).run(program):
        assert text in said


def test_all_ranks_raise_where_only_some_have_streams_of_their_own():
    def program(engine):
        options = [{"sharded": True, "steps_per_epoch": 2}, {}][engine.rank]
        with pytest.raises(ValueError, match="dataset length: expected the same on every rank.*sharded=True"):
            hvd.BalancedDataLoader(Shard(0, 40), balancer=hvd.Balancer(WHOLE, engine=engine), **options)

    World(2).run(program)


def test_samples_with_numbers_are_not_a_stream():
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    with pytest.raises(TypeError, match="sharded: expected an IterableDataset.*Received: list. Of a map-style"):
        hvd.BalancedDataLoader([1.0] * 40, balancer=balancer, sharded=True)


@WORKERS
def test_a_stream_without_samples_raises_on_all_ranks(workers):
    def program(engine):
        job = Job(engine, Shard(engine.rank, 40 * engine.rank), steps_per_epoch=3, num_workers=workers)
        with pytest.raises((ValueError, PeerError)) as raised:
            job.epoch()
        return str(raised.value)

    said = World(2).run(program)
    assert "Received: none from a stream of rank 0" in said[0] and "rank 0" in said[1]


def test_the_stream_of_a_state_has_as_many_steps():
    state = Job(SoloEngine(), Shard(0, 40), steps_per_epoch=3).loader.state_dict()
    with pytest.raises(ValueError, match="steps_per_epoch 4. Received: 3"):
        Job(SoloEngine(), Shard(0, 40), steps_per_epoch=4).loader.load_state_dict(state)
