"""The balancer and the dealer, without a framework: laws 3 and 4 while plans change, on ranks that are threads."""

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from simulated import Speed

from hvd_hetero.engine.hierarchy import one_level
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers import control
from hvd_hetero.optimizers.attachment import Exchanges, PeerError
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.dealer import Dealer, cut, proportional
from hvd_hetero.optimizers.departure import Departure, Flag
from hvd_hetero.optimizers.horizon import Horizon
from hvd_hetero.optimizers.route import Route
from hvd_hetero.optimizers.weighted import WeightedExchange
from hvd_hetero.policy.ladder import Rung
from hvd_hetero.trace.reader import read
from hvd_hetero.trace.record import Trace

WHOLE = 64


class Silent:
    """An exchange that needs nothing of the balancer."""

    def on_begin(self):
        pass

    def on_count(self, terms):
        pass


def train(engine, *, speeds, steps, lookahead=0, length=None, changes=None, state=None):
    """`steps` steps of a job whose ranks have the given speeds; the balancer, and how often each sample was dealt."""
    watch = Speed(speeds[engine.rank])
    balancer = Balancer(engine, global_batch_size=WHOLE, stopwatch=watch)
    balancer.lookahead = lookahead
    if state is not None:
        balancer.load_state_dict(json.loads(json.dumps(state)))
    number = balancer.exchanges.attach(Silent())
    vector = np.zeros(control.length(engine.size))
    exchange = WeightedExchange(
        engine,
        [vector],
        vector,
        routes=[Route(one_level(engine), "flat")],
        rides_in=0,
        outgoing=lambda: balancer.dialogue.outgoing(leads=number == 0, count=balancer.count_now),
        name="train",
    )
    dealer = Dealer(length or WHOLE * steps, global_batch_size=WHOLE, shuffle=True, seed=7, drop_last=False)
    seen = np.zeros(dealer.length, dtype=int)
    first = balancer.step + 1
    dealt = []
    batches = list(dealer.batches())
    for step in range(steps):
        while len(dealt) <= step + lookahead and len(dealt) < len(batches):  # as workers that load ahead do
            shares = balancer.plan_at(first + len(dealt)).shares
            dealt.append(cut(batches[len(dealt)], shares, engine.rank))
        if changes and step in changes:
            watch.seconds_per_sample = changes[step][engine.rank]
        mine = dealt[step]
        seen[mine] += 1
        balancer.begin(len(mine))
        watch.samples = len(mine)
        exchange.submit(0)
        balancer.pause()
        _, total = exchange.finish(lambda total: 1.0)
        balancer.resume()
        balancer.dialogue.incoming(total, leads=True)
        balancer.finished(wait_s=0.0, bytes_sent=0)
    return balancer, seen


@pytest.mark.parametrize("lookahead", [0, 1, 5])
@pytest.mark.parametrize("length", [WHOLE * 60, WHOLE * 60 - 37, WHOLE * 59 + 2])
def test_every_sample_once_whatever_the_plan_does(lookahead, length):
    changes = {30: [0.004, 0.001, 0.002]}
    ended = World(3).run(
        lambda engine: train(
            engine, speeds=[0.001, 0.002, 0.004], steps=60, lookahead=lookahead, length=length, changes=changes
        )
    )
    assert (sum(seen for _, seen in ended) == 1).all()
    assert len(ended[0][0].plans) >= 3, "the plan never changed: the test shows nothing"
    for balancer, _ in ended:
        assert balancer.plans == ended[0][0].plans
        assert all(sum(plan.shares) == WHOLE for plan in balancer.plans)


def test_shares_follow_speed_and_rest():
    ended = World(4).run(lambda engine: train(engine, speeds=[0.001, 0.002, 0.004, 0.004], steps=300))
    plans = ended[0][0].plans
    assert np.abs(np.array(plans[-1].shares) - [32, 16, 8, 8]).max() <= 1
    assert len(plans) <= 4 and plans[-1].step <= 40


def test_the_first_plan_stays_where_speeds_are_equal():
    ended = World(3).run(lambda engine: train(engine, speeds=[0.002] * 3, steps=100))
    assert [len(balancer.plans) for balancer, _ in ended] == [1, 1, 1]


def test_a_saved_state_goes_on_with_the_plan_and_on_other_ranks_with_a_first_one():
    ended = World(2).run(lambda engine: train(engine, speeds=[0.001, 0.003], steps=40))
    state = ended[0][0].state_dict()
    again = World(2).run(lambda engine: train(engine, speeds=[0.001, 0.003], steps=5, state=state))
    assert again[0][0].plan.shares == ended[0][0].plan.shares != (32, 32)
    assert again[0][0].step == ended[0][0].step + 5
    other = World(3).run(lambda engine: train(engine, speeds=[0.001] * 3, steps=5, state=state))
    assert sum(other[0][0].plan.shares) == WHOLE and len(other[0][0].plan.shares) == 3


