"""`strategy="auto"`: what is a stop, which strategy follows from what was measured, and the change on all ranks."""

import copy
import random

import pytest
import torch
from torch import nn

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.steadiness import Steadiness
from hvd_hetero.optimizers.stop import StopMeter
from hvd_hetero.optimizers.strategy_selector import EVERY, LEAST_EXCHANGES, StrategySelector
from hvd_hetero.policy.jitter import StopSums, estimate
from hvd_hetero.policy.speed import Observation, SpeedModel
from hvd_hetero.policy.strategy import LOCAL, SYNCHRONOUS, Prediction

WHOLE = 12
PROTOTYPE = nn.Linear(6, 3).double()


def test_a_stop_is_told_from_a_slow_step():
    meter = StopMeter()
    for step in range(40):
        meter.add(16, 0.2 * (1.0 + 0.1 * (-1) ** step) + (1.0 if step in (20, 30) else 0.0))
    ran = meter.take()
    assert ran.stops == 2 and ran.stopped_s == pytest.approx(2.0, abs=0.1)
    assert ran.running_s == pytest.approx(40 * 0.2, rel=0.03)
    assert meter.take() == StopSums()


def test_a_rank_that_becomes_slower_for_good_has_not_stopped():
    meter = StopMeter()
    for step in range(200):
        meter.add(16, 0.2 if step < 100 else 0.8)
    assert meter.take().stops <= 10


def test_a_larger_share_is_no_stop():
    meter = StopMeter()
    for step in range(100):
        meter.add(*((4, 0.1) if step % 2 else (40, 1.0)))
    assert meter.take().stops == 0


def test_what_was_run_says_how_unsteady_a_rank_is():
    jitter = estimate(StopSums(running_s=60.0, stopped_s=20.0, stops=10.0), variation=0.1)
    assert (jitter.stalled, jitter.stall_s, jitter.variation) == (0.25, 2.0, 0.1)
    assert not estimate(StopSums(60.0, 1.0, 1.0), least_stops=2.0).stalled
    assert not estimate(StopSums()).stalled


def job(
    strategy_selector, steps, *, stops, exchange_s=0.002, share=16, each_s=0.01, first=0, current=SYNCHRONOUS, seed=0
):
    """The choices in a job of four alike ranks, each of which is stopped for 1 s in `stops` steps of a thousand."""
    rng, made = random.Random(seed), []
    models = [SpeedModel(overhead_s=0.0, seconds_per_sample=each_s, standard_error=0.0, observations=20)] * 4
    windows = [[Observation(samples=share, compute_s=share * each_s * (1.0 + 0.01 * (-1) ** n)) for n in range(20)]] * 4
    meters = [StopMeter() for _ in range(4)]
    for step in range(first, first + steps):
        times = [share * each_s + (1.0 if rng.random() < stops / 1000 else 0.0) for _ in range(4)]
        for meter, time_s in zip(meters, times, strict=True):
            meter.add(share, time_s)
        whole_s = max(times) + exchange_s if current == SYNCHRONOUS else None
        strategy_selector._steadiness.hear(step, [meter.take() for meter in meters])
        strategy_selector.hear(busy_s=times, step_s=whole_s)
        choice = strategy_selector.look(step, current, models, windows, [share] * 4)
        if choice is not None:
            made.append((step, choice))
            current = choice.strategy
    return made


def test_a_steady_cluster_stays_synchronous():
    assert job(StrategySelector(Steadiness(4), round_steps=8, first_step=20), 400, stops=0) == []


def test_ranks_that_stop_are_left_to_themselves_and_taken_back():
    strategy_selector = StrategySelector(Steadiness(4), round_steps=8, first_step=20)
    (first, choice), *more = job(strategy_selector, 300, stops=30)
    assert choice.strategy == LOCAL and 20 <= first < 150 and "synchronous is" in choice.reason and not more
    (back, choice), *more = job(strategy_selector, 1500, stops=0, first=300, current=LOCAL)
    assert choice.strategy == SYNCHRONOUS and back < 1600 and not more


