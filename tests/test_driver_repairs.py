"""Every repair of the driver of elastic jobs, with the real driver and workers that are threads."""

from __future__ import annotations

import io
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest

from hvd_hetero.engine.termination import EXIT_STATUS_LEFT
from tests.repair import needs

pytestmark = pytest.mark.horovod
LIMIT_S = 20


@needs("absent_workers")
def test_the_elastic_driver_gives_up_workers_that_do_not_come() -> None:
    from horovod.runner.elastic.registration import WorkerStateRegistry

    class Slot(NamedTuple):
        local_rank: int

    class Driver:
        elastic_timeout = 0.2
        host_assignments = {"a": [Slot(0), Slot(1)], "b": [Slot(0)]}
        resumed = threading.Event()

        def finished(self):
            return False

        def stop(self, error_message=None): ...

        def give_up(self, host):
            hosts.blacklist(host)

        def resume(self):
            self.resumed.set()

    class Hosts:
        given_up: ClassVar[list[str]] = []

        def is_blacklisted(self, host):
            return host in self.given_up

        def blacklist(self, host):
            self.given_up.append(host)

    driver, hosts = Driver(), Hosts()
    registry = WorkerStateRegistry(driver, hosts)
    registry.reset(3)
    for slot in range(2):
        threading.Thread(target=registry.record_ready, args=("a", slot), daemon=True).start()
    assert driver.resumed.wait(10), "it waits for b[0] for ever"
    assert hosts.given_up == ["b"]


class Workers:
    """The workers of an elastic job, which run until they are told to end."""

    def __init__(self) -> None:
        self.slots: list[Any] = []
        self.told: list[list[threading.Event]] = []  # for each, what tells it to end: the job, its host, itself
        self._ends: list[threading.Event] = []
        self._status = 1
        self._changed = threading.Condition()

    def create(self, slot: Any, events: list[threading.Event]) -> tuple[int, float]:
        with self._changed:
            end = threading.Event()
            self.slots.append(slot)
            self.told.append(events)
            self._ends.append(end)
            self._changed.notify_all()
        end.wait()
        return self._status, 0.0

    def wait_for(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.slots) >= count, LIMIT_S):
                started = ", ".join(f"{slot.hostname}[{slot.local_rank}]" for slot in self.slots)
                pytest.fail(f"{count} workers were to be started; these were: {started}")

    def find(self, host: str, local_rank: int, *, start: int = 0) -> int:
        places = [(slot.hostname, slot.local_rank) for slot in self.slots]
        return places.index((host, local_rank), start)

    def end(self, worker: int, status: int = 1) -> None:
        self._status = status
        self._ends[worker].set()

    def end_all(self) -> None:
        for end in self._ends:
            end.set()


class Job(NamedTuple):
    """A driver and its workers; a host may come back a second after it was given up."""

    driver: Any
    workers: Workers
    ask: Callable[[str], list[int]]


@contextmanager
def elastic_job(hosts: dict[str, int], *, least: int | None = None) -> Iterator[Job]:
    """A job with a worker in each of the hosts' slots, which goes on with `least` of them; None: with all."""
    from horovod.runner.elastic.discovery import FixedHosts
    from horovod.runner.elastic.driver import ElasticDriver
    from horovod.runner.elastic.rendezvous import create_rendezvous_handler

    server = SimpleNamespace(init=lambda assignments: None, stop=lambda: None)
    ranks = sum(hosts.values())
    driver = ElasticDriver(
        server, FixedHosts(hosts), least or ranks, ranks, timeout=LIMIT_S, cooldown_range=(1, 1)
    )
    handler = create_rendezvous_handler(driver)
    asked = handler.__new__(handler)
    workers = Workers()
    driver.wait_for_available_slots(ranks)
    driver.start(ranks, workers.create)
    workers.wait_for(ranks)

    def ask(worker: str) -> list[int]:
        return [int(number) for number in asked._get_value("rank_and_size", worker).split(b",")]

    yield Job(driver, workers, ask)
    workers.end_all()
    driver.stop()


