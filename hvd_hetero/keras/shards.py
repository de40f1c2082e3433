"""Reads samples of a stream that is this rank's own: other ranks have other samples."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from hvd_hetero.optimizers.shards import check_steps
from hvd_hetero.optimizers.stream import StreamPlace
from hvd_hetero.optimizers.stream_state import Kept, iterator_at, keeper, state_of, tell_epoch

from .batch import Batch, joined, packed, rows_in, stacked
from .stream import check_samples, is_function, is_tf_data, let_go, read

BETWEEN_RUNS = -2  # no number of a run


class ShardSource:
    """The samples that this rank's stream yields next, whatever their numbers in the global batch are.

    The stream goes on from one epoch to the next, and is begun anew where it ends.

    Args:
        samples: a tf.data.Dataset of single samples, or another object that gives single samples each time that it is
            iterated; or a function that returns one for the number of an epoch, or of a pass where there are more.
        steps: global batches of an epoch.
        rows: how many samples of a tf.data.Dataset are read at a time.
        keeps: whether the stream itself keeps its place, from which it goes on.

    Raises:
        TypeError, ValueError: what gives no single samples, or `steps` is no number of batches.
    """

    block = 1
    arrays = ()
    _more: Callable[[int], Batch | None] | None = None  # reads on in the present pass

    def __init__(
        self, samples: Any, *, steps: int | None, global_batch_size: int, rows: int, keeps: bool = False
    ) -> None:
        self._keeps = keeps
        check_steps(steps)
        if not is_function(samples):
            _check(samples)
        self._samples, self._length, self._rows = samples, int(steps or 0) * global_batch_size, rows
        self._pass = -1  # the number of times that the stream was begun; at least the epoch in which it was
        self._next: StreamPlace | None = None  # the place at which the stream is to be begun, if that is given
        self._begun: list[tuple[int, int]] = []  # of each pass, the number, and `_taken` before its first sample
        self._keeper: Any = None  # the stream or iterator that keeps its place, if one does
        self._kept: list[tuple[int, Kept]] = []  # what it kept, each after `_taken` there; at most one before `_in_use`
        self._taken = self._in_use = 0  # samples read, and samples of batches in use, of all passes
        self._waiting: list[Batch] = []  # samples that were read, and are in no batch yet
        self._given: list[Batch] = []  # the samples of batches that may not be in use yet, the oldest batch first
        self._run, self._used = 0, 0  # the present run, and how many batches of it were used
        self._lock = threading.Lock()  # TensorFlow reads in threads of its own

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Batch:
        """As many samples as `indices` has."""
        return self.next(len(indices))

    def next(self, count: int, *, epoch: int = 0, run: int = 0) -> Batch:
        """The next `count` samples; of 0, the next one, which stays that.

        Args:
            epoch: the epoch that they are for.
            run: the run of reading that they are for. Where that is not the present one, they stay the next ones.
        """
        rows = max(1, count)
        with self._lock:
            used = count if run == self._run else 0
            waiting = sum(map(rows_in, self._waiting))
            while waiting < rows:
                waiting += self._read(rows - waiting, epoch)
            batch = joined(self._waiting)
            self._waiting = [_part(batch, used, waiting)] if waiting > used else []
            if run == self._run:
                self._given.append(_part(batch, 0, used))
        return _part(batch, 0, rows)

    def use(self, batches: int, *, run: int) -> None:
        """Says that so many batches of this run were used, or are in use; without effect once that run is over."""
        with self._lock:
            more = max(0, batches - self._used) if run == self._run else 0
            self._used += more
            self._in_use += sum(map(rows_in, self._given[:more]))
            del self._given[:more]
            while len(self._kept) > 1 and self._kept[1][0] <= self._in_use:
                del self._kept[0]

    @property
    def place(self) -> StreamPlace | None:
        """The place after the samples that are in use; None if nothing was read."""
        with self._lock:
            while len(self._begun) > 1 and self._begun[1][1] <= self._in_use:
                del self._begun[0]
            if not self._begun:
                return self._next
            number, first = self._begun[0]
            kept = next((kept for at, kept in self._kept[:1] if first < at <= self._in_use), None)
            return StreamPlace(number, self._in_use - first, kept)

    def rewind(self, run: int) -> None:
        """Begins a run of reading: the samples of all batches that it gave and that are not in use are the next ones
        again."""
        with self._lock:
            self._run, self._used = run, 0
            self._waiting = [batch for batch in (*self._given, *self._waiting) if rows_in(batch)]
            self._given.clear()

    def restart(self) -> None:
        """Begins the stream anew with the next batch, as when the ranks of an elastic job are others."""
        self.go_to(None)

    def go_to(self, place: StreamPlace | None) -> None:
        """Goes on from `place` with the next batch; None: from the beginning of a new pass."""
        with self._lock:
            self._waiting.clear()
            self._given.clear()
            self._begun.clear()
            self._kept.clear()
            self._taken = self._in_use = 0
            self._run, self._next = BETWEEN_RUNS, place  # who still reads for the run before takes nothing
            self._end()

    def _read(self, count: int, epoch: int) -> int:
        """Has more samples wait, at least one: about `count`. Returns how many."""
        if self._more is None:
            place, self._next = self._next or StreamPlace(max(self._pass + 1, epoch), 0), None
            self._pass, first = place.number, self._taken - place.used
            samples = self._samples(self._pass) if is_function(self._samples) else self._samples
            tell_epoch(samples, self._pass)
            self._more = self._reader(_check(samples), place)
            self._begun.append((self._pass, first))
            if self._keeps and place.kept is not None:
                self._kept.append((first + place.kept.used, place.kept))
        batch = self._more(count)
        if batch is not None:
            self._waiting.append(batch)
            self._taken += rows_in(batch)
            if self._keeper is not None:
                kept = Kept(self._taken - self._begun[-1][1], state_of(self._keeper))
                self._kept.append((self._taken, kept))
            return rows_in(batch)
        self._end()
        if self._taken == self._begun[-1][1]:
            raise ValueError(
                "Expected samples from the stream of every rank, each time that it is begun. Received: none. Give each "
                "rank some of the data, and no generator, which is over after one pass, but a function of the epoch "
                "that makes one."
            )
        return 0

    def _reader(self, samples: Any, place: StreamPlace) -> Callable[[int], Batch | None]:
        """A function that reads on from `place`, about so many samples; it returns None at the end."""
        if is_tf_data(samples):
            if self._keeps:
                keeper(samples, samples)  # says that it does not
            stream = (samples.skip(place.used) if place.used else samples).batch(self._rows).as_numpy_iterator()
            return lambda count: read(stream)
        iterator, passed_over = iterator_at(samples, place.kept if self._keeps else None)
        self._keeper = keeper(samples, iterator) if self._keeps else None
        singles: Iterator[Any] = itertools.islice(iterator, place.used - passed_over, None)

        def more(count: int) -> Batch | None:
            taken = [packed(sample) for sample in itertools.islice(singles, count)]
            return stacked(taken) if taken else None

        return more

    def _end(self) -> None:
        left, self._more, self._keeper = [self._more], None, None
        let_go(left)

    __del__ = _end


def _part(batch: Batch, first: int, stop: int) -> Batch:
    return keras.tree.map_structure(lambda leaf: leaf[first:stop], batch)


def _check(samples: Any) -> Any:
    """Returns `samples` if they are a stream of single samples.

    Raises:
        TypeError, ValueError: they are not.
    """
    if is_tf_data(samples):
        check_samples(samples)
    elif hasattr(samples, "shape") or isinstance(samples, (dict, list, tuple, keras.utils.PyDataset)):
        raise TypeError(
            "x: expected, with sharded=True, a stream of single samples: a tf.data.Dataset, an iterable, or a function "
            f"that makes one for an epoch. Received: {type(samples).__name__}. Of arrays: "
            "tf.data.Dataset.from_tensor_slices((x, y)), or lambda epoch: zip(x, y)."
        )
    elif not isinstance(samples, Iterable):
        raise TypeError(
            "x: expected, with sharded=True, a stream of single samples: a tf.data.Dataset, an iterable, or a function "
            f"that makes one for an epoch. Received: {type(samples).__name__}, which cannot be iterated."
        )
    return samples
