"""Ranks that wait for their samples: what loads them is a part of how fast they are."""

import dataclasses
import random
import time

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.engine.stopwatch import WallClock
from hvd_hetero.optimizers.agreement import BalancerArguments
from hvd_hetero.optimizers.planner import Planner
from hvd_hetero.optimizers.step_timer import StepTimer
from hvd_hetero.policy.loader_speed import FEW, FEW_TOLD, LEAST, MOST, TRIED, WINDOW, LoaderSpeed
from hvd_hetero.policy.partition import Bound, equal_shares

DEPTH = 4  # batches that are loaded ahead


class Loaded:
    """One rank of a synchronous job, whose loader works beside it, `DEPTH` batches ahead. `tells`: whether that tells
    how long it is busy, and which part of the time it takes to load is in that."""

    def __init__(self, tells):
        self.pace, self.begins, self.loaded_s, self.computed_s, self.tells = LoaderSpeed(), [], 0.0, 0.0, tells
        if tells:
            self.pace.begin(1, DEPTH)

    def step(self, now_s, samples, *, loads_s, computes_s, hands_s):
        """When it is done with a batch, how long it has computed, and what it says that it needs to load a sample."""
        wanted_s = self.begins[-DEPTH] if len(self.begins) >= DEPTH else 0.0
        self.loaded_s = max(self.loaded_s, wanted_s) + loads_s * samples
        if self.tells:
            self.pace.tell(samples, self.tells * loads_s * samples)
        begins_s = max(now_s, self.loaded_s) + hands_s
        step_s = begins_s - self.begins[-1] if self.begins else None
        self.pace.observe(samples, step_s=step_s, waited_s=begins_s - now_s, computed_s=self.computed_s)
        self.begins.append(begins_s)
        self.computed_s = compute_s = computes_s * samples
        return begins_s + compute_s, 0.0 if self.pace.is_pending else compute_s, self.pace.seconds_per_sample or 0.0


def job(steps, *, loads, computes, batch=64, noise=0.05, seed=0, hands_s=0.0, tells=0.0):
    """The seconds of each step, and the plans, from equal shares on; `loads(step)`: seconds of a sample, by rank."""
    draw, ranks, now_s, ends = random.Random(seed), len(computes), 0.0, [0.0]
    first = equal_shares(batch, ranks)
    planner = Planner(BalancerArguments(
        global_batch_size=batch, bounds=(Bound(lower=1),) * ranks, first_shares=first, micro_caps=(None,) * ranks,
    ))  # fmt: skip
    workers, said = [Loaded(tells) for _ in range(ranks)], None
    for step in range(steps):
        shares = planner.plan_at(step).shares
        if said is not None:
            planner.observe(step - 1, *said, dealt_ahead=DEPTH)
        if planner.announcement:
            planner.accept(planner.announcement, step)
        else:
            before_s = ends[-1] - ends[-2] if len(ends) > 1 else None
            planner.look(step, measured_step_s=before_s, dealt_ahead=DEPTH)
        done = [
            each.step(
                now_s, n, loads_s=load_s * draw.gauss(1.0, noise), computes_s=compute_s * draw.gauss(1.0, noise),
                hands_s=hands_s,
            )
            for each, n, load_s, compute_s in zip(workers, shares, loads(step), computes, strict=True)
        ]  # fmt: skip
        end_s, compute_s, loading_s = zip(*done, strict=True)
        said, now_s = (shares, compute_s, loading_s), max(end_s) + 0.002
        ends.append(now_s)
    return [end - begin for begin, end in zip(ends, ends[1:], strict=False)], planner.plans


def best_s(loads, computes, batch=64):
    """What a step takes at least, of samples that can be divided."""
    return batch / sum(1.0 / max(pair) for pair in zip(loads, computes, strict=True))


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("loads", [(0.001, 0.006), (0.006, 0.001), (0.004, 0.008), (0.005, 0.005)])
@pytest.mark.parametrize("computes", [(0.002, 0.002), (0.004, 0.002), (0.0005, 0.0005)])
@pytest.mark.parametrize("tells", [0.0, 0.4, 1.0])
def test_a_rank_that_waits_for_its_samples_has_fewer(loads, computes, tells):
    """Also where it only shows how slowly they come to a rank once it has been given too many. Where loaders tell all
    of it, the first plans are right, and last."""
    best = best_s(loads, computes) + 0.002
    for seed in range(2):
        steps, plans = job(600, loads=lambda _: loads, computes=computes, seed=seed, tells=tells)
        assert mean(steps[100:]) <= 1.08 * best
        assert len(plans) <= (6 if tells == 1.0 else 17)
        assert tells < 1.0 or mean(steps[20:60]) <= 1.06 * best


