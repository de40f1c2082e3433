"""Sums over ranks, by every algorithm with every codec, on ranks that are threads: laws 1, 2, 5 and 6."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvd_hetero.codecs.block import Int4, Int8
from hvd_hetero.engine import hierarchy
from hvd_hetero.engine.hierarchy import ALGORITHMS, levels_of, one_level, topology_now
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers import feedback, reduction, timing
from hvd_hetero.optimizers.codec_spec import CodecSpec, LinkCodecs
from hvd_hetero.optimizers.feedback import GatheredSum
from hvd_hetero.optimizers.reduction import ExactSum, HalfPrecisionSum
from hvd_hetero.optimizers.route import Route
from hvd_hetero.optimizers.route_trial import RouteTrial
from hvd_hetero.optimizers.router import Router
from hvd_hetero.optimizers.weighted_exchange import WeightedExchange
from hvd_hetero.policy.link import Link
from hvd_hetero.policy.topology import Topology

SHAPES = [(24, 40), (60, 16)]
LENGTH = 24 * 40 + 60 * 16
CODECS = {
    "none": CodecSpec(name="none"),
    "fp16": CodecSpec(name="fp16"),
    "bf16": CodecSpec(name="bf16"),
    "int8": CodecSpec(name="int8", block=64),
    "int4": CodecSpec(name="int4", block=64, warmup_steps=1),
    "topk": CodecSpec(name="topk", density=0.05, warmup_steps=0),
    "powersgd": CodecSpec(name="powersgd", rank=2, warmup_steps=0),
}
NODES = [
    ((0,),),
    ((0, 1),),
    ((0,), (1,)),
    ((0, 1), (2,)),
    ((0, 1), (2, 3)),
    ((0, 1, 2), (3,)),
    ((0, 3), (1, 2, 4)),
    ((0, 1, 2), (3, 4), (5, 6, 7)),
    ((0,), (1, 2, 3, 4), (5, 6, 7)),
]
LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy}


@pytest.fixture(autouse=True)
def quick_timing():
    """Nothing is cut short here, where timing itself is tested."""


def gradients(ranks, step, dtype=np.float64):
    """What each rank brings to a step."""
    return [np.random.RandomState(1000 * step + rank).standard_normal(LENGTH).astype(dtype) for rank in range(ranks)]


def combinations():
    for nodes, algorithm, codec in itertools.product(NODES, ALGORITHMS, CODECS):
        if not (codec == "powersgd" and algorithm in ("rails", "scatter")):  # it needs whole matrices
            sizes = "+".join(str(len(node)) for node in nodes)
            yield pytest.param(nodes, algorithm, codec, id=f"{sizes}-{algorithm}-{codec}")


class Watched:
    """An engine that tells of each all-reduce before it starts: `tell(name, array)`."""

    def __init__(self, engine, tell):
        self._engine, self._tell = engine, tell

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def allreduce_async(self, array, *, name, op="sum"):
        self._tell(name, array)
        return self._engine.allreduce_async(array, name=name, op=op)


def route_of(engine, nodes, algorithm, spec, local=None):
    return Route(levels_of(engine, Topology(nodes=nodes)), algorithm, cross=spec.reduction(SHAPES), local=local)


def summed(nodes, algorithm, spec, steps, array=np.asarray, dtype=np.float64, brought=gradients):
    """What each rank got in each step, and what all ranks together still keep: [rank][step], array."""
    ranks = sum(map(len, nodes))

    def program(engine):
        route = route_of(engine, nodes, algorithm, spec)
        results = []
        for step in range(steps):
            mine = array(brought(ranks, step, dtype)[engine.rank])
            result = route.start(mine, name="sum").wait()
            results.append(np.asarray(result).copy())
            route.end_step(bool(np.isfinite(results[-1]).all()))
        kept = array(np.zeros(LENGTH, dtype=dtype))
        route.move_residual_to(kept)
        return results, np.asarray(kept)

    ended = World(ranks).run(program)
    return [results for results, _ in ended], sum(kept for _, kept in ended)


@pytest.mark.parametrize(("nodes", "algorithm", "codec"), list(combinations()))
def test_nothing_is_lost_and_all_ranks_get_the_same(nodes, algorithm, codec):
    ranks, steps = sum(map(len, nodes)), 4
    results, kept = summed(nodes, algorithm, CODECS[codec], steps)
    for step in range(steps):
        assert len({results[rank][step].tobytes() for rank in range(ranks)}) == 1, "law 5"
    expected = [sum(gradients(ranks, step)) for step in range(steps)]
    if codec in ("none", "fp16", "bf16"):
        close = {"none": 1e-12, "fp16": 2**-10, "bf16": 2**-7}[codec]
        for got, true in zip(results[0], expected, strict=True):
            assert np.abs(got - true).max() <= close * np.abs(true).max() * (1 if codec == "none" else 2), "law 2"
    else:  # law 6: what was sent and what is kept make what was brought
        np.testing.assert_allclose(sum(results[0]) + kept, sum(expected), rtol=0, atol=1e-5)
        if codec != "int8" and (len(nodes) > 1 or (algorithm == "flat" and ranks > 1)):
            assert np.abs(kept).max() > 0.1, "these keep a good deal back; a test that never sees it shows nothing"


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("piece", [200, 333, 64])
def test_long_arrays_go_in_pieces(codec, piece, monkeypatch):
    monkeypatch.setattr(reduction, "PIECE", piece)
    monkeypatch.setattr(feedback, "SHORT_PIECE", piece)
    for algorithm in ("flat", "rails"):
        results, kept = summed(((0, 1), (2, 3, 4)), algorithm, CODECS[codec], 3)
        assert len({result[-1].tobytes() for result in results}) == 1
        true = [sum(gradients(5, step)) for step in range(3)]
        if codec in ("int8", "int4"):
            np.testing.assert_allclose(sum(results[0]) + kept, sum(true), rtol=0, atol=1e-5)
        else:
            np.testing.assert_allclose(results[0], true, rtol=0, atol=2**-4)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("algorithm", ["flat", "leader"])
def test_torch_and_numpy_give_the_same(algorithm, codec):
    nodes = ((0, 1), (2,))
    ours, kept = summed(nodes, algorithm, CODECS[codec], 3, dtype=np.float32)
    theirs, kept_there = summed(nodes, algorithm, CODECS[codec], 3, array=torch.from_numpy, dtype=np.float32)
    np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(kept, kept_there, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", CODECS)
def test_a_nan_on_one_rank_is_seen_by_all_and_spoils_nothing_that_is_kept(codec):
    nodes = ((0, 1), (2, 3))

    def brought(ranks, step, dtype):
        values = gradients(ranks, step, dtype)
        if step == 2:
            values[1][100] = math.nan
        return values

    for algorithm in ALGORITHMS:
        if codec == "powersgd" and algorithm in ("rails", "scatter"):
            continue
        results, kept = summed(nodes, algorithm, CODECS[codec], 5, brought=brought)
        for rank in range(4):
            assert np.isnan(results[rank][2]).any()
            assert all(np.isfinite(results[rank][step]).all() for step in (0, 1, 3, 4))
        if CODECS[codec].keeps:  # the step that failed left no trace
            sent = sum(results[0][step] for step in (0, 1, 3, 4))
            true = sum(sum(gradients(4, step)) for step in (0, 1, 3, 4))
            np.testing.assert_allclose(sent + kept, true, rtol=0, atol=1e-5)


def test_sums_that_overflow_float16_come_out_right():
    """4 ranks at 40,000, which Horovod's own fp16 makes infinite."""

    def brought(ranks, step, dtype):
        return [np.full(LENGTH, 40_000.0 if step != 1 else 10.0, dtype=dtype) for _ in range(ranks)]

    for algorithm in ALGORITHMS:
        results, _ = summed(((0, 1), (2, 3)), algorithm, CODECS["fp16"], 4, dtype=np.float32, brought=brought)
        for step, expected in enumerate([160_000.0, 40.0, 160_000.0, 160_000.0]):
            np.testing.assert_allclose(results[0][step], expected, rtol=2**-10)


