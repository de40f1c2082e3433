"""The balancer and the dealer, without a framework: laws 3 and 4 while plans change, on ranks that are threads."""

import itertools
import json
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from simulated import Speed

from hvd_hetero.engine.hierarchy import one_level
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.engine.port import CollectiveError
from hvd_hetero.optimizers import agreement, control
from hvd_hetero.optimizers.attachment import Exchanges
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.dealer import Dealer, cut, proportional
from hvd_hetero.optimizers.departure import Departure, Flag, PeerError
from hvd_hetero.optimizers.horizon import DealingHorizon
from hvd_hetero.optimizers.route import Route
from hvd_hetero.optimizers.weighted_exchange import WeightedExchange
from hvd_hetero.policy.ladder import Rung
from hvd_hetero.policy.replan import ReplanRule
from hvd_hetero.trace.own import own_trace
from hvd_hetero.trace.reader import read
from hvd_hetero.trace.record import Trace

WHOLE = 64


class Silent:
    """An exchange that needs nothing of the balancer."""

    def on_begin(self):
        pass

    def on_count(self):
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
        outgoing=lambda: balancer.dialogue.outgoing(leads=number == 0, count=balancer.progress.terms),
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
        balancer.step_timer.pause()
        _, total = exchange.finish(lambda total: 1.0)
        balancer.step_timer.run()
        balancer.dialogue.incoming(control.unpack(total, ranks=engine.size), leads=True)
        balancer.exchanged(wait_s=0.0, bytes_sent=0, leads=True)
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


def test_before_the_first_batch_the_first_plan_holds():
    balancer = World(1).run(lambda engine: Balancer(engine, global_batch_size=WHOLE))[0]
    assert balancer.step == -1 and balancer.plan_at(balancer.step) is balancer.plan
    assert not balancer.adaptive, "there is nobody to share with"


def test_before_the_first_batch_the_plan_is_the_one_of_that_batch():
    """Also where a job that has not begun goes on with less room."""
    begun = World(2).run(lambda engine: Balancer(engine, global_batch_size=8, shares=(6, 2)).state_dict())[0]

    def program(engine):
        balancer = Balancer(engine, global_batch_size=8, max_share=4)
        balancer.load_state_dict(begun)
        return balancer.plan.shares

    assert World(2).run(program) == [(4, 4)] * 2


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


def test_a_job_whose_global_batch_follows_the_number_of_ranks_hears_that_it_is_a_constant():
    def program(engine, state=None):
        balancer = Balancer(engine, global_batch_size=4 * engine.size)
        if state is not None:
            with pytest.raises(ValueError, match=r"global batch 12. Received: one of 8. .*no multiple of hvd.size\(\)"):
                balancer.load_state_dict(state)
        return balancer.state_dict()

    state = World(2).run(program)[0]
    World(3).run(lambda engine: program(engine, state))


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
        exact = [divmod(share * total, sum(shares)) for share in shares]
        down = [rest for part, (least, rest) in zip(parts, exact, strict=True) if part == least]
        up = [rest for part, (least, rest) in zip(parts, exact, strict=True) if part > least]
        assert max(down, default=0) <= min(up, default=sum(shares)), "what is left over goes to the largest remainders"


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_depends_on_seed_and_epoch_alone(shuffle):
    def order(seed, epoch):
        dealer = Dealer(100, global_batch_size=8, shuffle=shuffle, seed=seed, drop_last=False)
        return dealer.order(epoch).tolist()

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
            stop_sums=control.StopSums(1.0 + rank, 0.5 * rank, rank),
        )
        for rank in range(2)
    ]  # fmt: skip
    total = np.sum(np.array(vectors, dtype=np.float32), axis=0).tolist()
    report = control.unpack(total, ranks=2)
    assert report.announcement == announcement
    assert report.stop_sums == (control.StopSums(1.0, 0.0, 0.0), control.StopSums(2.0, 0.5, 1.0))
    assert report.count == 21.0 and report.failed == (1,) and report.compute_s == (0.0, 0.5)
    assert report.dealt_ahead == (0, 5)


