"""The watchdog, on watches of this process and, where a rank is stopped or gone, on processes of their own."""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from types import SimpleNamespace

import pytest
from asking import LIMIT_S, stranger

from hvd_hetero.engine import peer, peer_group, script, waits, watch
from hvd_hetero.engine.absence import JOIN, Absence
from hvd_hetero.engine.peer import Peer
from hvd_hetero.engine.watch import EXIT_STATUS_LEFT, Watch
from hvd_hetero.policy.patience import Patience

QUICK = Patience(fixed_warn_s=0.2, bound_s=0.6)
TALKS = Patience(fixed_warn_s=0.2, bound_s=60.0)  # and ends nothing
CHILD = """
    import atexit, sys, time
    from hvd_hetero.engine.watch import Watch
    from hvd_hetero.policy.patience import Patience

    def loads():
        while "ends" not in sys.argv:
            time.sleep(0.05)

    atexit.register(time.sleep, 30)  # as where there is much to tear down
    watch = Watch(Patience())
    print(watch.introduce(int(sys.argv[1])), flush=True)
    loads()
"""


class Ranks:
    """Watches of several ranks, what they said, and those that left."""

    def __init__(self, count, patience=QUICK):
        self.said, self.left = [], []
        self.watches = [Watch(patience, say=self.said.append, leave=self.left.append) for _ in range(count)]
        self.heard = []
        for each in self.watches:
            each.hearers.add(self.hear)
        self.texts = [each.introduce(rank) for rank, each in enumerate(self.watches)]
        self.meet()

    def meet(self, *more):
        for each in self.watches:
            each.meet([*self.texts, *more])

    def wait(self, rank, operation, seconds, ranks=(0, 1, 2), until=lambda: True):
        """Waits for so long, and then until something has come of it: this machine may be slow."""
        mine = self.watches[rank]
        mine.submitted(operation)
        with mine.waiting(operation, ranks):
            time.sleep(seconds)
            deadline = time.monotonic() + LIMIT_S
            while not until() and time.monotonic() < deadline:
                time.sleep(0.02)
        mine.ended(operation)

    def hear(self, **what):
        self.heard.append(what)

    def story(self):
        return "\n".join(self.said)


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(watch, "PERIOD_S", 0.05)
    made = []

    def make(count, **options):
        made.append(Ranks(count, **options))
        return made[-1]

    yield make
    for each in made:
        for one in each.watches:
            one.close()