def test_what_grows_beyond_its_scale_is_sent_again():
    names = []

    def program(engine):
        route = Route(one_level(Watched(engine, lambda name, _: names.append(name))), "flat", cross=HalfPrecisionSum())
        for value in (1.0, 1.0, 1.5, 1e3):
            result = route.start(np.full(8, value, dtype=np.float32), name="x").wait()
            np.testing.assert_allclose(result, 2 * value, rtol=2**-10)

    World(2).run(program)
    assert sorted(set(names)) == ["x.again", "x.exact", "x.half.0"]
    assert names.count("x.again") == 2, "once, on both ranks"


def test_what_is_small_after_zeros_is_not_rounded_by_their_scale():
    """The first gradients of what feeds a layer of zeros, as of LoRA, are zeros, and the next ones small."""

    def program(engine):
        route = Route(one_level(engine), "flat", cross=HalfPrecisionSum())
        for value in (0.0, 1e-8, 1.1e-8, 0.0):
            result = route.start(np.full(8, value, dtype=np.float32), name="x").wait()
            np.testing.assert_allclose(result, 2 * value, rtol=2**-10)

    World(2).run(program)


def test_half_carries_zeros_and_comes_back_from_them():
    def program(engine):
        route = Route(one_level(engine), "flat", cross=HalfPrecisionSum())
        values = [0.0, 0.0, 5.0, 5.0]
        return [route.start(np.full(8, v, dtype=np.float32), name="x").wait()[0] for v in values]

    assert World(3).run(program)[0] == [0.0, 0.0, 15.0, 15.0]


