"""The planner on a machine whose speed drifts: it does not chase the drift, and follows a real change."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from hvd_hetero.optimizers import speed_measurements
from hvd_hetero.optimizers.agreement import BalancerArguments
from hvd_hetero.optimizers.control import Announcement
from hvd_hetero.optimizers.look_schedule import LookSchedule
from hvd_hetero.optimizers.planner import Planner
from hvd_hetero.optimizers.speed_measurements import PriorModels
from hvd_hetero.policy import replan
from hvd_hetero.policy.ladder import idle_since
from hvd_hetero.policy.partition import Bound, split, step_time_s
from hvd_hetero.policy.rank_match import match_ranks
from hvd_hetero.policy.speed import Observation, SpeedModel

BATCH, STEPS = 64, 300
# Seconds of overhead and per sample of ranks at 0.8, 0.4, 0.2 and 0.2 cores, as ci/bench mixed measures them.
SPEEDS = ((0.010, 0.0056), (0.015, 0.0110), (0.030, 0.0260), (0.030, 0.0260))


def seconds(rank: int, samples: int, step: int, draw: random.Random, seed: int) -> float:
    """A step's compute time: all ranks drift together by 20 %, each by itself by 12 %, and each step by 5 %."""
    together = 0.20 * math.sin(step / 23 + seed)
    alone = 0.12 * math.sin(step / (11 + 3 * rank) + 2 * seed + rank)
    overhead, per_sample = SPEEDS[rank]
    return (overhead + per_sample * samples) * (1 + together + alone) * draw.gauss(1, 0.05)


Step = tuple[tuple[int, ...], list[float]]  # the shares, and the seconds of each rank's compute


def job(planner: Planner, steps: int, compute_of: Callable[[int, tuple[int, ...]], list[float]]) -> list[Step]:
    """The steps of a job of which `planner` hears, as rank 0's does; `compute_of(step, shares)`: seconds by rank."""
    done: list[Step] = []
    for step in range(steps):
        shares = planner.plan_at(step).shares
        compute = compute_of(step, shares)
        if done:
            planner.observe(step - 1, *done[-1])
        if planner.announcement:
            planner.accept(planner.announcement, step)
        else:
            planner.look(step, measured_step_s=max(compute) + 0.03)
        done.append((shares, compute))
    return done


def planner_of(ranks: int = 4, *, batch: int | None = None, least: int = 1) -> Planner:
    """One that knows nothing yet; equal shares."""
    whole = 16 * ranks if batch is None else batch
    terms = BalancerArguments(
        global_batch_size=whole,
        min_share=least,
        identities=tuple(range(ranks)),
        bounds=(Bound(lower=least),) * ranks,
        first_shares=(whole // ranks,) * ranks,
        micro_caps=(None,) * ranks,
    )
    return Planner(terms)


def run(seed: int, *, slow_at: int | None = None, steps: int = STEPS) -> tuple[Planner, list[float]]:
    """A planner after a job from equal shares, and the time of each step; rank 1 halves its speed at `slow_at`."""
    planner, draw = planner_of(), random.Random(seed)

    def compute_of(step: int, shares: tuple[int, ...]) -> list[float]:
        compute = [seconds(rank, share, step, draw, seed) for rank, share in enumerate(shares)]
        if slow_at is not None and step >= slow_at:
            compute[1] *= 2
        return compute

    times = [max(compute) for _, compute in job(planner, steps, compute_of)]
    return planner, times


@pytest.mark.parametrize("seed", range(6))
def test_a_drifting_machine_gets_few_plans(seed: int) -> None:
    planner, times = run(seed)
    assert len(planner.plans) - 1 <= 4, [plan.reason for plan in planner.plans]
    assert sum(times[40:]) / len(times[40:]) < 0.24  # equal shares take 0.47, the best ones of each step 0.204


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_becomes_twice_as_slow_is_followed_at_once(seed: int) -> None:
    planner, _ = run(seed, slow_at=STEPS, steps=STEPS + 30)
    assert planner.plans[-1].step > STEPS, "no plan after the change"
    assert planner.plans[-1].shares[1] <= 0.75 * planner.plan_at(STEPS).shares[1]


def test_without_its_brakes_it_chases_the_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_measurements, "CHANGED", 0.15)
    monkeypatch.setattr(replan, "DEARER", (1.0,))
    assert max(len(run(seed)[0].plans) - 1 for seed in range(6)) > 4


