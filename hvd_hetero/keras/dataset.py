"""`BalancedDataset`: each rank's share of one global order, as a `keras.utils.PyDataset` and a `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from hvd_hetero.engine import script
from hvd_hetero.optimizers.argument import check_whole
from hvd_hetero.optimizers.data_checksum import checksum
from hvd_hetero.optimizers.sampler import LOADED, ShareSampler, arguments_heard
from hvd_hetero.optimizers.shards import STATE, check_resumes, check_unsharded
from hvd_hetero.optimizers.stream import StreamPlace
from hvd_hetero.optimizers.unused_balancer import warn_of_none

from . import backend
from .ahead import Ahead
from .balancer import Balancer
from .batch import Batch, check_elements, with_texts
from .ending import free_at_exit
from .randomness import Aside
from .shards import ShardSource
from .source import Source, source_of
from .stream import EpochStreams, StreamSource, is_function
from .untuned import UntunedDataset, untuned

READ_AHEAD = 2  # batches that TensorFlow reads ahead of their use
LEFT_OUT = (
    "Expected an exchange of gradients for each batch of a loop over hvd.BalancedDataset before the next one is read. "
    "Received: none for {batches} of them. Gradients are weighted by the samples of the batch read last, so a loop "
    "that reads batches ahead of their use, or takes those of two datasets into one step, is not exact where sizes "
    "differ: when a plan changes, and in a short last batch. Read none ahead (workers= does), and make one dataset of "
    "two: hvd.BalancedDataset((x1, x2), ...). A loop that leaves batches out can ignore this."
)


def _source_of(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    sharded: bool,
    steps_per_epoch: int | None,
    resumes: bool | str,
    balancer: Balancer,
) -> Source:
    """What the samples are loaded from. Raises TypeError or ValueError for data that cannot be dealt."""
    whole, alone = balancer.global_batch_size, y is None and sample_weight is None
    if sharded and not alone:
        raise TypeError(
            "y, sample_weight: expected none with sharded=True, as the stream's samples have them: (x, y) or (x, "
            "y, sample_weight). Received: some."
        )
    if sharded:
        rows = -(-whole // balancer.size)
        return ShardSource(x, steps=steps_per_epoch, global_batch_size=whole, rows=rows, keeps=resumes == STATE)
    if is_function(x) and alone:
        return EpochStreams(x, global_batch_size=whole)
    return source_of(x, y, sample_weight, global_batch_size=whole)


class BalancedDataset(UntunedDataset):
    """Batches for `fit`, each as large as this rank's share at that moment.

    Every sample of an epoch is used exactly once over all ranks, whatever the plan does; the last batch may be short
    (`drop_last`). Each batch is announced to the balancer, so that gradients are weighted by their samples. Where a
    rank has no sample in a short batch, it gets one of another rank's, which counts for nothing in the gradient.

    Keras ignores `shuffle` of `fit` here: the order is this object's. With `steps_per_epoch`, an epoch of `fit`
    goes on where the last one ended. When loading fails on one rank, all ranks end. Constructing one is a collective
    call.

    Args:
        x, y, sample_weight: arrays, tensors, or nested structures of them. Or x alone, with all of it: a PyDataset
            whose batches are all of one size but the last; an object with `__len__` and `__getitem__` that gives single
            samples; or a tf.data.Dataset of single samples, of known length and in the same order on all ranks, which
            every rank reads as a whole (`shuffle=False`), or a function that gives one for the number of an epoch.
        balancer: deals the shares.
        terms: returns the number of terms that the loss of a batch is a mean over; called as `terms(x, y)`, or with the
            sample weights as well. Needed where that is not the number of samples: with a mask, with `ignore_class`,
            with `reduction="mean_with_sample_weight"`.
        shuffle, seed: the order of epoch e depends on the seed and e alone.
        drop_last: leave out what does not fill a global batch.
        sharded: x is a stream of this rank's own samples: a tf.data.Dataset (which may be endless), an iterable, or a
            function that gives one for the number of an epoch. This rank takes as many of them for a global batch as
            its share says, so that a fast one uses up more; streams go on from one epoch to the next, and start again
            where they end.
        steps_per_epoch: with `sharded`, global batches of an epoch.
        resumes: with `sharded`, how a rank that goes on from a checkpoint finds its place in its stream. True: it reads
            what it has used of the present pass, and drops it. "state": by the stream's own `state_dict()`, which no
            tf.data.Dataset has. False: it starts the stream again.
        workers: threads that load ahead; 0 for none.
        use_multiprocessing: makes them processes, for loading that keeps Python busy.

    Raises:
        ValueError, TypeError: on every rank, when arguments are wrong on any rank, or differ between ranks.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        balancer: Balancer,
        terms: Callable[..., float] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        sharded: bool = False,
        steps_per_epoch: int | None = None,
        resumes: bool | str = True,
        workers: int = 0,
        use_multiprocessing: bool = False,
    ) -> None:
        # Keras' own workers would deal batches out of order, and twice after an interruption.
        super().__init__(workers=1, use_multiprocessing=False)
        with arguments_heard(balancer):
            if not sharded:
                instead = " Where only the epochs of fit are to be shorter, give it to fit."
                check_unsharded(steps_per_epoch, resumes, instead=instead)
            check_resumes(resumes)
            check_whole("workers", workers, least=0)
            self._source = _source_of(
                x,
                y,
                sample_weight,
                sharded=sharded,
                steps_per_epoch=steps_per_epoch,
                resumes=resumes,
                balancer=balancer,
            )
            self._read_whole = isinstance(self._source, (StreamSource, EpochStreams))  # by every rank
            if (sharded or self._read_whole) and (shuffle or workers):
                raise ValueError(
                    "x: expected shuffle=False and workers=0 with a stream, which is read in its own order. "
                    f"Received: shuffle={shuffle}, workers={workers}. Use its prefetch(), and its shuffle(n, seed=..., "
                    "reshuffle_each_iteration=False): of lambda epoch: dataset.shuffle(n, seed=epoch, "
                    "reshuffle_each_iteration=False) each epoch has an order of its own."
                )
            length, content = len(self._source), checksum(self._source.arrays)
        self.balancer, self._terms = balancer, terms
        self.sampler = ShareSampler(
            length,
            balancer=balancer,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            block=self._source.block,
            checksum=content,
        )
        self._resumes, self._ranks = resumes, (balancer.rank, balancer.size)
        if sharded:
            balancer.engine.on_reset_end(self._restart)
        self._ahead = Ahead(self._source, workers=workers, use_processes=use_multiprocessing)
        self._fresh = True  # whether reading is yet to begin: batches read until then are only looked at
        self._ahead_of_use = False  # whether TensorFlow reads batches while others are in use
        self._at: int | None = None  # the step up to which use is accounted for, within an epoch
        self._used = 0  # the batches of this run of reading that were used, up to that step
        self._left_out = 0  # those that a loop has left out since
        self._trained = False  # whether a batch of this epoch was used
        self._told = False  # whether the script was told of what a loop has left out
        self._last: Batch = None
        self._run = 0  # how many times reading was begun or rewound
        self._readers = 0  # how many times Keras has begun to read
        self._unsaid: Exception | None = None  # error of loading that the other ranks may not know of yet
        self.aside = Aside()
        balancer.stateful_parts.add(self)
        free_at_exit(balancer)

    def __len__(self) -> int:
        return len(self.sampler.dealer)

    @property
    def workers(self) -> int:
        """Returns 1, so that Keras loads nothing ahead by itself. Keras reads this when it begins to read anew, in each
        `fit`; it is how this dataset learns of that."""
        self._count_used()
        self._fresh, self._at = True, None
        self._readers += 1
        return 1

    @workers.setter
    def workers(self, value: int) -> None:
        raise AttributeError(f"workers: expected as an argument of BalancedDataset. Received: set to {value} later.")

    # What Keras calls -----------------------------------------------------------------------------------------------

    def __getitem__(self, index: int) -> Batch:
        """Within an epoch the next batch, whatever `index` is; before one, batch `index`, which does not count as used.
        """
        self.aside.end()
        return with_texts(self._look(index) if self._fresh else self._next())

    def read(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches that Keras reads, until it begins to read anew. After a fit was broken off, a thread of
        TensorFlow may still be reading in the next fit: it is ended here, as it would take that fit's batches."""
        reader = self._readers
        for batch in batches:
            yield batch
            if reader != self._readers:
                return

    def _look(self, index: int) -> Batch:
        """Batch `index` from the present position, without dealing it. If it cannot be loaded, the last batch: the
        error will come again, and be told to the other ranks, when the batch is read to be used."""
        try:
            return self._ahead.load(self.sampler.peek(index))
        except Exception:
            if self._last is None:
                raise
            return self._last

    def on_epoch_begin(self) -> None:
        """Prepares reading; Keras calls it before the first batch of an epoch."""
        if self._fresh:
            self._rewind(ahead=backend.NAME == "tensorflow")
        else:
            self._will_load()
            if self.sampler.pending == len(self._ahead):
                # All that was announced is used. Announces anew, as another dataset may have been trained on since.
                self.balancer.forget(ahead=self._ahead_of_use, by=self)
        if self._at is None:
            self._at = self.balancer.begun(self)
        self.balancer.step_timer.run()  # time spent before this, such as on a validation, is no part of a step
        self.aside.begin()

    def on_epoch_end(self) -> None:
        """Counts what was used, and ends the epoch; Keras calls it after the last batch."""
        self.aside.end()
        self._count_used()
        if self._at is not None and not self._fresh:
            if self._trained:
                self.balancer.trained(self)
                self.balancer.end_epoch()
            else:  # this was an evaluation, whose batches were not trained on
                warn_of_none(self.balancer, evaluates="hvd.EvaluationDataset")
                self.balancer.withdraw(self)
                self._fresh = True
        self._at, self._trained = None, False

    # Other ways to read ---------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of `epoch`, and starts at its beginning. If `epoch` was resumed in the middle, it goes on
        from there; if at its end, nothing of it is left.

        For a loop of your own, which otherwise gets one epoch after the other. Also before a `fit` with `initial_epoch`
        for which no state was loaded: `fit` does not tell datasets of it."""
        self._count_used()
        self._at = None
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of an epoch, for a loop of your own; if it was resumed or broken off, the rest of them. A batch
        without an exchange of gradients before the next one is left out, if there are some for later ones."""
        self._count_used()
        left = len(self) - self.sampler.position
        if left == 0:
            self.sampler.end_epoch()
            return
        yield from self._epoch(left, ahead=False)
        self.on_epoch_end()

    def as_tf_dataset(self) -> Any:
        """A tf.data.Dataset whose iterations are epochs, with batches of any number of rows in its element_spec."""
        import tensorflow as tf

        first = self._ahead.load(self.sampler.peek(0))
        check_elements(first)
        spec = keras.tree.map_structure(lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), first)
        dataset = tf.data.Dataset.from_generator(lambda: self._epoch(len(self), ahead=True), output_signature=spec)
        return untuned(dataset.apply(tf.data.experimental.assert_cardinality(len(self))).prefetch(READ_AHEAD))

    def _epoch(self, batches: int, *, ahead: bool) -> Iterator[Batch]:
        self._count_used()
        self._rewind(ahead=ahead)
        self._at = self.balancer.begun(self)
        loaded, run = self.sampler.loaded, self._run
        for _ in range(batches):
            if ahead and run != self._run:  # as in `read`
                return
            batch, begun, step = self._next(), self.balancer.begun(self), self.balancer.step
            yield batch
            if not ahead and (run, begun) == (self._run, self.balancer.begun(self)):
                self._leave_out(taken=self.balancer.step > step)
            if self.sampler.loaded != loaded:
                raise RuntimeError(LOADED)

    # Dealing and loading --------------------------------------------------------------------------------------------

    def _rewind(self, *, ahead: bool) -> None:
        """Goes back to the first batch not used, so that what was dealt and not used is dealt again. `ahead`: whether
        TensorFlow reads batches while others are in use."""
        self._run += 1
        if self._unsaid is not None:
            self.balancer.departure.recover(self._unsaid)
            self._unsaid = None
        self._ahead.forget(run=self._run)
        self._used, self._left_out, self._trained = 0, 0, False
        self.balancer.forget(ahead=ahead, by=self)
        self.sampler.rewind()
        self._fresh, self._ahead_of_use = False, ahead
        self._will_load()

    def _will_load(self) -> None:
        self.balancer.step_timer.loading_meter.will_load(
            beside=self._ahead_of_use or self._ahead.pool is not None,
            in_parts=not self._read_whole,
            loaders=self._ahead.workers,
            ahead=self._ahead.most + (READ_AHEAD if self._ahead_of_use else 0),
        )

    def _leave_out(self, *, taken: bool) -> None:
        """Says that the batch announced last never began, as a loop has left it out: it is used up if one after it is.
        `taken`: it is used up, as a batch of another dataset began, which the loop takes into one step with it."""
        self._left_out += 1
        self._trained |= taken
        self.balancer.leave_out(self)
        if not taken:
            self.sampler.leave_out()

    def _uncounted(self) -> int:
        """The batches that were used since the last call of `_count_used`. Also for a thread that reads ahead."""
        at = self._at  # looked at once: the epoch may end meanwhile
        begun = 0 if at is None else self.balancer.begun(self) - at
        return min(begun + self._left_out, self.sampler.pending) if begun or self._trained else 0

    def _count_used(self) -> None:
        """Tells the sampler which batches were used since the last call."""
        if self._at is None:
            return
        used = self._uncounted()
        # In this order: a thread that reads ahead adds up the counted and the uncounted, and must not get too many.
        self._at = self.balancer.begun(self)
        self._used += used
        if used and self._left_out and not self._told:
            self._told = True
            script.warn(LEFT_OUT.format(batches=self._left_out))
        if used:
            self._left_out, self._trained = 0, True
        self._ahead.use(self._used, run=self._run)
        for _ in range(used):
            self.sampler.used()
        self.sampler.end_epoch()

    def _next(self) -> Batch:
        run = self._run
        if self._ahead_of_use:
            batch = self._fetched(run)
            if run == self._run:
                self.balancer.announce_loaded(by=self)
            return batch
        with self.balancer.step_timer.loading_meter.loading():
            return self._fetched(run)

    def _fetched(self, run: int) -> Batch:
        try:
            self._ahead.use(self._used + self._uncounted(), run=run)
            dealt, loaded = self._ahead.next(self.sampler.deal, run=run)
            if run != self._run:  # reading was rewound while this waited: announces nothing in the new run
                return loaded()[0]
            # Announced when it is read, not when it is dealt, which may be long before: if Keras reads nothing ahead,
            # it is the next batch in use.
            self.balancer.announce(dealt.used, whole=dealt.whole, by=self)
            (batch, busy_s), terms = loaded(), None
            self.balancer.step_timer.loading_meter.tell(dealt.used, busy_s)
            if self._terms is not None:
                parts = batch if isinstance(batch, tuple) else (batch,)
                terms = float(self._terms(*parts)) if dealt.used else 0.0
            if run != self._run:
                return batch
            self._last = batch
            if terms is not None:
                self.balancer.announce_terms(terms, by=self)
        except Exception as error:
            if run != self._run:  # the error is of a run that is over, in which TensorFlow still read ahead
                raise
            # Earlier batches are still to be used, so the other ranks are told when this rank comes to this batch.
            self._unsaid = error
            self.balancer.fail_at_exchange(error)
            if self._last is None:
                self.balancer.fail()
                raise
        return self._last

    # State ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """The position: the epoch, and how many global batches of it are used."""
        self._count_used()
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was saved, on any number of ranks. An epoch of `fit` still has `len(self)` batches;
        `KerasState.fit` ends it where the epoch of the data ends."""
        self.sampler.load_state_dict(state)
        self._fresh, self._at = True, None

    def own_state_dict(self) -> dict[str, Any]:
        """The place of this rank in a stream of its own, if it has one and `resumes`."""
        if not isinstance(self._source, ShardSource) or not self._resumes:
            return {}
        self._count_used()
        return {"ranks": self._ranks, "place": place.saved} if (place := self._source.place) else {}

    def load_own_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the place of `state`, if it is that of this rank among as many."""
        if self._resumes and state and tuple(state["ranks"]) == self._ranks and isinstance(self._source, ShardSource):
            self._source.go_to(StreamPlace.restored(state["place"]))

    def _restart(self) -> None:
        """Begins the stream anew, if an elastic job's ranks are others now: they have other streams."""
        ranks = self.balancer.rank, self.balancer.size
        if isinstance(self._source, ShardSource) and ranks != self._ranks:
            self._source.restart()
        self._ranks = ranks