@pytest.fixture
def job() -> Iterator[Job]:
    """One worker on host a, two on host b."""
    with elastic_job({"a": 1, "b": 2}) as made:
        yield made


@pytest.fixture
def small_job() -> Iterator[Job]:
    """The same, if one of them is enough."""
    with elastic_job({"a": 1, "b": 2}, least=1) as made:
        yield made


def _in_threads(call: Callable[[str], Any], of: list[str]) -> dict[str, Any]:
    """What came of the calls, which wait for one another."""
    results: dict[str, Any] = {}

    def run(one: str) -> None:
        results[one] = call(one)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in of]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(results) == len(of), f"only {sorted(results)} of {of} got an answer"
    return results


@needs("spared_hosts")
def test_a_dead_worker_is_started_anew_and_those_beside_it_go_on(small_job: Job) -> None:
    driver, workers, ask = small_job
    numbers = {(slot.hostname, slot.local_rank): slot.worker for slot in workers.slots}
    survivors = [f"a:0:{numbers['a', 0]}", f"b:1:{numbers['b', 1]}"]
    workers.end(workers.find("b", 0))
    ranks = sorted(answer[0] for answer in _in_threads(ask, survivors).values())
    workers.wait_for(4)
    assert len(set(ranks)) == 2 and ranks[0] == 0, "a worker that was started anew is rank 0"
    assert workers.find("b", 0, start=3) == 3
    assert not driver._host_manager.is_blacklisted("b")

    # once more at once is no accident: now its host is given up
    workers.end(3)
    answers = _in_threads(ask, survivors)
    assert answers[survivors[1]][0] == -1, "a worker that dies again and again was started again"


@needs("left_in_order")
def test_a_worker_that_leaves_in_order_is_started_anew_however_often(job: Job) -> None:
    driver, workers, ask = job
    numbers = {(slot.hostname, slot.local_rank): slot.worker for slot in workers.slots}
    survivors = [f"a:0:{numbers['a', 0]}", f"b:1:{numbers['b', 1]}"]
    for times in range(3):
        workers.end(workers.find("b", 0, start=3 + times - 1 if times else 0), status=EXIT_STATUS_LEFT)
        ranks = sorted(answer[0] for answer in _in_threads(ask, survivors).values())
        workers.wait_for(4 + times)
        assert len(set(ranks)) == 2 and ranks[0] == 0
        assert not driver._host_manager.is_blacklisted("b")
    # One that fails then is no accident if it does so again.
    assert ("b", 0) not in driver._restarted


@needs("spared_hosts")
def test_a_frozen_worker_is_ended_alone(job: Job) -> None:
    driver, workers, ask = job
    frozen = workers.find("b", 0)
    assert driver.spare("b", 0, {("a", 0): "READY", ("b", 1): "READY"}, True)
    assert [event.is_set() for event in workers.told[frozen]] == [False, False, True]
    assert not any(event.is_set() for event in workers.told[workers.find("b", 1)])


@needs("spared_hosts")
def test_one_that_goes_on_is_rank_0_also_where_the_first_of_every_host_has_died(job: Job) -> None:
    driver, workers, ask = job
    number = next(slot.worker for slot in workers.slots if (slot.hostname, slot.local_rank) == ("b", 1))
    workers.end(workers.find("a", 0))
    workers.end(workers.find("b", 0))
    assert _in_threads(ask, [f"b:1:{number}"])[f"b:1:{number}"][0] == 0
    assert not driver._host_manager.is_blacklisted("b")
    assert not driver.spare("b", 1, {}, True), "nobody has the state"


@needs("spared_hosts")
@pytest.mark.parametrize("status", [1, EXIT_STATUS_LEFT])
def test_the_first_worker_of_the_only_host_may_end(status: int) -> None:
    with elastic_job({"b": 2}) as (_, workers, ask):
        numbers = [slot.worker for slot in workers.slots]
        for times in range(1 if status == 1 else 3):
            workers.end(workers.find("b", 0, start=times + 1 if times else 0), status=status)
            assert ask(f"b:1:{numbers[1]}")[:2] == [0, 2], "a worker that was started anew is rank 0"
            workers.wait_for(3 + times)
            assert workers.slots[-1].rank == 1