def test_a_size_from_which_steps_take_longer_is_not_tried_again_and_again() -> None:
    """No line tells of it, so that shares beyond it seem to pay once those before it have been measured for a while."""
    draw = random.Random(0)

    def compute_of(step: int, shares: tuple[int, ...]) -> list[float]:
        times = [0.03 + (0.007 if rank else 0.0042) * share for rank, share in enumerate(shares)]
        times[0] *= 1.5 if shares[0] > 21 else 1.0
        return [each * draw.gauss(1, 0.02) for each in times]

    done = job(planner_of(), 1500, compute_of)
    assert sum(shares[0] > 21 for shares, _ in done[500:]) < 300


@pytest.mark.parametrize("overhead_s", [0.0, 0.004])
@pytest.mark.parametrize("factor", [1.1, 1.2])
def test_a_machine_that_a_plan_itself_makes_slower(overhead_s: float, factor: float) -> None:
    """Under equal shares the fast ranks wait and leave the machine to the slow ones; under good ones all are busy."""
    speeds = [
        SpeedModel(overhead_s=factor * overhead_s / core, seconds_per_sample=factor * 0.0022 / core)
        for core in (0.8, 0.4, 0.2, 0.2)
    ]
    best_s, excess = step_time_s(speeds, split(speeds, BATCH)), []
    for seed in range(10):
        planner, draw = planner_of(), random.Random(seed)

        def compute_of(step: int, shares: tuple[int, ...], planner: Planner = planner, draw: random.Random = draw):
            slower = 1.0 if planner.plan_at(step).version else 1.0 / factor
            return [s.time_s(b) * slower * draw.gauss(1, 0.03) for s, b in zip(speeds, shares, strict=True)]

        job(planner, 30, compute_of)
        excess.append(step_time_s(speeds, planner.plans[-1].shares) / best_s - 1)
    assert sum(excess) / len(excess) < 0.01, excess


@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_is_out_comes_back_when_it_has_recovered(again: bool) -> None:
    """From step 100 on, rank 3 needs longer for one sample than the others for all; perhaps not from step 200 on."""
    terms = BalancerArguments(
        global_batch_size=BATCH, min_share=0, max_share=None, quantum=1, max_micro_batch=None, shares=None,
        adaptive=True, bounds=(Bound(lower=0),) * 4, first_shares=(16,) * 4, micro_caps=(None,) * 4,
    )  # fmt: skip

    def compute_of(step: int, shares: tuple[int, ...]) -> list[float]:
        slow = 25.0 if step >= 100 and not (again and step >= 200) else 1.0
        return [0.01 * share * (slow if rank == 3 else 1.0) for rank, share in enumerate(shares)]

    given = [shares[3] for shares, _ in job(Planner(terms), 1000, compute_of)]
    out = given.index(0)
    assert 100 < out < 200 and not any(given[out : out + 256])
    assert 1 in given[out + 256 : out + 400], "it was never tried again"
    assert (given[-1] >= 12) if again else (given[-1] == 0 and sum(given[out:]) < 40)


def test_ranks_that_are_unlike_have_other_shares_after_a_few_steps() -> None:
    planner = planner_of()
    done = job(planner, 30, lambda step, shares: [SPEEDS[r][0] + SPEEDS[r][1] * b for r, b in enumerate(shares)])
    changed = [step for step, (shares, _) in enumerate(done) if step and shares != done[step - 1][0]]
    assert changed[0] <= 5 and len(changed) <= 2
    assert done[5][0] == done[6][0] == (32, 18, 7, 7)