def test_an_exchange_that_nothing_hides_speaks_for_steps_apart():
    """0.16 s of compute, 0.4 s of exchange: a round of 8 steps takes longer than its merge."""
    strategy_selector = StrategySelector(Steadiness(4), round_steps=8, first_step=20)
    (_, choice), *more = job(strategy_selector, 200, stops=0, exchange_s=0.4)
    assert choice.strategy == LOCAL and not more


def test_a_strategy_holds_for_a_while():
    """Even where the other one always seems to be twice as fast."""
    strategy_selector, current, made = (
        StrategySelector(Steadiness(2), round_steps=8, first_step=0, hold_steps=100), SYNCHRONOUS, []
    )  # fmt: skip

    def predict(*_):
        return [
            Prediction(strategy=strategy, samples_per_s=1.0 if strategy == current else 2.0, period_s=1.0)
            for strategy in (SYNCHRONOUS, LOCAL)
        ]

    strategy_selector.predict = predict
    for step in range(350):
        strategy_selector.hear(busy_s=[0.1, 0.1], step_s=0.2)
        choice = strategy_selector.look(step, current, [None] * 2, [[]] * 2, [16] * 2)
        if choice is not None:
            made.append(step)
            current = choice.strategy
    assert made == [LEAST_EXCHANGES - 1 + 100 * number for number in range(4)]


def test_shares_that_do_not_fit_alone_do_not_speak_for_steps_apart():
    """As where a bound holds the fast rank up: at the end of an epoch it waits for the slow one, apart or not."""
    strategy_selector = StrategySelector(Steadiness(2), round_steps=2, first_step=0)
    models = [SpeedModel(overhead_s=0.0, seconds_per_sample=each) for each in (0.001, 0.003)]
    for _ in range(LEAST_EXCHANGES):
        strategy_selector.hear(busy_s=[0.032, 0.096], step_s=0.096)
    assert strategy_selector.look(100, SYNCHRONOUS, models, [[], []], [32, 32]) is None


def test_one_rank_has_nobody_to_step_apart_from():
    """However long what is beside its computing takes."""
    strategy_selector = StrategySelector(Steadiness(1), round_steps=2, first_step=0)
    models = [SpeedModel(overhead_s=0.0, seconds_per_sample=0.001)]
    for _ in range(LEAST_EXCHANGES):
        strategy_selector.hear(busy_s=[0.032], step_s=0.096)
    assert strategy_selector.look(100, SYNCHRONOUS, models, [[]], [32]) is None


def test_looks_are_rare():
    strategy_selector, looked = StrategySelector(Steadiness(4), round_steps=8, first_step=0), []
    predict = strategy_selector.predict
    strategy_selector.predict = lambda *arguments: looked.append(1) or predict(*arguments)
    job(strategy_selector, 400, stops=0)
    assert 400 / EVERY - 3 <= len(looked) <= 400 / EVERY


class Counted:
    """A stopwatch whose time is counted."""

    def __init__(self):
        self.now_s = 0.0

    def mark(self):
        return self.now_s

    def passed(self, mark):
        return True

    def seconds(self, start, end):
        return end - start


