"""Measures, in the loading processes of a `DataLoader`, how long each is busy with a batch.

That is from when the numbers of the batch's samples arrive there until `collate_fn` has made the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Sampler, default_collate

_arrived_s = 0.0  # in a loading process: when the numbers of its present batch arrived


class Timed(NamedTuple):
    """A batch, and the seconds for which a loading process was busy with it."""

    batch: Any
    seconds: float


def timing_loader(
    dataset: Any, *, batch_sampler: Sampler[list[Any]], collate_fn: Callable[[Any], Any] | None, **arguments: Any
) -> DataLoader[Timed]:
    """A `DataLoader` with loading processes, which gives `Timed` batches. The dataset and `collate_fn` do not notice.

    Args:
        batch_sampler, collate_fn, arguments: as of `DataLoader`; among them `num_workers`, 1 or more.
    """
    collate = _Collate(collate_fn or default_collate)
    return DataLoader(dataset, batch_sampler=_Batches(batch_sampler), collate_fn=collate, **arguments)


class _Batches(Sampler[list[Any]]):
    """The batches of a sampler, as `_Numbers`."""

    def __init__(self, batches: Iterable[list[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[Any]]:
        return map(_Numbers, self._batches)


class _Numbers(list[Any]):
    """The numbers of a batch's samples, which are a plain list again where they arrive in a loading process."""

    def __reduce__(self) -> tuple[Callable[[list[Any]], list[Any]], tuple[list[Any]]]:
        return _arrive, (list(self),)


def _arrive(numbers: list[Any]) -> list[Any]:
    global _arrived_s
    _arrived_s = time.perf_counter()
    return numbers


class _Collate:
    """Makes `Timed` batches of what a `collate_fn` makes."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> Timed:
        batch = self._collate_fn(samples)
        return Timed(batch, time.perf_counter() - _arrived_s)
