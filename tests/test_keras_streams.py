"""`tf.data` and other streams as the samples of a Keras dataset."""

import functools
import queue
import threading
import types

import numpy as np
import pytest

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod", reason="build it with hvd-hetero build-horovod")


from keras_samples import LENGTH, WHOLE, Balancer, used

from hvd_hetero.engine.local import SoloEngine
from hvd_hetero.keras.dataset import BalancedDataset
from hvd_hetero.keras.evaluation import EvaluationDataset
from hvd_hetero.keras.stream import StreamSource


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
        found = loading_meter.by_itself, loading_meter.end().speed is not None
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
