"""What is recorded is read again, at next to no cost, and no trouble with the file reaches the training."""

import errno
import gc
import json
import os
import random
import time
import timeit
import tracemalloc
import warnings

import numpy as np
import pytest

from hvd_hetero.engine.local import SoloEngine
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.control import Announcement
from hvd_hetero.optimizers.record import Record
from hvd_hetero.policy.replan import Plan
from hvd_hetero.trace import NewerFormatError, RankRun, Run, Trace, read, reader, record
from hvd_hetero.trace.own import own_trace
from hvd_hetero.trace.record import FIELDS, FORMAT, KEPT_LINES
from hvd_hetero.trace.waiting import local_steps_of, waiting

PLAN = Plan(version=1, step=3, shares=(6, 2), reason="rank 1 is slowest", predicted_step_s=0.5)


class Clock:
    """A clock that goes on only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def write(folder, clock, *, rank=0, steps=range(10), share=4, span_s=0.25, **options):
    with Trace(folder, rank=rank, clock=clock, **options) as trace:
        for step in steps:
            clock.now += span_s
            trace.step(step=step, samples=share, data_s=0.01, compute_s=0.2, wait_s=0.04, bytes=1000, share=share)
    return trace


def test_what_is_recorded_is_read_again(tmp_path):
    clock = Clock()
    for rank in (1, 0):
        with Trace(tmp_path / "run", rank=rank, clock=clock) as trace:
            trace.step(step=2, samples=4, data_s=0.01, compute_s=1 / 3, wait_s=0.25, bytes=12345678, share=4,
                       extra_s=0.125, loading_s=0.5)
            trace.plan(PLAN)
            trace.event("evaluation", loss=1.5, note='a "quoted"\nline', what={1, }, bad=float("nan"))
    run = read(tmp_path / "run")
    assert list(run.ranks) == [0, 1] and run.plans == (PLAN,)
    record = run.ranks[1]
    step = record.steps[0]
    assert (step.step, step.samples, step.bytes, step.share, step.t_s) == (2, 4, 12345678, 4, 100.0)
    assert step.compute_s == pytest.approx(1 / 3, rel=1e-4)
    assert (step.wait_s, step.extra_s, step.loading_s) == (0.25, 0.125, 0.5)
    assert record.events[0].kind == "evaluation" and record.events[0].fields["note"] == 'a "quoted"\nline'
    assert (record.sessions, record.dropped, record.unreadable) == (1, 0, 0)


def test_what_a_field_less_of_an_older_record_says_is_read(tmp_path):
    write(tmp_path, Clock())
    file = tmp_path / "rank-00000.jsonl"
    header, *lines = file.read_text().splitlines()
    older = [header.replace(', "extra_s", "loading_s"', "")] + [line.rsplit(",", 2)[0] + "]" for line in lines]
    file.write_text("\n".join(older) + "\n")
    record = read(tmp_path).ranks[0]
    assert len(record.steps) == 10 and not record.unreadable
    assert all((step.share, step.extra_s, step.loading_s) == (4, 0.0, 0.0) for step in record.steps)


def test_a_run_that_begins_anew_goes_on_in_the_file_of_its_rank(tmp_path, monkeypatch):
    """In the folder that was named at first, also if the script has changed its working directory since."""
    clock = Clock()
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    moved = Trace("run", rank=2, clock=clock, flush_every_s=0.0)
    stays = Trace("run", rank=0, clock=clock, flush_every_s=0.0)
    monkeypatch.chdir("run")
    for trace in (moved, stays):
        for step in range(5):
            trace.step(step=step, samples=4, share=4)
    moved.restart(1)  # rank 1 is gone, and both went back to step 3
    stays.restart(0)
    for trace in (moved, stays):
        trace.event("ranks", size=2)
        for step in range(3, 6):
            trace.step(step=step, samples=6, share=6)
        trace.close()
    run = read(tmp_path / "run")
    assert [step.step for step in run.ranks[0].steps] == list(range(6)) and run.ranks[0].sessions == 2
    assert [step.samples for step in run.ranks[0].steps] == [4, 4, 4, 6, 6, 6], "what was undone is forgotten"
    assert [step.step for step in run.ranks[1].steps] == [3, 4, 5] and len(run.ranks[2].steps) == 5
    assert all(rank.unreadable == 0 for rank in run.ranks.values())


def test_every_line_is_json_whatever_is_recorded(tmp_path):
    with Trace(tmp_path, rank=3, clock=Clock()) as trace:
        trace.step(step=0, samples=1, compute_s=float("nan"), wait_s=float("-inf"), data_s=float("inf"))
        loop = []
        loop.append(loop)
        trace.event("odd", loop=loop, thing=object(), key={(1, 2): 3}, inf=float("inf"))

    def refuse(constant):
        raise AssertionError(constant)

    lines = (tmp_path / "rank-00003.jsonl").read_text().splitlines()
    assert len([json.loads(line, parse_constant=refuse) for line in lines]) == 3
    assert read(tmp_path).ranks[3].steps[0].compute_s == 0


def test_the_summary_of_a_rank(tmp_path):
    clock = Clock()
    with Trace(tmp_path, rank=0, clock=clock) as trace:
        for step in range(40):
            clock.now += 0.5 if step != 20 else 60.0       # a checkpoint
            share = 8 if step < 10 else 12
            trace.step(step=step, samples=share, data_s=0.1, compute_s=0.3 if step else 9.0, wait_s=0.05, share=share)
    summary = read(tmp_path).summaries(skip=10)[0]
    assert (summary.steps, summary.samples, summary.shares) == (30, 360, ((10, 12),))
    assert (summary.median_data_s, summary.median_compute_s, summary.median_wait_s) == (0.1, 0.3, 0.05)
    assert summary.samples_per_s == pytest.approx(24.0)
    assert read(tmp_path).summaries()[0].shares == ((0, 8), (10, 12))


def test_a_step_costs_less_than_20_microseconds(tmp_path):
    with Trace(tmp_path, rank=0, clock=timeit.default_timer) as trace:
        def step():
            trace.step(step=12345, samples=64, data_s=0.00123, compute_s=0.14567, wait_s=0.0345, bytes=188416, share=64)

        assert min(timeit.repeat(step, number=2000, repeat=5, timer=time.process_time)) / 2000 < 20e-6
    assert len(read(tmp_path).ranks[0].steps) == 10000


@pytest.mark.parametrize("set_by_s", [86400.0, -86400.0])
def test_no_step_is_longer_because_the_clock_of_the_host_is_set(tmp_path, monkeypatch, set_by_s):
    wall, monotonic = Clock(), Clock()
    wall.now = 1e9
    monkeypatch.setattr(time, "time", wall)
    monkeypatch.setattr(time, "monotonic", monotonic)
    with own_trace(tmp_path, ranks=[0], rank=0) as trace:
        for step in range(10):
            wall.now += 0.25 + (set_by_s if step == 5 else 0.0)
            monotonic.now += 0.25
            trace.step(step=step, samples=4, compute_s=0.2, share=4)
    steps, spans_s = (run := read(tmp_path).ranks[0]).steps, run.spans_s
    assert steps.t_s == pytest.approx(1e9 + 0.25 * np.arange(1, 11)) and spans_s[1:] == pytest.approx(0.25)


def test_records_are_written_when_the_clock_says_so(tmp_path):
    clock = Clock()
    trace = Trace(tmp_path, rank=0, clock=clock, flush_every_s=1.0)
    trace.step(step=0, samples=1)
    assert not len(read(tmp_path).ranks[0].steps)
    clock.now += 1.0
    trace.step(step=1, samples=1)
    assert len(read(tmp_path).ranks[0].steps) == 2      # readable while the run goes on
    trace.close()
    trace.close()
    trace.step(step=2, samples=1)
    assert trace.dropped == 1


def test_a_torn_line_costs_that_line_only(tmp_path):
    trace = write(tmp_path, Clock())
    with open(trace.path, "ab") as file:
        file.truncate(file.tell() - 20)
    record = read(tmp_path).ranks[0]
    assert (len(record.steps), record.unreadable) == (9, 1)
    write(tmp_path, Clock(), steps=range(9, 12))        # resumed: appended on a line of its own
    record = read(tmp_path).ranks[0]
    assert [s.step for s in record.steps] == list(range(12))
    assert (record.sessions, record.unreadable) == (2, 1)


@pytest.mark.parametrize("together", [1, 2, 3, 5])
def test_what_is_read_does_not_depend_on_how_many_lines_are_taken_in_at_once(tmp_path, monkeypatch, together):
    """Of whole, torn and odd lines, sessions that go back, and plans in between."""
    for begins in (0, 12, 7):
        with Trace(tmp_path, rank=0, clock=Clock()) as trace:
            for step in range(begins, begins + 9):
                trace.step(step=step, samples=4, share=step)
                if step % 4 == 0:
                    trace.plan(Plan(version=step, step=step, shares=(4,), reason=""))
                    trace.event("together", step=step, wait_s=0.5)
        with open(trace.path, "a") as file:
            file.write('[1, 2\n["3"]\n[[4]]\n[1e999, {}]\n[]\nnull\n["1",2,3,4,5,6,7,8,9,10]\n')
            file.write(" [99,1,1,1,1,1,1,1,1,1]\n")
    whole = read(tmp_path).ranks[0]
    assert whole.steps.step.tolist() == [*range(7), *range(7, 16), 99] and whole.unreadable == 3 * 7
    monkeypatch.setattr(reader, "TOGETHER", together)
    again = read(tmp_path).ranks[0]
    assert (again.steps == whole.steps).all() and again.hosts == whole.hosts
    assert (again.plans, again.events, again.unreadable) == (whole.plans, whole.events, whole.unreadable)


def test_a_report_of_many_steps_takes_few_bytes_of_memory_for_each(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "TOGETHER", 128)
    dice = random.Random(1)
    for rank in range(4):
        with Trace(tmp_path, rank=rank, clock=Clock()) as trace:
            for step in range(4000):
                trace.step(step=step, samples=step % 100, compute_s=dice.random(), wait_s=dice.random(), bytes=10**6)
    tracemalloc.start()
    try:
        assert waiting(read(tmp_path)).steps == 4000
        assert tracemalloc.get_traced_memory()[1] / (4 * 4000) < 400
    finally:
        tracemalloc.stop()


def test_what_a_resumed_run_does_again_replaces_the_first_time(tmp_path):
    clock = Clock()
    with Trace(tmp_path, rank=0, clock=clock) as trace:
        for step in range(10):
            trace.step(step=step, samples=4, share=4)
        trace.plan(PLAN)
        trace.plan(Plan(version=2, step=8, shares=(5, 3), reason="undone"))
    write(tmp_path, clock, steps=range(6, 8), share=5)
    run = read(tmp_path)
    assert [(s.step, s.share) for s in run.ranks[0].steps] == [(i, 4) for i in range(6)] + [(6, 5), (7, 5)]
    assert run.plans == (PLAN,)


def test_the_plans_of_a_resumed_run_are_those_that_held(tmp_path):
    """A balancer begins with a first plan, and only then goes on from a state."""
    first, second, third, late = (
        Plan(version=version, step=step, shares=shares, reason="")
        for version, step, shares in [(0, 0, (4, 4)), (1, 3, (5, 3)), (2, 8, (6, 2)), (2, 9, (7, 1))]
    )
    for begins, plans in [(0, [first, second, third]), (6, [first, second, late]), (10, [first, late])]:
        with Trace(tmp_path, rank=0, clock=Clock()) as trace:
            for plan in plans:
                trace.plan(plan)
            for step in range(begins, begins + 5):
                trace.step(step=step, samples=4)
    assert read(tmp_path).plans == (first, second, late)
    with Trace(tmp_path, rank=0, clock=Clock()) as trace:  # another job in the same folder
        trace.plan(third_party := Plan(version=0, step=0, shares=(2, 6), reason=""))
        trace.step(step=0, samples=4)
    assert read(tmp_path).plans == (third_party,)


def test_a_plan_that_was_yet_to_hold_at_a_checkpoint_is_among_those_of_the_resumed_run(tmp_path):
    announced = Announcement(version=1, shares=(4,), reason="", predicted_step_s=0.5, strategy="synchronous")

    def job(state=None):
        with Trace(tmp_path, rank=0, clock=Clock()) as trace:
            balancer = Balancer(SoloEngine(), global_batch_size=4, trace=trace)
            if state is not None:
                balancer.load_state_dict(state)
            trace.step(step=balancer.step + 1, samples=4)
            balancer.step += 1
            if state is None:
                balancer.record.plans([balancer.planner.accept(announced, balancer.step, dealt_ahead=5)])
            return balancer

    plans = job(job().state_dict()).plans
    assert [plan.step for plan in plans] == [0, 6] and read(tmp_path).plans == plans


def test_files_and_lines_that_are_none_of_a_trace_are_passed_over(tmp_path):
    trace = write(tmp_path, Clock())
    (tmp_path / "rank-x.jsonl").write_text("{}")
    with open(trace.path, "a") as file:
        file.write(json.dumps([9, *["text"] * (len(FIELDS) - 1)]) + "\n")
    record = read(tmp_path).ranks
    assert list(record) == [0] and len(record[0].steps) == 10 and record[0].unreadable == 1


def test_damaged_numbers_are_no_times(tmp_path):
    """What is below 0 or no number would end a report with an error of Python's."""
    trace = write(tmp_path, Clock())
    with open(trace.path, "a") as file:
        file.write(json.dumps([10, 102.75, 4, -1.0, 0.2, -3.5, 1000, 4, -9.0, 0.0]) + "\n")
        for wrong in ({"event": "any", "t_s": {}, "fields": {}}, {"event": "any", "t_s": None, "fields": {}},
                      {"dropped": float("nan"), "t_s": 1.0}, {"dropped": "x", "t_s": 1.0}):
            file.write(json.dumps(wrong) + "\n")
    record = read(tmp_path).ranks[0]
    last = record.steps[-1]
    assert (last.step, last.compute_s, last.data_s, last.wait_s, last.extra_s) == (10, 0.2, 0, 0, 0)
    assert (record.unreadable, record.events, record.dropped) == (4, [], 0)