def test_a_codec_within_nodes_composes_with_one_between_them():
    nodes = ((0, 1), (2, 3))

    def program(engine):
        route = route_of(engine, nodes, "rails", CODECS["int8"], local=HalfPrecisionSum())
        return [np.array(route.start(gradients(4, step)[engine.rank], name="x").wait()) for step in range(2)]

    results = World(4).run(program)
    for step in range(2):
        true = sum(gradients(4, step))
        assert len({ranks[step].tobytes() for ranks in results}) == 1
        assert np.abs(results[0][step] - true).max() < 0.15


def test_warm_up_is_exact():
    spec = CodecSpec(name="topk", density=0.01, warmup_steps=2)
    results, _ = summed(((0, 1), (2,)), "leader", spec, 3)
    for step in range(2):
        np.testing.assert_allclose(results[0][step], sum(gradients(3, step)), atol=1e-12)
    assert np.count_nonzero(results[0][2]) <= 3 * 0.01 * LENGTH + 3


@pytest.mark.parametrize("nodes", [((0,), (1,)), ((0, 1), (2,), (3,))])  # in one stage, and in two
def test_int4_sends_whole_bytes_first(nodes, monkeypatch):
    widths = []
    decode = Int4.decode  # both codecs inherit it
    for codec in (Int8, Int4):
        monkeypatch.setattr(codec, "decode", lambda *args: widths.append(args[1].shape[1]) or decode(*args))
    spec = CodecSpec(name="int4", block=64, warmup_steps=2)
    seen = []
    for steps in (2, 3):
        widths.clear()
        results, kept = summed(nodes, "leader", spec, steps)
        seen.append(set(widths))
        true = sum(sum(gradients(sum(map(len, nodes)), step)) for step in range(steps))
        np.testing.assert_allclose(sum(results[0]) + kept, true, rtol=0, atol=1e-5)
    assert seen == [{64 + 4}, {64 + 4, 32 + 4}]


def test_a_factor_that_died_out_comes_back():
    """After a gradient of zeros, PowerSGD's Q is zero, and would stay so."""

    def brought(ranks, step, dtype):
        return [values * (step != 1) for values in gradients(ranks, step, dtype)]

    spec = CODECS["powersgd"]
    results, kept = summed(((0,), (1,)), "flat", spec, 6, brought=brought)
    assert all(np.abs(results[0][step]).max() > 0.1 for step in (2, 3, 4, 5))


class Ticking:
    """A clock on which `costs[title]` seconds pass while a route is under way."""

    def __init__(self, costs):
        self.costs, self.now = costs, 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("bad", [(), (1, 4, 18)])
