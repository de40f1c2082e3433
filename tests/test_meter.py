"""What a rank's samples cost it: compute, and its own part of serving the communication."""

import time

import pytest

from hvd_hetero.engine.stopwatch import WallClock
from hvd_hetero.optimizers.meter import LOOK_EVERY, SMOOTHED, ComputeMeter, Pace


class Rank:
    """Compute and waiting on `cores` of a core, which others use for the rest, by clocks that only this moves."""

    def __init__(self, cores, stopwatch=WallClock, **asked):
        self.cores, self.now_s, self.processor_s, self.pool_s = cores, 0.0, 0.0, 0.0
        self.meter = ComputeMeter(
            stopwatch(lambda: self.now_s), processor_s=lambda: self.processor_s + self.pool_s,
            serving_s=lambda: self.processor_s, **{"crowding": lambda: 1.0 / min(cores, 1.0)} | asked,
        )  # fmt: skip

    def passes(self, work_s, wall_s=None):
        """`work_s` of processor time; as fast as the cores allow unless it takes longer for other reasons."""
        self.processor_s += work_s
        self.now_s += work_s / self.cores if wall_s is None else wall_s

    def step(self, compute, service, link_s, pool=0.0, pool_waiting=0.0):
        """`pool` and `pool_waiting`: processor time of a pool of threads that computes, too, and may spin."""
        self.meter.run()
        self.passes(compute)
        self.pool_s += pool
        self.meter.pause()
        self.passes(service, wall_s=link_s)
        self.pool_s += pool_waiting
        self.meter.run()
        self.meter.pause()
        compute_s = self.meter.take().seconds()
        return compute_s, self.meter.take_extra_s(compute_s)


def loaded(rank, work_s, wall_s=None):
    """The seconds in which a rank loads data in between, by `work_s` of processor time."""
    began_s, since = rank.now_s, rank.meter.clocks()
    rank.passes(work_s, wall_s)
    rank.meter.count_loading(since)
    return rank.now_s - began_s


@pytest.mark.parametrize("within", [False, True])
def test_what_a_rank_loads_is_neither_compute_nor_service(within):
    """Whether it computes on afterwards or waits. Loading waits for a disk as well, and tells no rate of the cores."""
    rank = Rank(0.5)
    rank.passes(3.0)
    rank.meter.run()
    rank.passes(0.1)
    if within:
        with rank.meter.aside(waits=False):
            loaded(rank, 1.0, wall_s=9.0)
    rank.passes(0.3)
    rank.meter.pause()
    if not within:
        loaded(rank, 1.0, wall_s=9.0)
    rank.passes(0.02, wall_s=0.0)
    rank.meter.run()
    compute_s = rank.meter.take().seconds()
    assert compute_s == pytest.approx(0.8) and rank.meter.take_extra_s(compute_s, 9.0) == pytest.approx(0.04)


def test_what_a_rank_does_between_steps_is_told_by_itself_and_neither_compute_nor_service():
    """And what follows it is a segment of its own."""
    rank = Rank(0.5)
    assert not rank.meter.take_open().segments and not rank.meter.running
    rank.meter.run()
    rank.passes(0.3)
    with rank.meter.aside(waits=False):
        rank.passes(5.0)
    rank.passes(0.1, wall_s=9.0)
    after_s = rank.meter.take_open().seconds()
    assert after_s == pytest.approx(9.6)
    rank.passes(0.1)
    rank.meter.pause()
    rank.passes(0.02, wall_s=0.0)
    rank.meter.run()
    compute_s = rank.meter.take().seconds()
    assert compute_s == pytest.approx(0.2) and rank.meter.take_extra_s(compute_s, after_s) == pytest.approx(0.04)


@pytest.mark.parametrize("cores", [0.2, 0.8, 1.0, 4.0])
def test_service_takes_as_long_as_the_ranks_cores_need_for_it(cores):
    rank = Rank(cores)
    for link_s in (0.0, 0.5):  # however long the link takes
        compute_s, service_s = rank.step(compute=0.4, service=0.02, link_s=link_s)
        assert compute_s == pytest.approx(0.4 / cores)
        assert service_s == pytest.approx(0.02 / cores)


def test_service_is_never_more_than_compute_and_each_step_counts_its_own():
    rank = Rank(0.5)
    assert rank.step(compute=0.1, service=9.0, link_s=1.0) == pytest.approx((0.2, 0.2))
    assert rank.step(compute=0.1, service=0.0, link_s=1.0) == pytest.approx((0.2, 0.0))


