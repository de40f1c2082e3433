"""Local steps on parts that only say what they are asked; with rounds and models they are in test_torch_local.py."""

import itertools
import sys
import warnings
from types import SimpleNamespace

import pytest

from hvd_hetero.engine.local import SoloEngine
from hvd_hetero.optimizers import local_step
from hvd_hetero.optimizers.local_step import LocalSteps
from hvd_hetero.optimizers.unsent_state import Count


def made(said, *, until=10, fraction=1.0):
    """Steps that are local up to batch `until`. Two fragments; a merge of the second is due in each step."""

    def says(name):
        return lambda *what, **_: said.append((name, *what))

    def after_step(samples, *, lr, compute, gradients):
        said.append(("rounds", samples, gradients))
        fragments[1].sends += 2

    fragments = [SimpleNamespace(sends=7), SimpleNamespace(sends=9)]
    steps = object.__new__(LocalSteps)
    steps._engine, steps._phase, steps._bytes = SoloEngine(), lambda step: step <= until, [10, 100]
    steps._counted, steps._newest, steps._before, steps._warned = Count(0.0), -1, [], False
    steps.begun = steps.apart = False
    steps._store = SimpleNamespace(
        narrow=False, lossy=[False, False], read=lambda index, into: (index, into), blend=says("blend")
    )
    steps._start_check = SimpleNamespace(
        begin=says("check"), hear=lambda: None, end=lambda: None, forget=says("forget")
    )
    steps.rounds = SimpleNamespace(
        fragments=fragments, update_fraction=fraction, after_step=after_step, begin=says("begin"),
        finish=says("finish"), part_of_batch=lambda samples: 0.5,
    )  # fmt: skip
    steps._balancer = SimpleNamespace(
        step=3, step_timer=SimpleNamespace(known=(1.0, 1.0)), departure=SimpleNamespace(check=lambda what: None),
        ladder=SimpleNamespace(hear_together=says("together")),
        record=SimpleNamespace(event=lambda kind, **fields: said.append((kind, fields))),
    )  # fmt: skip
    return steps


@pytest.mark.parametrize("by_rate", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_a_part_of_an_update_is_made_by_its_rate_or_taken_back_afterwards(fraction, by_rate):
    said, kept = [], [None, None]
    steps = made(said, fraction=fraction)
    for _ in range(2):
        kept = list(enumerate(kept))  # read into the arrays of the step before
        assert steps.before_step(by_rate=by_rate) == (fraction if by_rate else 1.0)
        assert steps.begun and steps.apart
        del said[:]
        assert steps.after_step(6.0, lr=0.1, gradients=2.0) == 200, "bytes of the merges of this step alone"
        blends = [] if by_rate or fraction == 1.0 else [("blend", index, kept[index], fraction) for index in range(2)]
        assert said == [*blends, ("rounds", 6.0, 2.0 * fraction)]
    assert steps.take_samples() == 12.0 and steps.samples == 0.0
    steps._store.narrow = True
    for rate in (True, False):
        assert steps.before_step(by_rate=rate) == 1.0, "what is lost in rounding would be more"
        del said[:]
        steps.after_step(6.0, lr=0.1)
        assert said == [("rounds", 6.0, 1.0)], "and nothing is taken back, as in the steps before"
    assert (steps.part(0.0), steps.part(3.0)) == (0.0, 0.5)


@pytest.mark.parametrize("until", [3, 10])
def test_a_merge_ends_steps_apart_also_of_a_rank_that_left_out_its_own(until):
    said = []
    steps = made(said, until=until)
    steps.merge()
    assert not said, "nobody is apart"
    steps.passed()
    assert steps.apart and not steps.begun
    steps.merge()
    kinds = [each[0] for each in said]
    assert kinds == ["check", "begin", "apart", "finish", "together", *["together"] * (until == 3)]
    (told,) = (each[1] for each in said if each[0] == "together" and len(each) > 1)
    assert told["step"] == 4 and 0.0 <= told["wait_s"] < 60.0
    assert not steps.begun and not steps.apart
    steps.begun = steps.apart = True
    steps.abandon()
    assert not steps.begun and not steps.apart and said[-1] == ("forget",)


def test_who_fails_before_its_first_local_step_is_out_of_merges_and_of_the_check_before_them():
    for begun, over, done in itertools.product([True, False], repeat=3):
        steps = made([])
        steps.begun = steps.apart = begun
        steps.rounds.withdraw = lambda over=over: lambda: over
        steps._start_check.send = lambda done=done: SimpleNamespace(done=lambda: done)
        assert steps.withdraw()() is (over if begun else over and done)
        assert not steps.begun and not steps.apart


def test_of_progress_that_is_given_up_it_is_warned_once():
    steps, given_up = made([]), []
    steps._on_give_up = lambda: given_up.append(True)
    with pytest.warns(RuntimeWarning, match="of rank 0 were not finite") as warned:
        warnings.simplefilter("always")
        for fields in ({}, {"dropped_steps": 3}, {"dropped_steps": 1}):
            steps._record(fields)
    assert len(warned) == 1 and given_up == [True, True]


@pytest.mark.parametrize(("left", "error", "warns"), [
    (None, False, False), ((True, False), False, True), ((False, False), False, False), ((True, True), False, False),
    ((True, False), True, False),
])  # fmt: skip
def test_a_job_that_ends_without_its_last_merge_says_so_unless_there_is_a_reason(monkeypatch, left, error, warns):
    warned = []
    monkeypatch.setattr(local_step.script, "warn", lambda text, kind: warned.append(text))
    monkeypatch.delattr(sys, "last_value", raising=False)
    if error:
        monkeypatch.setattr(sys, "last_value", OSError(), raising=False)
    local_step._warn_at_exit(lambda: left and SimpleNamespace(begun=left[0], leaves=left[1]))
    assert bool(warned) is warns