def automatic(engine, steps, stops_until, make=torch.optim.SGD, **settings):
    """One rank of a job in which each rank in turn is stopped for 1 s, until step `stops_until`."""
    hvd = pytest.importorskip("hvd_hetero.torch")
    torch.set_num_threads(1)
    model = copy.deepcopy(PROTOTYPE)
    balancer = hvd.Balancer(WHOLE, engine=engine, shares=(4, 4, 4), adaptive=False)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters(), lr=0.1, **settings), model.named_parameters(), balancer=balancer, strategy="auto"
    )
    clock, generator = Counted(), torch.Generator().manual_seed(1)
    balancer.step_timer.measure_with(clock)
    x = torch.randn(steps, WHOLE, 6, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(2)
    mine, is_local, alike = slice(4 * engine.rank, 4 * engine.rank + 4), [], []
    for step in range(steps):
        optimizer.zero_grad()
        balancer.begin(4)
        clock.now_s += 0.2 + (1.0 if step < stops_until and step % 12 == 4 * engine.rank else 0.0)
        is_local.append(balancer.plan.strategy == LOCAL)
        if is_local[-2:] == [True, False]:  # merged at the end of the step before
            alike.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        nn.functional.cross_entropy(model(x[step, mine]), y[step, mine]).backward()
        optimizer.step()
    optimizer.merge()
    return [torch.cat([p.detach().reshape(-1) for p in model.parameters()]), *alike], is_local, balancer.plans


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"momentum": 0.9},
        pytest.param({"make": torch.optim.AdamW}, marks=pytest.mark.slow),
        {"make": torch.optim.Adam, "amsgrad": True},
    ],
)
def test_auto_goes_apart_and_comes_back_on_all_ranks_at_once(settings):
    pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")
    found = World(3).run(lambda engine: automatic(engine, 900, 200, **settings), timeout_s=120)
    models, is_local, plans = found[0]
    assert plans[-1].strategy == SYNCHRONOUS and any(is_local) and not is_local[0] and not is_local[-1]
    assert [plan.strategy for plan in plans] == [SYNCHRONOUS, LOCAL, SYNCHRONOUS], [plan.reason for plan in plans]
    assert len(models) == 2
    for other, there, their_plans in found[1:]:
        assert there == is_local and list(their_plans) == list(plans)
        assert all(torch.equal(one, theirs) for one, theirs in zip(models, other, strict=True)), "law 5"


def test_auto_stays_synchronous_where_nothing_stops():
    pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")
    for _, is_local, plans in World(3).run(lambda engine: automatic(engine, 120, 0)):
        assert not any(is_local) and len(plans) == 1


def test_what_speaks_for_steps_apart_is_in_a_state():
    def planner():
        balancer = Balancer(SoloEngine(), global_batch_size=4)
        balancer.planner.strategy_selector = StrategySelector(balancer.planner.steadiness, round_steps=4, first_step=0)
        return balancer.planner

    before, after = planner(), planner()
    before.steadiness.hear(7, [StopSums(10.0, 5.0, 5.0)])
    before.strategy_selector.hear(busy_s=[0.1], step_s=0.3)
    after.load_state_dict(before.state_dict(), 7)
    assert after.steadiness._lately == before.steadiness._lately
    assert after.strategy_selector.exchange_s == pytest.approx(0.2)


@pytest.mark.parametrize(("stops", "looks"), [(5.0, 5), (0.0, 100)])
def test_predictions_take_a_small_part_of_the_time(monkeypatch, stops, looks):
    """Where a prediction takes long, as with ranks that stop at times, and steps are short, there are fewer."""
    steadiness, found = Steadiness(4), []
    steadiness.hear(0, [StopSums(running_s=10.0, stopped_s=0.001 * stops, stops=stops)] * 4)
    strategy_selector = StrategySelector(steadiness, round_steps=8, first_step=0)
    predict = strategy_selector.predict
    monkeypatch.setattr(strategy_selector, "predict", lambda *known: found.append(1) or predict(*known))
    models = [SpeedModel(overhead_s=0.0, seconds_per_sample=0.01 / 16, standard_error=0.0, observations=20)] * 4
    windows = [[Observation(samples=16, compute_s=0.01)] * 20] * 4
    for _ in range(8):
        strategy_selector.hear(busy_s=[0.01] * 4, step_s=0.01)
    for step in range(1000):
        assert strategy_selector.look(step, SYNCHRONOUS, models, windows, [16] * 4) is None
    assert len(found) == looks, "10 ms are 0.5 % of 200 steps of 10 ms"