@pytest.mark.parametrize("hands_s", [0.0, 0.01, 0.03])
def test_what_it_takes_to_hand_over_a_batch_is_no_loading(hands_s):
    """Shares follow computing, however much of a step that is."""
    computes = (0.001, 0.003)
    steps, plans = job(300, loads=lambda _: (0.0005, 0.0005), computes=computes, hands_s=hands_s)
    assert mean(steps[60:]) <= 1.1 * (best_s((0.0, 0.0), computes) + 0.002 + hands_s)
    assert len(plans) <= 5


@pytest.mark.parametrize("slow", [range(300), range(300, 600)])
@pytest.mark.parametrize("tells", [0.0, 0.7, 1.0])
def test_a_rank_whose_samples_come_faster_again_has_more(slow, tells):
    """From a cold disk and then from memory; or where others used that disk for a while."""
    before, after = (0.001, 0.006), (0.001, 0.001)
    steps, _ = job(1600, loads=lambda step: before if step in slow else after, computes=(0.002, 0.002), tells=tells)
    assert mean(steps[slow.start + 150 : slow.stop]) <= 1.12 * best_s(before, (0.002, 0.002)) + 0.002
    assert mean(steps[-200:]) <= 1.06 * best_s(after, (0.002, 0.002)) + 0.002
    if tells:
        assert mean(steps[slow.stop + 50 : slow.stop + 150]) <= 1.06 * best_s(after, (0.002, 0.002)) + 0.002


def heard(pace, count, *, step_s, waited_s, samples=4):
    for _ in range(count):
        pace.observe(samples, step_s=step_s, waited_s=waited_s, computed_s=(step_s or 0.0) - waited_s)
    return pace.seconds_per_sample


def test_who_does_not_wait_says_nothing():
    assert heard(LoaderSpeed(), 1000, step_s=1.0, waited_s=0.01) is None


def test_loaders_tell_how_fast_they_are_to_who_does_not_wait():
    pace = LoaderSpeed()
    pace.begin(2)
    found = []
    for batch in range(WINDOW):
        pace.tell(4, 9.0 if batch < 2 else 1.0)  # they open files first
        found.append(heard(pace, 1, step_s=1.0, waited_s=0.01))
    assert found == [None] * (2 + FEW_TOLD - 1) + [1.0 / 4 / 2] * (WINDOW - 1 - FEW_TOLD) and not pace.is_pending
    pace.tell(0, 9.0)  # a sample of another rank's
    for _ in range(WINDOW):
        pace.tell(4, 3.0)
    assert heard(pace, 1, step_s=1.0, waited_s=0.01) == 1.0 / 4, "no slower than what it has been seen to do"
    for _ in range(WINDOW):
        pace.tell(4, 0.5)
    assert heard(pace, 1, step_s=1.0, waited_s=0.01) == pytest.approx(0.5 / 3 / 4)


@pytest.mark.parametrize("busy_s, waited_s, found", [
    (1.0, 0.1, 0.25), (0.9, 0.1, 0.25), (0.4, 0.1, 0.1), (0.4, 0.3, 0.25),
])  # fmt: skip
def test_short_waits_are_for_loaders_only_if_these_are_busy(busy_s, waited_s, found):
    """Otherwise for a batch that is handed over."""
    pace = LoaderSpeed()
    pace.begin(1)
    for _ in range(3 * WINDOW):
        pace.tell(4, busy_s)
        heard(pace, 1, step_s=1.0, waited_s=waited_s)
    assert pace.seconds_per_sample == pytest.approx(found, rel=0.2)


def test_loaders_that_are_busy_all_the_time_are_not_asked_for_more():
    pace = LoaderSpeed()
    pace.begin(1)
    for _ in range(10 * LEAST):
        pace.tell(4, 0.95)
        assert heard(pace, 1, step_s=1.0, waited_s=0.01) in (None, 0.95 / 4)


