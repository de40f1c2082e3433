"""`hvd.BalancedDataset` on ranks that are threads: what `fit`'s adapters read from it, in whatever way they read."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod", reason="build it with hvd-hetero build-horovod")

import keras
from keras_samples import (
    LENGTH,
    SHARES,
    WHOLE,
    Balancer,
    Batches,
    Keras,
    Samples,
    arrays,
    make,
    numbers,
    train,
)

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.keras.dataset import BalancedDataset
from hvd_hetero.keras.evaluation import EvaluationDataset
from hvd_hetero.keras.source import source_of
from hvd_hetero.optimizers.departure import PeerError
from hvd_hetero.policy.loader_speed import LoaderSpeed


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


@pytest.mark.parametrize("kind", ["arrays", "samples"])
@pytest.mark.parametrize("options", [{"workers": 2}, {"workers": 1, "use_multiprocessing": True}, {}])
def test_workers_tell_how_long_each_batch_has_kept_them_busy(kind, options, monkeypatch):
    told, begun = [], []
    monkeypatch.setattr(LoaderSpeed, "tell", lambda self, samples, seconds: told.append((samples, seconds)))
    monkeypatch.setattr(LoaderSpeed, "begin", lambda self, *workers: begun.append(workers))
    balancer = Balancer(SoloEngine())
    reader = Keras(make(balancer, kind, **options))
    seen = train(balancer, reader.epoch())
    assert sum(samples for samples, _ in told) == (len(seen) if options else 0)
    assert all(0.0 < seconds < 60.0 for _, seconds in told)
    workers = options.get("workers", 0)
    assert set(begun) <= {(workers, 2 * workers), (workers, 2 * workers + 2)}, "two more that TensorFlow reads"


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


def test_a_loop_of_ones_own_may_leave_batches_out():
    """Those that it takes have their own samples, and those left out before or after one that it takes are used up."""

    def program(engine, taken):
        balancer, dealt = Balancer(engine), []
        deal, balancer.deal = balancer.deal, lambda step: dealt.append(step) or deal(step)
        dataset, seen = make(balancer), []
        for _ in range(2):
            for index, batch in enumerate(dataset):
                seen += (mine := numbers(batch))
                if index in taken:
                    assert dealt[-1] == balancer.step + 1, "by the plan of the step that it is for"
                    balancer.exchange(len(mine))
                    dataset.state_dict()
        assert balancer.ended_epochs == (2 if taken else 0)
        return seen, dataset.state_dict()["epoch"]

    for taken in ((2,), (0,), (1,), (0, 2)):
        with pytest.warns(UserWarning, match="can ignore this") as told:
            ended = World(3).run(lambda engine, taken=taken: program(engine, taken))
        assert sorted(sum((seen for seen, _ in ended), [])) == sorted([*range(LENGTH), *range(LENGTH)])
        assert [epoch for _, epoch in ended] == [2, 2, 2] and len(told) == 3
    assert all(epoch == 0 for _, epoch in World(3).run(lambda engine: program(engine, ()))), "it looks at them"


def test_loss_terms_are_those_of_the_batch_that_a_loop_takes():
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer = OfKeras(WHOLE, engine=SoloEngine())
    for index, (x, _) in enumerate(make(balancer, terms=lambda x, _: float(x.sum()))):
        if index:
            assert balancer.begin_if_unannounced() and balancer.progress.terms == x.sum()
            balancer.exchanges.arrivals.end_batch()


def test_a_loop_over_two_datasets_has_an_order_of_its_own_of_each_in_each_epoch():
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer, dealt = OfKeras(WHOLE, engine=SoloEngine()), []
    deal, balancer.deal = balancer.deal, lambda step: dealt.append(step) or deal(step)
    datasets, orders = (make(balancer), make(balancer)), []
    with pytest.warns(UserWarning, match="of two datasets") as told:
        for _ in range(2):
            seen = []
            for pair in zip(*datasets, strict=True):
                assert dealt[-2:] == [balancer.step + 1] * 2, "both by one plan"
                seen.append([numbers(batch) for batch in pair])
                assert balancer.begin_if_unannounced() and balancer.progress.terms == len(seen[-1][1])
                balancer.exchanges.arrivals.end_batch()
            orders.append([sum(each, []) for each in zip(*seen, strict=True)])
    assert len(told) == 1
    for first, second in zip(*orders, strict=True):
        assert sorted(first) == sorted(second) == list(range(LENGTH)) and first != second


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
    order = dataset.sampler.dealer.order(0)
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


@pytest.mark.parametrize("wrong, text", [
    ({"y": np.zeros(5)}, "same number of samples"),
    ({"steps_per_epoch": 3}, "steps_per_epoch: expected none"),
    ({"sharded": True}, "y, sample_weight: expected none"),
    ({"sharded": True, "y": None}, "steps_per_epoch: expected the number"),
    ({"x": lambda epoch: [], "y": None, "sharded": True, "steps_per_epoch": 3}, "expected shuffle=False and workers=0"),
    ({"x": lambda epoch: None, "y": None}, "expected a function that gives a tf.data.Dataset"),
    ({"workers": -1}, "workers: expected"),
])  # fmt: skip
def test_a_mistake_on_one_rank_is_an_error_on_all(wrong, text):
    x, y = arrays()

    def program(engine):
        balancer = Balancer(engine)
        with pytest.raises((TypeError, ValueError)) as raised:
            BalancedDataset(**{"x": x, "y": y, "balancer": balancer, **(wrong if engine.rank == 1 else {})})
        BalancedDataset(x, y, balancer=balancer)
        return str(raised.value)

    found = World(3).run(program)
    assert text in found[1] and "rank 1:" not in found[1]
    assert all("Expected valid arguments on every rank. Received: rank 1: wrong arguments (" in found[rank]
               and text in found[rank] for rank in (0, 2))


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
                balancer.step_timer.pause()
                balancer.exchanged(wait_s=0.0, bytes_sent=0, leads=True)
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


READING = """
import gc, inspect, time
import keras
import numpy as np
from hvd_hetero.engine.local import SoloEngine
from hvd_hetero.keras.balancer import Balancer
from hvd_hetero.keras.dataset import BalancedDataset

