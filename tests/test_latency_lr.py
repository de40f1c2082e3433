"""The learning-rate factor, without a framework: the same bits on all ranks; what does not last does not move it."""

import json

import numpy as np
import pytest

from hvd_hetero.engine.hierarchy import one_level
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers import control
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.latency_lr import WINDOW, LatencyLR
from hvd_hetero.optimizers.noise import NoiseMeter
from hvd_hetero.optimizers.route import Route
from hvd_hetero.optimizers.weighted_exchange import WeightedExchange
from hvd_hetero.policy.scaling import NoiseSums

WHOLE = 64


class Silent:
    def on_begin(self):
        pass

    def on_count(self):
        pass


def factors(engine, batches, *, rule="linear", base=WHOLE, staleness=lambda step: 1.0, noise=False, **options):
    """The factor of each step, on a rank that has `batches(step)[rank]` samples; the control vector is float32."""
    balancer = Balancer(engine, global_batch_size=WHOLE, min_share=0)
    lr = LatencyLR(rule=rule, base_batch_size=base, global_batch_size=WHOLE, **options)
    meter, rng = NoiseMeter(), np.random.RandomState(engine.rank)
    meter.measuring = noise
    seen = []

    def listen():
        lr.advance(
            samples=balancer.dialogue.entered, global_batch_size=balancer.global_batch_size,
            staleness=balancer.dialogue.mean_staleness, noise=meter.take(),
        )  # fmt: skip
        seen.append(lr.factor)

    balancer.dialogue.subscribe(listen)
    number = balancer.exchanges.attach(Silent())
    vector = np.zeros(5 + control.length(engine.size), dtype=np.float32)
    exchange = WeightedExchange(
        engine,
        [vector],
        vector[5:],
        routes=[Route(one_level(engine), "flat")],
        rides_in=0,
        outgoing=lambda: balancer.dialogue.outgoing(leads=number == 0, count=balancer.progress.terms, noise=meter),
        name="train",
    )
    for step in range(len(batches)):
        mine = batches[step][engine.rank]
        balancer.begin(mine)
        balancer.dialogue.staleness = staleness(step) + engine.rank - 1  # each rank knows its own
        gradient = rng.standard_normal(5) / np.sqrt(max(mine, 1)) + 0.2
        vector[:5] = gradient * mine
        meter.add(0, float((vector[:5] ** 2).sum()))
        exchange.submit(0)
        balancer.dialogue.staleness = float("nan")  # what it is later must not matter
        (merged,), total = exchange.finish(lambda total: 1 / total[0])
        balancer.dialogue.incoming(control.unpack(total, ranks=engine.size), leads=True, noise=meter)
        whole = [float((merged[:5] ** 2).sum())] if engine.rank == 0 else []
        meter.end(terms=mine, weight=mine, merged=whole, gain=1.0, all_terms=total[0], batches=1)
        balancer.exchanged(wait_s=0.0, bytes_sent=0, leads=True)
    return seen


def on_three(batches, **options):
    """The factors, once all ranks have agreed on every bit of them."""
    first, *others = World(3).run(lambda engine: factors(engine, batches, **options))
    for other in others:
        assert np.array_equal(np.array(first).view(np.int64), np.array(other).view(np.int64))
    return first


def test_the_factor_is_1_while_the_global_batch_stands():
    """Whoever takes how much of it, with a short last batch in every epoch and warm-up steps asked for."""
    rng, batches = np.random.RandomState(0), []
    for step in range(60):
        cuts = np.sort(rng.randint(0, (WHOLE if step % 6 < 5 else 9) + 1, size=2))
        batches.append(tuple(int(n) for n in np.diff([0, *cuts, WHOLE if step % 6 < 5 else 9])))
    for rule in ("linear", "sqrt", "adascale", lambda scale: scale**3):
        assert on_three(batches, rule=rule, warmup_steps=20, noise=True) == [1.0] * 60


def test_a_rank_that_is_out_for_good_lowers_the_factor_in_a_ramp_and_its_return_raises_it():
    away, back = 30, 70
    batches = [(32, 16, 0 if away <= step < back else 16) for step in range(120)]
    found = np.array(on_three(batches, rule="linear", ramp_steps=8))
    moved = away + WINDOW  # the batch of a step is heard of with the next one
    assert (found[:moved] == 1.0).all()
    assert found[moved : moved + 8] == pytest.approx(1.0 - 0.25 * np.arange(1, 9) / 8)
    assert (found[moved + 7 : back + 1] == 0.75).all()
    assert (np.diff(found[back : back + 9]) > 0).all() and (found[back + 8 :] == 1.0).all()