def test_what_is_ready_at_first_does_not_make_loaders_faster():
    """More may come in a while than was loaded in it."""
    pace = LoaderSpeed()
    pace.begin(1, 4)
    for step_s in (*(1.0,) * 8, *(0.1,) * 4, *(1.0,) * 4):
        pace.tell(4, 1.0)
        heard(pace, 1, step_s=step_s, waited_s=0.0)
    assert pace.seconds_per_sample == 0.25


def test_long_steps_between_short_ones_are_no_outliers():
    """As where the loaders of another rank end together."""
    pace = LoaderSpeed()
    pace.begin(1)
    for step_s in (0.1, 1.9) * WINDOW:
        pace.tell(4, 0.8)
        heard(pace, 1, step_s=step_s, waited_s=0.0)
    assert pace.seconds_per_sample == 0.2


@pytest.mark.parametrize("loaders", [2, 24, 32])
def test_many_who_load_end_together(loaders):
    pace, found = LoaderSpeed(), []
    pace.begin(loaders)
    for batch in range(6 * loaders):
        waited_s = 0.0 if batch % loaders else 0.4 * loaders
        pace.observe(4, step_s=0.1 + waited_s, waited_s=waited_s, computed_s=0.1)
        found.append(pace.seconds_per_sample)
    assert found[2 * max(WINDOW, loaders) :] == pytest.approx([0.5 / 4] * len(found[2 * max(WINDOW, loaders) :]))


def test_who_waits_longer_for_others_could_have_had_its_samples():
    for waited_s, known in ((0.2, False), (0.4, False), (0.5, True)):
        pace = LoaderSpeed()
        for _ in range(WINDOW):
            pace.observe(4, step_s=1.0, waited_s=waited_s, computed_s=0.1)
        assert (pace.seconds_per_sample is not None) == known


def test_who_waits_needs_what_a_batch_takes_to_come():
    """As for processes that end together: then there are several, and none for a while."""
    pace = LoaderSpeed()
    for _ in range(WINDOW):
        pace.observe(4, step_s=0.1, waited_s=0.0, computed_s=0.1)
        pace.observe(4, step_s=0.7, waited_s=0.6, computed_s=0.1)
    assert pace.seconds_per_sample == pytest.approx(0.1)


def test_tries_are_rarer_where_they_fail_and_more_frequent_where_they_do_not():
    pace, pauses = LoaderSpeed(), []
    heard(pace, 1, step_s=None, waited_s=0.2)
    for _ in range(6):
        found = heard(pace, WINDOW, step_s=1.0, waited_s=0.2)
        assert found == 0.25
        heard(pace, WINDOW, step_s=1.0, waited_s=0.0)  # until it has not waited, as far back as it looks
        steps = next(n for n in range(10**5) if heard(pace, 1, step_s=1.0, waited_s=0.0) < found)
        assert pace.seconds_per_sample == TRIED * found
        pauses.append(steps + WINDOW)
    assert LEAST <= pauses[0] <= LEAST + WINDOW
    assert all(later >= earlier for earlier, later in zip(pauses, pauses[1:], strict=False))
    assert MOST <= pauses[-1] <= MOST + WINDOW
    heard(pace, 40 * MOST, step_s=1.0, waited_s=0.0)
    assert pace.seconds_per_sample < 0.01 and pace._pause == LEAST


def test_the_time_between_two_epochs_is_no_loading():
    pace = LoaderSpeed()
    for _ in range(FEW - 1):
        heard(pace, 1, step_s=None, waited_s=60.0)
        heard(pace, 1, step_s=60.0, waited_s=60.0)
    assert pace.seconds_per_sample is None and pace.is_pending
    for _ in range(WINDOW):
        heard(pace, 1, step_s=None, waited_s=60.0)
        assert heard(pace, 1, step_s=0.1, waited_s=0.05) is not None, "short epochs say it together"
    assert pace.seconds_per_sample == pytest.approx(0.025)


def test_a_batch_for_which_something_compiles_says_nothing_of_loading():
    pace = LoaderSpeed()
    heard(pace, WINDOW, step_s=1.0, waited_s=0.5)
    for step_s in (30.0, *(1.0,) * WINDOW):
        assert heard(pace, 1, step_s=step_s, waited_s=0.5) <= 1.1 * 0.25
    assert heard(pace, 2 * WINDOW, step_s=4.0, waited_s=0.5) == 1.0, "what stays so long is usual"