@pytest.mark.parametrize(("crowding", "quota", "slowest"), [
    (1.0, None, 1.0), (1.5, None, 1.5), (1.0, 4.0, 1.0), (1.0, 0.5, 2.0), (3.0, 0.5, 3.0), (None, None, 5.0)
])  # fmt: skip
def test_compute_that_sleeps_does_not_make_service_slow(crowding, quota, slowest):
    """Nor does what waits for a disk, or for a device of which the stopwatch knows nothing."""
    rank = Rank(1.0, crowding=lambda: crowding, quota_cores=lambda: quota)
    rank.meter.run()
    rank.passes(0.2, wall_s=1.0)
    rank.meter.pause()
    rank.passes(0.1, wall_s=0.5)
    rank.meter.run()
    compute_s = rank.meter.take().seconds()
    assert compute_s == pytest.approx(1.0) and rank.meter.take_extra_s(compute_s) == pytest.approx(0.1 * slowest)


@pytest.mark.parametrize("pool", [0.0, 2.8])
@pytest.mark.parametrize("pool_waiting", [0.0, 0.7])
def test_a_pool_of_threads_computes_but_neither_serves_nor_makes_service_faster(pool, pool_waiting):
    """As OpenMP's, whose threads spin for a while when they have nothing to do."""
    rank = Rank(1.0)
    assert rank.step(0.4, 0.02, 0.1, pool=pool, pool_waiting=pool_waiting) == pytest.approx((0.4, 0.02))


def test_a_pool_of_threads_uses_the_quota():
    rank = Rank(1.0, quota_cores=lambda: 2.0)
    compute_s, extra_s = rank.step(0.4, 0.0, 0.1, pool=1.2)
    assert (compute_s, extra_s) == (pytest.approx(0.4), pytest.approx((0.4 + 1.2) / 2.0 - 0.4))


def test_a_script_may_train_in_another_thread_than_the_one_that_is_known():
    rank = Rank(1.0, quota_cores=lambda: 0.5)
    rank.meter.run()
    rank.pool_s += 0.4
    rank.now_s += 0.4
    rank.meter.pause()
    rank.passes(0.02)
    rank.meter.run()
    compute_s = rank.meter.take().seconds()
    assert rank.meter.take_extra_s(compute_s) == pytest.approx(0.4 / 0.5 - 0.4 + 0.02 / 0.5)


def test_horovod_may_be_initialised_again_while_a_rank_waits():
    """By other threads, whose processor time is less than that of the earlier ones."""
    rank = Rank(1.0)
    rank.passes(5.0)
    rank.meter.run()
    rank.passes(0.4)
    rank.meter.pause()
    rank.processor_s = 0.0
    rank.meter.run()
    compute_s = rank.meter.take().seconds()
    assert (compute_s, rank.meter.take_extra_s(compute_s)) == (pytest.approx(0.4), 0.0)


def test_what_a_rank_does_between_a_wait_that_failed_and_its_next_batch_is_no_service():
    """As ranks come together again, and restore what was committed."""
    rank = Rank(1.0)
    rank.step(compute=0.4, service=0.1, link_s=0.1)
    rank.passes(5.0)
    rank.meter.forget()
    rank.passes(5.0)
    assert rank.step(compute=0.4, service=0.0, link_s=0.1) == (pytest.approx(0.4), 0.0)


@pytest.mark.parametrize("quota", [None, 0.5])
def test_spinning_while_it_waits_is_no_service(quota):
    """Or the time for which a fast rank waits under MPI would be its own, and its share would not grow."""
    spinning, serving = (Rank(1.0, spins=spins, quota_cores=lambda: quota) for spins in (True, False))
    head_start_s = 0.0 if quota is None else 0.2
    assert spinning.step(compute=0.2, service=0.2, link_s=0.2) == pytest.approx((0.2, head_start_s))
    assert serving.step(compute=0.2, service=0.2, link_s=0.2) == pytest.approx((0.2, 0.2 + head_start_s))


def test_where_compute_is_on_a_device_service_says_nothing():
    class Device:
        def __init__(self, clock):
            self._clock = clock

        def mark(self):
            return self._clock()

        def seconds(self, start, end):
            return end - start

    rank = Rank(0.5, Device)
    assert rank.step(compute=0.1, service=0.1, link_s=1.0) == pytest.approx((0.2, 0.0))
    assert rank.meter.clocks() == (0.0, 0.0), "nor is anybody asked"


