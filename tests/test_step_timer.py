"""What a rank says of its steps where the device that computes them is behind Python, as a GPU is."""

import contextlib
import copy

import pytest
import torch
from simulated import Speed
from torch import nn

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.engine.stopwatch import WallClock
from hvd_hetero.optimizers import step_timer as module
from hvd_hetero.optimizers.step_timer import StepTimer

SIZE, WHOLE, STEPS = 2, 12, 40
torch.manual_seed(0)
PROTOTYPE = nn.Linear(3, 1)
DATA = torch.utils.data.TensorDataset(torch.randn(STEPS * WHOLE, 3), torch.randn(STEPS * WHOLE, 1))


class Late:
    """A stopwatch of a device that comes to a mark only when somebody waits for it, or when it is told to."""

    def __init__(self):
        self.now_s, self.marks, self.done, self.waits = 0.0, 0, 0, []

    def mark(self):
        self.marks += 1
        return self.marks, self.now_s

    def passed(self, mark):
        return mark[0] <= self.done

    def seconds(self, start, end):
        if not self.passed(end):
            self.waits.append(end[0])
        self.done = max(self.done, end[0])
        return end[1] - start[1]


def steps(watch, step_timer, numbers, heard):
    for number in numbers:
        step_timer.begin(samples=4)
        step_timer.run()
        watch.now_s += number
        step_timer.pause()
        step_timer.end(lambda entry, number=number: heard.append((number, entry.samples, entry.compute_s)))


def test_who_ends_a_step_waits_for_none_but_the_one_before_it():
    watch, heard = Late(), []
    step_timer = StepTimer(watch)
    steps(watch, step_timer, [1.0], heard)
    assert not heard and not watch.waits and step_timer.known == (0.0, 0.0)
    steps(watch, step_timer, [2.0], heard)
    assert heard == [(1.0, 4, 1.0)] and len(watch.waits) == 1 and step_timer.known == (4.0, 1.0)
    assert step_timer.reported == (4.0, 2.0) and heard[1:] == [(2.0, 4, 2.0)], "who asks is told of the last step"
    watch.done = 10**6
    waits = len(watch.waits)
    steps(watch, step_timer, [3.0, 4.0], heard)
    assert [each[0] for each in heard] == [1.0, 2.0, 3.0, 4.0], "each once, in order"
    assert len(watch.waits) == waits, "what the device has done is read at once"


def test_a_step_that_broke_off_is_no_part_of_the_next_one():
    for breaks_off in (StepTimer.restart, lambda step_timer: step_timer.load_state_dict(step_timer.state_dict())):
        watch, heard = Late(), []
        step_timer = StepTimer(watch)
        step_timer.run()
        watch.now_s += 5.0
        step_timer.pause()
        step_timer.loading_meter._waited_s = 0.5
        breaks_off(step_timer)
        step_timer.begin(samples=4)
        step_timer.run()
        watch.now_s += 1.0
        step_timer.pause()
        step_timer.end(heard.append)
        assert step_timer.reported == (4.0, 1.0) and heard[0].data_s == 0.0


