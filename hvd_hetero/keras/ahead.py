"""Loads the batches of a `BalancedDataset`, ahead of their use if it has workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

from hvd_hetero.optimizers.sampler import Dealt

from .batch import Batch
from .loading import processes, take, timed
from .shards import ShardSource
from .source import Source
from .stream import EpochStreams

BY_EACH = 2  # batches that are loaded ahead, for each worker
NO_RUN = -1


class Ahead:
    """Loads the batches that a sampler deals to this rank, in worker threads or processes, or in the calling thread.

    Args:
        source: the samples.
        workers: the number of threads or processes; 0 to load a batch when it is asked for, in the calling thread.
        use_processes: whether workers are processes instead of threads.

    Attributes:
        workers: their number.
        most: the most batches that they load ahead.
        pool: the pool of workers; None without workers.
    """

    def __init__(self, source: Source, *, workers: int, use_processes: bool) -> None:
        self._source, self.workers, self.most = source, workers, BY_EACH * workers
        self.pool: Executor | None = None
        if workers and use_processes:
            self.pool = processes(workers, source)
        elif workers:
            self.pool = ThreadPoolExecutor(workers, thread_name_prefix="hvd_hetero.loader")
        self._take = take if use_processes else source.take
        self._loading: deque[tuple[Dealt, Future[tuple[Batch, float]]]] = deque()

    def __len__(self) -> int:
        """The number of batches that were dealt ahead and not asked for yet."""
        return len(self._loading)

    def load(self, dealt: Dealt, *, run: int = NO_RUN) -> Batch:
        """Loads and returns a batch in the calling thread; `dealt` says which samples it has. `run`: the run of reading
        that it is for; without one it is only looked at."""
        if isinstance(self._source, ShardSource):
            return self._source.next(dealt.used, epoch=dealt.epoch, run=run)
        if isinstance(self._source, EpochStreams):
            self._source.epoch = dealt.epoch
        return self._source.take(dealt.indices)

    def next(self, deal: Callable[[], Dealt], *, run: int) -> tuple[Dealt, Callable[[], tuple[Batch, float]]]:
        """The next batch of this rank: what was dealt for it, and a function that returns it when it is loaded, and the
        seconds that loading took.

        Args:
            deal: deals this rank's part of one more global batch. With workers it is called until enough batches are
                being loaded ahead.
            run: the run of reading that it is for.

        Returns:
            The sample indices of the batch, and a function that waits for the batch. That function raises any error of
            loading.
        """
        if self.pool is None:
            dealt = deal()
            return dealt, partial(timed, self.load, dealt, run=run)
        while len(self._loading) <= self.most:
            dealt = deal()
            self._loading.append((dealt, self.pool.submit(timed, self._take, dealt.indices)))
        dealt, loading = self._loading.popleft()
        return dealt, loading.result

    def use(self, batches: int, *, run: int) -> None:
        """Says that so many batches of this run of reading were used, or are in use."""
        if isinstance(self._source, ShardSource):
            self._source.use(batches, run=run)

    def forget(self, *, run: int) -> None:
        """Drops all batches that were dealt ahead, because they have to be dealt again, in a new run of reading."""
        if isinstance(self._source, ShardSource):
            self._source.rewind(run)
        for _, loading in self._loading:
            loading.cancel()
        self._loading.clear()
