"""Checksums of data: they tell other samples, cost little, and bear what hosts may do differently."""

import numpy as np
import pytest

from hvd_hetero.optimizers.content import checksum, places

TOKENS = np.arange(50_000).reshape(5000, 10)


@pytest.mark.parametrize(
    "other",
    [
        [TOKENS[::-1]],
        [TOKENS[:2500].tolist()],
        [np.roll(TOKENS, 1, axis=0)],
        [TOKENS, TOKENS[:, 0] % 2 == 0],
        [TOKENS + 1],
    ],
    ids=["another order", "half", "shifted", "labels as well", "other numbers"],
)
def test_other_samples_have_another_checksum(other):
    assert checksum([TOKENS]) != checksum(other)
    assert checksum(other) == checksum([np.array(each) for each in other])


def test_what_hosts_may_do_differently_is_left_out():
    pictures = np.random.default_rng(0).integers(0, 256, size=(20, 8, 8), dtype=np.uint8)
    noise = np.random.default_rng(1).normal(size=(20, 8))
    texts = np.array(["a", "b"] * 10)
    plain = checksum([TOKENS])
    assert checksum([TOKENS, pictures, noise, texts, np.zeros((0, 3), int)]) == plain
    assert checksum([TOKENS.astype(">i8"), ]) == plain  # a host of the other order of bytes


def test_of_large_data_some_rows_are_looked_at():
    between = TOKENS.copy()
    between[1] = 0
    assert checksum([between]) == checksum([TOKENS])
    vast = np.lib.stride_tricks.as_strided(np.zeros(1, int), (10**6, 10**6), (0, 0))  # as if of 8 TB
    assert checksum([vast]) == checksum([np.zeros((1, 10**6), int)])


def test_rows_are_chosen_before_they_become_an_array():
    assert checksum([range(10**12)]) == checksum([np.array(places(10**12))])
    assert checksum([range(1, 10**12)]) != checksum([range(10**12)])


@pytest.mark.parametrize("rows", [[[1, 2], [3]], {1, 2}, [None, 1], ["a"], [10**30], [], {"a": 1}], ids=str)
def test_what_makes_no_array_of_whole_numbers_is_left_out(rows):
    assert checksum([rows]) == checksum([])