class Clock(WallClock):
    """Of a test: seconds and processor seconds."""

    now_s = cpu_s = 0.0

    def mark(self):
        return self.now_s

    def passes(self, seconds, cpu_s=0.0):
        self.now_s, self.cpu_s = self.now_s + seconds, self.cpu_s + cpu_s


def step_timer_of(clock):
    return StepTimer(clock, clock=lambda: clock.now_s, processor_s=lambda: clock.cpu_s)


@pytest.mark.parametrize("open_segment", [False, True])
@pytest.mark.parametrize("cpu", [0.0, 1.0])
def test_a_rank_that_loads_by_itself_takes_as_long_as_that_and_computing(open_segment, cpu):
    """Whether or not it is the processor that loads: what serves the communication is told from both."""
    clock, heard = Clock(), []
    sheet = step_timer_of(clock)
    sheet.loading_meter.will_load(beside=False)
    for _ in range(3):
        if open_segment:
            sheet.run()
        with sheet.loading_meter.loading():
            clock.passes(3.0, 3.0 * cpu)
        sheet.begin(4)
        sheet.run()
        clock.passes(5.0, 5.0)
        sheet.pause()
        clock.passes(2.0, 0.8 if cpu else 0.5)  # waits, and serves
        sheet.end(heard.append)
    served_s = 0.8 if cpu else 0.5
    for entry in heard[1:]:
        assert (entry.data_s, entry.compute_s) == (3.0, 5.0)
        assert entry.extra_s == pytest.approx(3.0 + served_s), "a core's time, also where a disk is waited for"
    assert sheet.reported == pytest.approx((4, 8.0 + served_s))


def test_a_rank_for_which_others_load_says_how_long_both_take():
    clock, heard, reported = Clock(), [], []
    sheet = step_timer_of(clock)
    sheet.loading_meter.will_load(beside=True)
    for _ in range(2):  # an iteration that was broken off
        with sheet.loading_meter.loading():
            clock.passes(99.0)
        sheet.begin(1)
        sheet.loading_meter.will_load(beside=True)
    sheet.end(lambda entry: None)
    sheet.loading_meter.will_load(beside=True)
    for step in range(3 * WINDOW):
        samples, waits_s = (4, 3.0) if step < WINDOW + 1 else (2, 0.0)
        with sheet.loading_meter.loading():
            clock.passes(waits_s)
        sheet.begin(samples)
        sheet.run()
        clock.passes(5.0 * samples / 4)
        sheet.pause()
        sheet.end(heard.append)
        reported.append((*sheet.reported, sheet.loading_s))
    assert reported[1:FEW] == [(4, 0.0, 0.0)] * (FEW - 1), "better nothing than what a plan would be wrong with"
    assert reported[FEW : WINDOW + 1] == [(4, 5.0, pytest.approx(2.0))] * (WINDOW + 1 - FEW), "8 s for 4 samples"
    assert reported[WINDOW + 1] == (2, 2.5, pytest.approx(2.0, rel=0.1)), "as much for a sample"
    assert [entry.loading_s for entry in heard] == [loading_s * samples for samples, _, loading_s in reported]
    assert {(entry.data_s, entry.extra_s) for entry in heard} == {(3.0, 0.0), (0.0, 0.0)}


def test_a_step_that_takes_longer_than_it_ever_will_again_says_nothing():
    clock = Clock()
    sheet = step_timer_of(clock)
    sheet.discard()
    with sheet.loading_meter.loading():
        clock.passes(9.0, 9.0)
    sheet.begin(4)
    sheet.end(lambda entry: None)
    assert sheet.reported == (4, 0.0)


def test_what_a_rank_reads_whatever_its_share_is_no_slowness_where_others_read_it():
    """Fewer samples would not make it faster. Where it reads by itself, they leave it more time for that."""
    for beside in (True, False):
        clock = Clock()
        sheet = step_timer_of(clock)
        sheet.loading_meter.will_load(beside=beside, in_parts=False)
        for _ in range(2 * WINDOW):
            with sheet.loading_meter.loading():
                clock.passes(7.0)
            sheet.begin(4)
            sheet.run()
            clock.passes(1.0)
            sheet.pause()
            sheet.end(lambda entry: None)
        assert (*sheet.reported, sheet.loading_s) == (4, 1.0 if beside else 8.0, 0.0)


class Numbered(torch.utils.data.Dataset):
    def __init__(self, length=12, seconds=0.0):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(3)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([torch.ones(3)] * 12)