class Slow:
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.2)
        return np.ones(3, "float32")

def keep(held):
    frame = inspect.currentframe()

reader = iter(BalancedDataset(Slow(), balancer=Balancer(4, engine=SoloEngine())).as_tf_dataset())
next(reader)
gc.disable()
keep([reader._iterator_resource])
"""


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow reads ahead in a thread")
def test_a_process_ends_while_data_is_read_that_only_garbage_holds():
    """A frame that refers to itself, here. The interpreter would collect it when that thread can no longer end."""
    env = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    assert subprocess.run([sys.executable, "-c", READING], timeout=120, env=env, check=False).returncode == 0


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


def test_arrays_of_objects_are_for_loops_of_ones_own():
    unlike, balancer = np.empty(4, object), Balancer(SoloEngine())
    unlike[:] = [np.zeros(1 + place % 2) for place in range(4)]
    for objects, kind in ((unlike, "ndarray"), (np.ones((4, 2), object), "int"), (np.array(["a", None] * 2), "None")):
        dataset = BalancedDataset(np.zeros((4, 2)), objects, balancer=balancer, shuffle=False)
        read = [lambda dataset=dataset: dataset[0]]
        for batch in [*read, dataset.as_tf_dataset] if keras.backend.backend() == "tensorflow" else read:
            with pytest.raises(TypeError, match=f"arrays of numbers or.*objects \\({kind}.*pad sequences"):
                batch()
    batch = next(iter(BalancedDataset(np.zeros(4), unlike, balancer=balancer, shuffle=False)))
    assert [len(each) for each in batch[1]] == [1, 2, 1, 2]
    assert len(BalancedDataset(np.array(["a", "b"], object), balancer=balancer)[0][0]) == 2


class SparseBatches(Batches):
    def __getitem__(self, index):
        return (SparseMatrix(),)


class SparseSamples(Samples):
    def __getitem__(self, index):
        return SparseMatrix()


@pytest.mark.parametrize("given", [SparseMatrix(), SparseBatches(), SparseSamples()])
def test_samples_are_dense(given):
    with pytest.raises(TypeError, match="Expected dense arrays.*a SparseMatrix"):
        source_of(given, None, None, global_batch_size=2).take(np.arange(2))


def test_samples_have_one_shape():
    for given, shapes in ((Unlike(), r"\(3, 2\), \(4, 2\)"), (UnlikeBatches(), r"\(3,\), \(4,\)")):
        source = source_of(given, None, None, global_batch_size=8)
        with pytest.raises(ValueError, match=f"samples of one shape. Received: {shapes}. Pad"):
            source.take(np.arange(2, 6))