def test_the_warm_up_starts_at_1_and_ends_at_the_rule():
    batches = [(32, 16, 16)] * 30
    assert on_three(batches, base=16, warmup_steps=10) == pytest.approx([1 + 3 * min(i, 10) / 10 for i in range(30)])
    assert on_three(batches, base=16, rule="sqrt", warmup_steps=10)[-1] == 2.0
    assert on_three(batches, base=16) == [4.0] * 30
    assert on_three(batches, base=128, warmup_steps=10) == [0.5] * 30  # nothing to warm up for


def test_what_is_more_stale_than_usual_counts_less_and_what_is_usual_does_not():
    found = on_three([(32, 16, 16)] * 30, staleness=lambda step: 5.0 if step == 20 else 2.0)
    assert found[20] == 0.5 and found[:20] + found[21:] == [1.0] * 29


@pytest.mark.parametrize("synchronous", [0, 70])
def test_merges_that_come_as_late_as_they_usually_do_cost_next_to_nothing(synchronous):
    """However they vary, and from the first one on: synchronous steps before them do not say what is usual."""
    lr = LatencyLR(rule="linear", global_batch_size=WHOLE)
    late = [0.0] * synchronous + np.random.RandomState(0).choice([0.25, 0.5, 0.75, 1.0, 1.75, 2.5], size=200).tolist()
    for staleness in late:
        lr.advance(samples=WHOLE, global_batch_size=WHOLE, staleness=staleness)
    assert lr.progress - synchronous > 0.98 * 200
    assert lr.advance(samples=WHOLE, global_batch_size=WHOLE, staleness=5.5) == 0.5
    # Ranks come together, as at the end of an epoch: what is merged after that is not late.
    assert lr.advance(samples=WHOLE, global_batch_size=WHOLE, staleness=5.5, steps=0) == 1.0


def test_adascale_moves_alike_on_all_ranks_and_between_its_bounds():
    found = on_three([(40, 20, 4)] * 80, rule="adascale", base=16, noise=True, ramp_steps=5)
    assert found[0] == 1.0 and 1.0 < found[-1] < 4.0 and len(set(found[5:])) > 40


def sums(noise, signal, batches):
    """Sums in their expectation."""
    whole = sum(batches)
    return NoiseSums(
        squared_norms=sum(signal + noise / b for b in batches), inverse_batches=sum(1 / b for b in batches),
        ranks=len(batches), merged=signal + noise / whole, batch=whole,
    )  # fmt: skip


def test_adascale_reaches_the_gain_of_the_noise_and_counts_progress():
    lr = LatencyLR(rule="adascale", base_batch_size=16, global_batch_size=64, ramp_steps=4)
    found = [
        lr.advance(samples=64, global_batch_size=64, noise=sums(48.0, 2.0, (50, 10, 4)) if i else None)
        for i in range(200)
    ]
    gain = (48 / 16 + 2) / (48 / 64 + 2)
    assert found[0] == 1.0 and found[-1] == pytest.approx(gain, rel=1e-9)
    assert lr.noise.samples == pytest.approx(24.0)
    assert lr.progress == pytest.approx(sum(found))
    assert lr.due() == int(sum(found)) and lr.due() == 0
    lr.advance(samples=64, global_batch_size=64)
    lr.advance(samples=64, global_batch_size=64)
    assert lr.due() in (3, 4)


def test_a_changed_global_batch_is_followed_in_a_ramp():
    lr = LatencyLR(rule="linear", global_batch_size=64, ramp_steps=4)
    found = [lr.advance(samples=64, global_batch_size=64 if step < 3 else 128) for step in range(10)]
    assert found == [1.0] * 3 + [1.25, 1.5, 1.75] + [2.0] * 4