def test_two_steps_of_unlike_sizes_are_not_enough_for_a_plan() -> None:
    """As in a short epoch: two points lie on a line exactly, and so look as if they had no noise."""
    planned = {16: 0, 4: 0}
    for second in planned:
        for seed in range(40):
            planner, draw = planner_of(), random.Random(seed)
            for step, samples in ((1, 16), (2, second)):
                planner.observe(step, (samples,) * 4, [samples / 16 * draw.lognormvariate(0.0, 0.2) for _ in range(4)])
            planner.look(3)
            planned[second] += planner.announcement is not None
    assert planned[4] == 0 and planned[16] < 10


def test_while_loaders_work_ahead_the_first_plan_is_not_replaced_early() -> None:
    """What they had ready when the job began says nothing of how fast they are."""
    made = []
    for dealt_ahead in (0, 2):
        planner = planner_of(2)
        for step in range(1, 20):
            planner.observe(step - 1, (16, 16), (0.1, 0.4), dealt_ahead=dealt_ahead)
            planner.look(step, dealt_ahead=dealt_ahead)
            if planner.announcement:
                made.append(step)
                break
    assert made[0] <= 3 and made[1] == 8


def test_a_rank_that_has_recovered_gets_its_samples_back() -> None:
    """Though twice its share of one sample gains little, and there were several plans lately."""
    for seed in range(3):
        planner, draw = planner_of(4, batch=32), random.Random(seed)

        def compute_of(step: int, shares: tuple[int, ...], draw: random.Random = draw) -> list[float]:
            slow = 12.0 if 40 <= step < 100 else 1.0
            return [
                (0.004 + 0.01 * share) * (slow if rank == 3 else 1.0) * draw.gauss(1, 0.03)
                for rank, share in enumerate(shares)
            ]

        given = [shares for shares, _ in job(planner, 250, compute_of)]
        assert given[99][3] == 1
        assert max(given[-1]) <= 9 and planner.plans[-1].version <= 6, given[-1]


def seen(first: int, *times: tuple[int, float]) -> list[tuple[int, Observation]]:
    """Eight steps of each of these samples and seconds, from step `first` on."""
    each = [Observation(samples=samples, compute_s=s) for samples, s in times for _ in range(8)]
    return list(enumerate(each, start=first))