def test_a_trial_finds_the_fastest_route_and_loses_nothing(loaded, bad):
    """Also where steps are not finite, and where others take over after each step what is saved."""
    steps, nodes = 30, ((0, 1), (2, 3))

    def program(engine):
        clock = Ticking({})
        told = []

        def make():
            routes = {
                "slow": route_of(engine, nodes, "rails", CODECS["int8"]),
                "fast": route_of(engine, nodes, "flat", CODECS["topk"]),
            }
            for title, seconds in (("slow", 2.0), ("fast", 1.0)):
                start = routes[title].start

                def slowed(array, *, name, start=start, seconds=seconds):
                    clock.now += seconds * (1 + engine.rank)  # other ranks wait longer: they came first
                    return start(array, name=name)

                routes[title].start = slowed
            # The clock stands still while a route starts, so what passes is what the route says.
            return RouteTrial(
                routes, chosen="slow", size_bytes=LENGTH * 8, engine=engine, tell=told.append, clock=clock
            )

        trial = make()
        total = 0.0
        for step in range(steps):
            mine = gradients(4, step)[engine.rank]
            if step in bad:
                mine[7] = np.inf
            found = np.array(trial.start(mine, name="x").wait())
            trial.end_step(step not in bad)
            if step not in bad:
                total = total + found
            if loaded:
                state, trial = trial.state_dict(), make()
                trial.load_state_dict(state)
        kept = np.zeros(LENGTH)
        trial.add_residual_to(kept)
        return trial.title, [choice.route for choice in told], total, kept

    ended = World(4).run(program)
    assert {title for title, *_ in ended} == {"fast"}
    assert all(told == ["fast"] for _, told, _, _ in ended)
    assert len({total.tobytes() for _, _, total, _ in ended}) == 1
    true = sum(sum(gradients(4, step)) for step in range(steps) if step not in bad)
    np.testing.assert_allclose(ended[0][2] + sum(kept for *_, kept in ended), true, rtol=0, atol=1e-4)


def test_the_router_gives_every_rank_the_same_way():
    nodes = ((0, 1), (2, 3))

    def program(engine):
        told = []
        levels = levels_of(engine, Topology(nodes=nodes))
        tell = lambda name, choice: told.append(choice)  # noqa: E731
        router = Router(levels, algorithm="auto", codecs=LinkCodecs(auto=True), tell=tell)
        array = np.zeros(LENGTH)
        routes = [router.route_for(f"b{i}", array, SHAPES, lossy=lossy) for i, lossy in enumerate((True, False))]
        for step in range(2):
            for i, route in enumerate(routes):
                route.start(gradients(4, step)[engine.rank], name=f"b{i}").wait()
                route.end_step(True)
        return [choice.route for choice in told]

    chosen = World(4).run(program)
    assert len(set(map(tuple, chosen))) == 1 and len(chosen[0]) == 2


def test_what_is_timed_anew_goes_by_the_same_names(monkeypatch):
    """Horovod keeps what has been agreed on for so many names: with further ones gradients would have to be anew."""
    monkeypatch.setattr(timing, "SIZES_BYTES", dict.fromkeys((2**14, 2**18), math.inf))  # which are always timed

    def program(engine):
        names = set()
        levels = levels_of(Watched(engine, lambda name, _: names.add(name)), Topology(nodes=((0, 1), (2, 3))))
        router = Router(levels, algorithm="auto", codecs=LinkCodecs())
        router.route_for("b", np.zeros(2**12), [(2**6, 2**6)], lossy=False)
        before, timing_s = set(names), router.timing_s
        router.time_anew()
        return len(before) > 1, names == before, router.timing_s not in (0.0, timing_s)

    assert World(4).run(program) == [(True, True, True)] * 4