def test_a_resumed_balancer_stands_on_the_rungs_of_its_plan():
    def program(engine):
        first = Balancer(engine, global_batch_size=8, min_share=0, shares=(7, 1, 0))
        again = Balancer(engine, global_batch_size=8, min_share=0)
        again.load_state_dict(first.state_dict())
        return again.ladder.rungs

    assert World(3).run(program) == [(Rung.EVERY_STEP, Rung.SMALLER_SHARE, Rung.OUT)] * 3


def test_the_plans_reason_and_prediction_arrive_on_every_rank():
    ended = World(2).run(lambda engine: train(engine, speeds=[0.001, 0.003], steps=40))
    first, second = (balancer.plans[-1] for balancer, _ in ended)
    assert first == second and "slowest" in first.reason and first.predicted_step_s > 0


def test_proportional_is_exact_and_within_one_of_the_share():
    rng = np.random.RandomState(0)
    for _ in range(500):
        shares = tuple(int(s) for s in rng.randint(0, 20, size=rng.randint(1, 7)))
        if not sum(shares):
            continue
        total = int(rng.randint(0, sum(shares) + 1))
        parts = proportional(shares, total)
        assert sum(parts) == total
        assert all(0 <= part <= share for part, share in zip(parts, shares, strict=True))
        assert all(abs(p - s * total / sum(shares)) < 1 for p, s in zip(parts, shares, strict=True))


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_depends_on_seed_and_epoch_alone(shuffle):
    def order(seed, epoch):
        dealer = Dealer(100, global_batch_size=8, shuffle=shuffle, seed=seed, drop_last=False)
        dealer.epoch = epoch
        return dealer.order().tolist()

    assert order(1, 0) == order(1, 0) and sorted(order(1, 0)) == list(range(100))
    assert (order(1, 0) != order(1, 1)) is shuffle and (order(1, 0) != order(2, 0)) is shuffle


def test_the_control_vector_comes_back_as_it_went():
    announcement = control.Announcement(
        version=3, shares=(40, 24), reason="rank 1 is slowest", predicted_step_s=0.5, strategy="local"
    )
    vectors = [
        control.pack(
            ranks=2, rank=rank, count=10.0 + rank, compute_s=0.5 * rank, samples=32.0, failed=rank == 1,
            dealt_ahead=5 * rank, announcement=announcement if rank == 0 else None,
            ran=control.Ran(1.0 + rank, 0.5 * rank, rank),
        )
        for rank in range(2)
    ]  # fmt: skip
    total = np.sum(np.array(vectors, dtype=np.float32), axis=0).tolist()
    report = control.unpack(total, ranks=2)
    assert report.announcement == announcement
    assert report.ran == (control.Ran(1.0, 0.0, 0.0), control.Ran(2.0, 0.5, 1.0))
    assert report.count == 21.0 and report.failed == (1,) and report.compute_s == (0.0, 0.5)
    assert report.dealt_ahead == (0, 5)


def test_a_rank_that_never_had_a_sample_stops_no_planning():
    from hvd_hetero.optimizers.agreement import Terms
    from hvd_hetero.optimizers.planner import Planner
    from hvd_hetero.policy.partition import Bound
    from hvd_hetero.policy.replan import ReplanRule

    terms = Terms(
        global_batch_size=64, min_share=0, max_share=None, quantum=1, max_micro_batch=None, shares=(32, 32, 0),
        adaptive=True, bounds=(Bound(),) * 3, micro_caps=(None,) * 3, first_shares=(32, 32, 0),
    )  # fmt: skip
    planner = Planner(terms, ReplanRule())
    for step in range(30):
        planner.observe(step, (32, 32, 0), (0.032, 0.096, 0.0))
        planner.look(step)
    assert planner.models is not None and len(planner.models) == 3


def test_what_a_rank_fails_with_is_raised_on_it_however_often_it_says_so():
    departure = Departure()
    departure.fail(OSError("no such file"))
    departure.fail()
    with pytest.raises(OSError, match="no such file"):
        departure.hear_failed([1], step=3)
    assert not departure.failed, "all have heard it"
    departure.fail()
    with pytest.raises(PeerError, match="rank 1"):
        departure.hear_failed([1], step=4)
    assert not departure.failed
    error = OSError("no such file")
    departure.fail(error)
    departure.recover(OSError("another one"))
    assert departure.failed and departure.error is error
    departure.recover(error)
    assert not departure.failed and departure.error is None


def test_a_state_is_plain_numbers_whatever_numbers_it_was_made_of():
    def program(engine):
        balancer = Balancer(engine, global_batch_size=np.int64(12), shares=np.array([8, 4]), max_share=np.int32(8))
        return json.loads(json.dumps(balancer.state_dict()))["planner"]["plans"][0]["shares"]

    assert World(2).run(program) == [[8, 4]] * 2