@pytest.fixture
def child(tmp_path, request):
    """The process of a rank that submits nothing."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(CHILD))
    process = subprocess.Popen(
        [sys.executable, str(script), "2", getattr(request, "param", "stays")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.said = process.stdout.readline().strip()
    yield process
    process.kill()
    process.wait()


def test_names_who_has_not_come_and_where_it_is(ranks):
    three = ranks(3, patience=TALKS)
    three.watches[2].submitted("other")  # submitted, and not waited for: it may be anywhere
    for watch_of in three.watches[:2]:  # before either waits
        watch_of.submitted("gradient")
    seen = threading.Event()
    waiters = [
        threading.Thread(target=three.wait, args=(rank, "gradient", 0.0), kwargs={"until": seen.is_set})
        for rank in (0, 1)
    ]
    for waiter in waiters:
        waiter.start()

    def both():
        said = all(any(f"rank {rank} (host" in text.splitlines()[0] for text in three.said) for rank in (0, 1))
        return said and len(three.heard) >= 2  # what is said is recorded after it

    deadline = time.monotonic() + LIMIT_S
    while not both() and time.monotonic() < deadline:
        time.sleep(0.02)
    story, heard = three.story(), list(three.heard)
    seen.set()
    for waiter in waiters:
        waiter.join()
    assert "rank 0 (host" in story and "rank 1 (host" in story, "every rank that waits says so"
    assert 'for the others in "gradient", at test_watch.py' in story
    assert "rank 2 (host" in story and "has not come: it is at test_watch.py" in story
    missing = [line for line in story.splitlines() if "has not come" in line]
    assert all("rank 2" in line for line in missing), "and names nobody else"
    assert len(heard) >= 2 and all((what["operation"], what["missing"]) == ("gradient", [2]) for what in heard)
    assert not three.left


def test_who_has_submitted_is_not_missing(ranks):
    two = ranks(2)
    two.watches[1].submitted("gradient")
    two.wait(0, "gradient", 0.3, ranks=(0, 1), until=lambda: two.said)
    assert "has not come" not in two.story() and "every rank has come" in two.story()
    two.watches[1].ended("gradient")
    assert two.watches[0].explain((0, 1)) == "", "who answers explains no failure"


def hears_that_it_is_awaited(two, operation, seconds, *, at, limit_s=LIMIT_S / 2):
    """Whether rank 0, which waits `at` another operation, goes on because rank 1 waits for it in `operation`."""
    seen = threading.Event()
    waiter = threading.Thread(target=two.wait, args=(1, operation, seconds, (0, 1), seen.is_set))
    waiter.start()
    give_up = time.monotonic() + limit_s
    alone = two.watches[0].wait_avoiding_deadlock(lambda: time.monotonic() > give_up, at, (0, 1))
    seen.set()
    waiter.join()
    return not alone


def test_who_has_not_taken_in_an_operation_is_missing_in_the_next_of_its_name(ranks):
    """As merges of one optimizer, while those of another are waited for."""
    two = ranks(2, patience=TALKS)
    for one in two.watches:
        one.submitted("merge", over=lambda: True)
    two.watches[1].ended("merge")
    assert hears_that_it_is_awaited(two, "merge", 0.0, at="another")


def test_who_is_through_with_an_operation_is_awaited_by_nobody_in_it(ranks):
    """As at the end of a job, while the last bytes are on their way to the other rank; and in the next one it is."""
    two = ranks(2, patience=TALKS)
    two.watches[0].submitted("sum")
    two.watches[0].ended("sum")
    assert not hears_that_it_is_awaited(two, "sum", 0.0, at="farewell", limit_s=2.0)
    assert hears_that_it_is_awaited(two, "sum", 0.0, at="farewell")


def test_who_waits_in_what_comes_after_an_operation_waits_for_nobody_in_it(ranks):
    """The operation is over for rank 1, which is in the next one; rank 0 has not heard of its end yet, as where it had
    no core: it is about to, and then comes."""
    two = ranks(2, patience=TALKS)
    for one in two.watches:
        one.submitted("merge.0", over=lambda: True)
    two.watches[1].ended("merge.0")
    assert not hears_that_it_is_awaited(two, "merge.1", 0.0, at="merge.0", limit_s=2.0)


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_wait_of_a_framework_is_watched_like_that_of_a_thread(ranks):
    two = ranks(2, patience=TALKS)
    two.watches[0].submitted("sum")
    two.watches[0].begin_graph_wait("sum", (0, 1), lasts=lambda: True, broken=two.left.append)
    assert until(lambda: 'for the others in "sum"' in two.story() and "rank 1 (host" in two.story())
    two.watches[0].end_graph_wait("sum")
    said = len(two.said)
    two.watches[1].submitted("sum")
    two.watches[1].ended("sum")
    two.wait(1, "sum", 0.3, ranks=(0, 1), until=lambda: "rank 0 (host" in two.story())
    assert 'rank 0 (host' in two.story().split("rank 1 (host", 2)[-1], "it has submitted it no longer"
    assert len(two.said) > said and not two.left


@pytest.mark.parametrize("child", ["ends"], indirect=True)
def test_a_wait_of_a_framework_that_has_given_up_ends_and_is_explained(ranks, child):
    one, broken = ranks(1, patience=TALKS), []
    one.meet(child.said)
    child.kill()
    child.wait()
    lasts = threading.Event()
    lasts.set()
    one.watches[0].submitted("sum")
    one.watches[0].begin_graph_wait("sum", (0, 2), lasts=lasts.is_set, broken=lambda: broken.append(True))
    time.sleep(0.2)
    assert not broken and "failed" not in one.story()
    lasts.clear()
    assert until(lambda: "failed" in one.story())
    assert broken == [True] and re.search(r'"sum" failed: rank 2 \(host \S+, process \d+\) is gone', one.story())
    assert not one.left


def test_a_wait_of_a_framework_that_is_over_holds_nothing_of_the_program(ranks):
    """Objects of a job that live on one rank alone would be rebuilt on that one alone."""

    class Program:
        def lasts(self):
            return True

    one, program = ranks(1, patience=TALKS), Program()
    left = weakref.ref(program)
    for end in (one.watches[0].end_graph_wait, lambda operation: one.meet()):
        one.watches[0].submitted("sum")
        one.watches[0].begin_graph_wait("sum", (0,), lasts=program.lasts, broken=program.lasts)
        time.sleep(0.2)  # it is looked at
        end("sum")
    del program
    assert until(lambda: left() is None)


def test_nothing_is_said_of_a_wait_that_ended_while_the_others_were_asked(ranks, monkeypatch):
    two, asked = ranks(2, patience=QUICK), threading.Event()
    monkeypatch.setattr(two.watches[0]._peer_group, "absent", lambda *_: asked.set() or [])
    two.watches[0].begin_graph_wait("sum", (0, 1), lasts=lambda: not asked.is_set(), broken=lambda: None)
    assert until(asked.is_set)
    time.sleep(1.0)  # beyond the bound
    assert not two.said and not two.left


def test_calls_are_under_way_until_they_end():
    def function():
        called.set()
        ends.wait(LIMIT_S)

    called, ends = threading.Event(), threading.Event()
    thread = threading.Thread(target=function)
    thread.start()
    called.wait(LIMIT_S)
    calls = [call for call in script.calls_within(threading.__file__) if call.f_code.co_name == "wait"]
    others = script.calls_within(__file__)
    assert len(others) == 2 and script.under_way(others) and calls and script.under_way(calls)
    ends.set()
    thread.join()
    assert not script.under_way([call for call in others if call.f_code is function.__code__])
    function()  # another call
    assert not script.under_way([call for call in others if call.f_code is function.__code__])
    assert script.under_way(others), "the other one is this test"
    assert not script.calls_within("/nowhere.py")


def test_short_waits_say_nothing(ranks):
    two = ranks(2, patience=Patience(fixed_warn_s=0.8, bound_s=60.0))  # of which all together are more
    for _ in range(12):
        two.wait(0, "gradient", 0.1, ranks=(0, 1))
    assert two.said == []


def test_names_operations_in_another_order(ranks):
    two = ranks(2, patience=TALKS)

    def both():
        return 'waits in "metric"' in two.story() and 'waits in "gradient"' in two.story()

    waiter = threading.Thread(target=two.wait, args=(1, "metric", 0.3, (0, 1), both))
    waiter.start()
    two.wait(0, "gradient", 0.3, (0, 1), both)
    waiter.join()
    assert 'waits in "metric"' in two.story() and 'waits in "gradient"' in two.story()
    assert "same order" in two.story() and not two.left


def test_ranks_that_wait_for_each_other_are_told_before_their_first_steps_are_over(ranks):
    two = ranks(2, patience=Patience(startup_warn_s=60.0, min_warn_s=0.3))
    waiter = threading.Thread(target=two.wait, args=(1, "metric", 0.3, (0, 1), lambda: len(two.said) > 1))
    waiter.start()
    two.wait(0, "gradient", 0.3, (0, 1), lambda: len(two.said) > 1)
    waiter.join()
    assert 'waits in "metric"' in two.story()


def test_first_steps_take_their_time(ranks):
    three = ranks(3, patience=Patience(startup_warn_s=60.0, min_warn_s=0.1))
    waiter = threading.Thread(target=three.wait, args=(1, "metric", 0.6, (1, 2)))
    waiter.start()
    three.wait(0, "gradient", 0.6)  # rank 1 waits for rank 2, which may still compile
    waiter.join()
    assert three.said == []


def test_whoever_waits_for_another_is_not_to_blame(ranks):
    three = ranks(3, patience=TALKS)

    def both():
        return len(three.said) >= 2

    waiter = threading.Thread(target=three.wait, args=(1, "within the node", 0.3, (1, 2), both))
    waiter.start()
    three.wait(0, "across", 0.3, (0, 1, 2), both)
    waiter.join()
    assert three.said and all("rank 2 (host" in text and 'waits in "within' not in text for text in three.said)


def test_a_wait_without_end_ends_where_it_is_caused(ranks):
    two = ranks(2)
    two.wait(0, "gradient", 0.6, ranks=(0, 1), until=lambda: two.left)
    assert two.left == [EXIT_STATUS_LEFT], "the rank that is missing, and not the one that waits"
    assert "rank 1" in two.said[-1] and "ends with an error" in two.said[-1] and '"gradient"' in two.said[-1]


def test_who_has_joined_waits_for_nobody(ranks):
    """It takes part in all that comes with zeros, until the others have no more samples either."""
    three = ranks(3, patience=Patience(fixed_warn_s=0.2, bound_s=0.6, min_warn_s=0.1))
    seen, others = threading.Event(), three.watches[0]._peer_group
    joiner = threading.Thread(target=three.wait, args=(0, JOIN, 0.0), kwargs={"until": seen.is_set})
    joiner.start()
    time.sleep(3.0)  # beyond the bound: ranks 1 and 2 train
    assert not three.said and not three.left
    waiter = threading.Thread(target=three.wait, args=(1, "gradient", 0.0), kwargs={"until": seen.is_set})
    waiter.start()
    assert until(lambda: three.left), "rank 2 is still waited for by who trains"
    seen.set()
    joiner.join()
    waiter.join()
    assert "rank 2 (host" in three.story() and "rank 0 (host" not in three.story() and three.left == [EXIT_STATUS_LEFT]
    assert others.absent(JOIN) == []


def test_who_has_joined_is_missing_in_operations_of_fewer_ranks(ranks):
    three = ranks(3, patience=TALKS)
    seen = threading.Event()
    joiner = threading.Thread(target=three.wait, args=(0, JOIN, 0.0), kwargs={"until": seen.is_set})
    joiner.start()
    three.wait(1, "within the node", 0.2, ranks=(0, 1), until=lambda: three.said)
    seen.set()
    joiner.join()
    assert 'rank 0 (host' in three.story() and f'waits in "{JOIN}"' in three.story() and not three.left


def test_a_rank_that_is_stopped_while_others_have_joined_is_named_and_at_last_ended(ranks, child):
    one = ranks(1)
    one.meet(child.said)
    os.kill(child.pid, signal.SIGSTOP)
    one.wait(0, JOIN, 0.0, (0, 2), lambda: child.poll() is not None)
    assert "does not answer" in one.story() and f'the others in "{JOIN}"' in one.story()
    assert child.wait(timeout=5) == -signal.SIGKILL


def test_operations_in_another_order_end_everywhere(ranks):
    two = ranks(2)
    waiter = threading.Thread(target=two.wait, args=(1, "metric", 0.6, (0, 1), lambda: two.left))
    waiter.start()
    two.wait(0, "gradient", 0.6, (0, 1), lambda: two.left)
    waiter.join()
    assert EXIT_STATUS_LEFT in two.left


def test_a_stopped_process_is_named_and_at_last_ended(ranks, child):
    one = ranks(1)
    one.meet(child.said)
    os.kill(child.pid, signal.SIGSTOP)
    assert "does not answer" in one.watches[0].explain((0, 2))
    one.wait(0, "gradient", 5.0, (0, 2), lambda: child.poll() is not None)
    assert f"rank 2 (host {Peer.from_text(child.said).host}, process {child.pid}) does not answer" in one.story()
    assert child.wait(timeout=5) == -signal.SIGKILL


def test_a_process_that_has_no_connection_free_is_named_and_not_killed(ranks, monkeypatch):
    killed = []
    monkeypatch.setattr(Peer, "kill", killed.append)
    monkeypatch.setattr(peer, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(peer, "QUESTION_S", 60.0)
    monkeypatch.setattr(peer, "ENDING_S", (0.01, 0.01))
    monkeypatch.setattr(watch, "GRACE_S", 0.2)
    two = ranks(2)
    port = Peer.from_text(two.texts[1]).port
    with contextlib.ExitStack() as others:  # which say nothing
        for _ in range(peer.MAX_CONNECTIONS):
            others.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        two.wait(0, "gradient", 0.0, ranks=(0, 1), until=lambda: two.left)
        assert two.watches[0].explain((0, 1)) == "", "it runs"
    assert re.search(r"rank 1 \(.*\) cannot be asked: too many connections", two.story())
    assert "that is the bound" in two.story() and two.left and not killed


def test_a_dead_process_is_named(ranks, child):
    one = ranks(1)
    one.meet(child.said)
    assert one.watches[0].explain((0, 2)) == ""
    child.kill()
    child.wait()
    assert "is gone: its process has ended" in one.watches[0].explain((0, 2))


@pytest.mark.parametrize("child", ["ends"], indirect=True)
def test_a_process_that_is_ending_is_gone_and_not_stopped(ranks, child):
    one = ranks(1)
    one.meet(child.said)
    deadline = time.monotonic() + LIMIT_S
    while not (said := one.watches[0].explain((0, 2))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert child.poll() is None and "is gone: its process has ended" in said


def test_only_who_knows_the_token_is_heard(ranks, child):
    one = ranks(1, patience=Patience(fixed_warn_s=0.5, bound_s=1.0))
    stranger = Peer.from_text(child.said.replace(Peer.from_text(child.said).token, "0" * 32))
    one.meet(stranger.to_text())
    assert "does not answer" in one.watches[0].explain((0, 2))
    assert child.poll() is None


def test_the_child_ends_when_told(ranks, child):
    one = ranks(1)
    one.meet(child.said)
    one.wait(0, "gradient", 0.6, (0, 2), lambda: child.poll() is not None)
    assert child.wait(timeout=5) == EXIT_STATUS_LEFT
    told = child.stderr.read()
    assert "in loads" in told and '"gradient"' in told, "with what it was doing"


def test_nobody_watches_where_the_stall_check_is_off(ranks):
    """But who is awaited goes on: the bound of a local strategy is no place to wait for good."""
    two = ranks(2, patience=None)
    assert hears_that_it_is_awaited(two, "metric", 0.6, at="merge")
    assert not two.watches[0].watches and not two.said and not two.left


def test_a_rank_that_does_not_end_as_it_is_told_keeps_nobody_for_good(ranks, monkeypatch):
    """As one whose process cannot end, though its watch answers."""
    monkeypatch.setattr(watch, "GRACE_S", 0.2)
    two = ranks(2)  # whoever leaves does so in name only
    two.wait(0, "gradient", 0.0, ranks=(0, 1), until=lambda: len(two.left) > 1)
    ends = [re.search(r"rank (\d)", text)[1] for text in two.said if "ends with an error" in text]
    assert ends[:2] == ["1", "0"], "the one that is waited for, and at last who waits"
    assert sum("that is the bound" in text for text in two.said) == 1, "and that is said once"


def test_time_in_which_this_process_itself_was_stopped_is_no_wait(ranks, monkeypatch):
    class Stopped(threading.Event):  # for an hour, whenever it sleeps
        looks, now = 0, time.monotonic()

        def wait(self, timeout=None):
            self.looks, self.now = self.looks + 1, self.now + 3600.0
            return super().wait(timeout)

    two, stopped = ranks(2, patience=Patience(fixed_warn_s=30.0, bound_s=600.0)), Stopped()
    monkeypatch.setattr(watch, "time", types.SimpleNamespace(monotonic=lambda: stopped.now))
    two.watches[0]._closed = stopped
    two.wait(0, "gradient", 0.0, ranks=(0, 1), until=lambda: stopped.looks > 3)
    assert not two.said and not two.left, "nobody else has kept it waiting"


def test_what_is_kept_of_operations_is_bounded_however_many_names_they_take():
    seen = waits.Waits()
    for number in range(waits.NAMES + 2):
        with seen.of_thread(f"metric.{number}", (0,)):
            pass
    with seen.of_thread("metric.0", (0,)):
        pass
    assert not seen.step_s, "it was so long ago that it is no step"
    for _ in range(2 * waits.STEPS):
        with seen.of_thread("gradient", (0,)):
            pass
    assert len(seen.step_s) == waits.STEPS


def test_who_waits_for_long_asks_ever_more_rarely_and_never_stops(monkeypatch):
    clock, asked = types.SimpleNamespace(now=0.0), []
    monkeypatch.setattr(peer_group, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(peer_group.background, "begin", lambda work, name: work())
    others = peer_group.PeerGroup(lambda: (), lambda operation: 0)
    monkeypatch.setattr(others, "_asked", lambda *_: asked.append(clock.now) or [])
    awaited = others.awaits("merge", (0, 1))
    while clock.now < 1000.0:
        assert not awaited()
        clock.now += 0.25
    assert asked[0] < 1.0 and asked[-1] > 500.0
    assert all(later >= 1.3 * earlier for earlier, later in zip(asked, asked[1:], strict=False))


@pytest.mark.parametrize("failure", [peer.SilentError, peer.BusyError, peer.GoneError])
def test_a_rank_that_has_not_answered_is_asked_again_soon_however_long_the_wait(ranks, monkeypatch, failure):
    def ask(peer_of, question):
        asked.append(clock.now)
        raise failure

    clock, asked, two = types.SimpleNamespace(now=0.0), [], ranks(2, patience=TALKS)
    monkeypatch.setattr(peer_group, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(peer_group.background, "begin", lambda work, name: work())
    monkeypatch.setattr(peer_group, "ask", ask)
    awaited = two.watches[0]._peer_group.awaits("merge", (0, 1))
    while clock.now < 200.0:
        assert not awaited()
        clock.now += 0.25
    longest = max(later - earlier for earlier, later in zip(asked, asked[1:], strict=False))
    assert (longest < 2 * peer_group.UNANSWERED_S) == (failure is not peer.GoneError)


def test_who_is_awaited_hears_of_it_though_another_rank_is_gone(ranks):
    two, gone = ranks(2, patience=TALKS), peer.QuestionServer(lambda question: {})
    two.meet(gone.peer(2).to_text())
    gone.close()
    seen = threading.Event()
    waiter = threading.Thread(target=two.wait, args=(1, "metric", 0.0, (0, 1), seen.is_set))
    waiter.start()
    give_up = time.monotonic() + LIMIT_S / 4
    alone = two.watches[0].wait_avoiding_deadlock(lambda: time.monotonic() > give_up, "merge", (0, 1, 2))
    seen.set()
    waiter.join()
    assert not alone


def test_all_ranks_that_are_missing_are_told_to_end_though_one_cannot_be_told(ranks, monkeypatch):
    def ask(peer_of, question):
        if peer_of.rank == 1:
            raise ConnectionResetError  # it has ended meanwhile
        told.append(peer_of.rank)

    three, told = ranks(3), []
    monkeypatch.setattr(watch, "ask", ask)
    three.wait(0, "gradient", 0.0, until=lambda: told)
    assert told == [2] and "the watchdog failed" not in three.story()


def test_what_a_rank_has_printed_is_not_lost_where_it_is_ended(monkeypatch):
    pipe, written = io.BytesIO(), []
    one = Watch(None, say=lambda text: None, leave=lambda status: written.append(pipe.getvalue()))
    one.introduce(0)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe))  # as in a job: it collects what is printed
    print("epoch 3: loss 0.5")
    one._finish("rank 1 has waited for this rank")
    one.close()
    assert written == [b"epoch 3: loss 0.5\n"]


class Unread(io.StringIO):
    """An output with a full pipe."""

    def __init__(self, read):
        super().__init__()
        self.flush = read.wait


@pytest.mark.parametrize("stuck", ["stdout", "stderr"])
def test_a_rank_that_is_stuck_in_printing_is_ended_all_the_same(monkeypatch, stuck):
    read, left = threading.Event(), []
    monkeypatch.setattr(watch, "LAST_WORDS_S", 0.05)
    monkeypatch.setattr(sys, stuck, Unread(read))
    one = Watch(None, leave=left.append)
    ending = threading.Thread(target=one._finish, args=("rank 1 has waited for this rank",), daemon=True)
    ending.start()
    ending.join(5.0)
    read.set()
    assert left == [EXIT_STATUS_LEFT]


def test_an_output_that_was_closed_keeps_no_rank_that_is_ended(monkeypatch):
    left = []
    monkeypatch.setattr(sys, "stdout", None)
    Watch(None, say=lambda text: None, leave=left.append)._finish("rank 1 has waited for this rank")
    assert left == [EXIT_STATUS_LEFT]


def test_who_connects_and_says_nothing_keeps_no_thread(monkeypatch):
    monkeypatch.setattr(peer, "QUESTION_S", 0.1)
    server, before = peer.QuestionServer(lambda question: {}), set(threading.enumerate())
    with socket.create_connection(("127.0.0.1", server.peer(0).port)):
        assert until(lambda: set(threading.enumerate()) - before)
        assert until(lambda: not set(threading.enumerate()) - before)
    server.close()


class Looks:
    """A watch that nothing runs, and a wait of it that lasts as long as the test says; `absent` are missing."""

    def __init__(self, patience):
        self.said, self.left, self.heard, self.asked, self.absent = [], [], [], [], []
        self.watch = Watch(patience, say=self.said.append, leave=self.left.append)
        self.watch._peer_group.me = stranger(0)
        self.watch._peer_group.absent = lambda *what: self.asked.append(self.wait.lasted_s) or self.absent
        self.watch.hearers.add(self.hear)
        self.watch.begin_graph_wait("sum", (0, 1, 2), lasts=lambda: True, broken=lambda: None)
        (self.wait,) = self.watch._waits.now()

    def hear(self, **what):
        self.heard.append((what["waited_s"], what["missing"]))

    def after(self, lasted_s):
        self.wait.lasted_s = lasted_s
        self.watch._look(self.wait)


ANSWERS, ELSEWHERE = {"answers": True}, {"answers": True, "elsewhere": True}
SILENT = {"answers": False}


@pytest.mark.parametrize(("absent", "told", "killed", "ends_s"), [
    ({1: ANSWERS}, [1], [], 70.0), ({1: ELSEWHERE}, [], [], 10.0), ({1: SILENT}, [], [], 70.0),
    ({2: SILENT}, [], [2], 70.0), ({1: ANSWERS, 2: SILENT}, [1], [2], 70.0), ({2: ANSWERS}, [2], [], 70.0),
    ({1: ELSEWHERE, 3: SILENT}, [], [], 70.0), ({1: ELSEWHERE, 2: ANSWERS}, [2], [], 70.0), ({}, [], [], 10.0),
])  # fmt: skip
def test_at_the_bound_those_who_are_missing_are_ended_and_who_waits_where_that_is_no_help(
    monkeypatch, absent, told, killed, ends_s
):
    """At once where nobody can be told, or else if it has not helped for a minute. Rank 2 is a process of this host."""
    asked, ended = [], []
    monkeypatch.setattr(watch, "ask", lambda peer_of, question: asked.append((peer_of.rank, question["kind"])))
    monkeypatch.setattr(Peer, "is_here", property(lambda peer_of: peer_of.rank == 2))
    monkeypatch.setattr(Peer, "kill", lambda peer_of: ended.append(peer_of.rank))
    looks = Looks(Patience(fixed_warn_s=4.0, bound_s=10.0))
    looks.absent = [Absence(stranger(rank), f"rank {rank}", **what) for rank, what in absent.items()]
    looks.after(9.9)
    assert not asked and not ended and not looks.left
    assert ("every rank has come" in looks.said[0]) == (not absent) and looks.said[0].count("\n") == max(len(absent), 1)
    left = {}
    for lasted_s in (10.0, 10.5, 69.9, 70.0):
        looks.after(lasted_s)
        left[lasted_s] = list(looks.left)
    assert asked == [(rank, "end") for rank in told] and ended == killed, "once"
    assert all(bool(left[lasted_s]) == (lasted_s >= ends_s) for lasted_s in left)
    assert set(looks.left) == {EXIT_STATUS_LEFT}
    assert sum("that is the bound (10 s)" in text for text in looks.said) == 1
    assert looks.heard[-1] == (10.0, list(absent)) and len(looks.heard) == 2


def test_who_asks_is_told_what_is_under_way_what_is_waited_for_and_since_when(monkeypatch):
    one = Watch(None)
    one.submitted("sum")
    one.submitted("sum")  # once more, before the first is over
    with one.waiting("sum", (0, 2)):
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: one._waits.since + 7.0))
        state = one._answer({"kind": "state"})
    assert (state["submitted"], state["waits"], state["among"], state["s"]) == (["sum"], ["sum"], [(0, 2)], 7.0)
    assert state["where"].startswith(os.path.basename(__file__))
    one.ended("sum")
    assert one._answer({"kind": "state"})["submitted"] == ["sum"]
    one.ended("sum")
    state = one._answer({"kind": "state"})
    assert state["submitted"] == state["waits"] == state["among"] == [], "or it would not be missing in the next one"
    assert state["s"] == 7.0, "since the last wait ended"


def test_a_wait_is_told_of_when_it_is_due_and_once_more_whenever_it_is_twice_as_long():
    looks = Looks(Patience(fixed_warn_s=4.0, min_warn_s=100.0, bound_s=1000.0))
    looks.absent = [Absence(stranger(1), "rank 1 has not come", answers=True)]
    told = []
    for lasted_s in (1.0, 3.9, 4.0, 5.0, 7.9, 8.0, 15.9, 16.0):
        looks.after(lasted_s)
        told.append(len(looks.said))
    assert told == [0, 0, 1, 1, 1, 2, 2, 3]
    assert looks.heard == [(4.0, [1]), (8.0, [1]), (16.0, [1])] and looks.asked == [4.0, 8.0, 16.0]


def test_before_a_word_is_due_ranks_are_asked_ever_more_rarely_whether_they_wait_for_each_other():
    looks = Looks(Patience(startup_warn_s=60.0, min_warn_s=5.0))
    for lasted_s in (4.9, 5.0, 9.9, 10.0, 19.9, 20.0, 39.9):
        looks.after(lasted_s)
    assert looks.asked == [5.0, 10.0, 20.0] and not looks.said and not looks.heard
    looks.absent = [
        Absence(stranger(1), "rank 1 waits", answers=True, elsewhere=True, mutual=True),
        Absence(stranger(2), "rank 2 has not come", answers=True),
    ]
    looks.after(40.0)
    assert len(looks.said) == 1 and looks.heard == [(40.0, [1, 2])], "one of them is enough"


def test_who_has_heard_that_it_is_awaited_waits_no_longer_until_it_has_waited_elsewhere(monkeypatch):
    def waits(done, *, unless):
        raise AssertionError("it waits")

    monkeypatch.setattr(watch, "wait_until", waits)
    one = Watch(None)
    one._peer_group.awaited = True
    assert one.wait_avoiding_deadlock(lambda: True, "merge", (0, 1)) is True
    assert one.wait_avoiding_deadlock(lambda: False, "merge", (0, 1)) is False
    with one.waiting("validation", (0, 1)):
        assert not one._peer_group.awaited
    one._peer_group.awaited = True
    one.begin_graph_wait("sum", (0, 1), lasts=lambda: True, broken=lambda: None)
    assert not one._peer_group.awaited
    with pytest.raises(AssertionError, match="it waits"):
        one.wait_avoiding_deadlock(lambda: True, "merge", (0, 1))


def test_who_is_awaited_in_what_comes_after_the_end_of_its_wait_has_waited_to_the_end(monkeypatch):
    """One rank looks, then the operation ends, and then another one is seen to wait in the next."""
    one, looks = Watch(None), iter([False, True, False])

    def awaited():
        one._peer_group.awaited = True
        return True

    monkeypatch.setattr(one._peer_group, "awaits", lambda operation, ranks: awaited)
    assert one.wait_avoiding_deadlock(lambda: next(looks), "merge", (0, 1)) is True
    assert not one._peer_group.awaited, "the next wait is one"
    assert one.wait_avoiding_deadlock(lambda: False, "merge", (0, 1)) is False
    assert one._peer_group.awaited, "it is awaited still"
    one._peer_group.awaited = False
    monkeypatch.setattr(one._peer_group, "awaits", lambda operation, ranks: lambda: False)
    later = iter([False, False, True])
    assert one.wait_avoiding_deadlock(lambda: next(later), "merge", (0, 1)) is True


def test_a_wait_lasts_as_long_as_the_watch_has_looked_and_slept(monkeypatch):
    """Looks take their time, as they ask other processes; and one that fails ends no watch."""
    clock, slept = SimpleNamespace(now=100.0), iter([0.5, 0.75, 50.0, 0.5])

    class Closed:  # after so many sleeps, of these lengths
        def wait(self, timeout):
            assert timeout == watch.PERIOD_S == 0.5
            asleep = next(slept, None)
            clock.now += asleep or 0.0
            return asleep is None

    def look(wait):
        lasted.append(wait.lasted_s)
        clock.now += 3.0
        raise OSError("no such process")

    lasted, looks = [], Looks(QUICK)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    looks.watch._closed, looks.watch._look = Closed(), look
    looks.watch._watch()
    assert lasted == [0.5, 4.25, 8.25, 11.75], "3 s each between, and of the sleep of 50 s no more than 1 s"
    assert len(looks.said) == 1 and "the watchdog failed: OSError" in looks.said[0], "the same is said once"


def test_who_is_through_with_an_operation_whose_last_bytes_are_on_their_way_is_not_missing(ranks):
    """Over a slow link an operation is over on one rank seconds before it is on another."""
    two = ranks(2, patience=TALKS)
    two.watches[1].submitted("sum")
    two.watches[1].ended("sum")
    waiting = threading.Thread(target=two.wait, args=(1, "next", 2.0, (0, 1)))
    waiting.start()
    two.wait(0, "sum", 1.5, (0, 1), until=lambda: any("rank 0 (host" in text for text in two.said))
    waiting.join()
    of_sum = [text for text in two.said if 'in "sum"' in text.splitlines()[0]]
    assert of_sum and not any("the same operations" in text for text in of_sum), of_sum
    two.said.clear()
    again = threading.Thread(target=two.wait, args=(1, "next", 2.0, (0, 1)))
    again.start()
    two.wait(0, "sum", 1.5, (0, 1))  # a second time, to which the other does not come
    again.join()
    assert any("the same operations" in text for text in two.said)


def test_of_too_many_operations_none_is_counted_so_that_nobody_who_is_missing_seems_to_have_come():
    mine = waits.Waits()
    for number in range(waits.NAMES):
        mine.submit(f"sum.{number}")
    assert mine.times("sum.0") == 1
    mine.submit("sum.0")
    assert mine.times("sum.0") == 2 and mine.times("another") == 0
    mine.submit("another")
    mine.submit("sum.0")
    assert mine.times("sum.0") == 0 == mine.times("another")
    mine.forget()
    mine.submit("sum.0")
    assert mine.times("sum.0") == 1


@pytest.fixture
def clock(monkeypatch):
    """That of `Waits`."""
    made = SimpleNamespace(now=10.0)
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_a_step_is_from_one_wait_for_an_operation_to_the_next_whatever_comes_in_between(clock):
    mine = waits.Waits()
    for _ in range(3):
        for operation, seconds in (("gradient", 1.0), ("metric", 3.0)):
            with mine.of_thread(operation, (0, 1)):
                clock.now += seconds
    assert list(mine.step_s) == [4.0] * 4


def test_a_rank_has_waited_since_the_oldest_of_its_waits_began_or_is_outside_since_the_last_ended(clock):
    mine = waits.Waits()
    assert mine.since == 10.0
    clock.now = 20.0
    with mine.of_thread("outer", (0, 1)):
        clock.now = 30.0
        mine.begin_graph_wait("graph", (0, 1), lasts=lambda: True, broken=lambda: None)
        assert mine.since == 20.0
        clock.now = 40.0
        with mine.of_thread("inner", (0, 1)):
            assert [wait.operation for wait in mine.now()] == ["inner", "graph"] and mine.since == 30.0
        assert [wait.operation for wait in mine.now()] == ["outer", "graph"] and mine.since == 20.0
        mine.end_graph_wait("graph")
        clock.now = 50.0
    assert mine.since == 50.0 and not mine.now()
    mine.begin_graph_wait("graph", (0, 1), lasts=lambda: True, broken=lambda: None)
    clock.now = 60.0
    mine.end_graph_wait("graph")
    assert mine.since == 60.0 and not mine.now()


def test_what_ranks_did_before_they_met_anew_is_forgotten(clock):
    mine = waits.Waits()
    for _ in range(2):
        mine.submit("sum")
        mine.begin_graph_wait("sum", (0, 1), lasts=lambda: False, broken=lambda: None)
    mine.submit("lost")
    assert mine.submitted == ["sum", "lost"] and mine.step_s
    mine.forget()
    mine.end("lost")  # late
    assert mine.submitted == [] == mine.now() and not mine.step_s
    with mine.of_thread("sum", (0, 1)):
        assert not mine.step_s, "it was no step"


def test_an_operation_is_under_way_until_each_time_it_was_submitted_is_over():
    mine = waits.Waits()
    mine.submit("sum", over=lambda: True)
    assert mine.submitted == []
    mine.submit("sum")
    assert mine.submitted == ["sum"]
    mine.end("sum")
    mine.end("sum")
    assert mine.submitted == [] and not mine._submitted, "nothing is kept of its name"


def test_a_wait_that_has_ended_while_another_was_looked_at_has_not_failed():
    looks = Looks(TALKS)
    looks.absent = [Absence(stranger(1), "rank 1 is gone", answers=False)]
    looks.watch.begin_graph_wait("next", (0, 1), lasts=lambda: True, broken=lambda: looks.left.append("broken"))
    looks.wait.lasts = lambda: looks.watch.end_graph_wait("next") or True
    looks.watch._end_failed_graph_waits()
    assert not looks.said and not looks.left


@pytest.mark.parametrize("lasted_s", [5.0, 20.0])
@pytest.mark.parametrize("fails", [True, False])
def test_a_wait_that_ends_while_the_others_are_asked_is_no_story(lasted_s, fails):
    looks = Looks(Patience(fixed_warn_s=4.0, bound_s=10.0))

    def absent(*_):
        if fails:
            looks.wait.lasts = lambda: False
        else:
            looks.watch.end_graph_wait("sum")
        return []

    looks.watch._peer_group.absent = absent
    looks.after(lasted_s)
    assert not looks.said and not looks.left and not looks.heard


def test_a_rank_listens_at_one_port_whatever_its_number_until_its_watch_is_closed():
    one = Watch(None)
    one.close()
    one = Watch(None)
    first, again = (Peer.from_text(one.introduce(rank)) for rank in (0, 1))
    assert (first.port, again.rank) == (again.port, 1) and "waits" in peer.ask(again, {"kind": "state"})
    one.close()
    with pytest.raises(peer.GoneError):
        peer.ask(again, {"kind": "state"})


def test_who_has_joined_counts_its_wait_anew_whenever_all_others_answer():
    """And says once more what it ends, should it come to that again."""
    looks = Looks(Patience(fixed_warn_s=4.0, bound_s=10.0))
    looks.wait.operation, gone = JOIN, [Absence(stranger(1), "rank 1 is gone", answers=False)]
    for _ in range(2):
        looks.absent = gone
        for lasted_s in (4.0, 10.0):
            looks.after(lasted_s)
        looks.absent = []
        looks.after(11.0)
        assert looks.wait.lasted_s == 0.0
    assert looks.heard == [(4.0, [1]), (10.0, [1])] * 2 and not looks.left


@pytest.fixture
def at_exit(monkeypatch):
    """What watches do at the end of this process, in the order in which they have registered it."""
    calls = []
    one = SimpleNamespace(register=calls.append, unregister=lambda call: calls.remove(call) if call in calls else None)
    monkeypatch.setattr(watch, "atexit", one)
    return calls


def test_a_rank_ends_after_those_that_have_failed(ranks, child, at_exit):
    one = ranks(1).watches[0]
    one.meet([child.said])
    for _ in range(2):
        one.end_after([2], leave=pytest.fail)
    stay = at_exit[-1]
    assert at_exit.count(stay) == 1
    staying = threading.Thread(target=stay)
    staying.start()
    staying.join(0.3)
    assert staying.is_alive()
    child.kill()
    staying.join(LIMIT_S)
    assert not staying.is_alive()


@pytest.mark.parametrize("stopped", [True, False])
def test_no_rank_stays_for_ever_for_one_that_has_failed(ranks, child, at_exit, monkeypatch, stopped):
    monkeypatch.setattr(watch, "STAY_S", 0.2)
    monkeypatch.setattr(peer, "QUESTION_S", 0.1)
    one = ranks(1).watches[0]
    one.meet([child.said])
    if stopped:
        child.send_signal(signal.SIGSTOP)
    one.end_after([2], leave=pytest.fail)
    at_exit[-1]()
    assert child.poll() is None


def test_a_rank_that_has_failed_and_waits_for_one_that_is_to_end_is_let_go_on(ranks, at_exit):
    two = ranks(2, patience=TALKS)
    left = threading.Event()
    waiter = threading.Thread(target=two.wait, args=(1, "in the end", 0.0, (0, 1)), kwargs={"until": left.is_set})
    waiter.start()

    def leave():
        assert not left.is_set()
        left.set()
        waiter.join()
        two.watches[1].close()

    two.watches[0].end_after([1], leave=leave)
    at_exit[-1]()
    assert left.is_set()


def test_after_a_reset_no_rank_stays_for_one_that_failed_before(ranks, child, at_exit, monkeypatch):
    one = ranks(1).watches[0]
    one.meet([child.said])
    one.end_after([2], leave=pytest.fail)
    one.meet([child.said])
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pytest.fail))
    at_exit[-1]()
