"""Checksums of data: they tell other samples, cost little, and bear what hosts may do differently."""

import numpy as np
import pytest

from hvd_hetero.optimizers.data_checksum import checksum, checksum_of_one, rows_covered

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
    assert checksum([TOKENS, TOKENS.reshape(5000, 5, 2)]) != plain  # wider numbers are no picture


def test_of_a_single_sample_numbers_and_texts_are_told_apart():
    def whole(*leaves):
        value = 0
        for leaf in leaves:
            value = checksum_of_one(leaf, value)
        return value

    others = [(1, 12), (11, 2), (12, 1), (-1, 12), ("1", 12), (b"ab", 12), (10**30, 12), (np.int64(1), 12), (12,)]
    assert len({whole(*leaves) for leaves in others}) == len(others)
    assert whole("ab") == whole(b"ab") == whole(np.frombuffer(b"ab", np.uint8))
    assert whole(1.5, None, 12) == whole(2.5, 12)
    assert whole(np.zeros((2, 3))) == whole(np.ones((2, 3))) != whole(np.zeros((3, 2)))


@pytest.mark.parametrize("leaf", [7, "token"])
def test_of_a_sample_that_is_a_list_of_thousands_no_arrays_are_made(leaf, monkeypatch):
    expected = checksum_of_one(leaf)
    monkeypatch.setattr(np, "asarray", None)  # 26 microseconds each
    assert checksum_of_one(leaf) == expected


def test_of_large_data_some_rows_are_looked_at():
    between = TOKENS.copy()
    between[1] = 0
    assert checksum([between]) == checksum([TOKENS])
    vast = np.lib.stride_tricks.as_strided(np.zeros(1, int), (10**6, 10**6), (0, 0))  # as if of 8 TB
    assert checksum([vast]) == checksum([np.zeros((1, 10**6), int)]) != checksum([])


def test_rows_are_chosen_before_they_become_an_array():
    assert checksum([range(10**12)]) == checksum([np.array(rows_covered(10**12))])
    assert checksum([range(1, 10**12)]) != checksum([range(10**12)])


@pytest.mark.parametrize("rows", [[[1, 2], [3]], {1, 2}, [None, 1], ["a"], [10**30], [], {"a": 1}], ids=str)
def test_what_makes_no_array_of_whole_numbers_is_left_out(rows):
    assert checksum([rows]) == checksum([])