def test_a_codec_within_nodes_is_timed_and_leaves_out_what_has_no_place_for_it():
    def program(engine):
        names = []
        levels = levels_of(engine, Topology(nodes=((0, 1), (2, 3))))
        within = replace(levels, local=Watched(levels.local, lambda name, _: names.append(name)))
        codecs = LinkCodecs(cross=CodecSpec(name="int8"), local=CodecSpec(name="fp16"))
        router = Router(within, algorithm="auto", codecs=codecs)
        route = router.route_for("b", np.zeros(2**12), [(2**6, 2**6)], lossy=True)
        route.start(np.ones(2**12), name="b").wait()
        titles = [title.replace(str(codecs.cross), "int8") for title, _ in router._timed]
        return titles, any(".half" in n for n in names)

    titles = ["flat, int8", "rails, int8, fp16 within", "leader, int8, fp16 within"]
    assert World(4).run(program) == [(titles, True)] * 4


@pytest.mark.parametrize(
    ("latency_s", "rate", "sizes"), [(8e-3, 0.5e6, 2), (8e-3, 2.5e6, 2), (8e-3, 25e6, 3), (1e-4, 1e9, 4)]
)
def test_a_line_is_fitted_to_two_sizes_at_least_and_more_where_they_take_no_seconds(latency_s, rate, sizes):
    """Small sums that take long must not end the timing: a line through one size predicts nothing."""

    def program(engine):
        clock, seen = Ticking({}), set()

        def takes_time(name, array):
            if name.rsplit(".", 1)[-1].isdigit():
                seen.add(array.nbytes)
                clock.now += latency_s + array.nbytes / rate

        told = []
        router = Router(one_level(Watched(engine, takes_time)), algorithm="auto", codecs=LinkCodecs(), clock=clock,
                        tell=lambda name, choice: told.append(choice))
        router.route_for("b", np.zeros(2**21), [(2**21,)], lossy=False)
        return len(seen), told[0].predicted_s

    for timed, predicted_s in World(2).run(program):
        assert timed == sizes
        assert predicted_s == pytest.approx(latency_s + 2**24 / rate, rel=0.02)


def test_what_warms_up_is_timed_compressed_and_has_no_trial():
    """Exact sums, as they are at first, say nothing about those that follow."""

    def program(engine):
        names = []
        levels = levels_of(Watched(engine, lambda name, _: names.append(name)), Topology(nodes=((0, 1), (2, 3))))
        codecs = LinkCodecs(cross=CodecSpec(name="powersgd", rank=2, warmup_steps=50))
        router = Router(levels, algorithm="auto", codecs=codecs)
        route = router.route_for("b", np.zeros(2**12), [(2**6, 2**6)], lossy=True)
        return type(route), any(name.endswith(".exact") for name in names), any(name.endswith(".q") for name in names)

    assert World(4).run(program) == [(Route, False, True)] * 4


def test_one_node_has_one_level():
    def program(engine):
        router = Router(levels_of(engine, Topology(nodes=((0, 1),))), algorithm="auto", codecs=LinkCodecs())
        return router.route_for("b", np.zeros(4), [(4,)], lossy=False).title

    assert World(2).run(program) == ["flat, exact", "flat, exact"]