def test_a_state_of_an_earlier_step_is_looked_at_in_time():
    strategy_selector = StrategySelector(Steadiness(4), round_steps=8, first_step=20)
    job(strategy_selector, 60, stops=0, first=1000)
    strategy_selector.load_state_dict(strategy_selector.state_dict())
    assert strategy_selector._next_look == 20
    strategy_selector.load_state_dict(strategy_selector.state_dict(), since=100)
    assert strategy_selector._next_look == 140, "a strategy holds for so many batches, whoever was lost meanwhile"


def foreseen(strategy_selector, synchronous, local):
    """Lets these samples per second be predicted to `strategy_selector`; the list has an entry for each prediction."""
    looked = []
    strategy_selector.predict = lambda *_: looked.append(1) or (
        Prediction(strategy=SYNCHRONOUS, samples_per_s=synchronous, period_s=1.0),
        Prediction(strategy=LOCAL, samples_per_s=local, period_s=1.0),
    )
    return looked


def heard(strategy_selector, count, busy_s=(1.0, 2.0), step_s=2.5):
    for _ in range(count):
        strategy_selector.hear(busy_s=busy_s, step_s=step_s)


def test_an_exchange_is_what_a_synchronous_step_takes_beyond_its_slowest_rank():
    strategy_selector = StrategySelector(Steadiness(2), round_steps=4, first_step=0)
    assert strategy_selector.exchange_s == 0.0
    heard(strategy_selector, 2, step_s=None)  # apart
    heard(strategy_selector, 2, busy_s=(0.0, 0.0), step_s=9.0)  # nobody has said anything
    assert strategy_selector.exchange_s == 0.0
    heard(strategy_selector, 3)
    heard(strategy_selector, 1, step_s=1.5)  # as clocks may have it: none is below 0
    heard(strategy_selector, 1, busy_s=(0.0, 2.0), step_s=7.0)
    assert strategy_selector.exchange_s == 0.5
    heard(strategy_selector, 4, step_s=1.5)
    assert strategy_selector.exchange_s == 0.0


def test_a_choice_waits_for_exchanges_only_while_there_are_some():
    for current in (SYNCHRONOUS, LOCAL):
        strategy_selector = StrategySelector(Steadiness(2), round_steps=4, first_step=30)
        samples_per_s = (100.0, 10.0) if current == SYNCHRONOUS else (10.0, 100.0)
        looked = foreseen(strategy_selector, *samples_per_s)
        heard(strategy_selector, LEAST_EXCHANGES - 1)
        strategy_selector.look(29, current, [], [], [])
        assert not looked
        strategy_selector.look(30, current, [], [], [])
        assert bool(looked) is (current == LOCAL)
        heard(strategy_selector, 1)
        strategy_selector.look(30 + EVERY, current, [], [], [])
        assert len(looked) == (2 if current == LOCAL else 1)


def test_looks_are_so_many_batches_apart_and_a_new_strategy_holds_for_as_many_as_it_should():
    strategy_selector = StrategySelector(Steadiness(2), round_steps=4, first_step=0, hold_steps=35)
    heard(strategy_selector, LEAST_EXCHANGES)
    looked, steps = foreseen(strategy_selector, 100.0, 100.0), []
    for step in range(40):
        before = len(looked)
        assert strategy_selector.look(step, SYNCHRONOUS, [], [], []) is None
        steps += [step] * (len(looked) - before)
    assert steps == list(range(0, 40, EVERY))
    looked = foreseen(strategy_selector, 10.0, 100.0)
    assert strategy_selector.look(40, SYNCHRONOUS, [], [], []).strategy == LOCAL
    foreseen(strategy_selector, 100.0, 10.0)
    made = [step for step in range(41, 90) if strategy_selector.look(step, LOCAL, [], [], []) is not None]
    assert made[0] == 75