@pytest.mark.parametrize("reached_through", ["model", "group"])
def test_waiting_for_others_in_the_middle_of_a_step_is_no_compute(reached_through):
    """As in a layer whose statistics are over all ranks, forth and back; or in what a script sends itself."""

    class Waits:
        def __init__(self, watch):
            self.watch = watch

        @contextlib.contextmanager
        def pass_by(self):
            yield
            self.watch.now_s += 5.0

    def program(engine):
        watch = Late()
        watch.done = 10**6
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        waits = Waits(watch)
        engine.during_waits(waits.pass_by)  # entered after the balancer's
        norm = hvd.SyncBatchNorm(3, balancer=balancer) if reached_through == "model" else nn.BatchNorm1d(3)
        model, pair = nn.Sequential(norm, copy.deepcopy(PROTOTYPE)), engine.group((0, 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        balancer.step_timer.measure_with(watch)
        found = []
        for step in range(4):
            balancer.begin(2)
            watch.now_s += 1.0 + engine.rank
            loss = model(torch.randn(2, 3, generator=torch.Generator().manual_seed(step))).square().mean()
            if reached_through == "group":
                pair.allreduce_async(torch.ones(1), name="sent").wait()
            loss.backward()
            watch.now_s += 0.5
            optimizer.step()
            found.append(balancer.step_timer.reported)
            watch.now_s += 0.25  # and between two steps: a metric, for which all wait, and what follows its sum
            pair.allreduce_async(torch.ones(1), name="validated").wait()
            watch.now_s += 0.5
        return found

    found = World(2).run(program)
    assert found == [[(2.0, each)] * 2 + [(2.0, each + 0.5)] * 2 for each in (1.5, 2.5)], "known once seen twice"


@pytest.mark.parametrize(("passes", "batches"), [(3, 1), (1, 3), (2, 2)])
def test_all_passes_of_an_update_are_compute_and_what_is_done_between_its_batches_is_not(passes, batches):
    def program(engine):
        watch = Late()
        watch.done = 10**6
        balancer, model = hvd.Balancer(4, engine=engine, adaptive=False), copy.deepcopy(PROTOTYPE)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, backward_passes_per_step=passes * batches
        )
        balancer.step_timer.measure_with(watch)
        for _ in range(batches):
            watch.now_s += 7.0
            balancer.begin(2)
            for _ in range(passes):
                watch.now_s += 1.0
                model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
        return balancer.step_timer.reported

    assert World(2).run(program) == [(2.0, float(passes))] * 2


@pytest.mark.parametrize("every", [1, 2, 9])
def test_what_a_rank_does_after_each_step_is_its_own_and_a_validation_now_and_then_is_not(every):
    watch, heard = Late(), []
    watch.done = 10**6
    step_timer = StepTimer(watch)
    for step in range(30):
        step_timer.before_batch()
        step_timer.before_batch()  # as of a second batch of this step
        steps(watch, step_timer, [1.0], heard)
        step_timer.run()
        watch.now_s += 0.5
        if step % every == 0:
            with step_timer.aside():  # waits for data of its own
                watch.now_s += 100.0
            watch.now_s += 7.0
        if step == 20:  # a batch that broke off, and what is done then
            step_timer.before_batch()
            step_timer.begin(samples=0)
            step_timer.run()
            watch.now_s += 50.0
        said = step_timer.reported[1]
        assert said == (1.0 if step < 2 else 8.5 if every == 1 else 1.5) / (2 if step == 21 else 1), step
    assert {each[2] for each in heard} == {1.0}, "compute is told without it"


def test_under_a_quota_every_second_of_processor_time_costs_the_same_whatever_it_is_for():
    """Compute, service, and what is done after a step."""
    now, used = [0.0], [0.0]
    step_timer = StepTimer(
        WallClock(lambda: now[0]), quota_cores=lambda: 0.5, clock=lambda: now[0], processor_s=lambda: used[0]
    )

    def passes(work_s, wall_s):
        now[0], used[0] = now[0] + wall_s, used[0] + work_s

    for _ in range(5):
        step_timer.before_batch()
        step_timer.begin(samples=4)
        step_timer.run()
        passes(0.1, 0.1)  # the others kept it waiting: its quota is ahead
        step_timer.pause()
        passes(0.02, 0.7)
        step_timer.run()
        step_timer.pause()
        step_timer.end(lambda entry: None)
        step_timer.run()
        passes(0.1, 0.1)
    assert step_timer.reported == (4.0, pytest.approx(0.22 / 0.5))


def test_what_was_done_once_after_a_step_is_not_of_two_steps():
    """Of which the second begins no batch, as the last merge."""
    watch, heard = Late(), []
    watch.done = 10**6
    step_timer = StepTimer(watch)
    steps(watch, step_timer, [1.0], heard)
    step_timer.run()
    watch.now_s += 0.5
    step_timer.before_batch()
    steps(watch, step_timer, [1.0, 1.0], heard)
    assert step_timer.reported == (4.0, 1.0)


def test_the_time_of_a_step_is_from_batch_to_batch_and_that_of_another_job_is_none():
    now = [0.0]
    step_timer, told = StepTimer(None, clock=lambda: now[0]), []
    for now[0] in (1.0, 3.0, 8.0):
        step_timer.begin(samples=4)
        told.append((step_timer.last_step_s, step_timer.usual_step_s))
    step_timer.restart()
    assert told == [(None, None), (2.0, 2.0), (5.0, 3.5)] and step_timer.usual_step_s is None


def test_who_waits_for_others_says_so_and_who_looks_for_a_plan_has_not_waited():
    step_timer = StepTimer(None)
    step_timer.run()
    for aside, waits in ((step_timer.aside, False), (step_timer.waiting, True)):
        with aside():
            pass
        step_timer.pause()
        assert (step_timer.take_waited_s() > 0.0) is waits
        step_timer.run()


@pytest.mark.parametrize("begun", [True, False])
def test_waits_for_data_are_those_of_a_training_batch_that_has_begun(begun):
    """Also if it was in another process, and the rest of it follows a validation here."""
    for resumed in (True, False):
        step_timer, heard = StepTimer(None), []
        if resumed:
            step_timer.load_state_dict({"samples": 4, "begun": [4, 1] if begun else [0, 0]})
        elif begun:
            step_timer.begin(samples=4)
        step_timer.loading_meter._waited_s = 0.5
        step_timer.loading_meter.will_load(beside=False)
        step_timer.end(heard.append)
        assert heard[0].data_s == (0.5 if begun else 0.0)


def test_how_slow_loaders_are_is_seen_in_usual_steps_and_taken_from_before_a_restart_until_then():
    watch, heard, seen = Late(), [], []
    watch.done = 10**6
    step_timer = StepTimer(watch)
    step_timer.resume_loading(0.0)
    assert step_timer.loading_meter.speed.seconds_per_sample is None
    step_timer.resume_loading(0.25)
    step_timer.resume_loading(0.5)
    assert step_timer.loading_s == step_timer.loading_meter.speed.seconds_per_sample == 0.25
    step_timer.loading_meter.will_load(beside=True)
    step_timer.loading_meter.speed.observe = lambda samples, **times: seen.append((samples, times["computed_s"]))
    for number in (1.0, 60.0, 2.0):
        if number == 60.0:
            step_timer.discard()  # it is compiled
        steps(watch, step_timer, [number], heard)
    assert seen == [(4, 1.0), (4, 2.0)] and step_timer.loading_s == 0.25


def test_looking_for_a_better_plan_is_no_compute_of_rank_0():
    def program(engine):
        watch = Late()
        watch.done = 10**6
        balancer, model = hvd.Balancer(4, engine=engine), copy.deepcopy(PROTOTYPE)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        balancer.step_timer.measure_with(watch)

        def look(step, **_):
            watch.now_s += 7.0

        balancer.planner.look = look
        found = []
        for _ in range(4):
            balancer.begin(2)
            watch.now_s += 1.0
            model(torch.ones(2, 3)).sum().backward()
            watch.now_s += 0.5
            optimizer.step()
            found.append(balancer.step_timer.reported)
        return found, watch.now_s

    assert World(2).run(program) == [([(2.0, 1.5)] * 4, 34.0), ([(2.0, 1.5)] * 4, 6.0)]


def test_what_was_not_read_is_neither_lost_nor_another_step_s():
    watch, heard = Late(), []
    step_timer = StepTimer(watch)
    step_timer.begin(samples=4)
    step_timer.discard()
    step_timer.loading_meter._waited_s = 0.5
    step_timer.end(heard.append)
    step_timer.begin(samples=6)
    step_timer.run()
    watch.now_s += 7.0
    step_timer.loading_meter._waited_s = 0.25
    step_timer.pause()
    step_timer.end(heard.append)
    assert step_timer.reported == (6.0, 7.0) and step_timer.take_stops().running_s == 7.0
    assert [(each.samples, each.data_s, each.compute_s) for each in heard] == [(4, 0.5, 0.0), (6, 0.25, 7.0)]
    state = step_timer.state_dict()
    steps(watch, step_timer, [3.0], told := [])
    step_timer.load_state_dict(state)
    assert told == [(3.0, 4, 3.0)] and step_timer.reported == (6.0, 0.0), "of the state, not of the step before it"
    steps(watch, step_timer, [1.0], told := [])
    step_timer.run()
    step_timer.measure_with(Speed(1.0))  # it was told: its own stays
    steps(watch, step_timer, [2.0], told := [])
    step_timer.restart()
    assert told == [(2.0, 4, 2.0)] and step_timer.reported == (0.0, 0.0)


class Moments:
    """A trace of which step ended when."""

    def __init__(self, watch):
        self.watch, self.steps = watch, []

    def now(self):
        return self.watch.now_s

    def step(self, *, step, compute_s, t_s, **rest):
        self.steps.append((step, compute_s, t_s))

    def plan(self, plan): ...

    def flush(self): ...

    def event(self, kind, **fields): ...


def train(engine, strategy, done):
    """One rank whose device is behind (`done` 0) or never; a sample takes rank 1 twice as long."""
    watch = Late()
    watch.done = done
    model = copy.deepcopy(PROTOTYPE)
    balancer = hvd.Balancer(WHOLE, engine=engine)
    balancer.trace = trace = Moments(watch)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), balancer=balancer, strategy=strategy)
    balancer.step_timer.measure_with(watch)
    for x, y in hvd.BalancedDataLoader(DATA, balancer=balancer):
        optimizer.zero_grad()
        begun, waits = watch.marks, len(watch.waits)
        loss = ((model(x) - y) ** 2).mean()
        watch.now_s += 0.01 * len(x) * (1 + engine.rank)
        loss.backward()
        optimizer.step()
        assert all(mark <= begun for mark in watch.waits[waits:]), "a step waits for nothing that it began itself"
    optimizer.merge()
    return [plan.shares for plan in balancer.plans], trace.steps, model.weight.detach()


