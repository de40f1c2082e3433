"""`hvd.BalancedDataset` on ranks that are threads: what `fit`'s adapters read from it, in whatever way they read."""

import functools
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod", reason="build it with hvd-hetero build-horovod")

import keras

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.keras.dataset import BalancedDataset
from hvd_hetero.keras.evaluation import EvaluationDataset
from hvd_hetero.keras.source import source_of
from hvd_hetero.keras.stream import StreamSource
from hvd_hetero.optimizers.attachment import PeerError
from hvd_hetero.optimizers.balancer import Balancer as FrameworkFree

LENGTH, WHOLE = 22, 8  # the third batch of an epoch is short
SHARES = (5, 2, 1)


class Balancer(FrameworkFree):
    """What the dataset needs of `hvd.Balancer`, and an optimizer's exchange without gradients."""

    def __init__(self, engine, shares=SHARES, **options):
        super().__init__(engine, global_batch_size=WHOLE, shares=shares if engine.size > 1 else None, **options)
        self.announced, self.terms, self.ended_epochs = [], [], 0

    def announce(self, samples, *, by):
        self.announced.append(samples)

    def announce_terms(self, terms, *, by):
        self.terms.append(terms)

    def announce_loaded(self, *, by): ...

    def forget(self, *, ahead, by):
        self.announced.clear()
        self.terms.clear()

    def withdraw(self, by): ...

    def trained(self, by): ...

    def begun(self, by):
        return self.step

    def end_epoch(self):
        self.ended_epochs += 1

    def exchange(self, rows):
        """What the optimizer does; the batch in use has `rows` rows."""
        samples = self.announced.pop(0)
        assert self.departure.error or rows == max(samples, 1), "the batch in use is not the one that was announced"
        self.begin(samples)
        vector = np.array(self.dialogue.outgoing(leads=True, count=float(samples)))
        self.dialogue.incoming(self.engine.allreduce_async(vector, name="control").wait().tolist(), leads=True)
        return samples


def arrays():
    x = np.arange(LENGTH, dtype="float32")[:, None]
    return x, 2 * x


class Samples:
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return tuple(array[index] for array in arrays())


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-LENGTH // 4)

    def __getitem__(self, index):
        return tuple(array[4 * index : 4 * index + 4] for array in arrays())


def make(balancer, kind="arrays", **options):
    x, y = arrays()
    if kind == "dictionary":
        return BalancedDataset({"a": x, "b": [x, x + 0.5]}, {"out": y}, np.ones(LENGTH), balancer=balancer, **options)
    if kind == "samples":
        return BalancedDataset(Samples(), balancer=balancer, **options)
    if kind == "batches":
        return BalancedDataset(Batches(), balancer=balancer, **options)
    return BalancedDataset(x, y, balancer=balancer, **options)


def numbers(batch):
    """The numbers of a batch's samples; checks that what belongs together came together."""
    x, y = batch[0], batch[1]
    if isinstance(x, dict):
        assert len(batch) == 3 and np.array_equal(x["b"][0] + 0.5, x["b"][1])
        x, y = x["a"], y["out"]
    assert np.array_equal(2 * x, y) and x.dtype == keras.config.floatx()
    return x[:, 0].astype(int).tolist()


def prefetched(batches, depth):
    """Reads ahead in a thread of its own, once the first batch is asked for, as tf.data does; 0: without bound."""
    ready = queue.Queue(maxsize=depth)

    def load():
        for batch in batches:
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=load, daemon=True).start()
    yield from iter(ready.get, None)


class Keras:
    """Reads a dataset as Keras' trainers do (their data adapter and epoch iterator, without a model)."""

    def __init__(self, dataset, steps_per_epoch=None, shuffle=True, prefetch=None):
        from keras.src.trainers.epoch_iterator import EpochIterator

        class Reader(EpochIterator):
            def _get_iterator(self):
                batches = super()._get_iterator()
                return batches if prefetch is None else prefetched(batches, prefetch)

        self.iterator = Reader(dataset, steps_per_epoch=steps_per_epoch, shuffle=shuffle)
        self.iterator.reset()

    def epoch(self):
        for *_, batches in self.iterator:
            yield batches[0]


def train(balancer, epoch, stop=None):
    """One epoch of a fit; the numbers of this rank's samples."""
    seen = []
    for count, batch in enumerate(epoch, start=1):
        mine = numbers(batch)
        seen += mine[: balancer.exchange(len(mine))]
        if count == stop:
            break
    return seen