@needs("spared_hosts")
def test_a_worker_has_to_last_longer_each_time(small_job: Job) -> None:
    driver, ready = small_job.driver, {("a", 0): "READY", ("b", 0): "READY"}
    for count, (age_s, alone, spared) in enumerate([
        (1e9, True, True), (119, True, False), (121, True, True), (121, True, False), (241, True, True),
        (10, False, False),
    ]):  # fmt: skip
        if ("b", 1) in driver._restarted:
            driver._restarted["b", 1] = time.time() - age_s, driver._restarted["b", 1][1]
        assert driver.spare("b", 1, ready, alone) == spared, count
    driver._restarted.clear()
    assert all(driver.spare("b", 1, ready, False) for _ in range(3)), "others failed in the same moment"
    driver._restarted.clear()
    last = {("b", 0): "READY"}
    assert [driver.spare("b", 1, last, True) for _ in range(4)] == [True] * 3 + [False], "nobody else has the state"


@needs("spared_hosts")
@pytest.mark.parametrize("least", [1, 2])
def test_a_host_without_which_too_few_slots_are_left_is_given_up_last_and_with_a_word(
    least: int, caplog: pytest.LogCaptureFixture
) -> None:
    with elastic_job({"a": 1, "b": 2}, least=least) as (driver, _, _):
        ready = {("a", 0): "READY", ("b", 0): "READY"}
        spared = [driver.spare("b", 1, ready, True) for _ in range(4)]
        assert spared == [True, least > 1, least > 1, False]
        driver.give_up("b")
        assert driver._host_manager.is_blacklisted("b")
        assert "Host b is given up, as none of its ranks goes on, or one of them has failed again" in caplog.text
        assert f"The other hosts have 1 slots, and --min-np asks for {least}" in caplog.text
        assert (f"the job waits for others, for {LIMIT_S} s at most" in caplog.text) == (least > 1)


@needs("failed_job")
def test_a_job_whose_ranks_were_all_given_up_has_failed(job: Job) -> None:
    driver = job.driver
    assert not driver.failed
    for host, slot in (("a", 0), ("b", 0), ("b", 1)):
        threading.Thread(target=driver._worker_registry.record_failure, args=(host, slot), daemon=True).start()
    deadline = time.monotonic() + LIMIT_S
    while not driver.finished() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert driver.finished() and driver.failed


@needs("stale_workers")
def test_a_host_that_was_given_up_and_comes_back_gets_new_workers_and_the_old_ones_do_not_count(job: Job) -> None:
    driver, workers, ask = job
    driver._restarted[("b", 0)] = time.time(), 3  # so that the host is not spared
    dead, late = workers.find("b", 0), workers.find("b", 1)
    numbers = {(slot.hostname, slot.local_rank): slot.worker for slot in workers.slots}
    workers.end(dead)
    survivors = [f"a:0:{numbers['a', 0]}", f"b:1:{numbers['b', 1]}"]
    answers = _in_threads(ask, survivors)

    # both of b's are started anew, also the one whose process still runs, and which has asked for its rank
    workers.wait_for(5)
    assert sorted((slot.hostname, slot.local_rank) for slot in workers.slots[3:]) == [("b", 0), ("b", 1)]
    assert workers.told[late][1].is_set()
    assert answers[survivors[0]][:2] == [0, 3]
    assert answers[survivors[1]][:2] == [-1, -1], "a process of a host that was given up has a rank"
    assert ask(survivors[1])[:2] == [-1, -1], "it asked again, and has one now"

    # its late end is no failure of the one that has its slot now
    workers.end(late)
    again = [f"a:0:{numbers['a', 0]}", *(f"b:{slot.local_rank}:{slot.worker}" for slot in workers.slots[3:])]
    ranks = sorted(answer[0] for answer in _in_threads(ask, again).values())
    assert ranks == [0, 1, 2]
    assert not driver._host_manager.is_blacklisted("b")
    assert len(workers.slots) == 5