def test_plans_and_traces_are_what_they_are_where_nothing_is_late():
    late, prompt = (
        World(SIZE).run(lambda engine, done=done: train(engine, "synchronous", done)) for done in (0, 10**9)
    )
    for ours, theirs in zip(late, prompt, strict=True):
        assert ours[0] == theirs[0] and ours[0][-1] == (8, 4)
        assert ours[1] == theirs[1] and len(ours[1]) == STEPS, "the last step is read at the end of the epoch"
        assert torch.equal(ours[2], theirs[2])


def test_steps_apart_are_measured_without_waiting():
    for shares, told, _ in World(SIZE).run(lambda engine: train(engine, hvd.LocalSGD(round_steps=4), 0)):
        assert shares[-1] == (8, 4) and len(told) == STEPS


def test_of_batches_that_another_process_began_only_the_samples_are_known():
    now, told = [0.0], []
    sheet = StepTimer(WallClock(lambda: now[0]))
    sheet.load_state_dict({"samples": 8, "begun": [8, 1]})
    sheet.run()
    now[0] += 0.5  # the rest of it
    sheet.pause()
    sheet.end(told.append)
    assert sheet.reported == (8.0, 0.0) and [entry.samples for entry in told] == [8]


def test_of_several_batches_between_two_exchanges_one_is_told_and_all_are_recorded():
    watch, heard = Late(), []
    watch.done = 10**6
    sheet = StepTimer(watch)
    for samples, seconds in ((4, 1.0), (8, 5.0)):
        sheet.begin(samples)
        sheet.run()
        watch.now_s += seconds
        sheet.pause()
    sheet.end(heard.append)
    assert sheet.reported == (6.0, 3.0) and [(each.samples, each.compute_s) for each in heard] == [(12, 6.0)]
    ran = sheet.take_stops()
    assert ran.running_s + ran.stopped_s == pytest.approx(6.0)
    sheet.end(heard.append)
    assert sheet.reported == (0.0, 0.0) and heard[-1].samples == 0, "and none of them twice"


