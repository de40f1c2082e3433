"""The edits of the driver of elastic jobs: workers that do not come, that come back, and that end late."""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_REGISTRATION = "horovod/runner/elastic/registration.py"
_DRIVER = "horovod/runner/elastic/driver.py"
_RENDEZVOUS = "horovod/runner/elastic/rendezvous.py"
_DISCOVERY = "horovod/runner/elastic/discovery.py"

EDITS: Final = (
    Edit(
        name="absent_workers",
        reason="once one worker is ready for new ranks, the driver waits for all others without limit: one that is "
        "frozen, or whose host cannot be reached, keeps the job waiting for ever. After the elastic timeout it counts "
        "as failed, and its process is ended",
        file=_REGISTRATION,
        find="""                self._states[key] = state
                self._workers[state].add(key)

            rendezvous_id = self._rendezvous_id
""",
        replace="""                self._states[key] = state
                self._workers[state].add(key)
                if state == READY and self._expected_in != self._rendezvous_id:
                    self._expected_in = self._rendezvous_id
                    self._expect_all(self._rendezvous_id)

            rendezvous_id = self._rendezvous_id
""",
    ),
    Edit(
        name="absent_workers",
        reason="what counts the time",
        file=_REGISTRATION,
        find="""    def _wait(self, key, state, rendezvous_id):
""",
        replace="""    def _expect_all(self, rendezvous_id):
        def fail_absent():
            with self._lock:
                if self._rendezvous_id != rendezvous_id:
                    return
                assigned = [(host, slot.local_rank)
                            for host, slots in self._driver.host_assignments.items() for slot in slots]
                absent = [key for key in assigned if key not in self._states]
            for host, slot in absent:
                logging.error('worker %s[%s] is not ready after %s s: it counts as failed', host, slot, seconds)
                threading.Thread(target=self.record_failure, args=(host, slot), daemon=True).start()

        seconds = self._driver.elastic_timeout
        timer = threading.Timer(seconds, fail_absent)
        timer.daemon = True
        timer.start()

    def _wait(self, key, state, rendezvous_id):
""",
    ),
    Edit(
        name="absent_workers",
        reason="for which round of ranks the time runs",
        file=_REGISTRATION,
        find="        self._rendezvous_id = 0\n",
        replace="        self._rendezvous_id = 0\n        self._expected_in = None\n",
    ),
    Edit(
        name="absent_workers",
        reason="the timeout of --elastic-timeout",
        file=_DRIVER,
        find="    def world_size(self):\n",
        replace="""    @property
    def elastic_timeout(self):
        return self._timeout

    def world_size(self):
""",
    ),
    Edit(
        name="stale_workers",
        reason="the driver takes every slot of the last assignment for one with a running worker. A host that was "
        "given up and comes back within one wait for slots is not started anew, and the job waits for workers that "
        "are gone. Now a slot counts as running only while its host has not been given up",
        file=_DRIVER,
        find="""                            for slot_info in slots])

        # Adjust the host assignments to account for added / removed hosts
        host_assignments, host_assignments_list = self._get_host_assignments(current_hosts)
""",
        replace="""                            for slot_info in slots])
        self._current_workers = {slot: (worker, given_up)
                                 for slot, (worker, given_up) in self._current_workers.items()
                                 if slot in active_slots and not given_up.is_set()}
        active_slots = set(self._current_workers)

        # Adjust the host assignments to account for added / removed hosts
        host_assignments, host_assignments_list = self._get_host_assignments(current_hosts)
""",
    ),
    Edit(
        name="stale_workers",
        reason="a worker of an earlier round that ends late was recorded as a failure of the one that has its slot "
        "now, whose host was then given up: the end of a worker counts only while the slot is its own",
        file=_DRIVER,
        find="""            exit_code, timestamp = res
            self._handle_worker_exit(slot_info, exit_code, timestamp)

        thread = threading.Thread(target=run_worker)
""",
        replace="""            exit_code, timestamp = res
            if host_event.is_set() or not self.is_current(*slot, worker):
                logging.debug('a worker of an earlier round has ended: %s[%s]', *slot)
                return
            self._handle_worker_exit(slot_info, exit_code, timestamp)

        self._workers_started += 1
        worker = slot_info.worker = str(self._workers_started)
        slot = slot_info.hostname, slot_info.local_rank
        self._current_workers[slot] = worker, host_event
        self._left.discard(slot)
        if slot in self._ends:
            self._ends[slot].set()
        self._ends[slot] = own_event = threading.Event()
        thread = threading.Thread(target=run_worker)
""",
    ),
    Edit(
        name="stale_workers",
        reason="which worker has which slot",
        file=_DRIVER,
        find="        self._rank_assignments = {}\n        self._world_size = 0\n",
        replace="""        self._rank_assignments = {}
        self._current_workers = {}
        self._workers_started = 0
        self._ends = {}
        self._restarted, self._left, self._holder = {}, set(), None
        self._world_size = 0
""",
    ),
    Edit(
        name="stale_workers",
        reason="whether a worker is the one that its slot has now",
        file=_DRIVER,
        find="    def has_rank_assignment(self, host, slot):\n",
        replace="""    def is_current(self, host, slot, worker):
        return self._current_workers.get((host, slot), (None,))[0] == worker

    def has_rank_assignment(self, host, slot):
""",
    ),
    Edit(
        name="stale_workers",
        reason="a worker is told its number",
        file="horovod/runner/gloo_run.py",
        find="""        "HOROVOD_CROSS_SIZE": str(slot_info.cross_size)
    }
    return horovod_rendez_env
""",
        replace="""        "HOROVOD_CROSS_SIZE": str(slot_info.cross_size)
    }
    if hasattr(slot_info, 'worker'):
        horovod_rendez_env["HOROVOD_ELASTIC_WORKER"] = slot_info.worker
    return horovod_rendez_env
""",
    ),
    Edit(
        name="stale_workers",
        reason="and says it when it asks which rank it is",
        file="horovod/common/gloo/gloo_context.cc",
        find="""    auto key = hostname_ + ":" + std::to_string(local_rank);
""",
        replace="""    auto key = hostname_ + ":" + std::to_string(local_rank);
    if (auto worker = std::getenv("HOROVOD_ELASTIC_WORKER")) {
      key += std::string(":") + worker;
    }
""",
    ),
    Edit(
        name="stale_workers",
        reason="a process that nobody could end, frozen or on a host that could not be reached for a while, took the "
        "rank of the worker that has its slot by then: two processes with one rank. It has no rank any more",
        file=_RENDEZVOUS,
        find="""                host, local_rank = key.split(':')
                return self._get_rank_and_size(host, int(local_rank))
""",
        replace="""                host, local_rank, *worker = key.split(':')
                return self._get_rank_and_size(host, int(local_rank), *worker)
""",
    ),
    Edit(
        name="stale_workers",
        reason="asked twice: the slot may be given to another worker while this one waits for the others",
        file=_RENDEZVOUS,
        find="""        def _get_rank_and_size(self, host, local_rank):
            logging.info('_get_rank_and_size: {} {}'.format(host, local_rank))
            driver.record_ready(host, local_rank)
            slot_info = driver.get_slot_info(host, local_rank)
""",
        replace="""        def _get_rank_and_size(self, host, local_rank, worker=None):
            def is_stale():
                return worker is not None and not driver.is_current(host, local_rank, worker)

            logging.info('_get_rank_and_size: {} {}'.format(host, local_rank))
            if not is_stale():
                driver.record_ready(host, local_rank)
            slot_info = INVALID_SLOT_INFO if is_stale() else driver.get_slot_info(host, local_rank)
""",
    ),
    Edit(
        name="stale_workers",
        reason="what a worker without a rank is told",
        file=_RENDEZVOUS,
        find="from horovod.runner.common.util import codec\n",
        replace="from horovod.runner.common.util import codec\n"
        "from horovod.runner.common.util.hosts import INVALID_SLOT_INFO\n",
    ),
    Edit(
        name="lone_host",
        reason="the driver of an elastic job on one host waits, without a word, until the elastic timeout for a second "
        "one to find the interfaces over which they reach each other. It says so, and what to do",
        file=_DRIVER,
        find="""                    return current_hosts
                if self._shutdown.is_set():
""",
        replace="""                    return current_hosts
                if avail_slots >= min_num_proc and not lone:
                    lone = True
                    logging.warning('All %d slots are on one host. Waiting for a second host, to find out how they '
                                    'reach each other. If there will be none, or if you know the network, name it: '
                                    '--network-interfaces lo for one host alone, or that of all hosts.', avail_slots)
                if self._shutdown.is_set():
""",
    ),
    Edit(
        name="lone_host",
        reason="once",
        file=_DRIVER,
        find="""        self._wait_hosts_cond.acquire()
        try:
            while True:
                current_hosts = self._host_manager.current_hosts
""",
        replace="""        lone = False
        self._wait_hosts_cond.acquire()
        try:
            while True:
                current_hosts = self._host_manager.current_hosts
""",
    ),
    Edit(
        name="late_discovery",
        reason="the driver looks for hosts with a lock in its hand: while a discovery script hangs, ranks that come "
        "together wait for it, and so does the end of the job. It looks without",
        file=_DRIVER,
        find="""            self._wait_hosts_cond.acquire()
            try:
                update_res = self._host_manager.update_available_hosts()
""",
        replace="""            found = problem = None
            try:
                found = self._host_manager.find()
            except BaseException as e:
                problem = e
            self._wait_hosts_cond.acquire()
            try:
                if problem is not None:
                    raise problem
                update_res = self._host_manager.update_available_hosts(found)
""",
    ),
    Edit(
        name="late_discovery",
        reason="a script that is at it when the job ends is ended",
        file=_DRIVER,
        find="""        self._shutdown.set()
        self._rendezvous.stop()
""",
        replace="""        self._shutdown.set()
        self._host_manager.end()
        self._rendezvous.stop()
""",
    ),
    Edit(
        name="late_discovery",
        reason="looking, and what comes of it",
        file=_DISCOVERY,
        find="    def update_available_hosts(self):\n",
        replace="""    def find(self):
        return self._discovery.find_available_hosts_and_slots()

    def end(self):
        if hasattr(self._discovery, 'ended'):
            self._discovery.ended.set()

    def update_available_hosts(self, found=None):
""",
    ),
    Edit(
        name="late_discovery",
        reason="what was found",
        file=_DISCOVERY,
        find="        host_slots = self._discovery.find_available_hosts_and_slots()\n",
        replace="        host_slots = self.find() if found is None else found\n",
    ),
    Edit(
        name="late_discovery",
        reason="a script that hangs is ended after a minute, and the hosts stay as they were, as where it fails",
        file=_DISCOVERY,
        find="""        exit_code = safe_shell_exec.execute(
            self._discovery_script, stdout=stdout)
""",
        replace="""        late = threading.Event()
        timer = threading.Timer(DISCOVERY_SECS, late.set)
        timer.daemon = True
        timer.start()
        exit_code = safe_shell_exec.execute(
            self._discovery_script, stdout=stdout, events=[late, self.ended])
        timer.cancel()
        if late.is_set():
            raise RuntimeError('The discovery script {} did not end within {:.0f} s, and was ended.'.format(
                self._discovery_script, DISCOVERY_SECS))
""",
    ),
    Edit(
        name="late_discovery",
        reason="says that it is to end",
        file=_DISCOVERY,
        find="""class HostDiscoveryScript(HostDiscovery):
    def __init__(self, discovery_script, slots):
""",
        replace="""DISCOVERY_SECS = 60.0


class HostDiscoveryScript(HostDiscovery):
    def __init__(self, discovery_script, slots):
        self.ended = threading.Event()
""",
    ),
    Edit(
        name="ended_waits",
        reason="horovodrun that is told to end (SIGTERM, Ctrl-C) while it waits for as many slots as --min-np says "
        "goes on waiting, until the elastic timeout",
        file=_DRIVER,
        find="""                if self._shutdown.is_set():
                    raise RuntimeError('Job has been shutdown, see above error messages for details.')
                self._wait_hosts_cond.wait(tmout.remaining())
""",
        replace="""                if self._shutdown.is_set() or self.told_to_end.is_set():
                    raise RuntimeError('Job has been shutdown, see above error messages for details.')
                self._wait_hosts_cond.wait(min(1.0, tmout.remaining()))
""",
    ),
    Edit(
        name="ended_waits",
        reason="what says so",
        file=_DRIVER,
        find="        self._worker_clients = {}\n",
        replace="        self._worker_clients = {}\n        self.told_to_end = threading.Event()\n",
    ),
    Edit(
        name="ended_waits",
        reason="who says so",
        file="horovod/runner/gloo_run.py",
        find="        create_worker = _create_elastic_worker_fn(exec_command, run_command, env, event)\n",
        replace="""        create_worker = _create_elastic_worker_fn(exec_command, run_command, env, event)
        driver.told_to_end = event
""",
    ),
)