def test_a_rank_that_never_had_a_sample_stops_no_planning():
    from hvd_hetero.optimizers.agreement import BalancerArguments
    from hvd_hetero.optimizers.planner import Planner
    from hvd_hetero.policy.partition import Bound

    terms = BalancerArguments(
        global_batch_size=64, min_share=0, shares=(32, 32, 0), bounds=(Bound(),) * 3, micro_caps=(None,) * 3,
        first_shares=(32, 32, 0),
    )  # fmt: skip
    planner = Planner(terms)
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
    with pytest.raises(PeerError, match=r"rank 1 could not \(its data loader raised, or its script called"):
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


def test_what_is_no_trace_is_told(tmp_path):
    balancer = Balancer(SoloEngine(), global_batch_size=4)
    for wrong in (3, str(tmp_path)):
        with pytest.raises(TypeError, match=f"trace: expected an hvd_hetero.trace.Trace, or None. Received: {wrong!r}"):
            balancer.trace = wrong
    for wrong in (0, 2.5, [], True):
        with pytest.raises(TypeError, match=f"run: expected a folder .* Received: {re.escape(repr(wrong))}"):
            own_trace(wrong, ranks=(0,), rank=0)
    balancer.trace = own_trace(tmp_path / "run", ranks=(0,), rank=0)
    balancer.trace.close()
    assert len(read(tmp_path / "run").plans) == 1


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
    horizon = DealingHorizon()
    for step in (5, 3):
        with horizon.reaching(step):
            pass
    assert horizon.said(2, lookahead=0, ahead=0) == 3