def test_the_last_step_is_read_at_the_end_however_many_there_were(monkeypatch):
    at_exit, watch, heard = [], Late(), []
    monkeypatch.setattr(module.atexit, "register", lambda *call: at_exit.append(call))
    sheet = StepTimer(watch)
    steps(watch, sheet, [1.0, 2.0, 3.0], heard)
    assert len(heard) == 2 and len(at_exit) == 1
    (function, *arguments), = at_exit
    function(*arguments)
    assert heard[-1] == (3.0, 4, 3.0)
    del sheet
    function(*arguments)  # of one that is gone there is nothing to read
    assert len(heard) == 3


def test_whoever_is_ready_before_its_batch_waited_for_it():
    now = [0.0]
    sheet, heard = StepTimer(WallClock(lambda: now[0])), []
    sheet.begin(4)
    sheet.run()
    assert sheet.running
    now[0] += 2.0
    loaded = sheet.loading_meter.now()
    now[0] += 3.0
    sheet.loading_meter.loaded(loaded)
    sheet.pause()
    assert not sheet.running
    sheet.end(heard.append)
    assert (heard[0].data_s, heard[0].compute_s) == (2.0, 3.0)
    sheet.run()
    sheet.loading_meter.loaded(loaded)  # it was there before: nothing was waited for
    now[0] += 1.0
    sheet.pause()
    sheet.end(heard.append)
    assert (heard[1].data_s, heard[1].compute_s) == (0.0, 1.0)