@needs("stale_workers")
def test_a_worker_that_has_lost_its_slot_to_another_ends_without_a_word(job: Job) -> None:
    driver, workers, _ = job
    failures: queue.Queue[tuple[str, int]] = queue.Queue()
    driver._worker_registry.record_failure = lambda *slot: failures.put(slot)
    driver._start_worker_process(driver.host_assignments["b"][0])
    workers.wait_for(4)
    old, new = workers.find("b", 0), workers.find("b", 0, start=3)
    workers.end(old)
    workers.end(new)
    assert failures.get(timeout=LIMIT_S) == ("b", 0)
    with pytest.raises(queue.Empty):
        failures.get(timeout=0.5)


@needs("lone_host")
def test_the_elastic_driver_says_that_it_waits_for_a_second_host(caplog: pytest.LogCaptureFixture) -> None:
    from horovod.runner.elastic.discovery import FixedHosts
    from horovod.runner.elastic.driver import ElasticDriver
    from horovod.runner.util.threads import in_thread

    server = SimpleNamespace(init=lambda assignments: None, stop=lambda: None)
    hosts = FixedHosts({"a": 2})
    driver = ElasticDriver(server, hosts, 2, 2, timeout=LIMIT_S)
    try:
        waiting = in_thread(driver.wait_for_available_slots, (2, 2), daemon=True)
        deadline = time.monotonic() + LIMIT_S
        while "second host" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        hosts.set({"a": 2, "b": 1})
        waiting.join(LIMIT_S)
        assert not waiting.is_alive(), "the second host is there"
        assert caplog.text.count("--network-interfaces lo") == 1
    finally:
        driver.stop()


@needs("late_discovery")
def test_a_discovery_script_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    from horovod.runner.elastic.discovery import HostDiscoveryScript
    from horovod.runner.elastic.driver import ElasticDriver

    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\n[ -e {tmp_path}/hang ] && {{ touch {tmp_path}/hangs; sleep 60; }}\necho a:1\n")
    script.chmod(0o755)
    server = SimpleNamespace(init=lambda assignments: None, stop=lambda: None)
    driver = ElasticDriver(server, HostDiscoveryScript(str(script), 1), 1, 1, timeout=LIMIT_S)
    driver.wait_for_available_slots(1)
    (tmp_path / "hang").touch()
    wait_for(lambda: (tmp_path / "hangs").exists())
    for call in (lambda: driver.wait_for_available_slots(1), driver.stop):
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@needs("late_discovery")
def test_a_discovery_script_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.runner.elastic import discovery

    monkeypatch.setattr(discovery, "DISCOVERY_SECS", 0.5)
    with pytest.raises(RuntimeError, match="did not end within"):
        discovery.HostDiscoveryScript("sleep 60", 1).find_available_hosts_and_slots()


@needs("discovery_error")
@pytest.mark.parametrize(("script", "slots", "words"), [
    ("exit 3", 1, "Exit code: 3"), ("echo a:two", 1, "Received: 'a:two'"), ("echo :2", 1, "Received: ':2'"),
    ("echo a:2:2", 1, "Received: 'a:2:2'"), ("echo a:1; echo b", None, "--slots-per-host. Received: 'b'"),
])  # fmt: skip
def test_what_is_wrong_with_a_discovery_script_is_told(script, slots, words, caplog):
    from horovod.runner.elastic.discovery import HostDiscoveryScript
    from horovod.runner.elastic.driver import ElasticDriver

    server = SimpleNamespace(init=lambda assignments: None, stop=lambda: None)
    driver = ElasticDriver(server, HostDiscoveryScript(script, slots), 1, 1, timeout=LIMIT_S)
    try:
        with pytest.raises(RuntimeError, match="see above"):
            driver.wait_for_available_slots(1)
        assert words in caplog.text
    finally:
        driver.stop()


