"""Law 7: every tensor is in exactly one bucket; order and caps hold."""

import random

import pytest

from hvd_hetero.policy.buckets import (
    FIXED_PART,
    LEAST_BYTES,
    OVERLAP_BYTES,
    as_ready,
    assign,
    by_dtype,
    cap_bytes,
    last_of_widest,
)
from hvd_hetero.policy.link import Link


def cases(count=300):
    rng = random.Random(7)
    for _ in range(count):
        sizes = [rng.choice([0, 1, rng.randint(1, 50), rng.randint(1, 400)]) for _ in range(rng.randint(0, 40))]
        yield sizes, {"cap_bytes": rng.randint(1, 200), "last_cap_bytes": rng.choice([None, rng.randint(1, 60)])}


def test_every_tensor_is_in_exactly_one_bucket_in_the_order_given():
    for sizes, caps in cases():
        assert [i for bucket in assign(sizes, **caps) for i in bucket] == list(range(len(sizes)))


def test_no_bucket_exceeds_its_cap_unless_it_holds_a_single_tensor():
    for sizes, caps in cases():
        buckets = assign(sizes, **caps)
        most = [caps["cap_bytes"]] * len(buckets)
        if buckets:
            most[-1] = caps["last_cap_bytes"] or most[-1]
        for bucket, cap in zip(buckets, most, strict=True):
            assert bucket and (len(bucket) == 1 or sum(sizes[i] for i in bucket) <= cap)


def test_no_bucket_is_closed_before_it_is_full():
    for sizes, caps in cases():
        caps["last_cap_bytes"] = None
        buckets = assign(sizes, **caps)
        for k in range(len(buckets) - 1):
            assert sum(sizes[i] for i in buckets[k]) + sizes[buckets[k + 1][0]] > caps["cap_bytes"]


def test_small_last_buckets():
    assert assign([10] * 8, cap_bytes=30, last_cap_bytes=20) == ((0, 1, 2), (3, 4, 5), (6, 7))
    assert assign([1, 100, 1], cap_bytes=10) == ((0,), (1,), (2,))
    assert assign([], cap_bytes=1) == ()


@pytest.mark.parametrize("whole", [OVERLAP_BYTES, 2 * OVERLAP_BYTES, 40 * OVERLAP_BYTES])
def test_most_of_what_is_worth_it_leaves_while_the_rest_is_computed(whole):
    sizes = [whole // 16] * 16
    buckets = as_ready(sizes, ["float32"] * 16, cap_bytes=8 * OVERLAP_BYTES)
    assert [i for bucket in buckets for i in bucket] == list(range(16))
    assert (len(buckets) == 1) == (whole <= OVERLAP_BYTES)
    last = sum(sizes[i] for i in buckets[-1])
    assert len(buckets) == 1 or last == min(whole // 4, 7.5 * OVERLAP_BYTES)


def test_one_dtype_per_bucket_and_every_tensor_once_ordered_by_when_complete():
    rng = random.Random(3)
    for sizes, caps in cases():
        dtypes = [rng.choice("abc") for _ in sizes]
        buckets = by_dtype(sizes, dtypes, **caps)
        assert sorted(i for bucket in buckets for i in bucket) == list(range(len(sizes)))
        assert all(len({dtypes[i] for i in bucket}) == 1 and list(bucket) == sorted(bucket) for bucket in buckets)
        assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets)


def test_the_last_bucket_of_all_is_kept_small_and_not_that_of_another_dtype():
    assert by_dtype([1] * 8, "abababab", cap_bytes=4, last_cap_bytes=2) == ((1, 3), (0, 2, 4, 6), (5, 7))


def test_wrong_arguments_say_what_was_received():
    with pytest.raises(ValueError, match="cap_bytes: expected at least 1. Received: 0"):
        assign([1], cap_bytes=0)
    with pytest.raises(ValueError, match="Received: -1"):
        assign([1, -1], cap_bytes=1)
    with pytest.raises(ValueError, match="one for each of 2 tensors. Received: 1"):
        by_dtype([1, 1], ["a"], cap_bytes=1)


@pytest.mark.parametrize("latency_s", [1e-5, 3e-4, 5e-3, 0.1])
@pytest.mark.parametrize("rate", [2.5e6, 12.5e6, 125e6, 1e10])
def test_a_bucket_is_as_small_as_its_fixed_cost_allows(latency_s, rate):
    line, most = Link(latency_s=latency_s, bandwidth_bytes_per_s=rate), 8 * 2**20
    cap = cap_bytes(line, most=most)
    assert min(LEAST_BYTES, most) <= cap <= most
    if cap < most:
        assert latency_s <= FIXED_PART * line.time_s(cap) * (1 + 1e-6)
    if cap > LEAST_BYTES:
        assert latency_s >= FIXED_PART * line.time_s(0.99 * cap)
    assert cap_bytes(line, most=1000) == 1000


@pytest.mark.parametrize("widths, found", [({}, None), ({0: 4}, 0), ({0: 4, 2: 4}, 2), ({0: 8, 1: 8, 3: 4}, 1)])
def test_a_control_vector_rides_in_the_last_bucket_of_the_widest_type(widths, found):
    assert last_of_widest(widths) == found


@pytest.mark.parametrize("wide", [0, 1])
def test_in_keras_as_well(wide):
    pytest.importorskip("hvd_hetero.keras", reason="pip install keras, and hvd-hetero build-horovod")
    from hvd_hetero.keras.layout import BucketLayout, Spec

    specs = [Spec((3,), "float64" if index == wide else "float32") for index in range(2)]
    layout = BucketLayout(specs, bucket_bytes=2**20, tail=5, lossy=lambda shape: False, zeros=lambda n, of: [of] * n)
    assert layout.members[layout.tail_in] == [wide] and layout.tail == ["float64"] * 5