def train(engine, data, *, batch=4, workers=0, loading=None, **options):
    """The balancer after an epoch."""
    balancer = hvd.Balancer(batch, engine=engine, **options)
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
    for part in hvd.BalancedDataLoader(data, balancer=balancer, num_workers=workers, **(loading or {})):
        optimizer.zero_grad()
        model(part).mean().backward()
        optimizer.step()
    return balancer


@pytest.mark.parametrize("data", [Numbered, Stream])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_says_who_loads(data, workers):
    def program(engine):
        loading_meter = train(engine, data(), workers=workers, adaptive=False).step_timer.loading_meter
        _, own_s, _, pace = loading_meter.end()
        return loading_meter.by_itself, pace is not None, own_s

    assert World(2).run(program) == [(workers == 0, workers > 0 and data is Numbered, 0.0)] * 2


class Plainly(Numbered):
    """Wants the numbers of a batch as any `DataLoader` gives them."""

    def __getitems__(self, numbers):
        assert type(numbers) is list and type(numbers[0]) is int
        return [self[number] for number in numbers]


class Own(torch.utils.data.IterableDataset):
    def __iter__(self):
        for _ in range(12):
            time.sleep(0.002)
            yield torch.ones(3)


@pytest.mark.parametrize("data, options", [
    (Plainly(seconds=0.002), {}), (Plainly(seconds=0.002), {"collate_fn": torch.stack, "persistent_workers": True}),
    (Own(), {"sharded": True, "steps_per_epoch": 3}), (Stream(), {}),
])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 2])
def test_processes_that_load_tell_how_long_they_were_busy(data, options, workers, monkeypatch):
    told, begun = [], []
    monkeypatch.setattr(LoaderSpeed, "tell", lambda self, samples, seconds: told.append((samples, seconds)))
    monkeypatch.setattr(LoaderSpeed, "begin", lambda self, *workers: begun.append(workers))
    options = options if workers else {name: value for name, value in options.items() if name != "persistent_workers"}

    World(1).run(lambda engine: train(engine, data, workers=workers, loading=options, adaptive=False))
    assert [samples for samples, _ in told] == ([4] * 3 if workers and not isinstance(data, Stream) else [])
    assert all(0.008 <= seconds < 5.0 for _, seconds in told)
    assert set(begun) == {(workers, 2 * workers)}


@pytest.mark.parametrize("workers", [0, 1])
def test_shares_follow_how_fast_samples_come(workers):
    def program(engine):
        data = Numbered(40 * 16, seconds=(0.0005, 0.006)[engine.rank])
        return [plan.shares for plan in train(engine, data, batch=16, workers=workers).plans]

    (shares, others) = World(2).run(program)
    assert shares == others and shares[0] == (8, 8)
    assert max(first for first, _ in shares) >= 11


class Late(Clock):
    """Of a device that is known to have come to a mark only when somebody waits for it."""

    def passed(self, mark):
        return False


def late_steps(clock, sheet, count, *, hands_s, computes_s, waits_s, first_s=0.0, samples=4):
    """What is said in each of so many steps, once its exchange asks for what ended last."""
    said = []
    for step in range(count):
        with sheet.loading_meter.loading():
            clock.passes(hands_s)
        sheet.begin(samples)
        sheet.run()
        clock.passes(computes_s + first_s * (step == 0))
        sheet.pause()
        said.append(sheet.reported)
        clock.passes(waits_s)
        sheet.end(lambda entry: None)
    return said


@pytest.mark.parametrize("first_s", [0.0, 10.0, 30.0])
def test_a_first_step_that_a_device_takes_long_for_is_no_loading(first_s):
    """A fast rank waits for others, and a little for what is handed over: it is to have more samples."""
    clock = Late()
    sheet = step_timer_of(clock)
    sheet.loading_meter.will_load(beside=True)
    said = late_steps(clock, sheet, 60, hands_s=0.06, computes_s=0.4, waits_s=0.54, first_s=first_s)
    assert said[2:] == [pytest.approx((4, 0.4))] * 58