@needs("discovery_error")
def test_a_discovery_script_may_print_hosts_with_and_without_slots_and_empty_lines():
    from horovod.runner.elastic.discovery import HostDiscoveryScript

    said = HostDiscoveryScript("printf 'a:2\\r\\n\\nb: 3\\nc \\n'", 4)
    assert said.find_available_hosts_and_slots() == {"a": 2, "b": 3, "c": 4}
    assert HostDiscoveryScript("true", None).find_available_hosts_and_slots() == {}


@needs("early_hosts")
def test_workers_hear_of_a_host_that_came_before_they_listened() -> None:
    from horovod.runner.elastic.discovery import FixedHosts
    from horovod.runner.elastic.driver import ElasticDriver
    from horovod.runner.elastic.worker import HostUpdateResult

    class Hosts(FixedHosts):
        asked = 0

        def find_available_hosts_and_slots(self):
            self.asked += 1
            return super().find_available_hosts_and_slots()

    server = SimpleNamespace(init=lambda assignments: None, stop=lambda: None)
    hosts, workers, told = Hosts({"a": 1}), Workers(), []
    driver = ElasticDriver(server, hosts, 1, 2, timeout=LIMIT_S)
    try:
        driver.wait_for_available_slots(1)
        driver.start(1, workers.create)
        workers.wait_for(1)
        hosts.set({"a": 1, "b": 1})
        wait_for(lambda: driver._host_manager.current_hosts.count_available_slots() == 2)
        driver._worker_clients["a", 0] = SimpleNamespace(notify_hosts_updated=lambda at, how: told.append(how))
        wait_for(lambda: told)
        asked = hosts.asked
        wait_for(lambda: hosts.asked > asked + 1)
        assert told == [HostUpdateResult.added], "they are told once"
    finally:
        workers.end_all()
        driver.stop()


@needs("ended_waits")
def test_who_waits_for_hosts_hears_that_the_job_is_to_end() -> None:
    from horovod.runner.elastic.discovery import FixedHosts
    from horovod.runner.elastic.driver import ElasticDriver

    server = SimpleNamespace(init=lambda assignments: None, stop=lambda: None)
    driver = ElasticDriver(server, FixedHosts({"a": 1}), 2, 2, timeout=60)
    heard = threading.Event()

    def wait() -> None:
        with pytest.raises(RuntimeError, match="shutdown"):
            driver.wait_for_available_slots(2)
        heard.set()

    threading.Thread(target=wait, daemon=True).start()
    driver.told_to_end.set()
    assert heard.wait(LIMIT_S)
    driver.stop()


@needs("kept_output")
def test_what_a_rank_has_said_stays_when_its_place_is_taken(tmp_path: Path) -> None:
    from horovod.runner import gloo_run

    settings = SimpleNamespace(
        elastic=True, verbose=0, output_filename=str(tmp_path), num_proc=2, ssh_port=None, ssh_identity_file=None,
        prefix_output_with_timestamp=False,
    )  # fmt: skip
    slot = SimpleNamespace(rank=1, hostname="localhost")
    said = tmp_path / "rank.1" / "stdout"
    for _ in range(2):  # of the next job with this folder alone
        run = gloo_run._exec_command_fn(settings)
        run("echo why it died", slot, [])
        run("echo of the next one", slot, [])
        assert said.read_text().count("\n") == 2


@needs("termination")
def test_what_a_script_of_the_users_waits_for_hears_that_it_is_to_end(tmp_path: Path) -> None:
    from horovod.runner.common.util import safe_shell_exec

    rank = tmp_path / "rank.py"
    rank.write_text(
        "import pathlib, signal, sys\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((here / 'heard').touch(), sys.exit(75)))\n"
        "(here / 'began').touch()\nsignal.pause()\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\n{sys.executable} {rank}\nexit $?\n")
    script.chmod(0o755)
    end, status = threading.Event(), []

    def run() -> None:
        out = io.StringIO(), io.StringIO()
        status.append(safe_shell_exec.execute(str(script), stdout=out[0], stderr=out[1], events=[end]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_for(lambda: (tmp_path / "began").exists())
    end.set()
    thread.join(LIMIT_S)
    assert (tmp_path / "heard").exists() and status == [75]


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