class Rationed(Rank):
    """A rank that gets `cores` of each period at once, and no more of it, as Linux's CFS bandwidth control does."""

    PERIOD_S = 0.01

    def __init__(self, cores, quota_cores):
        super().__init__(cores, quota_cores=quota_cores)
        self.period, self.used_s = 0, 0.0

    def passes(self, work_s, wall_s=None):
        end_s = self.now_s if wall_s is None else self.now_s + wall_s
        while work_s > 1e-9:
            if (period := int(self.now_s / self.PERIOD_S + 1e-6)) > self.period:
                self.period, self.used_s = period, 0.0
            next_s = (self.period + 1) * self.PERIOD_S
            now_s = min(work_s, self.cores * self.PERIOD_S - self.used_s, next_s - self.now_s)
            if now_s > 1e-9:
                self.used_s, self.processor_s = self.used_s + now_s, self.processor_s + now_s
                self.now_s, work_s = self.now_s + now_s, work_s - now_s
            else:
                self.now_s = next_s
        self.now_s = max(self.now_s, end_s)


def long_run(link_s, quota_cores, steps=100, settled=SMOOTHED):
    """What a step is said to take a rank of 0.2 cores that waits for `link_s`, and what it takes, in seconds."""
    rank, said = Rationed(0.2, quota_cores), []
    for step in range(settled + steps):
        if step == settled:
            began_s = rank.now_s
        said.append(sum(rank.step(compute=0.0065, service=0.0005, link_s=link_s)))
    return sum(said[settled:]) / steps, (rank.now_s - began_s) / steps


@pytest.mark.parametrize("link_s", [0.0, 0.0137, 0.031, 0.1])
def test_under_a_quota_a_step_takes_what_it_would_if_the_others_waited_for_it(link_s):
    _, alone_s = long_run(0.0, lambda: None)
    assert alone_s == pytest.approx((0.0065 + 0.0005) / 0.2, rel=0.01)
    assert long_run(link_s, lambda: 0.2)[0] == pytest.approx(alone_s, rel=0.07)


@pytest.mark.parametrize("link_s", [0.0, 0.0137, 0.031, 0.1])
@pytest.mark.parametrize(("compute", "loading", "service"), [(0.0065, 0.003, 0.001), (0.001, 0.0005, 0.0002)])
def test_under_a_quota_loading_and_service_take_their_parts_of_it_as_well(compute, loading, service, link_s):
    """Also if all of them are so short that a rank which has waited has its quota ahead."""
    rank, said = Rationed(0.2, lambda: 0.2), []
    for _ in range(SMOOTHED + 100):
        rank.meter.run()
        rank.passes(compute)
        rank.meter.pause()
        loaded_s = loaded(rank, loading)
        rank.passes(service, wall_s=link_s)
        rank.meter.run()
        compute_s = rank.meter.take().seconds()
        said.append(compute_s + loaded_s + rank.meter.take_extra_s(compute_s, loaded_s))
    assert sum(said[SMOOTHED:]) / 100 == pytest.approx((compute + loading + service) / 0.2, rel=0.07)


def test_under_a_quota_too_who_works_while_it_waits_is_not_taken_to_serve_all_the_time():
    rank = Rationed(0.2, lambda: 0.2)
    for _ in range(10):
        compute_s, extra_s = rank.step(compute=0.0065, service=0.1, link_s=0.5)
        assert extra_s < 0.0065 / 0.2 + compute_s


def test_who_has_waited_computes_faster_than_its_quota():
    """Or the law above would hold without anybody's doing."""
    assert long_run(0.031, lambda: None)[0] < 0.9 * long_run(0.0, lambda: None)[0]


def test_a_quota_that_is_changed_is_heard_of_and_a_wide_one_says_nothing():
    """Though it is asked for now and then only, as that takes its time."""
    quota, asked = [None], []
    rank = Rank(1.0, quota_cores=lambda: asked.append(True) or quota[0])
    for cores, extra_s in ((None, 0.0), (0.5, 0.1), (4.0, 0.0)):
        quota[0] = cores
        said = [rank.step(compute=0.1, service=0.0, link_s=0.0) for _ in range(LOOK_EVERY + 1)]
        for each in said:  # at once: what the other quota has cost is no measure of this one
            assert each == pytest.approx((0.1, extra_s))
    assert len(asked) == 3