def test_what_a_device_computes_while_its_rank_loads_takes_no_longer_than_both():
    """As in steps apart, in which nobody waits for it."""

    class Beside(Late):
        """Begins a segment once the one before it is over, as long as it is said to take."""

        free_s, length_s = 0.0, 1.0

        def mark(self):
            return self.now_s

        def seconds(self, start, end):
            return self.length_s

    for loads_s, expected_s in ((0.6, 1.0), (1.5, 1.5)):
        clock = Beside()
        sheet = step_timer_of(clock)
        sheet.loading_meter.will_load(beside=False)
        for _ in range(4):
            with sheet.loading_meter.loading():
                clock.passes(loads_s)
            sheet.begin(4)
            sheet.run()
            sheet.pause()
            clock.passes(max(0.0, 1.0 - loads_s))  # until the step before is over
            sheet.end(lambda entry: None)
        assert sheet.reported == pytest.approx((4, expected_s))


def test_what_limits_a_rank_is_known_after_something_else_has_loaded_and_after_a_short_batch():
    clock = Clock()
    sheet = step_timer_of(clock)

    def train(batches, waits_s, samples=4, beside=True):
        sheet.loading_meter.will_load(beside=beside)
        for _ in range(batches):
            with sheet.loading_meter.loading():
                clock.passes(waits_s)
            sheet.begin(samples)
            sheet.run()
            clock.passes(0.4 + 0.05 * samples)
            sheet.pause()
            sheet.end(lambda entry: None)
        return sheet.loading_s

    assert train(2 * WINDOW, 0.4) == pytest.approx(0.25)
    assert train(1, 0.0, samples=1) == pytest.approx(0.25)
    sheet.loading_meter.will_load(beside=False)
    for _ in range(3):
        with sheet.loading_meter.loading():
            clock.passes(60.0)  # of a validation, which begins no batch
    assert train(1, 0.4) == pytest.approx(0.25)
    assert train(1, 0.4, beside=False) == 0.0, "what loads now does not do so beside computing"
    assert train(1, 0.4) == pytest.approx(0.25)


def test_what_limits_a_rank_is_known_to_who_resumes_it():
    """On whichever place of whichever ranks it is; of other hardware it says nothing."""

    def run(state, identities):
        def program(engine):
            balancer = hvd.Balancer(16, engine=engine)
            balancer.planner._arguments = dataclasses.replace(
                balancer.planner._arguments, identities=identities, kinds=identities
            )
            if state is None:
                balancer.planner.observe(0, (8.0, 8.0), (0.1, 0.1), (0.5, 0.0))
            else:
                balancer.load_state_dict(state)
            sheet = balancer.step_timer
            return balancer.state_dict(), sheet.loading_s, sheet.loading_meter.speed.seconds_per_sample

        return World(2).run(program)

    state = run(None, ("a", "b"))[0][0]
    for identities, expected in ((("a", "b"), [0.5, 0.0]), (("b", "a"), [0.0, 0.5]), (("b", "c"), [0.0, 0.0])):
        for (_, loading_s, pace_s), wanted in zip(run(state, identities), expected, strict=True):
            assert (loading_s, pace_s or 0.0) == (wanted, wanted)


def test_a_loader_within_another_one_s_loop_loads_for_itself():
    def program(engine):
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        outer, inner = (hvd.BalancedDataLoader(Numbered(), balancer=balancer, num_workers=n) for n in (1, 0))
        said = []
        with torch.no_grad():
            for step, _ in enumerate(outer):
                if step == 0:
                    said += [balancer.step_timer.loading_meter.by_itself for _ in inner]
                said.append(balancer.step_timer.loading_meter.by_itself)
        return said

    assert World(2).run(program) == [[True] * 3 + [True, False, False]] * 2


def test_what_is_known_of_an_earlier_process_s_loaders_is_tried_soon():
    """There may be more of them now."""
    known, resumed = LoaderSpeed(), LoaderSpeed()
    known.seconds_per_sample = 1.0
    resumed.resume(1.0)
    for pace in (known, resumed):
        for _ in range(LEAST):
            pace.observe(4, step_s=4.0, waited_s=0.0, computed_s=4.0)
    assert known.seconds_per_sample > 0.8 > 0.7 > resumed.seconds_per_sample
    for _ in range(WINDOW):
        resumed.observe(4, step_s=4.0, waited_s=2.0, computed_s=2.0)
    assert resumed.seconds_per_sample == 1.0
    for _ in range(LEAST):
        resumed.observe(4, step_s=4.0, waited_s=0.0, computed_s=4.0)
    assert resumed.seconds_per_sample > 0.8, "what it has waited for is known"