class FullDisk:
    """A file on a disk that is full for a while, and takes part of a line before it says so."""

    def __init__(self, file):
        self.file, self.full = file, True

    def write(self, data):
        if self.full:
            self.file.write(data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def close(self):
        self.file.close()


def test_a_full_disk_is_warned_of_once_and_what_was_dropped_is_counted(tmp_path):
    clock = Clock()
    trace = Trace(tmp_path, rank=0, clock=clock, flush_every_s=0.0)
    trace._file = disk = FullDisk(trace._file)
    with pytest.warns(RuntimeWarning, match="No space left on device.*Training goes on"):
        trace.step(step=0, samples=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 5):
            trace.step(step=step, samples=1)
        disk.full = False
        trace.step(step=5, samples=1)
        trace.close()
    record = read(tmp_path).ranks[0]
    assert [s.step for s in record.steps] == [5]
    assert record.dropped == trace.dropped == 5


def test_a_folder_that_cannot_be_made_is_warned_of(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="Training goes on"):
        trace = write(tmp_path / "file" / "run", Clock())
    assert trace.dropped == 10


def test_a_bounded_file_stays_within_its_bound_and_keeps_room_for_plans(tmp_path):
    clock = Clock()
    for _ in range(2):      # also when it is continued
        with Trace(tmp_path, rank=0, clock=clock, max_bytes=8192, flush_every_s=0.0) as trace:
            for step in range(1000):
                trace.step(step=step, samples=1, compute_s=0.123456)
            trace.plan(PLAN)
    assert (tmp_path / "rank-00000.jsonl").stat().st_size <= 8192
    record = read(tmp_path).ranks[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(9):
            write(tmp_path, clock, max_bytes=8192)
    assert (tmp_path / "rank-00000.jsonl").stat().st_size <= 8192
    assert record.plans and record.dropped > 1000 and len(record.steps) + record.dropped == 2000


def test_wrong_arguments_say_what_was_received(tmp_path):
    with pytest.raises(ValueError, match="Received: -1"):
        Trace(tmp_path, rank=-1, clock=Clock())
    with pytest.raises(ValueError, match="max_bytes: expected at least 4096, or None. Received: 10"):
        Trace(tmp_path, rank=0, clock=Clock(), max_bytes=10)
    with pytest.raises(FileNotFoundError, match="Expected a folder with the record of a run"):
        read(tmp_path / "none")
    (tmp_path / "rank-00000.jsonl").write_text('{"format": 99, "rank": 0, "fields": []}\n')
    with pytest.raises(NewerFormatError, match="format 1 or older. Received: 99"):
        read(tmp_path)


def test_what_was_undone_is_no_event_of_the_run(tmp_path):
    """Ranks that went apart in steps that were gone back from did not, in the end."""
    for first, last in ((0, 60), (40, 200)):
        with Trace(tmp_path, rank=0, clock=lambda: 0.0) as trace:
            for step in range(first, last):
                if step in (30, 50) and first == 0:
                    trace.event("apart" if step == 50 else "kept", step=step)
                trace.step(step=step, samples=4)
    run = read(tmp_path).ranks[0]
    assert len(run.steps) == 200 and [event.kind for event in run.events] == ["kept"]
    assert not local_steps_of(run, range(200)).any()


def test_no_more_lines_wait_in_memory_than_are_kept(tmp_path):
    with Trace(tmp_path, rank=0, clock=Clock(), flush_every_s=1e9) as trace:
        for step in range(KEPT_LINES + 1):
            trace.step(step=step, samples=1)
        assert len(read(tmp_path).ranks[0].steps) >= KEPT_LINES


def test_a_file_that_events_have_filled_has_room_to_tell_what_was_dropped(tmp_path):
    with Trace(tmp_path, rank=0, clock=Clock(), max_bytes=8192, flush_every_s=0.0) as trace:
        for number in range(500):
            trace.event("evaluation", number=number, text="x" * (number % 50))
    assert read(tmp_path).ranks[0].dropped == trace.dropped > 0
    assert (tmp_path / "rank-00000.jsonl").stat().st_size <= 8192


def test_what_was_dropped_at_several_times_is_counted_once_each(tmp_path):
    trace = Trace(tmp_path, rank=0, clock=Clock(), flush_every_s=0.0)
    trace._file = disk = FullDisk(trace._file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(9):
            disk.full = step % 3 == 0
            trace.step(step=step, samples=1)
    trace.close()
    record = read(tmp_path).ranks[0]
    assert record.dropped == trace.dropped == 3 and len(record.steps) == 6


def test_what_is_recorded_after_the_end_is_dropped_however_late(tmp_path):
    clock = Clock()
    trace = write(tmp_path, clock)
    clock.now += 100.0
    trace.step(step=10, samples=1)
    trace.event("late")
    assert trace.dropped == 2 and len(read(tmp_path).ranks[0].steps) == 10


def test_one_write_is_not_the_end_of_collecting_lines(tmp_path):
    clock = Clock()
    with Trace(tmp_path, rank=0, clock=clock, flush_every_s=1.0) as trace:
        clock.now += 1.0
        trace.step(step=0, samples=1)
        trace.step(step=1, samples=1)
        assert len(read(tmp_path).ranks[0].steps) == 1, "the next is due in a second"


def test_what_was_done_as_another_rank_stays_in_that_ones_file_and_takes_no_room(tmp_path):
    with Trace(tmp_path, rank=2, clock=Clock(), max_bytes=4096, flush_every_s=1e9) as trace:
        for step in range(200):
            trace.step(step=step, samples=4)
        before = trace.dropped
        trace.restart(1)
        for step in range(200, 210):
            trace.step(step=step, samples=4)
    run = read(tmp_path)
    assert 0 < before == trace.dropped and len(run.ranks[2].steps) == 200 - before
    assert [step.step for step in run.ranks[1].steps] == list(range(200, 210))


def test_a_script_that_ends_leaves_nothing_in_memory(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr(record.atexit, "register", at_exit.append)
    trace = record.trace_of(str(tmp_path), rank=0, clock=Clock())
    trace.step(step=0, samples=1)
    for call in at_exit:
        call()
    assert len(read(tmp_path).ranks[0].steps) == 1
    assert record.trace_of(None, rank=0, clock=Clock()) is None


def test_a_wait_for_others_that_step_apart_is_no_pause(tmp_path):
    clock = Clock()
    with Trace(tmp_path, rank=0, clock=clock) as trace:
        for step in range(40):
            if step in (10, 20):    # a merge: one at the end of an epoch, and one with a validation after it
                clock.now += 10.0
                for wait_s in (4.0, 6.0):  # of two optimizers
                    trace.event("together", step=step, wait_s=wait_s)
            if step in (20, 30):
                clock.now += 30.0
            clock.now += 0.25
            trace.step(step=step, samples=4)
        trace.event("together", step=40, wait_s=5.0)
    assert read(tmp_path).summaries()[0].samples_per_s == pytest.approx(4 * 37 / (37 * 0.25 + 25.0))


def test_a_step_that_is_missing_says_nothing_of_the_speed(tmp_path):
    clock = Clock()
    with Trace(tmp_path, rank=0, clock=clock) as trace:
        for step in range(20):
            clock.now += 0.25
            if step % 3 != 2:
                trace.step(step=step, samples=4)
    assert read(tmp_path).summaries()[0].samples_per_s == pytest.approx(16.0)


def test_what_happened_in_a_step_that_is_done_again_is_forgotten(tmp_path):
    for begins in (0, 4):
        with Trace(tmp_path, rank=0, clock=Clock()) as trace:
            for step in range(begins, 6):
                trace.event("kept", step=step)
                trace.step(step=step, samples=4)
    assert [event.fields["step"] for event in read(tmp_path).ranks[0].events] == list(range(6))


def test_a_record_of_the_next_format_is_refused(tmp_path):
    (tmp_path / "rank-00000.jsonl").write_text(json.dumps({"format": FORMAT + 1, "rank": 0, "fields": []}) + "\n")
    with pytest.raises(NewerFormatError):
        read(tmp_path)


def test_the_ranks_that_are_there_are_those_of_who_recorded_last(tmp_path):
    """Rank 2 came last and left; rank 1 came when the first plan had been made."""
    clock = Clock()
    three = Plan(version=2, step=2, shares=(3, 3, 2), reason="")
    two = Plan(version=3, step=4, shares=(4, 4), reason="")
    for rank, plans, ends in ((2, [three], 4), (0, [PLAN, three, two], 9), (1, [three, two], 9)):
        with Trace(tmp_path, rank=rank, clock=clock) as trace:
            for step in range(2 if rank == 2 else 0, ends):
                clock.now = 100.0 + step
                for plan in plans if step == ends - 1 else ():
                    trace.plan(plan)
                trace.step(step=step, samples=4)
    run = read(tmp_path)
    assert set(run.present) == {0, 1} and run.gone == (2,)
    assert run.plans == (PLAN, three, two), "of the rank that recorded the most"


def test_a_long_wait_is_written_at_once(tmp_path):
    """It may be the last that this rank has to say."""
    trace = Trace(tmp_path, rank=0, clock=Clock(), flush_every_s=1e9)
    Record(trace)._waited(operation="gradient", waited_s=60.0, line="train.py:7", missing=[1])
    assert [event.kind for event in read(tmp_path).ranks[0].events] == ["wait"]
    trace.close()


def test_a_trace_that_a_balancer_is_given_later_has_long_waits_as_well(tmp_path):
    """As Keras's `TraceCallback` gives it one; and without it again, a wait is no error."""

    class Hears(SoloEngine):
        def hear_waits(self, hear):
            self.hear = hear

    record, engine = Record(None), Hears()
    record.waits(engine)
    record.trace = trace = Trace(tmp_path, rank=0, clock=Clock(), flush_every_s=1e9)
    engine.hear(operation="gradient", waited_s=60.0, line="train.py:7", missing=[1])
    record.trace = None
    engine.hear(operation="gradient", waited_s=70.0, line="train.py:7", missing=[1])
    assert [event.fields["waited_s"] for event in read(tmp_path).ranks[0].events] == [60.0]
    trace.close()


def test_an_event_of_a_script_may_have_a_step_of_its_own_meaning(tmp_path):
    """A resumed session is read whole, whatever an earlier one has recorded."""
    with Trace(tmp_path, rank=0, clock=Clock()) as trace:
        for step in range(10):
            trace.step(step=step, samples=4)
        trace.event("mine", step="the first")
        trace.event("undone", step=8)
    write(tmp_path, Clock(), steps=range(6, 12))
    record = read(tmp_path).ranks[0]
    assert [s.step for s in record.steps] == list(range(12)) and record.unreadable == 0
    assert [event.kind for event in record.events] == ["mine"]


def test_the_file_of_a_rank_that_was_another_has_the_plan_as_well(tmp_path):
    trace = Trace(tmp_path, rank=1, clock=Clock())
    told = Record(trace)
    told.plans([PLAN])
    told.ranks(SoloEngine(), step=3)
    told.plans([PLAN])
    trace.close()
    run = read(tmp_path)
    assert run.ranks[0].plans == [PLAN] == run.ranks[1].plans


def test_a_run_had_as_many_ranks_in_a_step_as_the_plan_that_held_then():
    plans = [Plan(version=0, step=3, shares=(4, 4), reason=""), Plan(version=1, step=5, shares=(3, 3, 2), reason="")]
    run = Run(folder="", ranks={0: RankRun(rank=0, plans=plans)})
    assert run.sizes_at(np.array([0, 2, 3, 4, 5, 9])).tolist() == [2, 2, 2, 2, 3, 3]
    assert Run(folder="", ranks={0: RankRun(rank=0)}).sizes_at(np.array([0])).tolist() == [1]
    assert run.missing == (0, 1, 2), "none of which has recorded a step"


def test_a_plan_that_holds_from_the_step_that_a_run_goes_on_from_is_kept(tmp_path):
    for begins in (0, PLAN.step):
        with Trace(tmp_path, rank=0, clock=Clock()) as trace:
            if begins == 0:
                trace.plan(PLAN)
                trace.event("of no step")
            for step in range(begins, begins + 5):
                trace.step(step=step, samples=4)
    record = read(tmp_path).ranks[0]
    assert record.plans == [PLAN] and [event.kind for event in record.events] == ["of no step"]
    assert record.session_starts == {0, PLAN.step}


def test_a_session_that_was_undone_or_made_no_step_leaves_neither_plan_nor_first_step(tmp_path):
    later = Plan(version=1, step=4, shares=(6, 2), reason="")
    for begins, steps, plans in [(0, 10, [PLAN]), (8, 4, []), (8, 0, [later]), (5, 9, [])]:
        with Trace(tmp_path, rank=0, clock=Clock()) as trace:
            for plan in plans:
                trace.plan(plan)
            for step in range(begins, begins + steps):
                trace.step(step=step, samples=4)
    record = read(tmp_path).ranks[0]
    assert record.plans == [PLAN] and record.session_starts == {0, 5} and record.sessions == 4


@pytest.mark.parametrize("wrong", [{"rank": 0, "flush_every_s": -1.0}, {"rank": 0, "flush_every_s": float("nan")},
                                   {"rank": -1, "flush_every_s": 1.0}])
def test_a_single_argument_that_is_wrong_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="rank and flush_every_s: expected 0 or more"):
        Trace(tmp_path, clock=Clock(), **wrong)


def test_a_run_without_plans_has_the_ranks_that_recorded(tmp_path):
    for rank in (0, 3):
        write(tmp_path, Clock(), rank=rank)
    run = read(tmp_path)
    assert set(run.present) == {0, 3} and run.gone == run.missing == () and run.plans == ()


def test_a_step_that_ended_when_a_worker_said_is_recorded_then(tmp_path):
    clock = Clock()
    with Trace(tmp_path, rank=0, clock=clock) as trace:
        trace.step(step=0, samples=4, t_s=90.5)
        assert trace.now() == 100.0
        clock.now = 107.0
        trace.step(step=1, samples=4)
        trace.event("seen")
    record = read(tmp_path).ranks[0]
    assert [step.t_s for step in record.steps] == [90.5, 107.0] and record.events[0].t_s == 107.0


def test_a_summary_counts_samples_and_bytes_of_the_steps_that_it_is_of(tmp_path):
    write(tmp_path, Clock(), steps=range(10), share=3)
    summary = read(tmp_path).ranks[0].summary(skip=4)
    assert (summary.samples, summary.bytes, summary.steps, summary.shares) == (18, 6000, 6, ((4, 3),))
    empty = read(tmp_path).ranks[0].summary(skip=10)
    assert (empty.samples, empty.samples_per_s, empty.median_compute_s, empty.shares) == (0, 0.0, 0.0, ())


def test_the_host_of_a_rank_is_that_of_the_last_session_that_names_one(tmp_path):
    for host in ("a", "b", ""):
        write(tmp_path, Clock(), host=host)
    assert read(tmp_path).ranks[0].host == "b"


def test_a_rank_that_has_recorded_no_step_is_none_of_those_who_recorded_last(tmp_path):
    write(tmp_path, Clock())
    with Trace(tmp_path, rank=1, clock=Clock()) as trace:
        trace.plan(Plan(version=9, step=0, shares=(8,), reason="undone"))
    assert set(read(tmp_path).present) == {0, 1}, "the plan of a rank without a step is not the newest"


def test_a_bounded_file_stays_within_its_bound_however_often_a_run_begins_anew(tmp_path):
    trace = Trace(tmp_path, rank=0, clock=Clock(), max_bytes=4096, flush_every_s=0.0)
    for _ in range(100):
        for step in range(5):
            trace.step(step=step, samples=1)
        trace.restart(0)
    trace.close()
    assert (tmp_path / "rank-00000.jsonl").stat().st_size <= 4096


def test_a_rank_that_was_on_several_hosts_has_one_record(tmp_path):
    """An elastic job on hosts that share no folder: rank 1 was on b, and after b had gone on a."""

    def recorded(host, rank, steps, at_s, folder=None):
        clock = iter(range(at_s, at_s + 1000))
        with Trace(tmp_path / (folder or host), rank=rank, clock=lambda: float(next(clock)), host=host) as trace:
            for step in steps:
                trace.step(step=step, samples=8)

    recorded("b", 1, range(6), 1000)
    recorded("a", 1, range(4, 10), 2000)  # from the last commit on
    recorded("a", 2, range(6), 1000)
    recorded("a", 3, range(6), 1000, folder="yesterday")  # another run, and no host
    run = read(tmp_path)
    assert [step.step for step in run.ranks[1].steps] == list(range(10))
    assert run.ranks[1].host == "a" and run.ranks[1].sessions == 2
    assert sorted(run.ranks) == [1, 2] and len(run.ranks[2].steps) == 6
    with pytest.raises(FileNotFoundError, match="or with one for each host"):
        read(tmp_path / "c")


@pytest.mark.parametrize("recorded", [(1, 2), (0, 1, 2)])
def test_without_a_step_of_rank_0_who_is_there_is_known_of_who_recorded_last(tmp_path, recorded):
    for rank, shares, ends in ((0, (3, 3, 2), 0), (1, (4, 4), 9), (2, (3, 3, 2), 4)):
        if rank in recorded:
            with Trace(tmp_path, rank=rank, clock=Clock()) as trace:
                trace.plan(Plan(version=0, step=0, shares=shares, reason=""))
                for step in range(ends):
                    trace.step(step=step, samples=4, t_s=100.0 + step)
    run = read(tmp_path)
    assert set(run.present) == {0, 1} & set(recorded) and run.gone == (2,) and run.missing == (0,)


def test_a_trace_ends_with_who_holds_it_and_nothing_of_it_is_lost(tmp_path):
    for number in range(8):
        trace = record.trace_of(str(tmp_path / str(number)), rank=0, clock=lambda: 0.0)
        trace.step(step=0, samples=1)
        del trace
    gc.collect()
    with os.scandir("/proc/self/fd") as all_open:
        found = [os.readlink(each.path) for each in all_open if os.path.lexists(each.path)]
    assert not [path for path in found if path.startswith(str(tmp_path))]
    assert [len(read(tmp_path / str(number)).ranks[0].steps) for number in range(8)] == [1] * 8


def test_the_clock_of_a_host_that_has_left_says_nothing_of_who_is_there(tmp_path):
    three, two = (Plan(version=n, step=s, shares=shares, reason="") for n, s, shares in
                  ((0, 0, (3, 3, 2)), (1, 4, (4, 4))))
    for rank, plans, ends, ahead in ((0, [three, two], 9, 0.0), (1, [three, two], 9, 0.0), (2, [three], 4, 3600.0)):
        clock = Clock()
        with Trace(tmp_path, rank=rank, clock=clock) as trace:
            for plan in plans:
                trace.plan(plan)
            for step in range(ends):
                clock.now = 100.0 + ahead + step
                trace.step(step=step, samples=4)
    run = read(tmp_path)
    assert set(run.present) == {0, 1} and run.gone == (2,)


def test_a_clock_that_is_set_back_holds_up_no_line(tmp_path):
    clock = Clock()
    clock.now = 10_000.0
    trace = Trace(tmp_path, rank=0, clock=clock)
    trace.step(step=0, samples=1)
    clock.now -= 3600
    for step in range(1, 20):
        clock.now += 1.1
        trace.step(step=step, samples=1)
    assert len(read(tmp_path).ranks[0].steps) >= 19


def test_what_a_script_does_again_after_going_back_replaces_the_first_time(tmp_path):
    """As after `state.restore()`, within one process."""
    balancer = Balancer(SoloEngine(), global_batch_size=4, trace=Trace(tmp_path, rank=0, clock=Clock()))

    def train(steps):
        for _ in range(steps):
            balancer.begin(4)
            balancer.exchanged(wait_s=0.0, bytes_sent=0, leads=True)

    train(5)
    state = balancer.state_dict()
    train(3)
    balancer.load_state_dict(state)
    train(2)
    balancer.record.flush()
    found = read(tmp_path)
    assert found.ranks[0].steps.step.tolist() == list(range(7)) and found.ranks[0].session_starts == {0, 5}
    assert len(found.plans) == 1