def test_wrong_arguments_say_what_was_expected():
    def program(engine):
        with pytest.raises(ValueError, match="topology: expected one of 2 ranks.*Received: one of 3 ranks"):
            levels_of(engine, Topology(nodes=((0, 1), (2,)), local=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)))
        with pytest.raises(ValueError, match="algorithm: expected one of flat, rails, scatter, leader"):
            Route(one_level(engine), "ring", cross=ExactSum())

    World(2).run(program)
    for wrong, message in (
        ({"name": "zip"}, "name: expected one of none, fp16"),
        ({"name": "int8", "block": 3}, "block: expected"),
        ({"name": "topk", "density": 0.0}, "density: expected"),
        ({"name": "powersgd", "rank": 0}, "rank: expected"),
        ({"name": "topk", "warmup_steps": -1}, "warmup_steps: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            CodecSpec(**wrong)
    with pytest.raises(ValueError, match="local: expected none, fp16 or bf16"):
        LinkCodecs(local=CodecSpec(name="topk"))


OTHER_NODES = [(((0, 1), (2, 3)), ((0, 1, 2), (3,))), (((0, 1, 2), (3,)), ((0, 1), (2, 3)))]


@pytest.mark.parametrize(("before", "after"), OTHER_NODES)
@pytest.mark.parametrize("codec", ["fp16", "int8", "topk", "powersgd"])
@pytest.mark.parametrize("algorithm", ["rails", "leader"])
def test_a_state_of_other_nodes_is_begun_anew_on_all_ranks(before, after, codec, algorithm):
    """A checkpoint is restored on as many ranks, of which others share a node: who sums which part is another one."""
    if codec == "powersgd" and algorithm == "rails":
        return

    def program(engine):
        first = route_of(engine, before, algorithm, CODECS[codec])
        second = route_of(engine, after, algorithm, CODECS[codec])
        for step in range(2):
            mine = gradients(4, step)[engine.rank]
            mine[: LENGTH // 2] *= 4.0  # parts of unlike size
            first.start(mine, name="a").wait()
            first.end_step(True)
        second.load_state_dict(first.state_dict())
        result = np.array(second.start(gradients(4, 2)[engine.rank], name="b").wait())
        second.end_step(True)
        kept = np.zeros(LENGTH)
        second.move_residual_to(kept)
        return result, kept

    ended = World(4).run(program, timeout_s=20)
    assert len({result.tobytes() for result, _ in ended}) == 1
    np.testing.assert_allclose(ended[0][0] + sum(kept for _, kept in ended), sum(gradients(4, 2)), rtol=0, atol=2e-2)


@pytest.mark.parametrize("rank", [1, 8])
def test_factors_of_another_rank_are_begun_anew(rank):
    def program(engine):
        route = None
        for step, spec in enumerate((CODECS["powersgd"], replace(CODECS["powersgd"], rank=rank))):
            before, route = route, Route(one_level(engine), "flat", cross=spec.reduction(SHAPES))
            if before is not None:
                route.load_state_dict(before.state_dict())
            result = np.array(route.start(gradients(2, step)[engine.rank], name=f"{step}").wait())
            route.end_step(True)
            results[engine.rank].append(result)
        kept = np.zeros(LENGTH)
        route.move_residual_to(kept)
        return kept

    results: list[list[np.ndarray]] = [[], []]
    kept = sum(World(2).run(program))
    true = sum(sum(gradients(2, step)) for step in range(2))
    np.testing.assert_allclose(sum(results[0]) + kept, true, rtol=0, atol=1e-9)


def test_states_go_on_where_they_were():
    """A route that is saved and loaded gives what it would have given."""
    for codec in ("fp16", "int8", "int4", "topk", "powersgd"):

        def program(engine, codec=codec):
            first = Route(one_level(engine), "flat", cross=CODECS[codec].reduction(SHAPES))
            for step in range(3):
                first.start(gradients(2, step)[engine.rank], name="a").wait()
                first.end_step(True)
            second = Route(one_level(engine), "flat", cross=CODECS[codec].reduction(SHAPES))
            second.load_state_dict(first.state_dict())
            return [
                np.array(route.start(gradients(2, 3)[engine.rank], name=name).wait())
                for route, name in ((first, "a"), (second, "b"))
            ]

        for one, other in World(2).run(program):
            assert one.tobytes() == other.tobytes(), codec


def test_blocks_are_summed_in_the_order_of_ranks():
    """So that results repeat bit for bit, whoever comes first."""
    runs = [summed(((0, 1, 2),), "flat", CodecSpec(name="bf16"), 2)[0][0][1].tobytes() for _ in range(3)]
    assert len(set(runs)) == 1
    assert isinstance(CodecSpec(name="bf16").reduction(SHAPES), GatheredSum)


def test_later_stages_start_while_a_rank_still_computes():
    """Between two gradients a rank looks at what is under way: the sum between nodes does not wait for the last one."""

    def program(engine):
        started = []

        levels = levels_of(engine, Topology(nodes=((0, 1), (2, 3))))
        levels = replace(levels, cross=levels.cross and Watched(levels.cross, lambda name, _: started.append(name)))
        buckets = [np.ones(8), np.ones(8), np.ones(8)]
        exchange = WeightedExchange(
            engine, buckets, np.zeros(1), routes=[Route(levels, "leader") for _ in buckets], rides_in=None,
            outgoing=lambda: [1.0], name="x",
        )
        for index in range(3):
            exchange.submit(index)
            engine.allreduce_async(np.zeros(1), name=f"computing.{index}").wait()  # everybody has submitted
        before = list(started)
        results, total = exchange.finish(lambda total: 1.0)
        assert total == [4.0] and all((result == 4.0).all() for result in results)
        return before

    before = World(4).run(program)
    for rank in (0, 2):
        assert {"x.bucket.0.leaders", "x.bucket.1.leaders"} <= set(before[rank]), before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_topology_of_other_ranks_is_found_anew_in_an_elastic_job_alone(monkeypatch, capfd, rank):
    engine, two = SimpleNamespace(size=3, rank=rank), Topology(nodes=((0,), (1,)))
    three = Topology(nodes=((0, 1), (2,)))
    monkeypatch.setattr(hierarchy, "is_elastic", lambda: False)
    assert all(topology_now(engine, each) is each for each in (two, three, "auto", "flat", None))
    monkeypatch.setattr(hierarchy, "is_elastic", lambda: True)
    assert all(topology_now(engine, each) is each for each in (three, "auto", "flat", None))
    assert capfd.readouterr().err == ""
    assert topology_now(engine, two) == "auto"
    told = capfd.readouterr().err
    assert ("one of 2 ranks, and there are 3" in told) is (rank == 0), "said once"


def test_half_keeps_its_digits_after_a_step_of_very_large_gradients():
    """What falls out of the scale is sent again, as what grows out of it is."""

    def program(engine):
        route, off = Route(one_level(engine), "flat", cross=HalfPrecisionSum()), []
        for step in range(12):
            size = np.float32(1e12 if step == 3 else 1.0)
            each = [gradient * size for gradient in gradients(2, step, np.float32)]
            got, true = route.start(each[engine.rank].copy(), name="x").wait(), sum(each)
            off.append(float(np.linalg.norm(got - true) / np.linalg.norm(true)))
            route.end_step(True)
        return off

    assert max(World(2).run(program)[0]) < 1e-3


def test_zeros_now_and_then_leave_the_scale_of_half_as_it_is():
    sent = []

    def program(engine):
        start = engine.allreduce_async
        engine.allreduce_async = lambda array, **how: sent.append(how["name"]) or start(array, **how)
        route = Route(one_level(engine), "flat", cross=HalfPrecisionSum())
        for step in range(8):
            route.start(np.full(8, 0.0 if step % 2 else 5.0, dtype=np.float32), name="x").wait()

    World(2).run(program)
    assert "x.again" not in sent


def powersgd_sends(factor, array, spike=1.0):
    """The sums of some steps, over `factor`; the fourth is of gradients so many times as large."""

    def program(engine):
        spec, found = CodecSpec(name="powersgd", rank=2, warmup_steps=0), []
        route = Route(one_level(engine), "flat", cross=spec.reduction(SHAPES))
        for step in range(10):
            size = np.float32(factor * (spike if step == 3 else 1.0))
            mine = gradients(2, step, np.float32)[engine.rank] * size
            found.append(np.asarray(route.start(array(mine), name="x").wait()) / size)
            route.end_step(True)
        return found

    return World(2).run(program)[0]


@pytest.mark.parametrize("array", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-50, 2.0**30, 2.0**60, 2.0**100])
def test_powersgd_sends_of_large_and_small_gradients_what_it_sends_of_usual_ones(scale, array):
    """P is M Q, and Q what was M^T P before: in squares of gradients float32 has no room for these."""
    for usual, other in zip(powersgd_sends(1.0, array), powersgd_sends(scale, array), strict=True):
        assert usual.any() and other.any(), "a sum of zeros is no step"
        np.testing.assert_allclose(other, usual, rtol=0, atol=1e-3)


def test_a_step_of_very_large_gradients_does_not_stop_those_of_powersgd_after_it():
    assert all(each.any() for each in powersgd_sends(1.0, np.asarray, spike=1e12))
