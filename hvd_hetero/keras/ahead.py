"""Loading the batches of a `BalancedDataset`, ahead of their use where it has workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

from hvd_hetero.optimizers.sampler import Dealt

from .batch import Batch
from .loading import processes, take
from .source import Source
from .stream import EpochStreams

BY_EACH = 2  # batches that a worker loads ahead


class Ahead:
    """Loads the batches that are dealt, in workers if there are any.

    Args:
        workers: threads, or processes; 0 to load a batch when it is asked for, in the thread that asks.

    Attributes:
        workers: how many.
        pool: of them; None for none.
    """

    def __init__(self, source: Source, *, workers: int, use_processes: bool) -> None:
        self._source, self.workers, self._most = source, workers, BY_EACH * workers
        self.pool: Executor | None = None
        if workers and use_processes:
            self.pool = processes(workers, source)
        elif workers:
            self.pool = ThreadPoolExecutor(workers, thread_name_prefix="hvd_hetero.loader")
        self._take = take if use_processes else source.take
        self._loading: deque[tuple[Dealt, Future[Batch]]] = deque()

    def __len__(self) -> int:
        """Batches that were dealt and not asked for yet."""
        return len(self._loading)

    def load(self, dealt: Dealt) -> Batch:
        """Loads a dealt batch now, in this thread."""
        if isinstance(self._source, EpochStreams):
            self._source.epoch = dealt.epoch
        return self._source.take(dealt.indices)

    def next(self, deal: Callable[[], Dealt]) -> tuple[Dealt, Callable[[], Batch]]:
        """What the next batch is of, dealt now or before, and a function that waits for it; it raises what loading
        raised."""
        if self.pool is None:
            dealt = deal()
            return dealt, partial(self.load, dealt)
        while len(self._loading) <= self._most:
            dealt = deal()
            self._loading.append((dealt, self.pool.submit(self._take, dealt.indices)))
        dealt, loading = self._loading.popleft()
        return dealt, loading.result

    def forget(self) -> None:
        """Drops the batches that were dealt ahead."""
        for _, loading in self._loading:
            loading.cancel()
        self._loading.clear()