@pytest.mark.parametrize("rule", ["sqrt", "adascale"])
@pytest.mark.parametrize("stop", [7, 23, 45])
def test_a_state_saved_in_the_middle_goes_on_bit_for_bit(rule, stop):
    """Stopped in a warm-up, in a ramp and behind it; the state goes through JSON. The global batch has grown before."""

    def step(lr, index):
        factor = lr.advance(
            samples=64 if index < 12 else 32, global_batch_size=64, staleness=float(index % 3),
            noise=sums(48.0, 2.0 + index % 5, (50, 10, 4)),
        )  # fmt: skip
        return factor, lr.due()

    def make():
        return LatencyLR(rule=rule, base_batch_size=16, global_batch_size=48, warmup_steps=15, ramp_steps=10)

    whole, first = make(), make()
    expected = [step(whole, index) for index in range(60)]
    found = [step(first, index) for index in range(stop)]
    assert len(set(expected)) > 20
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.factor == first.factor
    found += [step(resumed, index) for index in range(stop, 60)]
    assert found == expected and resumed.state_dict() == whole.state_dict()


def test_a_state_on_another_global_batch_ramps_from_where_it_was():
    """What the learning rate was tuned for stays, also where nobody named it."""
    old = LatencyLR(rule="linear", global_batch_size=64, ramp_steps=4)
    for _ in range(5):
        old.advance(samples=48, global_batch_size=64)
    new = LatencyLR(rule="linear", global_batch_size=32, ramp_steps=4)
    new.load_state_dict(old.state_dict())
    assert new.base_batch_size == 64
    assert [new.advance(samples=32, global_batch_size=32) for _ in range(6)] == [0.875, 0.75, 0.625, 0.5, 0.5, 0.5]
    named = LatencyLR(rule="linear", base_batch_size=32, global_batch_size=32)
    with pytest.raises(ValueError, match="base_batch_size 32. Received: one for 64"):
        named.load_state_dict(old.state_dict())


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"rule": "cube"}, "rule: expected one of linear, sqrt, adascale, or a function .* Received: 'cube'"),
        ({"rule": lambda scale: 0.0}, "rule: expected a finite number above 0 for scale 1.0. Received: 0.0"),
        ({"base_batch_size": 0}, "base_batch_size: expected an integer of at least 1. Received: 0"),
        ({"base_batch_size": 8.0}, "base_batch_size: expected an integer of at least 1. Received: 8.0"),
        ({"warmup_steps": -1}, "warmup_steps: expected an integer of at least 0. Received: -1"),
        ({"ramp_steps": 0}, "ramp_steps: expected an integer of at least 1. Received: 0"),
    ],
)
def test_a_wrong_argument_raises(wrong, message):
    with pytest.raises(ValueError, match=message):
        LatencyLR(**{"rule": "linear", "global_batch_size": 64, **wrong})


def test_the_vector_has_one_length_and_carries_the_norms():
    norms = control.Norms(squared_norm=1.5, inverse_terms=0.25, ranks=1.0, merged=0.75)
    common = {"ranks": 2, "count": 1.0, "compute_s": 0.0, "samples": 4.0, "failed": False, "announcement": None}
    told, silent = control.pack(rank=0, norms=norms, **common), control.pack(rank=1, staleness=3.0, **common)
    assert len(told) == len(silent) == control.length(2)
    report = control.unpack([a + b for a, b in zip(told, silent, strict=True)], ranks=2)
    assert report.norms == norms and report.staleness == 1.5


def test_a_norm_that_is_not_finite_stays_at_home():
    meter = NoiseMeter()
    meter.measuring = True
    meter.add(0, float("inf"))
    meter.end(terms=4, weight=1.0, merged=[float("nan")], gain=1.0, all_terms=8, batches=1)
    assert meter.outgoing() == control.Norms()
    meter.incoming(control.Norms(squared_norm=1.0, inverse_terms=0.25, ranks=1.0), 8)
    assert meter.take() is None
    meter.incoming(control.Norms(squared_norm=3.0, inverse_terms=0.5, ranks=2.0, merged=1.0), 8)
    assert meter.take() is not None and meter.take() is None, "a step counts once"


@pytest.mark.parametrize(("terms", "batches"), [(8.0, 1), (80.0, 1), (16.0, 2), (160.0, 2)])
def test_noise_is_that_of_samples_whatever_the_number_of_their_loss_terms(terms, batches):
    """Of global batches of 8 samples, on two ranks; a sample may be a text of ten tokens."""
    meter = NoiseMeter()
    meter.end(terms=terms / 2, weight=1.0, merged=[1.0], gain=1.0, all_terms=terms, batches=batches)
    norms = control.Norms(squared_norm=3.0, inverse_terms=2 / (terms / 2), ranks=2.0, merged=1.0)
    meter.incoming(norms, 8.0)
    found = meter.take()
    assert found.batch == pytest.approx(8 * batches) and found.inverse_batches == pytest.approx(2 / (4 * batches))
