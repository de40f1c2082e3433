"""Laws of Keras data that is each rank's own: a rank takes what its stream yields next, as much as its share says."""

import itertools

import numpy as np
import pytest

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod", reason="build it with hvd-hetero build-horovod")

import keras
from keras_samples import SHARES, WHOLE, Balancer, Batches, Keras, used

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.keras.content import loaded, saved
from hvd_hetero.keras.dataset import BalancedDataset
from hvd_hetero.keras.shards import ShardSource
from hvd_hetero.optimizers.stream import StreamPlace
from hvd_hetero.optimizers.stream_state import Kept

LENGTHS = (40, 7, 13)


class Stream:
    """What an endless tf.data.Dataset is to a source."""

    def __init__(self, samples):
        self.samples = samples

    def batch(self, size):
        self.size = size
        return self

    def skip(self, count):
        return Stream(itertools.islice(self.samples, count, None))

    def as_numpy_iterator(self):
        samples = iter(self.samples)
        while batch := list(itertools.islice(samples, self.size)):
            yield np.array(batch)


def tf_data(samples):
    """What passes for one of TensorFlow's."""
    return type("DatasetV2", (Stream,), {"__module__": "tensorflow.python.data"})(samples)


class Numbers:
    """Numbers of a rank's own, one at a time, each time that it is iterated."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(np.float32(self.samples))


class KeepsPlace(Numbers):
    """Numbers, and iterators over them that know their place."""

    def __iter__(self):
        self.iterator = Place(self.samples)
        return self.iterator


class Place:
    def __init__(self, samples):
        self.samples, self.at, self.given = samples, 0, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.samples):
            raise StopIteration
        self.at, self.given = self.at + 1, self.given + 1
        return np.float32(self.samples[self.at - 1])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def own(rank):
    return list(range(1000 * rank, 1000 * rank + LENGTHS[rank]))


def shards(samples, balancer, **options):
    return BalancedDataset(
        samples, balancer=balancer, **{"sharded": True, "steps_per_epoch": 4, "shuffle": False, **options}
    )


FORMS = pytest.mark.parametrize(
    "form", [tf_data, Numbers, lambda samples: lambda epoch: Numbers(samples), KeepsPlace]
)


@FORMS
def test_each_rank_takes_what_its_stream_yields_next_in_each_epoch(form):
    def program(engine):
        balancer = Balancer(engine, adaptive=False)
        dataset = shards(form(own(engine.rank)), balancer)
        assert len(dataset) == 4
        return [used(dataset, balancer) for _ in range(3)]

    for rank, epochs in enumerate(World(3).run(program)):
        assert list(map(len, epochs)) == [4 * SHARES[rank]] * 3
        assert sum(epochs, []) == list(itertools.islice(itertools.cycle(own(rank)), 12 * SHARES[rank]))


def test_what_keras_looks_at_before_it_trains_is_not_used_up():
    balancer = Balancer(SoloEngine())
    dataset = shards(Numbers(range(1000)), balancer)
    for fit in range(2):
        seen, fits = [], Keras(dataset, prefetch=None)
        for _ in range(2):
            for batch in fits.epoch():
                seen += batch[0].astype(int).tolist()
                balancer.exchange(len(batch[0]))
        assert seen == list(range(fit * 8 * WHOLE, (fit + 1) * 8 * WHOLE))


@pytest.mark.parametrize("prefetch", [None, 2])
def test_what_was_read_and_not_used_is_the_next_again(prefetch):
    """As where a fit is left early, or the torch back end builds a model with a first batch."""
    balancer = Balancer(SoloEngine())
    dataset, seen = shards(Numbers(range(1000)), balancer), []
    for stop in (1, 4, 2, 3):
        built = Keras(dataset, prefetch=prefetch)
        next(iter(built.epoch()))
        built.iterator.reset()
        for number, batch in enumerate(Keras(dataset, prefetch=prefetch).epoch(), start=1):
            seen += batch[0].astype(int).tolist()
            balancer.exchange(len(batch[0]))
            if number == stop:
                break
    assert seen == list(range(10 * WHOLE))


def test_no_more_samples_are_kept_than_are_not_in_use_yet():
    balancer = Balancer(SoloEngine())
    dataset = shards(Numbers(range(100000)), balancer, steps_per_epoch=100)
    for batch in dataset:
        balancer.exchange(len(batch[0]))
        assert len(dataset._source._given) <= 2


def test_a_rank_without_a_share_gets_a_sample_that_stays_the_next():
    source = ShardSource(Numbers(range(5)), steps=1, global_batch_size=WHOLE, rows=2)
    batches = [source.next(0), source.next(3), source.next(0), source.next(4)]
    assert [batch[0].tolist() for batch in batches] == [[0], [0, 1, 2], [3], [3, 4, 0, 1]]


def test_a_stream_with_set_epoch_is_told_the_epoch_and_each_pass_after_it():
    told = []
    numbers = Numbers(range(5))
    numbers.set_epoch = told.append
    source = ShardSource(numbers, steps=2, global_batch_size=WHOLE, rows=2)
    source.next(12, epoch=3)
    source.next(4, epoch=9)
    assert told == [3, 4, 5, 9]


def test_a_function_is_told_the_epoch_and_each_pass_after_it():
    told = []

    def make(epoch):
        told.append(epoch)
        return Numbers([epoch] * 3)

    source = ShardSource(make, steps=2, global_batch_size=WHOLE, rows=2)
    assert source.next(4, epoch=5)[0].tolist() == [5, 5, 5, 6]
    assert source.next(3, epoch=6)[0].tolist() == [6, 6, 7]
    assert told == [5, 6, 7]


def test_a_stream_begins_anew_with_other_ranks():
    source = ShardSource(Numbers(range(50)), steps=2, global_batch_size=WHOLE, rows=2)
    source.next(3)
    source.restart()
    assert source.next(2)[0].tolist() == [0, 1]


@FORMS
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_run_that_goes_on_reads_what_an_uninterrupted_one_would(form, prefetch):
    """In passes of 13 samples over epochs of 4 batches of 8, whatever TensorFlow has read ahead."""
    def dataset():
        balancer = Balancer(SoloEngine())
        resumes = "state" if form is KeepsPlace else True
        return shards(form(list(range(13))), balancer, resumes=resumes), balancer

    def some(data, balancer, stop):
        seen = []
        for number, batch in enumerate(Keras(data, prefetch=prefetch).epoch(), start=1):
            seen += batch[0].astype(int).tolist()
            balancer.exchange(len(batch[0]))
            if number == stop:
                return seen

    expected = list(itertools.islice(itertools.cycle(range(13)), 9 * WHOLE))
    for stop in range(1, 5):
        data, balancer = dataset()
        seen = some(data, balancer, stop)
        state = data.state_dict(), loaded(saved(balancer.stateful_parts.own_state_dict()))
        data, balancer = dataset()
        data.load_state_dict(state[0])
        balancer.stateful_parts.load_own_state_dict(state[1])
        seen += some(data, balancer, 3)
        state = data.state_dict(), balancer.stateful_parts.own_state_dict()
        ahead = some(data, balancer, 2)
        data.load_state_dict(state[0])
        balancer.stateful_parts.load_own_state_dict(state[1])  # goes back, as an elastic job does
        assert some(data, balancer, 2) == ahead
        assert seen + ahead == expected[: (stop + 5) * WHOLE]


def test_a_stream_that_knows_its_place_is_not_read_again():
    def read(source, *counts):
        taken = []
        for count in counts:
            taken += source.next(count, run=1)[0].astype(int).tolist()
        return taken

    def resumed(place):
        numbers = KeepsPlace(range(50))
        source = ShardSource(numbers, steps=1, global_batch_size=WHOLE, rows=2, keeps=True)
        source.go_to(StreamPlace.restored(loaded(saved(place.saved))))
        source.rewind(1)
        return source, numbers

    source, numbers = resumed(StreamPlace(0, 0))
    read(source, *[5] * 6)
    source.use(4, run=1)
    assert source.place[:2] == (0, 20)
    again, numbers = resumed(source.place)
    assert again.place == source.place, "also before anything is read"
    assert read(again, 5, 5) == list(range(20, 30)) and numbers.iterator.given == 10
    assert again.place == source.place, "nothing of that is in use"
    again.use(1, run=1)
    assert again.place[:2] == (0, 25) and again.place.kept == (25, {"at": 25}, None)
    source.rewind(2)  # what was read and is not in use is in smaller batches now
    source.next(3, run=2)
    source.use(1, run=2)
    assert source.place[:2] == (0, 23) and source.place.kept == (20, {"at": 20}, None)
    again, numbers = resumed(source.place)
    assert read(again, 5) == list(range(23, 28)) and numbers.iterator.given == 8


def test_no_more_places_are_kept_than_are_not_in_use_yet():
    source = ShardSource(KeepsPlace(range(50)), steps=1, global_batch_size=WHOLE, rows=2, keeps=True)
    source.rewind(1)
    for batches in range(1, 40):
        source.next(4, run=1)
        source.use(batches, run=1)
    assert len(source._kept) == 1


@pytest.mark.parametrize("keeps, kept, given", [(False, Kept(20, {"at": 20}), 25), (True, None, 25)])
def test_a_stream_is_read_again_where_one_run_alone_asks_it_for_its_place(keeps, kept, given):
    numbers = KeepsPlace(range(50))
    source = ShardSource(numbers, steps=1, global_batch_size=WHOLE, rows=2, keeps=keeps)
    source.go_to(StreamPlace(0, 23, kept))
    source.rewind(1)
    assert source.next(2, run=1)[0].tolist() == [23, 24] and numbers.iterator.given == given
    source.use(1, run=1)
    assert source.place == (0, 25, Kept(25, {"at": 25}) if keeps else None)


@pytest.mark.parametrize("form", [tf_data, Numbers])
def test_a_stream_that_is_to_know_its_place_and_does_not_is_an_error(form):
    balancer = Balancer(SoloEngine())
    with pytest.raises(TypeError, match="expected a stream with state_dict.*With resumes=True"):
        used(shards(form(range(100)), balancer, resumes="state"), balancer)


def test_a_place_is_of_one_rank_among_as_many():
    balancer = Balancer(SoloEngine())
    data = shards(Numbers(range(100)), balancer)
    used(data, balancer)
    (name, place), = balancer.stateful_parts.own_state_dict().items()
    for other in ({"ranks": (0, 2)}, {"ranks": (1, 1)}, {}):
        balancer = Balancer(SoloEngine())
        data = shards(Numbers(range(100)), balancer)
        balancer.stateful_parts.load_own_state_dict({name: {**place, **other}})
        assert used(data, balancer)[0] == (0 if other else 4 * WHOLE)


def test_a_stream_that_is_not_to_resume_has_no_place():
    balancer = Balancer(SoloEngine())
    data = shards(Numbers(range(100)), balancer, resumes=False)
    used(data, balancer)
    assert list(balancer.stateful_parts.own_state_dict().values()) == [{}]
    data.load_own_state_dict({"ranks": (0, 1), "place": [0, 50]})  # as a run that was to resume has saved it
    assert used(data, balancer)[0] == 4 * WHOLE, "it goes on in this process"
    with pytest.raises(TypeError, match="resumes: expected True, as a state has the place"):
        BalancedDataset(np.ones(8), balancer=balancer, resumes=False)


def test_a_stream_that_has_become_shorter_is_begun_anew():
    source = ShardSource(Numbers(range(9)), steps=1, global_batch_size=WHOLE, rows=2)
    source.go_to(StreamPlace(2, 10))
    source.rewind(1)
    assert source.next(4, run=1)[0].tolist() == [0, 1, 2, 3] and source.place == StreamPlace(3, 0)
    source.use(1, run=1)
    assert source.place == StreamPlace(3, 4)


def test_who_still_reads_for_a_run_that_is_over_uses_nothing_of_the_next():
    source = ShardSource(Numbers(range(9)), steps=1, global_batch_size=WHOLE, rows=2)
    source.rewind(1)
    source.next(2, run=1)
    source.rewind(2)
    assert source.next(3, run=2)[0].tolist() == [0, 1, 2]
    source.use(1, run=1)
    source.rewind(3)
    assert source.next(1, run=3)[0].tolist() == [0]


def test_a_rank_that_stays_the_same_among_as_many_goes_on_after_an_elastic_reset():
    balancer = Balancer(SoloEngine())
    data = shards(Numbers(range(1000)), balancer)
    firsts = [used(data, balancer)[0]]
    data._restart()
    firsts.append(used(data, balancer)[0])
    balancer.size = 2
    data._restart()
    firsts.append(used(data, balancer)[0])
    assert firsts == [0, 4 * WHOLE, 0]


def test_nested_samples_keep_together():
    samples = [({"a": np.full(2, n), "b": n}, n + 0.5) for n in range(20)]
    source = ShardSource(lambda epoch: iter(samples), steps=2, global_batch_size=WHOLE, rows=2)
    for first in (0, 7):
        x, y = source.next(7)
        assert x["a"][:, 1].tolist() == x["b"].tolist() == list(range(first, first + 7))
        assert y.tolist() == [n + 0.5 for n in range(first, first + 7)] and y.dtype == keras.config.floatx()


def test_it_goes_on_in_the_middle_of_an_epoch():
    balancer = Balancer(SoloEngine())
    dataset = shards(Numbers(range(1000)), balancer)
    state = {"epoch": 2, "position": 3, "length": 4 * WHOLE, "seed": 0, "global_batch_size": WHOLE}
    dataset.load_state_dict(state)
    assert [len(used(dataset, balancer)) // WHOLE for _ in range(2)] == [1, 4]


def test_how_fast_a_rank_reads_is_measured_as_it_reads_its_share_alone():
    balancer = Balancer(SoloEngine())
    next(shards(Numbers(range(100)), balancer)._epoch(1, ahead=True))
    assert balancer.step_timer.loading_meter.end().speed is not None


@pytest.mark.parametrize("samples", [Numbers([]), iter([1.0, 2.0])])
def test_a_stream_without_samples_is_an_error(samples):
    source = ShardSource(samples, steps=1, global_batch_size=WHOLE, rows=2)
    with pytest.raises(ValueError, match="Received: none. Give each rank some of the data, and no generator"):
        source.next(3)


@pytest.mark.parametrize("samples, options, text", [
    (Numbers([1]), {"steps_per_epoch": None}, "steps_per_epoch: expected the number of global batches"),
    (Numbers([1]), {"steps_per_epoch": 2.5}, "steps_per_epoch: expected an integer of at least 1. Received: 2.5"),
    (Numbers([1]), {"sharded": False}, "steps_per_epoch: expected none.*give it to fit"),
    (Numbers([1]), {"shuffle": True}, "expected shuffle=False and workers=0"),
    (Numbers([1]), {"workers": 1}, "expected shuffle=False and workers=0"),
    (Numbers([1]), {"y": np.ones(3)}, "y, sample_weight: expected none with sharded=True"),
    (np.ones(3), {}, "Received: ndarray. Of arrays: tf.data.Dataset.from_tensor_slices"),
    (Batches(), {}, "Received: Batches. Of arrays"),
    (3, {}, "Received: int, which cannot be iterated"),
])
def test_wrong_arguments_say_what_to_do(samples, options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        shards(samples, Balancer(SoloEngine()), **options)


def test_a_function_has_to_give_a_stream():
    with pytest.raises(TypeError, match="Received: ndarray"):
        ShardSource(lambda epoch: np.ones(3), steps=1, global_batch_size=WHOLE, rows=2).next(1)


def test_epochs_differ_on_no_rank():
    def program(engine):
        with pytest.raises(ValueError, match="dataset length: expected the same on every rank"):
            shards(Numbers([1]), Balancer(engine, shares=None), steps_per_epoch=3 + engine.rank)

    World(2).run(program)


def test_a_thread_that_reads_ahead_while_batches_are_counted_loses_none():
    """It may come between any two steps of the counting, as where a commit is made within an epoch."""
    balancer = Balancer(SoloEngine())
    dataset = shards(Numbers(range(1000)), balancer)
    counts = dataset.sampler.used

    def reads_meanwhile():
        dataset.sampler.used = counts
        dataset._next()
        return counts()

    def trains(batches):
        for batch in batches:
            balancer.exchange(len(batch[0]))
            yield batch[0].astype(int).tolist()

    seen = [next(trains(Keras(dataset).epoch()))]
    dataset._next()  # read ahead, and not used
    dataset.sampler.used = reads_meanwhile
    assert dataset.state_dict()["position"] == 1
    seen += trains(Keras(dataset).epoch())  # the fit was broken off
    assert sum(seen, []) == list(range(5 * WHOLE))


def test_an_epoch_may_end_while_a_thread_reads_ahead():
    balancer = Balancer(SoloEngine())
    dataset = shards(Numbers(range(1000)), balancer)
    begun = balancer.begun

    def ends_meanwhile(by):
        balancer.begun = begun
        dataset.on_epoch_end()
        return begun(by)

    for batch in Keras(dataset).epoch():
        balancer.exchange(len(batch[0]))
        balancer.begun = ends_meanwhile
        assert dataset._next()[0][0] == WHOLE
        break
