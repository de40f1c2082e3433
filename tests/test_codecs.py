"""The codecs: law 6, slow references beside the fast paths, and what must come through unharmed."""

import math
import warnings

import numpy as np
import pytest
import torch

from hvd_hetero.codecs.block import Brain, Int4, Int8
from hvd_hetero.codecs.half import GREATEST, ScaledHalf, scale_for
from hvd_hetero.codecs.lowrank import LowRank, orthonormal, pays
from hvd_hetero.codecs.sparse import TopK
from hvd_hetero.codecs.verbs import exponent_of, verbs_of
from hvd_hetero.optimizers.codec_spec import CodecSpec, matrix_shape

LIBRARIES = {"numpy": np.asarray, "torch": lambda values: torch.from_numpy(np.array(values))}


@pytest.fixture(params=LIBRARIES)
def array(request):
    """Makes an array of the library under test."""
    return LIBRARIES[request.param]


def noise(length, seed=0, dtype=np.float32):
    return (np.random.RandomState(seed).standard_normal(length) * 10.0 ** np.random.RandomState(seed + 1).uniform(
        -3, 3, length)).astype(dtype)


def numbers(values):
    return np.asarray(values)


# int8 and int4 ----------------------------------------------------------------------------------------------------

MOST = {"int8": 127, "int4": 7}


def integer_reference(values, block, most):
    """The formula, value by value, in exact arithmetic: decoded values of q = round(x / s), s = max |x| / most."""
    decoded = []
    for begin in range(0, len(values), block):
        part = [float(value) for value in values[begin : begin + block]]
        scale = float(np.float32(max(abs(value) for value in part) / most))
        decoded += [round(value / scale) * scale if scale else 0.0 for value in part]
    return decoded