def test_a_trace_tells_what_each_rank_may_have_and_once_more_when_the_ranks_have_changed(tmp_path):
    def program(engine):
        trace = Trace(tmp_path, rank=engine.rank, clock=lambda: 0.0)
        more = {"max_share": 40, "max_micro_batch": 8, "quantum": 2} if engine.rank else {}
        balancer = Balancer(engine, global_batch_size=WHOLE, trace=trace, **more)
        balancer.rebuild()
        trace.close()

    World(2).run(program)
    told = [[event.fields for event in rank.events if event.kind == "limits"] for rank in read(tmp_path).ranks.values()]
    assert told[0] == [{"lower": 1, "upper": None, "quantum": 1, "micro_batch": None}] * 2
    assert told[1] == [{"lower": 1, "upper": 40, "quantum": 2, "micro_batch": 8}] * 2


def test_ranks_stop_with_the_batch_by_which_all_have_heard_however_often_it_is_said():
    flag = Flag()
    for step in range(5, 12):
        flag.hear((1,), step + 4)
    assert flag.by(8) == () and flag.by(9) == (1,) == flag.by(30)
    flag.heard_by_all()
    assert flag.by(0) == (1,)


def test_what_was_dealt_stays_dealt_where_another_loader_has_come_less_far():
    horizon = Horizon()
    for step in (5, 3):
        with horizon.reaching(step):
            pass
    assert horizon.said(2, lookahead=0, ahead=0) == 3


@pytest.mark.parametrize("call", ["withdraw", "complete"])
def test_a_rank_that_fails_waits_until_the_others_have_heard_of_it(call):
    """For its process ends then, and with it all that they wait for."""

    def exchange(looks):  # that is over after so many
        left = iter(range(looks))
        done = lambda: next(left, None) is None  # noqa: E731
        return SimpleNamespace(withdraw=lambda: done, miss=lambda: done)

    exchanges = Exchanges(lambda: False)
    exchanges.attach(exchange(3))
    exchanges.attach(exchange(6))
    assert getattr(exchanges, call)(0.0), "none is left under way"


def test_a_thread_that_deals_ahead_goes_on_where_a_state_is_loaded():
    balancer = Balancer(SoloEngine(), global_batch_size=4)
    state, dealt = balancer.state_dict(), []
    balancer.dialogue.horizon.said(0, lookahead=0, ahead=0)
    thread = threading.Thread(target=lambda: dealt.append(balancer.deal(1)), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not dealt, "no plan is to come in behind it"
    balancer.load_state_dict(state)
    thread.join(5.0)
    assert dealt


@pytest.mark.parametrize("wrong, text", [
    ({"global_batch_size": 2**24 + 2}, "at most 16777216"),
    ({"global_batch_size": 8, "quantum": 2, "shares": (3, 5)}, "multiple of 2"),
])  # fmt: skip
def test_what_plans_cannot_hold_is_wrong_on_all_ranks(wrong, text):
    errors = World(2).run(lambda engine: Balancer(engine, **wrong), errors="return")
    assert all(isinstance(error, ValueError) and text in str(error) for error in errors), errors


def test_a_rank_that_misses_a_batch_agrees_with_the_others_on_who_leads():
    def exchange():
        return SimpleNamespace(on_begin=lambda: None, miss=lambda: None)

    missing, there = (Exchanges(lambda: False) for _ in range(2))
    both = exchange(), exchange()
    for exchanges in (missing, there):
        for one in both:
            exchanges.attach(one)
        exchanges.ended(both[1])
    there.ended(both[0])
    missing.complete(0.0)
    for exchanges in (missing, there):
        exchanges.on_begin()
        assert exchanges.leads(both[0]) and not exchanges.leads(both[1])


def test_nobody_trains_on_after_a_failure_in_a_step_apart():
    balancer = Balancer(SoloEngine(), global_batch_size=4)
    balancer.planner.apart = lambda step: True
    balancer.fail()
    with pytest.raises(RuntimeError, match="Go on from a checkpoint"):
        balancer.begin(4)


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_job_that_goes_on_with_less_room_keeps_to_it_from_the_first_batch_on(adaptive):
    state = World(2).run(lambda engine: train(engine, speeds=[0.001, 0.003], steps=60))[0][0].state_dict()

    def program(engine):
        balancer = Balancer(
            engine, global_batch_size=WHOLE, max_share=40 if engine.rank == 0 else None, adaptive=adaptive
        )
        balancer.load_state_dict(state)
        return [balancer.plan_at(balancer.step + ahead) for ahead in range(4)]

    first, second = World(2).run(program)
    assert first == second and first[0].shares == (48, 16), "the plan of what was trained stays"
    assert {plan.shares[0] <= 40 for plan in first[1:]} == {True}


def test_shares_that_are_given_for_good_hold_also_for_a_job_that_goes_on():
    state = World(2).run(lambda engine: train(engine, speeds=[0.001, 0.003], steps=60))[0][0].state_dict()

    def program(engine, **given):
        balancer = Balancer(engine, global_batch_size=WHOLE, adaptive=False, **given)
        balancer.load_state_dict(state)
        return balancer.plan_at(balancer.step + 1).shares

    assert World(2).run(lambda engine: program(engine, shares=(32, 32))) == [(32, 32)] * 2
    assert World(2).run(program) == [(48, 16)] * 2, "what was found is kept where nothing else is said"