@pytest.mark.parametrize("kind", ["arrays", "dictionary", "samples", "batches"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_once_in_each_epoch_of_fit(kind, workers):
    def program(engine):
        balancer = Balancer(engine)
        reader = Keras(make(balancer, kind, workers=workers))
        return [train(balancer, reader.epoch()) for _ in range(3)], balancer.ended_epochs

    random.seed(0)  # fit's own shuffle would draw from it, differently on each rank
    ended = World(3).run(program)
    orders = [sum((seen[epoch] for seen, _ in ended), []) for epoch in range(3)]
    assert all(sorted(order) == list(range(LENGTH)) for order in orders)
    assert orders[0] != orders[1], "each epoch has an order of its own"
    assert [epochs for _, epochs in ended] == [3, 3, 3]


def test_epochs_of_steps_per_epoch_go_on_where_the_last_one_ended():
    balancer = Balancer(SoloEngine())
    reader = Keras(make(balancer), steps_per_epoch=2)
    seen = [train(balancer, reader.epoch()) for _ in range(2)]
    assert sorted(sum(seen, [])) == list(range(LENGTH))


def test_a_fit_that_was_interrupted_goes_on_with_what_was_not_used():
    """Also after an evaluation, and with batches that a worker had loaded ahead."""

    def program(engine, workers):
        balancer = Balancer(engine)
        dataset = make(balancer, workers=workers)
        seen = train(balancer, Keras(dataset).epoch(), stop=1)
        assert dataset.state_dict()["position"] == 1
        for batch in Keras(dataset, shuffle=False).epoch():
            numbers(batch)  # no exchange: an evaluation
        return seen + train(balancer, Keras(dataset).epoch(), stop=2)

    for workers in (0, 2):
        ended = World(3).run(lambda engine, workers=workers: program(engine, workers))
        assert sorted(sum(ended, [])) == list(range(LENGTH))


def test_a_thread_that_reads_for_a_fit_that_was_broken_off_takes_nothing_from_the_next():
    """It waits for a batch until that is under way, and then has no other announced, nor the terms of its own."""
    waits, goes_on = threading.Event(), threading.Event()

    class Slow(Samples):
        def __getitem__(self, index):
            if index == WHOLE and not waits.is_set():
                waits.set()
                goes_on.wait(10)
            return super().__getitem__(index)

    balancer = Balancer(SoloEngine())
    dataset = BalancedDataset(Slow(), balancer=balancer, shuffle=False, terms=lambda x, y: float(x[0, 0]))
    seen = train(balancer, Keras(dataset, prefetch=2).epoch(), stop=1)
    assert waits.wait(10)
    epoch = Keras(dataset).epoch()
    seen += train(balancer, epoch, stop=1)
    goes_on.set()
    time.sleep(0.3)
    seen += train(balancer, epoch, stop=1)
    assert seen == list(range(LENGTH)) and balancer.terms == [WHOLE, 2 * WHOLE]


def test_a_saved_state_goes_on_in_the_middle_of_an_epoch():
    def program(engine):
        balancer = Balancer(engine)
        dataset = make(balancer)
        seen = train(balancer, Keras(dataset).epoch(), stop=2)
        balancer = Balancer(engine)
        again = make(balancer)
        again.load_state_dict(dataset.state_dict())
        return seen + train(balancer, Keras(again).epoch(), stop=1)

    assert sorted(sum(World(3).run(program), [])) == list(range(LENGTH))


def test_a_loop_of_ones_own_and_looking_at_a_batch():
    balancer = Balancer(SoloEngine())
    dataset = make(balancer)
    first = numbers(dataset[0])
    assert balancer.announced == []
    seen = train(balancer, iter(dataset))
    assert seen[:WHOLE] == first and sorted(seen) == list(range(LENGTH)) and balancer.ended_epochs == 1


def test_a_loop_of_ones_own_goes_on_with_what_is_left_of_an_epoch():
    def program(engine):
        balancer = Balancer(engine)
        dataset = make(balancer)
        seen = train(balancer, iter(dataset), stop=2)
        kept = dataset.state_dict()
        balancer = Balancer(engine)
        again = make(balancer)
        again.load_state_dict(kept)
        again.set_epoch(0)
        seen += train(balancer, iter(again))
        kept = {**again.state_dict()}
        ended = make(balancer := Balancer(engine))
        ended.load_state_dict(kept)
        ended.set_epoch(0)
        assert not train(balancer, iter(ended)), "resumed at the end of it: nothing is left"
        ended.set_epoch(1)
        seen += train(balancer, iter(ended))
        ended.set_epoch(0)
        return seen + train(balancer, iter(ended))

    assert sorted(sum(World(3).run(program), [])) == sorted(3 * [*range(LENGTH)])


def test_a_loop_of_ones_own_does_not_go_on_from_another_place():
    balancer = Balancer(SoloEngine())
    dataset = make(balancer)
    loop = iter(dataset)
    kept = dataset.state_dict()
    assert len(train(balancer, loop, stop=1)) == WHOLE
    dataset.load_state_dict(kept)
    with pytest.raises(RuntimeError, match="Leave the loop"):
        next(loop)
    assert sorted(train(balancer, iter(dataset))) == list(range(LENGTH))


def test_an_error_of_loading_ends_every_rank_after_what_was_loaded_before():
    class Broken(Samples):
        def __getitem__(self, index):
            if index == 17:
                raise OSError("disk on fire")
            return super().__getitem__(index)

    def program(engine, workers):
        balancer = Balancer(engine)
        source = Broken() if engine.rank == 0 else Samples()
        dataset = BalancedDataset(source, balancer=balancer, shuffle=False, workers=workers)
        train(balancer, Keras(dataset).epoch())

    for workers in (0, 1):
        errors = World(3).run(lambda engine, workers=workers: program(engine, workers), errors="return")
        assert [type(error) for error in errors] == [OSError, PeerError, PeerError]


def test_worker_processes_load_what_they_are_asked_for():
    balancer = Balancer(SoloEngine())
    dataset = make(balancer, "samples", workers=2, use_multiprocessing=True)
    assert sorted(train(balancer, Keras(dataset).epoch())) == list(range(LENGTH))
    assert os.getpid() not in dataset._ahead.pool._processes


def test_samples_of_one_source_batch_stay_together():
    dataset = make(Balancer(SoloEngine()), "batches")
    order = dataset.sampler.dealer.order()
    assert sorted(order) == list(range(LENGTH)) and order.tolist() != sorted(order)
    blocks = [number // 4 for number in order]
    assert sum(a != b for a, b in zip(blocks, blocks[1:], strict=False)) == 5


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.zeros(4), np.zeros(5), {}, "same number of samples"),
        (np.zeros(()), None, {}, "first axis"),
        ((number for number in range(3)), None, {}, "collect them"),
        (Samples(), np.zeros(4), {}, "expected none, because Samples"),
        (np.zeros(4), None, {"drop_last": True}, "drop_last=False"),
    ],
)
def test_wrong_arguments(x, y, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        BalancedDataset(x, y, balancer=Balancer(SoloEngine()), **options)


@pytest.mark.parametrize("kind", ["arrays", "samples", "batches"])
def test_lists_of_inputs_come_as_tuples_of_which_tf_data_takes_some(kind):
    x, y = arrays()

    class Listed(Batches if kind == "batches" else Samples):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return [[x, x + 0.5], y]

    balancer = Balancer(SoloEngine())
    given = ([x, x + 0.5], y) if kind == "arrays" else (Listed(),)
    for data in (BalancedDataset(*given, balancer=balancer), EvaluationDataset(*given, balancer=balancer)):
        inputs, _ = data[0]
        assert isinstance(inputs, tuple) and np.array_equal(inputs[0] + 0.5, inputs[1])


def test_ranks_that_have_other_samples_each():
    x, y = np.random.default_rng(0).normal(size=(LENGTH, 2)), np.arange(LENGTH)

    def program(engine):
        mine = slice(engine.rank, None, engine.size)
        BalancedDataset(x, y, balancer=Balancer(engine))
        BalancedDataset(x + 1e-6 * engine.rank, y, balancer=Balancer(engine))  # rounded on each host
        BalancedDataset(x[mine][:7], balancer=Balancer(engine))  # no whole numbers to go by
        with pytest.raises(ValueError, match="every rank needs all of it"):
            BalancedDataset({"x": x[mine][:7]}, y[mine][:7], balancer=Balancer(engine))
        return True

    assert all(World(3).run(program))


def test_a_pydataset_of_uneven_batches_is_refused_when_its_odd_one_comes():
    class Uneven(Batches):
        def __getitem__(self, index):
            batch = super().__getitem__(index)
            return tuple(array[:-1] for array in batch) if index == 2 else batch

    dataset = BalancedDataset(Uneven(), balancer=Balancer(SoloEngine()), shuffle=False)
    with pytest.raises(ValueError, match="expected 4 samples in batch 2"):
        dataset[1]


def test_every_sample_once_while_plans_change_and_keras_reads_ahead():
    """Also in threads that deal while this one exchanges."""
    steps = 60

    class Clock:
        def __init__(self, rank):
            self.seconds_s = (0.004, 0.002, 0.001)[rank]

        def mark(self):
            return 0.0

        def passed(self, mark):
            return True

        def seconds(self, start, end):
            return self.seconds_s

    def program(engine):
        balancer = Balancer(engine, shares=None, stopwatch=Clock(engine.rank), min_share=0)
        x = np.arange(WHOLE * steps - 3, dtype="float32")[:, None]
        reader = Keras(BalancedDataset(x, 2 * x, balancer=balancer), prefetch=7 * engine.rank)
        seen = []
        for _ in range(2):
            seen.append([])
            for batch in reader.epoch():
                mine = numbers(batch)
                used = balancer.exchange(len(mine))
                balancer.pause()
                balancer.finished(wait_s=0.0, bytes_sent=0)
                seen[-1] += mine[:used]
        return seen, balancer.plans

    ended = World(3).run(program)
    for epoch in range(2):
        assert sorted(sum((seen[epoch] for seen, _ in ended), [])) == list(range(WHOLE * steps - 3))
    assert len(ended[0][1]) >= 2, "the plan never changed: the test shows nothing"


@pytest.mark.parametrize("length", [3, 7, LENGTH])
def test_a_validation_sees_every_sample_once_and_each_rank_has_some(length):
    def program(engine):
        dataset = EvaluationDataset(np.arange(length), balancer=Balancer(engine))
        batches = [dataset[index][0].tolist() for index in range(len(dataset))]
        assert batches and all(0 < len(batch) <= SHARES[engine.rank] for batch in batches)
        return sum(batches, [])

    assert sum(World(3).run(program), []) == list(range(length))


def test_too_few_samples_for_a_validation_on_all_ranks():
    errors = World(3).run(lambda e: EvaluationDataset(np.arange(2), balancer=Balancer(e)), errors="return")
    assert all("at least one sample for each of 3 ranks" in str(error) for error in errors)


class Exchange:
    """What a balancer tells of batches."""

    def on_begin(self): ...

    def on_count(self, terms): ...

    def on_epoch_end(self): ...

    def withdraw(self):
        return lambda: True


def test_a_batch_begins_with_the_exchange_that_comes_first_and_again():
    """Two optimizers in a training step; and then another one, as `compile` makes for thawed layers."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer = OfKeras(WHOLE, engine=SoloEngine())
    first, second, third = Exchange(), Exchange(), Exchange()
    for each in (first, second, third):
        balancer.exchanges.attach(each)
    for samples in (8, 7, 6):
        balancer.announce(samples)
    seen = []
    for each in (second, first, second, first):
        balancer.exchanges.arrivals.first(each)
        seen.append((balancer.step, balancer.progress.terms, balancer.exchanges.leads(second)))
    assert seen == [(0, 8.0, True), (0, 8.0, True), (1, 7.0, True), (1, 7.0, True)]
    balancer.forget()  # an epoch begins
    for samples in (5, 4):
        balancer.announce(samples)
    for at, samples in ((2, 5.0), (3, 4.0)):
        balancer.exchanges.arrivals.first(third)
        assert (balancer.step, balancer.progress.terms, balancer.exchanges.leads(third)) == (at, samples, True)
    balancer.begin(3)  # a loop without a dataset
    balancer.exchanges.arrivals.first(third)
    balancer.exchanges.arrivals.first(first)
    assert (balancer.step, balancer.progress.terms, balancer.exchanges.leads(third)) == (4, 3.0, True)


def test_gradients_of_a_batch_of_which_some_are_there_are_of_that_batch():
    """And not of the next one, which may be of another size, or without a sample: what a normalisation asks."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer = OfKeras(WHOLE, min_share=0, engine=SoloEngine())
    exchange = Exchange()
    balancer.exchanges.attach(exchange)
    balancer.forget(ahead=True)
    seen = []
    for samples in (8, 0, 3):
        balancer.announce(samples)
    for terms in (16.0, 0.0, 9.0):
        balancer.announce_terms(terms)
    for _ in range(3):
        seen.append((balancer.terms_due, balancer.idle))
        balancer.exchanges.arrivals.first(exchange)
        seen.append((balancer.terms_due, balancer.idle))
        balancer.exchanges.arrivals.complete(exchange)
    assert seen == [(16.0, False)] * 2 + [(0.0, True)] * 2 + [(9.0, False)] * 2
    balancer.announce(4)
    balancer.exchanges.arrivals.first(exchange)
    balancer.forget(ahead=True)  # it broke off
    balancer.announce(7)
    assert balancer.terms_due == 7


def test_a_batch_that_the_script_begins_may_have_several_exchanges_although_others_are_announced():
    """As those of `as_tf_dataset()` are, which loads ahead."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer = OfKeras(WHOLE, engine=SoloEngine())
    tape = Exchange()
    balancer.exchanges.attach(tape)
    balancer.forget(ahead=True)
    for samples in (8, 7, 6):
        balancer.announce(samples)
    seen = []
    for samples in (8, 7):
        balancer.begin(samples)
        for _ in range(3):
            balancer.exchanges.arrivals.first(tape)
            seen.append((balancer.step, balancer.progress.terms))
    assert seen == [(0, 8.0)] * 3 + [(1, 7.0)] * 3


def test_what_a_script_begins_by_hand_uses_batches_of_its_loop_and_none_of_a_fit_that_was_stopped():
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    def used(stopped):
        balancer = OfKeras(WHOLE, engine=SoloEngine(), adaptive=False)
        dataset = make(balancer)
        epoch = Keras(dataset, prefetch=2).epoch() if stopped else iter(dataset)
        next(epoch)
        if stopped:
            deadline = time.monotonic() + 20.0
            while dataset.sampler.pending < 3 and time.monotonic() < deadline:
                time.sleep(0.01)  # it is read ahead
            assert balancer.begin_if_unannounced()
        for _ in range(2):
            balancer.begin(3)
            if not stopped:
                next(epoch)
        return dataset.state_dict()["position"]

    assert used(stopped=True) == 1 and used(stopped=False) == 2


def test_an_exchange_that_comes_again_is_of_the_present_batch_until_another_is_announced():
    """It leads once. What is attached in the middle of a batch, as a tape is that is made there, is of it too."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer = OfKeras(WHOLE, min_share=0, engine=SoloEngine())
    tape, late = Exchange(), Exchange()
    balancer.exchanges.attach(tape)
    seen = []

    def run(*exchanges):
        for each in exchanges:
            balancer.exchanges.arrivals.first(each)
            balancer.exchanges.arrivals.complete(each)
            seen.append((balancer.step, balancer.progress.terms, balancer.exchanges.leads(each)))

    balancer.begin(8)
    run(tape)
    balancer.exchanges.attach(late)
    run(late, tape)
    balancer.announce(0)
    assert balancer.idle
    run(tape)
    assert balancer.idle, "until another batch is announced"
    run(late, tape)
    assert seen == [(0, 8.0, True), (0, 8.0, False), (0, 8.0, False), (1, 0.0, True), (1, 0.0, False), (1, 0.0, False)]
    del seen[:]
    for samples in (7, 6):  # a loop that begins what a dataset announces ahead
        balancer.announce(samples)
        balancer.announce(samples)
        balancer.begin(samples)
        run(tape, tape)
    assert seen == [(2, 7.0, True), (2, 7.0, False), (3, 6.0, True), (3, 6.0, False)]


def test_an_exchange_that_comes_again_where_batches_are_announced_ahead_is_refused_in_the_end():
    """Nobody can tell to which batch it belongs, and an epoch that is over leaves none that it could belong to."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer, exchange = OfKeras(WHOLE, engine=SoloEngine()), Exchange()
    balancer.exchanges.attach(exchange)
    for samples in (8, 7):
        balancer.announce(samples)
    balancer.exchanges.arrivals.first(exchange)
    balancer.exchanges.arrivals.first(exchange)
    with pytest.raises(RuntimeError, match="optimizer for each time"):
        balancer.exchanges.arrivals.first(exchange)
    balancer.forget()
    balancer.announce(6)
    balancer.exchanges.arrivals.first(exchange)
    balancer.exchanges.arrivals.first(exchange)
    balancer.end_epoch()
    with pytest.raises(RuntimeError, match="Received: none"):
        balancer.exchanges.arrivals.first(exchange)
    balancer.forget(ahead=True)
    balancer.announce(6)
    balancer.exchanges.arrivals.first(exchange)
    with pytest.raises(RuntimeError, match="optimizer for each time"):
        balancer.exchanges.arrivals.first(exchange)


def test_parts_of_an_exchange_are_of_one_batch_whatever_is_announced():
    """As those of an optimizer that a traced train_step applies twice; it leads with the first of them."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer, exchange, other = OfKeras(WHOLE, engine=SoloEngine()), Exchange(), Exchange()
    for each in (exchange, other):
        balancer.exchanges.attach(each)
    balancer.forget(ahead=True)
    for samples in (8, 7, 6):
        balancer.announce(samples)
    seen = []
    for each, part in [(exchange, 0), (exchange, 1), (other, 0)] * 3:
        balancer.exchanges.arrivals.first(each, part)
        seen.append((balancer.step, balancer.progress.terms, balancer.exchanges.leads(each)))
    assert seen == [
        (step, float(samples), leads) for step, samples in enumerate((8, 7, 6)) for leads in (True, False, False)
    ]


@pytest.mark.parametrize("prefetch", [None, 0, 1])
def test_an_evaluation_in_the_midst_of_an_epoch_of_another_dataset_takes_nothing_from_it(prefetch):
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer, exchange = OfKeras(WHOLE, engine=SoloEngine()), Exchange()
    balancer.exchanges.attach(exchange)
    trained, looked_at = Keras(make(balancer), prefetch=prefetch), Keras(make(balancer), prefetch=prefetch)
    seen = []
    for _ in range(2):
        for batch in trained.epoch():
            balancer.exchanges.arrivals.first(exchange)
            assert balancer.progress.terms == len(batch[0])
            seen += numbers(batch)
            list(looked_at.epoch())
    assert sorted(seen[:LENGTH]) == sorted(seen[LENGTH:]) == list(range(LENGTH)) and balancer.step == 5


@pytest.mark.parametrize(("prefetch", "workers"), [(None, 0), (None, 2), (0, 0), (1, 2)])
def test_training_on_another_dataset_between_two_epochs_takes_nothing_from_them(prefetch, workers):
    """As a callback does that fits another model, a probe, at the end of each epoch."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer, exchange = OfKeras(WHOLE, engine=SoloEngine()), Exchange()
    balancer.exchanges.attach(exchange)
    outer = Keras(make(balancer, workers=workers), prefetch=prefetch)
    for _ in range(3):
        inner = Keras(make(balancer, workers=workers), prefetch=prefetch)
        for reader in (outer, inner):
            seen = []
            for batch in reader.epoch():
                balancer.exchanges.arrivals.first(exchange)
                assert balancer.progress.terms == len(batch[0])
                seen += numbers(batch)
            assert sorted(seen) == list(range(LENGTH))
    assert balancer.step == 17


class Stream:
    """What a tf.data.Dataset is to its source: batches in one order, from the start each time."""

    def __init__(self, length, first=0):
        self.length, self.first = length, first

    def cardinality(self):
        return self.length

    def options(self):
        return types.SimpleNamespace(deterministic=None)

    def batch(self, size):
        self.size = size
        return self

    def as_numpy_iterator(self):
        starts = range(0, self.length, self.size)
        return iter([self.first + np.arange(at, min(at + self.size, self.length)) for at in starts])


def tf_data(length, first=0):
    """What passes for one of TensorFlow's."""
    kind = type("DatasetV2", (Stream,), {"__module__": "tensorflow.python.data"})
    return kind(length, first)


def test_any_samples_of_a_stream_can_be_taken():
    """A validation's part of a rank begins anywhere and goes over the borders of global batches, again and again."""
    source = StreamSource(Stream(LENGTH), global_batch_size=WHOLE)
    for first, stop in ((0, 8), (5, 9), (3, 20), (20, 22), (0, 22)):
        assert source.take(np.arange(first, stop))[0].tolist() == list(range(first, stop))


def test_nobody_waits_for_the_end_of_a_stream():
    """TensorFlow may take a minute for it: when a stream begins anew, and when nobody needs it any more."""
    goes_on, threads = threading.Event(), queue.Queue()

    class Slow:
        def __init__(self, batches):
            self.batches = batches

        def __next__(self):
            return next(self.batches)

        def __del__(self):
            goes_on.wait(5)
            threads.put(threading.get_ident())

    class Anew(Stream):
        def as_numpy_iterator(self):
            return Slow(super().as_numpy_iterator())

    source = StreamSource(Anew(LENGTH), global_batch_size=WHOLE)
    for _ in range(3):
        assert source.take(np.arange(WHOLE))[0].tolist() == list(range(WHOLE))
        source.take(np.arange(WHOLE, LENGTH))
    del source
    assert threads.empty(), "one has waited"
    goes_on.set()
    assert threading.get_ident() not in {threads.get(timeout=30) for _ in range(3)}


@pytest.mark.parametrize("name", ["RaggedTensorSpec", "SparseTensorSpec", "DatasetSpec"])
def test_a_stream_has_dense_samples(name):
    stream, dense, other = Stream(LENGTH), type("TensorSpec", (), {}), type(name, (), {})
    stream.element_spec = (dense(), {"y": type("NoneTensorSpec", (), {})()})
    assert len(StreamSource(stream, global_batch_size=WHOLE)) == LENGTH
    stream.element_spec = (dense(), {"y": other()})
    with pytest.raises(ValueError, match=f"dense samples.*Received: one with elements of {name}. Make them dense"):
        StreamSource(stream, global_batch_size=WHOLE)


@pytest.mark.parametrize("options", [{"workers": 2}, {"use_multiprocessing": True}])
def test_a_stream_for_a_validation_is_read_by_one_thread(options):
    """Two would each take the other's place in it: samples come twice or not at all."""
    balancer = Balancer(SoloEngine(), shares=(WHOLE,))
    with pytest.raises(ValueError, match="workers=1"):
        EvaluationDataset(tf_data(LENGTH), balancer=balancer, **options)
    data = EvaluationDataset(tf_data(LENGTH), balancer=balancer)
    assert [number for batch in data for number in batch[0].tolist()] == list(range(LENGTH))


def used(dataset, balancer):
    """The samples of an epoch that is trained on."""
    seen = []
    for batch in dataset:
        balancer.exchange(len(batch[0]))
        seen += batch[0].tolist()
    return seen


@pytest.mark.parametrize("kind", ["function", "partial", "object"])
def test_a_function_of_the_epoch_gives_the_stream_of_each_epoch(kind):
    made = []

    def make(epoch, times=100):
        made.append(epoch)
        return tf_data(LENGTH, first=times * epoch)

    class Made:
        def __call__(self, epoch):
            return make(epoch)

    function = {"function": make, "partial": functools.partial(make, times=1000), "object": Made()}[kind]
    times = 1000 if kind == "partial" else 100
    balancer = Balancer(SoloEngine())
    dataset = BalancedDataset(function, balancer=balancer, shuffle=False)
    for epoch in range(3):
        seen = used(dataset, balancer)
        assert seen == list(range(epoch * times, epoch * times + LENGTH))
    assert made == [0, 1, 2], "each is made once"
    dataset = BalancedDataset(function, balancer=Balancer(SoloEngine()), shuffle=False)
    dataset.load_state_dict({"epoch": 5, "position": 2, "length": LENGTH, "seed": 0, "global_batch_size": WHOLE})
    assert [batch[0].tolist() for batch in dataset] == [list(range(5 * times + 2 * WHOLE, 5 * times + LENGTH))]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_dataset_says_who_loads_it(workers, ahead):
    """A rank reads a stream whatever its share: see `LoadingMeter.will_load`."""
    balancer = Balancer(SoloEngine())
    numbers = np.arange(LENGTH)
    for data in (
        BalancedDataset(numbers, balancer=balancer, workers=workers),
        BalancedDataset(tf_data(LENGTH), balancer=balancer, shuffle=False),
    ):
        next(data._epoch(1, ahead=ahead))
        loading_meter, in_parts = balancer.step_timer.loading_meter, not isinstance(data._source, StreamSource)
        by_itself = not ahead and not (in_parts and workers)
        found = loading_meter.by_itself, loading_meter.end().pace is not None
        assert found == (by_itself, in_parts and not by_itself)


def test_a_function_of_the_epoch_has_to_give_streams_of_one_length():
    def make(function, **options):
        return BalancedDataset(function, balancer=Balancer(SoloEngine()), **{"shuffle": False, **options})

    dataset = make(lambda epoch: tf_data(LENGTH + epoch))
    used(dataset, dataset.balancer)
    with pytest.raises(ValueError, match="22 for epoch 0, and of 23 for epoch 1"):
        used(dataset, dataset.balancer)
    with pytest.raises(TypeError, match="Received: one that gives ndarray"):
        make(lambda epoch: np.zeros(4))
    with pytest.raises(ValueError, match="expected shuffle=False"):
        make(lambda epoch: tf_data(LENGTH), shuffle=True)
    with pytest.raises(TypeError, match="expected none, because function"):
        make(lambda epoch: tf_data(LENGTH), y=np.zeros(4))


ENDLESS = """
import os, sys, time
import numpy as np
from hvd_hetero.engine.local import SoloEngine
from hvd_hetero.keras.balancer import Balancer
from hvd_hetero.keras.dataset import BalancedDataset

balancer = Balancer(4, engine=SoloEngine())
data = BalancedDataset(np.arange(40.0), balancer=balancer, workers=2, use_multiprocessing=True)
next(iter(data))
print("WORKERS", *data._ahead.pool._processes, flush=True)
time.sleep(60)
"""


def test_loading_processes_end_with_a_rank_that_is_killed():
    """Or they would hold its output open, and horovodrun would wait for them."""
    rank = subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True)
    workers = []
    for line in rank.stdout:
        if line.startswith("WORKERS"):
            workers = [int(word) for word in line.split()[1:]]
            break
    rank.kill()
    rank.wait()
    assert len(workers) >= 1
    deadline = time.monotonic() + 10
    while (left := [pid for pid in workers if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert rank.stdout.read() == "", "returns when nobody holds it open any more"


def a_series(values):
    """What pandas calls a Series, as far as anyone here asks."""
    own = {"__module__": "pandas", "to_numpy": lambda self: np.array(values), "shape": (len(values),)}
    return type("Series", (), own)()


@pytest.mark.parametrize("place", ["x", "y", "sample_weight"])
def test_a_pandas_series_is_a_column_as_fit_makes_it_one(place):
    given = {"x": np.ones((3, 2)), "y": np.ones(3), "sample_weight": np.ones(3), place: a_series([1.0, 2.0, 3.0])}
    batch = source_of(*given.values(), global_batch_size=2).take(np.array([2, 0]))
    assert batch[list(given).index(place)].tolist() == [[3.0], [1.0]]


def test_outputs_without_sample_weights_of_their_own_weigh_1():
    y = [np.ones((3, 2)), np.ones(3)]
    batch = source_of(np.ones((3, 2)), y, [np.array([1.0, 2.0, 3.0]), None], global_batch_size=2).take(np.array([2, 0]))
    assert [w.tolist() for w in batch[2]] == [[3.0, 1.0], [1.0, 1.0]]


def test_an_input_or_target_that_is_none_says_what_to_do():
    for weights in (None, [None, np.ones(3)]):
        for y in ([np.ones(3), None], [None, np.ones(3)]):
            with pytest.raises(ValueError, match="Received: None among them"):
                source_of(np.ones((3, 2)), y, weights, global_batch_size=2)


class SparseMatrix:
    """What scipy's sparse matrices and TensorFlow's sparse and ragged tensors are to numpy: one object."""

    shape = (4, 6)


class Unlike(Samples):
    """Sequences of several lengths."""

    def __getitem__(self, index):
        return np.zeros((3 + index % 2, 2))


class UnlikeBatches(keras.utils.PyDataset):
    """Each padded to its own longest."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return (np.zeros((4, 3 + index)),)


def test_samples_have_one_shape_and_are_dense():
    with pytest.raises(TypeError, match="Expected dense arrays.*a SparseMatrix"):
        source_of(SparseMatrix(), None, None, global_batch_size=2)
    for given, shapes in ((Unlike(), r"\(3, 2\), \(4, 2\)"), (UnlikeBatches(), r"\(3,\), \(4,\)")):
        source = source_of(given, None, None, global_batch_size=8)
        with pytest.raises(ValueError, match=f"samples of one shape. Received: {shapes}. Pad"):
            source.take(np.arange(2, 6))
