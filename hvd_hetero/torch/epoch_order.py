"""The order of each epoch as a user's `sampler` draws it, alike on all ranks and in a job that goes on."""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Iterable, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from hvd_hetero.optimizers.draws import Draws, Generator
from hvd_hetero.optimizers.stream_state import tell_epoch

from .draws import TORCH, seed_of


def check_sampler(sampler: Any, shuffle: bool | None) -> int:
    """Returns how many indices `sampler` draws for an epoch.

    Raises:
        TypeError: it has no length, gives batches, or draws for one rank only.
        ValueError: `shuffle` is True as well.
    """
    if isinstance(sampler, DistributedSampler) or hasattr(sampler, "num_replicas"):
        raise TypeError(
            f"sampler: expected one that draws for all ranks. Received: {sampler!r}, which draws for one. Leave it "
            "out, if it does no more than split the data: each rank gets its part of each batch, and set_epoch() is "
            "the loader's."
        )
    if isinstance(sampler, BatchSampler):
        raise TypeError(
            f"sampler: expected one that gives single indices. Received: {sampler!r}, which gives batches, and these "
            "are the balancer's. Give what orders the samples, as its .sampler."
        )
    if not isinstance(sampler, Iterable) or not hasattr(sampler, "__len__"):
        raise TypeError(
            "sampler: expected an iterable of indices with a length, as of torch.utils.data.Sampler. Received: "
            f"{sampler!r}."
        )
    if shuffle:
        raise ValueError("shuffle: expected False or none beside a sampler, which gives the order. Received: True.")
    return len(cast("Sized", sampler))


class EpochOrder:
    """Draws the order of an epoch from `sampler`, whose indices may be of any type that the dataset takes.

    What it draws from PyTorch's generator on the CPU, NumPy's and Python's, or from its own `generator`, follows from
    `seed`, the epoch and the seed of its generator. So all ranks draw the same, as does a job that goes on from a
    checkpoint. All of these generators are afterwards what they were before.

    Args:
        sampler: see `check_sampler`. Its `set_epoch` is called, if it has one. Indices that are no whole numbers are
            compared between ranks as texts.
        length: indices that it draws for an epoch.
    """

    def __init__(self, sampler: Iterable[Any], *, length: int, seed: int) -> None:
        self._sampler, self._length, self._seed = sampler, length, seed
        generator = getattr(sampler, "generator", None)
        self._generators, self._own_seed = [], 0
        if isinstance(generator, torch.Generator):
            self._generators = [Generator(generator.manual_seed, generator.get_state, generator.set_state)]
            self._own_seed = generator.initial_seed()
        self._epoch: int | None = None  # that of `_indices`
        self._indices: np.ndarray | list[Any] = []
        self.checksum = 0  # of the indices drawn last

    def __str__(self) -> str:
        """What has to be the same on all ranks."""
        return f"{type(self._sampler).__name__} of seed {self._own_seed}"

    def begin(self, epoch: int) -> None:
        """Draws the order of `epoch`, if that was not drawn last.

        Raises:
            ValueError: there are more or fewer indices than the sampler's length.
        """
        if epoch == self._epoch:
            return
        self._epoch = None
        seed = seed_of(self._seed, epoch, self._own_seed)
        with Draws(seed, TORCH, *self._generators)():
            tell_epoch(self._sampler, epoch)
            drawn = list(itertools.islice(self._sampler, self._length + 1))
        if len(drawn) != self._length:
            many = "more" if len(drawn) > self._length else len(drawn)
            raise ValueError(
                f"sampler: expected {self._length} indices in epoch {epoch}, as its length was when the loader was "
                f"made. Received: {many}."
            )
        self._indices = _numbers(drawn)
        in_bytes = self._indices.tobytes() if isinstance(self._indices, np.ndarray) else repr(drawn).encode()
        self.checksum, self._epoch = zlib.crc32(in_bytes), epoch

    def at(self, places: np.ndarray) -> list[Any]:
        """The indices at these places of the order drawn last."""
        if isinstance(self._indices, np.ndarray):
            return list(self._indices[places].tolist())
        return [self._indices[place] for place in places]


def _numbers(drawn: list[Any]) -> np.ndarray | list[Any]:
    """The indices in an array, which takes less memory, if they are whole numbers."""
    try:
        return np.fromiter(map(operator.index, drawn), np.int64, len(drawn))
    except (TypeError, OverflowError):
        return drawn