@pytest.mark.parametrize("length", [1, 8, 511, 512, 513, 3000])
@pytest.mark.parametrize(("codec", "row"), [(Int8(block=64), 64), (Int4(block=64), 32)], ids=["int8", "int4"])
def test_integers_are_the_formula(array, length, codec, row):
    values = noise(length, dtype=np.float64)
    rows = codec.encode(array(values))
    assert tuple(rows.shape) == (-(-length // 64), row + 4)
    decoded = numbers(codec.decode(rows, array(values)))[:length]
    np.testing.assert_allclose(decoded, integer_reference(values, 64, MOST[codec.name]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", [Int8(64), Int4(64), Brain()], ids=["int8", "int4", "bf16"])
def test_what_is_decoded_and_the_error_make_the_value(array, codec):
    values = array(noise(1000))
    error = values - codec.decode(codec.encode(values), values)[:1000]
    total = numbers(codec.decode(codec.encode(values), values)[:1000] + error)
    np.testing.assert_allclose(total, numbers(values), rtol=0, atol=1e-7 * np.abs(numbers(values)).max())
    most = MOST.get(codec.name)
    bound = np.abs(numbers(values)).max() / most * 0.51 if most else np.abs(numbers(values)) / 256
    assert (np.abs(numbers(error)) <= bound).all()


@pytest.mark.parametrize("codec", [Int8(64), Int4(64)], ids=["int8", "int4"])
def test_blocks_of_zeros_stay_zero_and_lost_blocks_are_seen(array, codec):
    values = np.zeros(192, dtype=np.float32)
    values[64], values[128] = math.inf, math.nan
    decoded = numbers(codec.decode(codec.encode(array(values)), array(values)))
    assert (decoded[:64] == 0).all() and np.isnan(decoded[64:]).all()


def test_brain_rounds_to_nearest_as_torch_does(array):
    values = np.concatenate([noise(4000), [0.0, -0.0, 1.0, 1.00390625, 1.01171875, math.inf, -math.inf]]).astype(
        np.float32
    )
    codec = Brain()
    decoded = numbers(codec.decode(codec.encode(array(values)), array(values)))[: len(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert decoded.tobytes() == expected.tobytes()
    assert np.isnan(numbers(codec.decode(codec.encode(array(np.array([math.nan], np.float32))), array(values)))[0])


def test_what_bfloat16_cannot_hold_is_infinite_and_no_warning(array):
    values, codec = array(np.array([1e39, -1e39, 1.0])), Brain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers(codec.decode(codec.encode(values), values))[:3].tolist() == [math.inf, -math.inf, 1.0]


def test_int8_refuses_a_block_that_makes_no_sense():
    with pytest.raises(ValueError, match="block: expected a multiple of 4"):
        Int8(block=6)


# fp16 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1e-44, 1e-30, 3e-8, 0.5, 1.0, 40_000.0, 65_504.0, 1e30])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 64])
def test_the_scale_leaves_room_for_the_sum_and_wastes_little_of_it(largest, ranks):
    exponent = exponent_of(largest)
    scale = scale_for(exponent, ranks)
    assert largest <= 2.0**exponent < 2 * largest * (1 + 1e-12)
    assert ranks * largest * scale <= GREATEST / 2
    assert scale <= 2.0**120, "float32 holds it, and its inverse"
    if scale < 2.0**120:
        assert ranks * largest * scale > GREATEST / 16
    assert math.frexp(scale)[0] == 0.5, "a power of two changes no mantissa"


def test_scaled_half_keeps_eleven_bits(array):
    values = noise(1000) * 1e6
    scale = scale_for(exponent_of(float(np.abs(values).max())), 4)
    codec, decoded = ScaledHalf(), array(np.zeros_like(values))
    codec.decode_into(decoded, codec.encode(array(values), scale), scale)
    decoded = numbers(decoded)
    large = np.abs(values) > np.abs(values).max() * 1e-4
    np.testing.assert_allclose(decoded[large], values[large], rtol=2**-11)


def test_nothing_and_infinity_have_their_own_exponents():
    assert scale_for(exponent_of(0.0), 4) == 1.0
    assert scale_for(exponent_of(math.inf), 4) is None and scale_for(exponent_of(math.nan), 4) is None


# top-k ------------------------------------------------------------------------------------------------------------


def topk_reference(values, count):
    """The `count` entries of largest magnitude, found by sorting; zeros elsewhere."""
    kept = sorted(range(len(values)), key=lambda i: -abs(values[i]))[:count]
    return [values[i] if i in kept else 0.0 for i in range(len(values))]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("density", [0.001, 0.1, 1.0])
def test_topk_sends_the_largest_entries(array, dtype, density):
    values = noise(500, dtype=dtype)
    codec = TopK(density)
    decoded = array(np.zeros(500, dtype=dtype))
    rows = codec.encode(array(values))
    codec.add_to(decoded, rows)
    assert len(rows) == max(1, round(500 * density))
    assert numbers(decoded).tolist() == topk_reference(values.tolist(), codec.count(500))


@pytest.mark.parametrize("kind", ["normal", "ties", "concentrated", "constant"])
def test_a_sampled_threshold_finds_the_same_entries(kind):
    """The fast path of long torch tensors, against numpy's."""
    values = np.random.RandomState(3).standard_normal(200_000).astype(np.float32)
    if kind == "ties":
        values = np.round(values, 1)
    if kind == "concentrated":  # no sample sees them
        values[:] = 0.0
        values[1001:1101] = 5.0
    if kind == "constant":
        values[:] = 1.0
    for density in (0.0003, 0.01, 0.4):
        codec, found = TopK(density), torch.zeros(200_000)
        codec.add_to(found, codec.encode(torch.from_numpy(values)))
        count = codec.count(200_000)
        assert sorted(np.abs(values))[-count:] == sorted(np.abs(values[codec.places(
            codec.encode(torch.from_numpy(values))).numpy()])), density
        assert (found.numpy() == values)[found.numpy() != 0].all()


def test_topk_sends_nothing_of_nothing_and_else_an_entry_at_least():
    assert [TopK(0.01).count(length) for length in (0, 1, 100, 1000)] == [0, 1, 1, 10]


def test_topk_sends_a_nan(array):
    values = noise(100)
    values[40] = math.nan
    decoded = array(np.zeros(100, dtype=np.float32))
    codec = TopK(0.02)
    codec.add_to(decoded, codec.encode(array(values)))
    assert np.isnan(numbers(decoded)[40])


# PowerSGD ---------------------------------------------------------------------------------------------------------


def powersgd_reference(matrices, q):
    """Algorithm 1 of arXiv:1905.13727 for the matrices of all workers, in the paper's notation and in fp64."""
    p = sum(m @ q for m in matrices)
    p_hat, _ = np.linalg.qr(p)  # ORTHOGONALIZE
    q_new = sum(m.T @ p_hat for m in matrices)
    return p_hat @ q_new.T


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_the_papers_algorithm(array, rank):
    shapes = [(12, 20), (30, 7)]
    workers = [noise(12 * 20 + 30 * 7, seed=w, dtype=np.float64) for w in range(3)]
    codec = LowRank(shapes, rank=rank)
    q = codec.first_q(array(workers[0]))
    left = sum(codec.left(array(w), q) for w in workers)
    p = orthonormal(codec.split_left(left))
    right = codec.split_right(sum(codec.right(array(w), p) for w in workers))
    result = array(np.zeros(450))
    codec.product_into(result, p, right)
    left_over = array(workers[0].copy())
    codec.subtract_product(left_over, p, right)
    np.testing.assert_allclose(numbers(left_over) + numbers(result), workers[0], atol=1e-9)
    result = numbers(result)
    for index, (begin, (rows, columns)) in enumerate(zip([0, 240], shapes, strict=True)):
        matrices = [w[begin : begin + rows * columns].reshape(rows, columns) for w in workers]
        expected = powersgd_reference(matrices, numbers(q[index]))
        np.testing.assert_allclose(result[begin : begin + rows * columns], expected.reshape(-1), rtol=1e-9, atol=1e-6)


def test_columns_become_orthonormal_and_dependent_ones_zero(array):
    matrix = np.random.RandomState(0).standard_normal((50, 4))
    matrix[:, 2] = matrix[:, 0] + 2 * matrix[:, 1]
    other = np.random.RandomState(1).standard_normal((30, 2))
    *alike, last = map(numbers, orthonormal([array(each.copy()) for each in (matrix, 1e-9 * matrix[::-1], other)]))
    for done in alike:
        np.testing.assert_allclose(done.T @ done, np.diag([1.0, 1.0, 0.0, 1.0]), atol=1e-12)
    np.testing.assert_allclose(last.T @ last, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(last @ (last.T @ other), other, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_columns_become_orthonormal_though_their_squares_are_no_numbers_of_float32(array, scale):
    matrix = (np.random.RandomState(0).standard_normal((50, 3)) * scale).astype(np.float32)
    done = numbers(orthonormal([array(matrix)])[0])
    np.testing.assert_allclose(done.T @ done, np.eye(3), atol=1e-5)


def test_zeros_stay_zeros_and_a_nan_spreads_over_its_matrix_alone(array):
    spoilt = np.ones((5, 2))
    spoilt[3, 0] = np.nan
    zeros, bad, good = map(numbers, orthonormal([array(each) for each in (np.zeros((5, 2)), spoilt, np.eye(5)[:, :2])]))
    assert not zeros.any() and np.isnan(bad).all() and np.array_equal(good, np.eye(5)[:, :2])


def test_powersgd_of_a_matrix_of_low_rank_is_exact(array):
    left, right = np.random.RandomState(1).standard_normal((40, 2)), np.random.RandomState(2).standard_normal((30, 2))
    values = array((left @ right.T).reshape(-1))
    codec = LowRank([(40, 30)], rank=2)
    p = orthonormal(codec.split_left(codec.left(values, codec.first_q(values))))
    result = array(np.zeros(1200))
    codec.product_into(result, p, codec.split_right(codec.right(values, p)))
    np.testing.assert_allclose(numbers(result), numbers(values), atol=1e-10)


def test_factors_have_no_more_columns_than_their_matrix_has_rows_or_columns():
    codec = LowRank([(2, 30), (40, 3), (9, 9)], rank=4)
    assert codec.ranks == [2, 3, 4] and codec.right_length == 30 * 2 + 3 * 3 + 9 * 4
    left = codec.split_left(np.zeros(2 * 2 + 40 * 3 + 9 * 4))
    assert len(codec.right(np.zeros(codec.length), left)) == codec.right_length


def test_powersgd_pays_for_large_matrices_only():
    assert pays(512, 512, 4) and not pays(8, 512, 4) and not pays(512, 8, 4)


@pytest.mark.parametrize("shape, matrix", [
    ((64, 32), (64, 32)),
    ((128, 64, 3, 3), (128, 576)),  # a convolution of PyTorch, and of Keras
    ((3, 3, 64, 128), (576, 128)),
    ((512, 8, 64), (512, 512)),  # of Keras's attention: query, and output
    ((8, 64, 512), (512, 512)),
])  # fmt: skip
def test_a_parameter_is_seen_as_the_squarest_matrix(shape, matrix):
    assert matrix_shape(shape) == matrix
    assert shape == (64, 32) or CodecSpec(name="powersgd").takes(shape)


def test_the_first_q_is_the_same_in_every_library():
    codec = LowRank([(8, 16)], rank=3)
    ours = codec.first_q(np.zeros(1, np.float32))[0]
    theirs = codec.first_q(torch.zeros(1))[0]
    assert ours.tobytes() == theirs.numpy().tobytes()


def test_something_else_than_an_array_is_refused():
    with pytest.raises(TypeError, match="Expected a numpy array or a torch tensor. Received: <class 'list'>"):
        verbs_of([1.0])


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_the_largest_may_be_a_negative_one(make):
    array = make([-3.0, 1.0])
    verbs = verbs_of(array)
    assert verbs.largest(array) == 3.0 and verbs.exponent(array) == 2
    assert not verbs.all_finite([make([-np.inf, 1.0])])


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_norm_of_many_small_numbers_beside_a_large_one_is_exact(make):
    values = np.full(1_000_001, 1e-3, np.float32)
    values[0] = 1e3
    array = make(values)
    assert float(verbs_of(array).squared_norm(array)) == pytest.approx(1e6 + 1.0, rel=1e-9)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize("length", [1, 1 << 16, 20_000_001])
def test_a_norm_is_nearly_right_of_however_many_numbers(make, length):
    array = make(np.full(length, 1.1, np.float32))
    assert verbs_of(array).squares(array) == pytest.approx(length * np.float64(np.float32(1.1)) ** 2, rel=1e-4)
    array[length // 2] = np.nan
    assert np.isnan(verbs_of(array).squares(array))


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_difference_may_take_the_place_of_either(make):
    for place in (0, 1):
        arrays = make([3.0, 5.0]), make([1.0, 1.0])
        verbs_of(arrays[0]).difference_into(arrays[place], *arrays)
        assert arrays[place].tolist() == [2.0, 4.0]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_state_that_was_loaded_is_nobody_elses(make):
    like, saved = make([0.0, 0.0]), make([1.0, 2.0])
    loaded = verbs_of(like).like(saved, like)
    loaded += 1.0
    assert saved.tolist() == [1.0, 2.0]


def test_the_largest_are_found_where_a_sample_has_nothing_else():
    """As where they lie as far apart as what is looked at."""
    length = 1 << 17
    values = torch.rand(length)
    values[:: length // 20_000] += 10.0
    count = length // 2
    places = verbs_of(values).top(values, count)
    assert len(places) == count and values[places.long()].sum() == pytest.approx(float(values.topk(count).values.sum()))


def test_not_a_number_is_among_the_largest():
    for length in (1000, 1 << 17):
        values = torch.rand(length)
        values[7] = torch.nan
        assert 7 in verbs_of(values).top(values, 10).tolist()