def test_what_a_rank_has_reported_may_be_dealt_before_the_answer_and_nothing_beyond():
    """Which is as much as its loader may deal, and as many batches further as it may begin."""
    for dealt, lookahead, last in [(5, 1, 8), (3, 4, 9)]:
        horizon, order, reached = DealingHorizon(dealt), [], threading.Event()
        horizon.said(2, lookahead=lookahead, ahead=3, answers=2)

        def deals(horizon=horizon, order=order, reached=reached, last=last):
            for step in (last, last + 1):
                with horizon.reaching(step):
                    order.append(step)
                reached.set()

        thread = threading.Thread(target=deals, daemon=True)
        thread.start()
        assert reached.wait(5.0)
        for answer in ("first", "second"):
            with horizon.heard():
                order.append(answer)
        thread.join(5.0)
        assert order == [last, "first", "second", last + 1]


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
    before = balancer.dialogue.horizon
    assert before.said(0, lookahead=0, ahead=0) == 0
    thread = threading.Thread(target=lambda: dealt.append(balancer.deal(1)), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not dealt, "no plan is to come in behind it"
    balancer.load_state_dict(state)
    thread.join(5.0)
    assert dealt and before.said(0, lookahead=0, ahead=0) == 1
    assert balancer.dialogue.horizon.said(0, lookahead=0, ahead=0) == 0, "that was of the batches before"


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
    balancer.planner.is_local = lambda step: True
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
        plans = [balancer.plan_at(balancer.step + ahead) for ahead in range(4)]
        assert balancer.share == plans[1].shares[engine.rank]
        return plans

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


def test_a_thread_that_deals_ahead_waits_for_no_answer_that_cannot_come():
    """Where a rank has failed, and where ranks have become others, before anything is made anew."""
    forgets = []
    for fails in (True, False):
        engine = SoloEngine()
        engine.on_reset_begin = forgets.append
        balancer = Balancer(engine, global_batch_size=4)
        horizon = balancer.dialogue.horizon
        horizon.said(0, lookahead=0, ahead=0, answers=3)
        assert horizon._bound == 0
        if fails:
            said = control.pack(ranks=1, rank=0, count=0.0, compute_s=0.0, samples=0.0, failed=True, announcement=None)
            with pytest.raises(PeerError):
                balancer.dialogue.hear_failed(control.unpack(said, ranks=1))
        else:
            forgets[-1]()
        dealt = []
        thread = threading.Thread(target=lambda to=balancer, dealt=dealt: dealt.append(to.deal(9)), daemon=True)
        thread.start()
        thread.join(5.0)
        assert dealt


def balancers(ranks, **options):
    """Of ranks that are only asked, one after the other."""
    return World(ranks).run(lambda engine: Balancer(engine, global_batch_size=8, **options))


def test_exchanges_that_do_not_lead_tell_of_no_batch_and_move_no_plan():
    for balancer in balancers(2):
        dialogue = balancer.dialogue
        balancer.planner.announcement = control.Announcement(
            version=1, shares=(5, 3), reason="", predicted_step_s=0.5, strategy="synchronous"
        )
        balancer.step_timer.known, dialogue.staleness = (4.0, 0.5), 2.0
        balancer.step_timer._stops = SimpleNamespace(take=lambda: control.StopSums(3.0, 2.0, 1.0))
        balancer.departure.leaving.said = True
        balancer.lookahead, balancer.step_timer.loading_s = 2, 0.25
        report = control.unpack(dialogue.outgoing(leads=False, count=3.0), ranks=2)
        assert report.count == 3.0 and report.announcement is None
        assert report.leaving == (balancer.rank,) and report.stopping == report.failed == () and not report.lays_out
        assert report.samples == report.compute_s == report.loading_s == (0.0, 0.0) and report.staleness == 0.0
        assert report.dealt_ahead == (0, 0) and report.stop_sums == (control.StopSums(),) * 2
        said = control.unpack(dialogue.outgoing(leads=True, count=3.0), ranks=2)
        assert said.samples[balancer.rank] == 4.0 and said.compute_s[balancer.rank] == 0.5 and said.staleness == 1.0
        assert said.stop_sums[balancer.rank] == (3.0, 2.0, 1.0), "and of stops nothing was lost"
        assert said.loading_s[balancer.rank] == 0.25 and said.dealt_ahead[balancer.rank] == 2
        assert (said.announcement is None) == (balancer.rank != 0)
        bound = dialogue.horizon._bound
        dialogue.incoming(report, leads=False)
        assert dialogue.horizon._bound == bound, "no answer to what leads"
        # What is measured apart counts for rounds of those that do not lead, too.
        said = control.unpack(dialogue.outgoing(leads=False, count=3.0, measured=(8.0, 0.5)), ranks=2)
        assert said.busy_s[balancer.rank] == 2.0


def sum_of(*vectors):
    """What all ranks read of these: a sum in single precision."""
    return np.sum(np.array(vectors, dtype=np.float32), axis=0, dtype=np.float32).tolist()


def heard_of(*said, **of_all):
    """What all ranks hear where each says this, and nothing beside it."""
    nothing = {"count": 0.0, "compute_s": 0.0, "samples": 0.0, "failed": False, "announcement": None, **of_all}
    return control.unpack(sum_of(*(
        control.pack(ranks=len(said), rank=rank, **{**nothing, **mine}) for rank, mine in enumerate(said)
    )), ranks=len(said))  # fmt: skip


def test_the_batch_that_a_rank_is_at_is_heard_in_single_precision_and_where_it_was_dealt():
    last = control.BATCHES - 1
    for batch, origin, heard in [
        (None, None, (-1, -1)), (None, 3, (-1, -1)), (0, None, (0, -1)), (0, 0, (0, 0)),
        (last, control.ORIGINS - 1, (last, control.ORIGINS - 1)), (last + 1, 7, (0, 7)),
        (last - 1, None, (last - 1, -1)),
    ]:  # fmt: skip
        report = heard_of({"batch": 5, "origin": 1}, {"batch": batch, "origin": origin}, {})
        assert report.batches == (5, heard[0], -1) and report.origins == (1, heard[1], -1), (batch, origin)


def test_a_rank_is_busy_with_what_takes_longer():
    """A rank that has not said how long it computed says nothing of that."""
    report = heard_of(
        {"samples": 4.0, "compute_s": 1.0, "loading_s": 0.5}, {"samples": 4.0, "compute_s": 3.0, "loading_s": 0.5},
        {"samples": 4.0, "loading_s": 0.5}, {"samples": 4.0, "compute_s": 1.0},
    )  # fmt: skip
    assert report.loading_s == (0.5, 0.5, 0.5, 0.0) and report.busy_s == (2.0, 3.0, 0.0, 1.0)


def test_who_leaves_stops_or_lays_out_anew_is_heard_of_each_rank_by_itself():
    flags = list(itertools.product([False, True], repeat=3))
    for one, other in itertools.product(flags, flags):
        said = [dict(zip(("leaves", "stops", "lays_out"), each, strict=True)) for each in (one, other)]
        report = heard_of(*said)
        assert report.leaving == tuple(rank for rank in (0, 1) if said[rank]["leaves"])
        assert report.stopping == tuple(rank for rank in (0, 1) if said[rank]["stops"])
        assert report.lays_out == (one[2] or other[2])


@pytest.mark.parametrize(("reason", "heard"), [
    ("x" * control.REASON_LENGTH, "x" * control.REASON_LENGTH), ("y" * 200, "y" * control.REASON_LENGTH),
    ("Gerät 1 ist langsam", "Ger?t 1 ist langsam"), ("", ""),
])  # fmt: skip
def test_a_reason_travels_as_far_as_it_fits_and_bends_nothing_beside_it(reason, heard):
    announcement = control.Announcement(
        version=7, shares=(1, 2, 3), reason=reason, predicted_step_s=0.25, strategy="synchronous"
    )
    said = {
        "comparison": control.ParameterComparison(hash=2**24 - 1, interval=9), "staleness": 3.0,
        "norms": control.Norms(1.0, 2.0, 3.0, 4.0),
    }  # fmt: skip
    report = heard_of({**said, "announcement": announcement}, said, said)
    assert report.announcement.reason == heard and report.announcement.shares == (1, 2, 3)
    assert (report.announcement.version, report.announcement.predicted_step_s) == (7, 0.25)
    assert report.announcement.strategy == "synchronous"
    assert report.interval == 9, "rank 0 says it"
    assert report.hashes == (2**24 - 1,) * 3 and report.staleness == 3.0, "the mean"
    assert report.norms == (3.0, 6.0, 9.0, 12.0)


def test_of_steps_apart_who_leaves_or_stops_is_known_from_the_batch_that_no_rank_is_beyond():
    for balancer in balancers(2):
        said = heard_of({"stops": True}, {"leaves": True}, count=1.0, samples=4.0)
        balancer.dialogue.incoming(said, leads=True, step=5, ahead=3)
        for batch, leaving, stopping in [(7, (), ()), (8, (1,), (0,)), (20, (1,), (0,))]:
            balancer.step = batch
            assert (balancer.leaving, balancer.stopping) == (leaving, stopping)
        balancer.go_on()
        assert balancer.stopping == () and balancer.leaving == (1,)


def test_a_rank_that_was_told_to_end_says_so_among_other_ranks_as_well_and_forgets_what_was_heard():
    departure = Departure()
    departure.leaving.said = departure.stopping.said = departure.final = True
    departure.leaving.hear((0,), 2)
    departure.stopping.hear((1,), 2)
    departure.fail(OSError("no such file"))
    departure.left_out = 4
    departure.restart()
    assert departure.leaving.said and departure.stopping.said
    assert departure.leaving.by(9) == () == departure.stopping.by(9)
    assert not departure.failed and departure.error is None and departure.left_out is None
    departure.check()


def test_once_ranks_have_come_together_all_have_heard_who_leaves_and_who_stops():
    departure = Departure()
    departure.leaving.hear((0,), 90)
    departure.stopping.hear((1,), 90)
    departure.heard_by_all()
    assert departure.leaving.by(3) == (0,) and departure.stopping.by(3) == (1,)


def test_what_ranks_took_is_of_the_batch_before_and_rank_0_looks_at_it_where_shares_may_change():
    plan = control.Announcement(version=1, shares=(5, 3), reason="", predicted_step_s=0.5, strategy="synchronous")
    for adaptive, announced in itertools.product([True, False], [None, plan]):
        for rank, balancer in enumerate(balancers(2, adaptive=adaptive)):
            planner, observed, stops, looks = balancer.planner, [], [], []
            planner.observe = lambda *seen, observed=observed, **ahead: observed.append((*seen, ahead))
            planner.steadiness.hear = lambda *seen, stops=stops: stops.append(seen)
            planner.look = lambda step, looks=looks, **how: looks.append((step, how["dealt_ahead"]))
            balancer.step = 6
            said = heard_of({"announcement": announced}, {"dealt_ahead": 3}, compute_s=0.5, samples=4.0)
            balancer.dialogue.incoming(said, leads=True)
            assert observed == [(5, (4.0, 4.0), (0.5, 0.5), (0.0, 0.0), {"dealt_ahead": 3})]
            assert [step for step, _ in stops] == [5]
            assert looks == ([(6, 3)] if rank == 0 and adaptive and announced is None else [])


def test_a_strategy_left_to_us_is_chosen_by_whole_steps_only_where_all_make_them_together():
    for rank, balancer in enumerate(balancers(2, adaptive=False)):
        planner, heard, looks = balancer.planner, [], []
        planner._strategy_selector = SimpleNamespace(hear=lambda heard=heard, **what: heard.append(what["step_s"]))
        planner.look = lambda step, looks=looks, **_: looks.append(step)
        balancer.step_timer._pace = SimpleNamespace(last_s=2.0, usual_s=2.0)
        for step in (None, 9):
            balancer.dialogue.incoming(heard_of({}, {}, compute_s=0.5, samples=4.0), leads=True, step=step)
        assert heard == [2.0, None] and len(looks) == (0 if rank else 2), "rank 0 looks, though shares are given"


def test_a_failure_names_the_ranks_as_horovod_does_and_the_batch():
    """Of a process set of some ranks, too."""

    def program(engine):
        group = engine.group([1, 2])
        if group is None:
            return None
        balancer = Balancer(group, global_batch_size=4)
        balancer.step = 11
        with pytest.raises(PeerError, match=r"batch 11\. Received: rank 2 could not"):
            balancer.dialogue.incoming(heard_of({}, {"failed": True}), leads=False)
        return balancer.departure.left_out

    assert World(3).run(program) == [None, 11, 11]


def test_ranks_that_differ_are_named_as_horovod_does():
    """Of a process set of some ranks, too."""

    def program(engine):
        group = engine.group([1, 2])
        if group is None:
            return
        with pytest.raises(ValueError, match="global_batch_size: .* Received: rank 1: 4; rank 2: 6"):
            Balancer(group, global_batch_size=2 + 2 * engine.rank)
        with pytest.raises(ValueError, match=r"rank 2: wrong.*\(min_share" if engine.rank == 1 else "^min_share"):
            Balancer(group, global_batch_size=4, min_share=1 - 2 * (engine.rank == 2))
        with pytest.raises(ValueError, match="number: .* Received: rank 1: 1; rank 2: 2"):
            agreement.agree_on(group, {"number": engine.rank}, name="number")
        with pytest.raises(ValueError, match="text: .* Received: rank 1: 1; rank 2: 2"):
            agreement.agree_text(group, lambda: str(engine.rank), title="text", name="text")
        with pytest.raises(ValueError, match="rank 2: wrong" if engine.rank == 1 else "no good"):
            with agreement.heard(group, name=lambda: "heard"):
                if engine.rank == 2:
                    raise ValueError("no good")
            agreement.agree_on(group, {}, name="heard")

    World(3).run(program)


def test_a_wrong_argument_on_one_rank_of_an_elastic_job_ends_that_rank_alone(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    *others, last = World(3).run(
        lambda engine: Balancer(engine, global_batch_size=6, min_share=-1 if engine.rank == 2 else 1), errors="return"
    )
    assert isinstance(last, ValueError) and str(last).startswith("min_share: expected")
    assert all(isinstance(one, CollectiveError) for one in others), "what an elastic job goes on from"


def test_listeners_are_called_once_each_after_an_exchange_that_leads():
    (balancer,) = balancers(1)
    dialogue, calls = balancer.dialogue, []

    def listener():
        calls.append((dialogue.entered, dialogue.steps, dialogue.mean_staleness))

    dialogue.subscribe(listener)
    dialogue.subscribe(listener)
    dialogue.incoming(heard_of({"samples": 6.0, "staleness": 1.5}), leads=False, steps=5)
    assert calls == [] and (dialogue.entered, dialogue.steps) == (8.0, 1)
    dialogue.incoming(heard_of({"samples": 6.0, "staleness": 1.5}), leads=True, step=4, steps=3)
    dialogue.incoming(heard_of({"samples": 0.0, "staleness": 1.5}), leads=True, step=5)
    assert calls == [(6.0, 3, 1.5), (6.0, 1, 1.5)], "a batch that nobody tells of is like the one before"


def test_whether_plans_follow_speeds_is_yes_or_no():
    with pytest.raises(ValueError, match="adaptive: expected True or False. Received: 'no'"):
        Balancer(SoloEngine(), global_batch_size=4, adaptive="no")
    for no in (0, None, np.bool_(False)):
        assert not Balancer(SoloEngine(), global_batch_size=4, adaptive=no).arguments.adaptive


def test_an_error_of_the_device_that_a_count_is_on_stays_what_it_is():
    class Count:
        def __init__(self, *shape):
            self.shape = shape

        def __float__(self):
            raise RuntimeError("out of memory, in a kernel before")

    balancer = Balancer(SoloEngine(), global_batch_size=4)
    balancer.begin(4)
    for one in (Count(), Count(1)):
        with pytest.raises(RuntimeError, match="out of memory"):
            balancer.count(one)
    with pytest.raises(TypeError, match=r"terms: expected a number.*of shape \[3\]"):
        balancer.count(Count(3))


@pytest.mark.parametrize(("rules", "text"), [
    ((None, ReplanRule(minimum_gain=0.5)), "rule: expected the same on every rank. Received: rank 0: ReplanRule"),
    (("fast", "fast"), "rule: expected an hvd.ReplanRule, or None. Received: 'fast'"),
    ((None, "fast"), "rule"),
])  # fmt: skip
def test_ranks_have_one_rule(rules, text):
    made = World(2).run(lambda engine: Balancer(engine, global_batch_size=4, rule=rules[engine.rank]), errors="return")
    assert all(isinstance(one, ValueError) for one in made) and text in str(made[1])


class Told:
    """A trace that keeps what it is told."""

    def __init__(self):
        self.steps, self.plans, self.events, self.flushed = [], [], [], 0

    def now(self):
        return 0.0

    def step(self, **fields):
        self.steps.append(fields)

    def plan(self, plan):
        self.plans.append(plan.version)

    def event(self, kind, **fields):
        self.events.append(kind)

    def restart(self, rank):
        self.events.append(f"restart {rank}")

    def flush(self):
        self.flushed += 1


def test_a_step_is_from_its_batch_to_the_exchange_that_leads_with_what_all_exchanges_took():
    now, trace = [0.0], Told()
    device = SimpleNamespace(mark=lambda: now[0], passed=lambda mark: True, seconds=lambda start, end: end - start)
    balancer = Balancer(SoloEngine(), global_batch_size=4, stopwatch=device, trace=trace)
    balancer.step_timer.take_waited_s = lambda: 0.125
    for _ in range(4):
        balancer.begin(4)
        now[0] += 1.0
        for wait_s, sent, leads in ((0.5, 10, False), (0.25, 5, True)):
            balancer.exchanged(wait_s=wait_s, bytes_sent=sent, leads=leads)
        now[0] += 7.0  # done after each step: it is no compute, and the next plan counts it
    found = [(each["step"], each["compute_s"], each["wait_s"], each["bytes"]) for each in trace.steps]
    assert found == [(step, 1.0, 0.875, 15) for step in range(4)]
    assert balancer.step_timer.known == (4, 8.0)
    flushed = trace.flushed
    balancer.end_epoch()
    assert trace.flushed == flushed + 1


class Hooked(SoloEngine):
    """Keeps what it is asked to call."""

    def __init__(self):
        super().__init__()
        self.ends, self.contexts, self.waits = [], [], []

    def on_reset_end(self, rebuild):
        self.ends.append(rebuild)

    def during_waits(self, context):
        self.contexts.append(context)

    def hear_waits(self, hear):
        self.waits.append(hear)


def test_a_balancer_hears_of_resets_and_of_waits_and_goes_on_where_it_was():
    engine, trace = Hooked(), Told()
    balancer = Balancer(engine, global_batch_size=4, trace=trace)
    balancer.begin(4)
    with engine.contexts[0]():
        pass
    balancer.step_timer.pause()
    assert balancer.step_timer.take_waited_s() > 0.0
    balancer.step_timer.known = (4.0, 0.5)
    balancer.fail_at_exchange(OSError("lost with the ranks that were to hear of it"))
    balancer.strategies.begins(balancer)
    engine.ends[0]()
    assert balancer.step == 0 and not balancer.departure.failed and balancer.step_timer.known == (0.0, 0.0)
    assert not balancer.strategies.leads(balancer)
    engine.waits[0](operation="sum")
    assert trace.events == ["limits", "restart 0", "ranks", "limits", "wait"] and trace.plans == [0, 0]


@pytest.mark.parametrize("elastic", [True, False])
def test_shares_of_another_number_of_ranks_are_a_mistake_unless_ranks_come_and_leave(monkeypatch, elastic):
    if elastic:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    made = World(2).run(lambda engine: Balancer(engine, global_batch_size=9, shares=(3, 3, 3)), errors="return")
    assert [isinstance(one, Balancer) for one in made] == [elastic] * 2
    left = Balancer(SoloEngine(), global_batch_size=9, shares=(9,))
    left._asked = replace(left._asked, shares=(3, 3, 3))  # of before the others left
    left.rebuild()
    assert left.plan.shares == (9,)


def test_a_new_plan_is_told_and_so_is_who_takes_part_in_another_way():
    for balancer in balancers(2, min_share=0):
        balancer.trace = trace = Told()
        plan = control.Announcement(version=1, shares=(8, 0), reason="", predicted_step_s=0.5, strategy="synchronous")
        links = []
        balancer.dialogue.links = SimpleNamespace(hear=lambda step, links=links, **how: links.append((step, how)))
        for announcement in (plan, plan, None):
            said = heard_of({"announcement": announcement}, {}, compute_s=0.5, samples=4.0)
            balancer.dialogue.incoming(said, leads=True)
        assert trace.plans == [0, 1] and trace.events == ["limits", "rung"]
        assert links == [(-1, {"busy_s": (0.5, 0.5), "together": True})] * 3


@pytest.mark.parametrize("ended", [True, False])
def test_who_has_failed_may_train_on_if_the_others_have_heard_of_it(ended):
    """In the batch that they have begun, or in the next."""
    balancer, waits = Balancer(SoloEngine(), global_batch_size=4), []
    balancer.begin(4)
    balancer.step_timer._pace = SimpleNamespace(usual_s=2.0, begin=lambda: None)
    balancer.dialogue.horizon.said(0, lookahead=0, ahead=0)
    begun = []
    balancer.exchanges.attach(SimpleNamespace(on_begin=lambda: begun.append(balancer.step), on_count=lambda: None))
    balancer.exchanges.withdraw = lambda usual_s: waits.append(usual_s) or ended
    balancer.fail()
    assert balancer.step == 1 and begun == [1] and waits == [2.0] and balancer.departure.failed
    assert balancer.dialogue.horizon._bound == float("inf")
    if ended:
        balancer.begin(4)
    else:
        with pytest.raises(RuntimeError, match="Go on from a checkpoint"):
            balancer.begin(4)


def test_where_the_exchange_of_a_rank_that_fails_fails_too_nobody_trains_on():
    def breaks(usual_s):
        raise OSError("the others are gone")

    balancer = Balancer(SoloEngine(), global_batch_size=4)
    balancer.exchanges.withdraw = breaks
    balancer.fail()
    with pytest.raises(RuntimeError, match="Go on from a checkpoint"):
        balancer.begin(4)


def test_a_trace_hears_of_going_back_and_of_nothing_where_a_job_goes_on():
    balancer = Balancer(SoloEngine(), global_batch_size=4)
    state = balancer.state_dict()
    balancer.begin(4)
    later = balancer.state_dict()
    later["planner"]["loading_s"] = [0.25]
    balancer.trace = trace = Told()
    balancer.load_state_dict(later)
    assert trace.events == ["limits"] and trace.plans == [0] and balancer.step_timer.loading_s == 0.25
    balancer.load_state_dict(state)
    assert trace.events == ["limits", "restart 0"] and trace.plans == [0, 0]


def test_a_balancer_says_what_it_is_at():
    balancer = Balancer(SoloEngine(), global_batch_size=4)
    balancer.begin(4)
    assert repr(balancer) == "Balancer(global_batch_size=4, shares=4, step=0)"