def test_other_ranks_than_before_get_shares_that_know_of_their_passes() -> None:
    """What is known of them says that each pass of rank 0, of four samples, costs ten samples' time."""

    def planner(*caps: int | None) -> Planner:
        ranks = len(caps)
        terms = BalancerArguments(
            global_batch_size=60, min_share=1, max_share=None, quantum=1, max_micro_batch=None, shares=None,
            adaptive=True, identities=tuple(range(ranks)), bounds=(Bound(lower=1),) * ranks,
            first_shares=(60 // ranks,) * ranks, micro_caps=caps,
        )  # fmt: skip
        return Planner(terms)

    before, after = planner(4, None, None), planner(4, None)
    for step in range(6, 18):
        samples = (4, 20, 36) if step % 2 else (2, 22, 36)
        before.observe(step, samples, [0.010 + 0.001 * samples[0], *(0.001 + 0.001 * b for b in samples[1:])])
    after.load_state_dict(before.state_dict(), 20)
    assert after.plans[-1].shares == (12, 48)


def test_what_was_measured_counts_once_however_often_it_is_looked_at() -> None:
    # The machine became 5 % faster with a plan: two sizes close together show an overhead that is not there.
    window, past = seen(0, (28, 0.056), (34, 0.0646)), PriorModels()
    first = past.fit(window)
    assert first is not None and first.overhead_s < 0.2 * first.time_s(34)
    assert {past.fit(window) for _ in range(50)} == {first}


def test_what_was_measured_before_the_window_is_not_forgotten() -> None:
    old, new = seen(0, (8, 0.036), (40, 0.100)), seen(16, (20, 0.060))
    past = PriorModels()
    for end in range(1, len(old) + 1):
        past.fit(old[:end])
    for end in range(1, len(new) + 1):  # overlaps what the last models rest on
        past.fit([*old[end:], *new[:end]])
    model = past.fit(new)
    assert model is not None and model.overhead_s == pytest.approx(0.020, rel=0.05)
    assert past.fit([]) == model


def test_old_plans_are_forgotten_but_for_those_with_which_ranks_went_out_or_came_back() -> None:
    planner = planner_of(2, batch=8, least=0)
    out = {300: 0, 330: 4}  # rank 0 goes out, and comes back
    share = 4
    for number in range(1, 3000):
        share = out.get(number, share or 0) if share == 0 or number in out else 4 + number % 2
        said = Announcement(
            version=number, shares=(share, 8 - share), reason="", predicted_step_s=0.0, strategy="synchronous"
        )
        planner.accept(said, 10 * number)
        held = max(0, 10 * number - 4000)
        assert planner.plan_at(held).version == max(0, (held - 1) // 10)
    assert len(planner.plans) < 450
    assert [plan.version for plan in planner.plans[:3]] == [0, 300, 330]
    assert idle_since(planner.plans[:2], 0) == planner.plans[1].step


@pytest.mark.parametrize(("ranks", "step_s", "early", "late"), [(4, 0.1, 1, 4), (256, 0.1, 7, 62), (512, 2.0, 1, 7)])
def test_looks_take_a_part_of_the_time(ranks: int, step_s: float, early: int, late: int) -> None:
    """A look takes rank 0 a tenth of a millisecond for each rank, for which all wait."""
    looks = LookSchedule(ranks, clock=lambda: 0.0)
    assert (looks.pause(20, step_s), looks.pause(200, step_s)) == (early, late)
    assert looks.pause(20, 0.0) == 1, "nothing is known of the time yet"


def test_what_was_measured_of_a_rank_before_it_went_out_does_not_count_when_it_comes_back() -> None:
    planner = planner_of(2, batch=8, least=0)

    def announced(version: int, shares: tuple[int, ...]) -> Announcement:
        return Announcement(version=version, shares=shares, reason="", predicted_step_s=0.0, strategy="synchronous")

    for step in range(20):
        planner.observe(step, [4.0, 4.0], [0.1, 9.0])
    assert planner.accept(announced(1, (8, 0)), 20) is not None and len(planner._measurements.recent[1]) > 10
    assert planner.accept(announced(1, (8, 0)), 21) is None, "it is known"
    assert planner.accept(announced(2, (7, 1)), 400) is not None
    assert not planner._measurements.recent[1] and len(planner._measurements.recent[0]) > 10


def test_the_first_steps_with_a_plan_are_not_measured_nor_those_of_what_loaders_had_ready() -> None:
    planner = planner_of(2)
    for step in range(10):
        planner.observe(step, (16, 16), (0.1, 0.1), dealt_ahead=9)
    early = planner._measurements.recent[0]
    said = Announcement(version=1, shares=(8, 24), reason="", predicted_step_s=0.0, strategy="synchronous")
    plan = planner.accept(said, 10, dealt_ahead=3)
    assert plan is not None and plan.step == 14 and plan.predicted_step_s is None
    for step in range(10, 20):
        planner.observe(step, planner.plan_at(step).shares, (0.1, 0.1))
    late = planner._measurements.recent[0][len(early) :]
    assert len(early) == 7 and [seen.samples for seen in late] == [16] * 4 + [8] * 4


@pytest.mark.parametrize(("saved", "now", "expected"), [
    ([(1, 0), (2, 0)], [(1, 0), (2, 0)], [0, 1]),
    ([(1, 0), (1, 0)], [(1, 0), (1, 0)], [0, 1]),
    ([(1, 0), (2, 0)], [(2, 0), (7, 0), (1, 0)], [1, None, 0]),
    ([(1, 0), (2, 0), (3, 5)], [(7, 0), (8, 0), (9, 0), (4, 5)], [0, 1, None, 2]),
    ([(1, 0), (2, 5)], [(2, 0), (1, 5)], [1, 0]),
])
def test_a_rank_goes_on_with_what_was_measured_of_its_device_or_else_of_one_of_its_kind(saved, now, expected) -> None:
    """Each is gone on with once."""
    assert match_ranks(saved, now) == expected


def test_measurements_follow_a_rank_to_its_new_number():
    def planner(*identities):
        made = planner_of(2)
        made._arguments = replace(made._arguments, identities=identities)
        return made

    before, after = planner(7, 8), planner(8, 7)
    for step in range(5, 30):
        before.observe(step, (16, 16), (0.1, 0.3))
    after.load_state_dict(before.state_dict(), 30)
    slow, fast = after.plan_at(30).shares
    assert fast > 2 * slow
    before.observe(30, (16, 16), (0.1, 0.3), (0.1, 0.0))
    after.load_state_dict(before.state_dict(), 30)
    fast, slow = after.plan_at(30).shares
    assert after.loading.seconds == [0.0, 0.1] and fast > 2 * slow, "whose samples come slowly"


def test_plans_do_not_count_that_were_made_before_it_was_known_how_slowly_samples_come():
    planner, shares = planner_of(2), [(40, 24), (44, 20), (40, 24), (44, 20)]
    for version, announced in enumerate(shares, start=1):
        planner.accept(Announcement(
            version=version, shares=announced, reason="", predicted_step_s=0.1, strategy="synchronous"
        ), 10 * version)  # fmt: skip
        if version < 4:
            loading_s = [0.0, 0.0] if version == 2 else [0.0, 0.1]  # another loader is in use meanwhile
            planner.observe(10 * version + 5, announced, (0.1, 0.1), loading_s)
    assert planner.loading.aware(planner.plans[:-1]) == planner.plans[1:-1], "only what is slower than ever is news"
    resumed = planner_of(2)
    resumed.load_state_dict(planner.state_dict(), 45)
    assert resumed.loading.aware(resumed.plans) == resumed.plans[1:]
    resumed.load_state_dict(planner_of(2).state_dict(), 45)
    assert resumed.loading.aware(planner.plans) == planner.plans, "of plans that are gone nothing is known"


def test_a_rank_that_never_had_a_sample_is_taken_for_an_ordinary_one():
    planner = planner_of(4, least=0)
    planner.plans[0] = replace(planner.plans[0], shares=(32, 16, 16, 0))
    for step in range(5, 40):
        planner.observe(step, (32, 16, 16, 0), (0.1, 0.1, 0.4, 0.0))
    planner.look(40)
    *known, idle = (model.seconds_per_sample for model in planner.models)
    assert min(known) < idle < max(known)


def test_ranks_whose_steps_take_twice_as_long_half_the_time_get_few_plans() -> None:
    """As with long and short sequences in turn: whichever speed has the majority of a window is not the rank's."""
    for seed in range(2):
        planner, draw = planner_of(), random.Random(seed)

        def compute_of(step: int, shares: tuple[int, ...], draw: random.Random = draw) -> list[float]:
            return [
                (overhead + each * share) * draw.choice((1.0, 2.0)) * draw.gauss(1, 0.03)
                for (overhead, each), share in zip(SPEEDS, shares, strict=True)
            ]

        job(planner, 1500, compute_of)
        assert planner.plans[-1].version <= 30, planner.plans[-1].version


def test_looks_that_take_long_become_rarer() -> None:
    now, looked = [0.0], []

    class Slow(Planner):
        def _look(self, step: int, measured_step_s: float | None, rule: replan.ReplanRule) -> None:
            now[0] += 0.05
            looked.append(step)

    planner = Slow(planner_of()._arguments, clock=lambda: now[0])
    for step in range(1000):
        planner.observe(step - 1, [16] * 4, [0.1] * 4)
        planner.look(step, measured_step_s=0.1)
    assert 0.05 * sum(step >= 40 for step in looked) <= 0.01 * 0.1 * 1000