def test_what_lies_between_batches_is_neither():
    """A segment that is begun anew is forgotten: loading data is not this batch's compute."""
    rank = Rank(1.0)
    rank.meter.run()
    rank.passes(5.0)  # between the update and the next batch
    with rank.meter.aside(waits=True):  # as after a validation, for its sums
        rank.passes(1.0)
    rank.passes(2.0)
    there = rank.meter.now()
    rank.passes(0.1)
    assert rank.meter.begin_at(there) == pytest.approx(2.0)
    with rank.meter.aside(waits=True):
        rank.passes(3.0)
    assert rank.step(compute=0.4, service=0.1, link_s=0.1) == pytest.approx((0.4, 0.1))


def test_what_was_loaded_in_between_is_neither():
    rank = Rank(0.5)
    rank.meter.run()
    rank.passes(0.1)  # the update
    with rank.meter.aside(waits=False):
        rank.passes(1.0)
        with rank.meter.aside(waits=True):  # for what it loads, which is out of it already
            rank.passes(2.0, wall_s=6.0)
    rank.passes(0.3)
    rank.meter.pause()
    rank.passes(0.02, wall_s=0.0)
    rank.meter.run()
    compute_s = rank.meter.take().seconds()
    assert compute_s == pytest.approx(0.8) and rank.meter.take_extra_s(compute_s) == pytest.approx(0.04)


def test_what_was_waited_for_others_in_the_middle_is_service():
    rank = Rank(1.0)
    rank.meter.run()
    rank.passes(0.5)
    with rank.meter.aside(waits=True):
        rank.passes(0.1, wall_s=2.0)
    rank.passes(0.5)
    rank.meter.pause()
    compute_s = rank.meter.take().seconds()
    assert compute_s == pytest.approx(1.0) and rank.meter.take_extra_s(compute_s) == pytest.approx(0.1)


def test_what_was_waited_for_others_in_the_middle_is_told_once(monkeypatch):
    """In wall time, whatever clock tells what is computed."""
    rank = Rank(1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: rank.now_s)
    rank.passes(50.0)
    rank.meter.run()
    for waits, wall_s in ((True, 2.0), (False, 7.0), (True, 1.0)):
        with rank.meter.aside(waits=waits):
            rank.passes(0.1, wall_s=wall_s)
        rank.passes(0.5)
    rank.meter.pause()
    assert rank.meter.take_aside_s() == pytest.approx(3.0) and rank.meter.take_aside_s() == 0.0


def test_between_two_steps_a_rank_has_worked_since_it_last_waited_for_others_and_all_waits_are_told(monkeypatch):
    rank = Rank(1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: rank.now_s)
    rank.meter.run()
    for waits, wall_s in ((True, 2.0), (True, 1.0), (False, 7.0)):
        rank.passes(0.5)
        with rank.meter.aside(waits=waits):
            rank.passes(0.1, wall_s=wall_s)
    rank.passes(0.25)
    assert rank.meter.take_open().seconds() == pytest.approx(0.75)
    rank.passes(4.0)
    assert rank.meter.take_open().seconds() == pytest.approx(4.0), "another one has begun"
    rank.meter.pause()
    assert not rank.meter.take_open().segments
    assert rank.meter.take().seconds() == 0.0 and rank.meter.take_aside_s() == pytest.approx(3.0)


def test_a_segment_begins_when_what_it_needs_was_there():
    rank = Rank(1.0)
    early = rank.meter.now()
    rank.passes(1.0)
    assert rank.meter.begin_at(early) == 0.0 and not rank.meter.running, "nothing is measured yet"
    rank.meter.run()
    rank.passes(1.0)
    with rank.meter.aside(waits=True):
        rank.passes(2.0)
    rank.passes(2.0)
    there = rank.meter.now()  # as the thread that loads ahead saw it
    rank.passes(0.5)
    assert rank.meter.begin_at(early) == 0.0 and rank.meter.begin_at(there) == pytest.approx(2.0)
    rank.meter.pause()
    assert rank.meter.take().seconds() == pytest.approx(0.5) and rank.meter.take_aside_s() == 0.0


def test_another_stopwatch_begins_anew():
    """A batch may have begun before anybody knew on which device it is computed: marks of two kinds do not mix."""

    class Events:
        def mark(self):
            return ["event"]

        def passed(self, mark):
            return True

        def seconds(self, start, end):
            assert start == end == ["event"]
            return 0.25

    rank = Rank(1.0)
    rank.meter.run()
    rank.passes(1.0)
    rank.meter.pause()
    rank.meter.run()
    with rank.meter.aside(waits=True):
        rank.passes(1.0)
    rank.meter.stopwatch = Events()
    assert rank.meter.running
    rank.meter.pause()
    assert rank.meter.take().seconds() == 0.25
    idle = Rank(1.0).meter
    idle.stopwatch = Events()
    assert not idle.running


