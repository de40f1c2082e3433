"""What tests of Keras's data share: samples in each form, a balancer that deals them, and Keras's loop."""

import queue
import threading

import keras
import numpy as np

from hvd_hetero.keras.dataset import BalancedDataset
from hvd_hetero.optimizers.balancer import Balancer as FrameworkFree
from hvd_hetero.optimizers.control import unpack

LENGTH, WHOLE = 22, 8  # the third batch of an epoch is short
SHARES = (5, 2, 1)


class Balancer(FrameworkFree):
    """What the dataset needs of `hvd.Balancer`, and an optimizer's exchange without gradients."""

    def __init__(self, engine, shares=SHARES, **options):
        super().__init__(engine, global_batch_size=WHOLE, shares=shares if engine.size > 1 else None, **options)
        self.announced, self.terms, self.ended_epochs = [], [], 0

    def announce(self, samples, *, whole, by):
        self.announced.append(samples)

    def announce_terms(self, terms, *, by):
        self.terms.append(terms)

    def announce_loaded(self, *, by): ...

    def forget(self, *, ahead, by):
        self.announced.clear()
        self.terms.clear()

    def leave_out(self, by):
        self.forget(ahead=False, by=by)

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
        total = self.engine.allreduce_async(vector, name="control").wait().tolist()
        self.dialogue.incoming(unpack(total, ranks=self.engine.size), leads=True)
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


def used(dataset, balancer):
    """The samples of an epoch that is trained on."""
    seen = []
    for batch in dataset:
        balancer.exchange(len(batch[0]))
        seen += batch[0].tolist()
    return seen