def test_with_another_stopwatch_processor_time_begins_anew_as_well():
    rank = Rank(1.0)
    rank.meter.run()
    rank.passes(1.0)
    rank.meter.stopwatch = type("Other", (WallClock,), {})(lambda: rank.now_s)
    rank.passes(0.25)
    rank.meter.pause()
    rank.passes(0.125)
    rank.meter.run()
    compute_s = rank.meter.take().seconds()
    assert compute_s == 0.25 and rank.meter.take_extra_s(compute_s) == pytest.approx(0.125)


@pytest.mark.parametrize("open_still", [True, False])
def test_what_is_forgotten_is_neither_compute_nor_a_wait(open_still):
    rank = Rank(1.0)
    rank.meter.run()
    rank.passes(1.0)
    with rank.meter.aside(waits=True):
        rank.passes(0.1, wall_s=2.0)
    if not open_still:
        rank.meter.pause()
    rank.meter.forget()
    rank.passes(0.5)
    rank.meter.pause()
    compute_s = rank.meter.take().seconds()
    assert compute_s == (0.5 if open_still else 0.0)
    assert rank.meter.take_aside_s() == 0.0 and rank.meter.take_extra_s(compute_s) == 0.0


@pytest.mark.parametrize(("call", "seconds"), [("pause", 0.0), ("run", 0.25)])
def test_a_segment_may_end_or_begin_anew_within_what_is_excluded_from_it(call, seconds):
    rank = Rank(1.0)
    rank.meter.run()
    rank.passes(1.0)
    with rank.meter.aside(waits=False):
        rank.passes(4.0)
        getattr(rank.meter, call)()
    rank.meter.take()
    rank.passes(0.25)
    rank.meter.pause()
    assert rank.meter.take().seconds() == seconds


@pytest.mark.parametrize(("call", "seconds"), [("pause", 5.0), ("run", 0.25)])
def test_another_thread_may_end_a_segment_just_when_what_is_excluded_from_it_ends(call, seconds):
    """As the script does while a thread of its own that communicates has waited."""
    now_s, others = 0.0, []

    def processor_s():
        if others:
            getattr(meter, others.pop())()
        return 0.0

    meter = ComputeMeter(WallClock(lambda: now_s), processor_s=processor_s)
    meter.run()
    with meter.aside(waits=True):
        now_s += 5.0
        others.append(call)
    assert meter.running == (call == "run")
    now_s += 0.25
    meter.pause()
    assert meter.take().seconds() == seconds and not others


def test_a_segment_that_is_discarded_is_neither_compute_nor_service():
    rank = Rank(1.0)
    rank.meter.run()
    rank.passes(5.0)
    assert rank.step(compute=1.0, service=0.1, link_s=0.5) == (pytest.approx(1.0), pytest.approx(0.1))


def test_what_is_done_aside_of_no_segment_opens_none():
    rank = Rank(1.0)
    with rank.meter.aside(waits=True):
        rank.passes(1.0)
    assert not rank.meter.running and not rank.meter.take().segments and rank.meter.take_aside_s() == 0.0


def test_the_usual_time_of_a_step_is_from_beginning_to_beginning_and_one_long_step_does_not_move_it():
    now = [0.0]
    pace, found = Pace(clock=lambda: now[0]), []
    for now[0] in (0.0, 1.0, 9.0, 10.0, 12.0):
        pace.begin()
        found.append((pace.last_s, pace.usual_s))
    assert found == [(None, None), (1.0, 1.0), (8.0, 4.5), (1.0, 1.0), (2.0, 1.5)]


@pytest.mark.parametrize(("steps_s", "usual_s"), [
    ([0.025, 0.075] * 9, 0.05),  # two loaders that finish together
    ([0.075, 0.025] * 9, 0.05),
    ([0.05] * 8 + [5.0] + [0.05] * 3 + [5.0] + [0.05], 0.05),  # a validation now and then
    ([0.05], 0.05),
])  # fmt: skip
def test_the_usual_step_is_a_mean_that_rare_long_ones_do_not_move(steps_s, usual_s):
    now = 0.0
    pace = Pace(lambda: now)
    pace.begin()
    for step_s in steps_s:
        now += step_s
        pace.begin()
    assert pace.usual_s == pytest.approx(usual_s, rel=0.15)
