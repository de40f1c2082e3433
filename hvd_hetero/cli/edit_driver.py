"""The edits of the driver of elastic jobs: workers that do not come, that come back, and that end late."""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_REGISTRATION = "horovod/runner/elastic/registration.py"
_DRIVER = "horovod/runner/elastic/driver.py"
_RENDEZVOUS = "horovod/runner/elastic/rendezvous.py"

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
        self._restarted = {}
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
        name="spared_hosts",
        reason="when one worker fails, its host is given up: healthy workers on it are ended as well, and with them, "
        "where others have just failed, the last that have the state of the job. Now a host with a worker that is "
        "ready is spared: only the failed one is started anew, unless that happened a short while ago",
        file=_REGISTRATION,
        find="""        for host, slot in failures:
            self._host_manager.blacklist(host)
""",
        replace="""        ready = {host for (host, slot), state in self._states.items() if state == READY}
        for host, slot in sorted(failures, key=lambda key: (key[1] == 0, key)):
            alone = all(other == host for other, _ in failures)
            if host not in ready or not self._driver.spare(host, slot, self._states, alone):
                self._host_manager.blacklist(host)
""",
    ),
    Edit(
        name="spared_hosts",
        reason="a worker that has failed may still be there, frozen: it is ended. Rank 0, from which others take the "
        "state, has to be one that goes on",
        file=_DRIVER,
        find="    def world_size(self):\n",
        replace="""    def spare(self, host, slot, states, alone):
        now = time.time()
        last, count = self._restarted.get((host, slot), (0, 0))
        again = now - last < SPARED_AGAIN_SECS * 2 ** max(0, count - 1)
        if again and (alone or count >= MOST_SPARED_AGAIN):
            return False
        if slot == 0:
            with self._wait_hosts_cond:  # which discovery holds, too
                hosts_now = self._host_manager.current_hosts
                order = sorted(hosts_now.host_assignment_order, key=lambda name: states.get((name, 0)) != READY)
                if not order or states.get((order[0], 0)) != READY:
                    return False
                hosts_now.host_assignment_order[:] = order
        logging.info('start worker anew: %s[%s]', host, slot)
        self._restarted[(host, slot)] = now, count + 1
        self._current_workers.pop((host, slot), None)
        if (host, slot) in self._ends:
            self._ends[(host, slot)].set()
        return True

    def world_size(self):
""",
    ),
    Edit(
        name="spared_hosts",
        reason="the state of a worker that goes on",
        file=_DRIVER,
        find="from horovod.runner.elastic.registration import WorkerStateRegistry\n",
        replace="from horovod.runner.elastic.registration import READY, WorkerStateRegistry\n",
    ),
    Edit(
        name="spared_hosts",
        reason="each worker can be ended alone",
        file=_DRIVER,
        find="[shutdown_event, host_event])",
        replace="[shutdown_event, host_event, own_event])",
    ),
    Edit(
        name="spared_hosts",
        reason="a worker that fails again and again is no accident: each time it has to last for twice as long. Where "
        "others failed in the same moment, it may have failed for their sake",
        file=_DRIVER,
        find="ELASTIC_TIMEOUT_SECS = 600\n",
        replace="ELASTIC_TIMEOUT_SECS = 600\nSPARED_AGAIN_SECS = 120\nMOST_SPARED_AGAIN = 3\n",
    ),
    *(
        Edit(
            name="failed_job",
            reason="a job whose ranks were all given up, without one that ended by itself, ended with status 0",
            file=_REGISTRATION,
            find=f"            logging.{found}\n            self._driver.stop()\n",
            replace=f"            logging.{found}\n            self._driver.fail()\n",
        )
        for found in (
            "error('failure count == {} -> stop running'.format(self._size))",
            "error('blacklisted slots count == {} -> stop running'.format(self._size))",
            "exception('failed to activate new hosts -> stop running')",
        )
    ),
    Edit(
        name="failed_job",
        reason="that it has failed is kept",
        file=_DRIVER,
        find="    def finished(self):\n",
        replace="""    def fail(self):
        self.failed = True
        self.stop()

    def finished(self):
""",
    ),
    Edit(
        name="failed_job",
        reason="at first it has not",
        file=_DRIVER,
        find="        self._worker_clients = {}\n",
        replace="        self._worker_clients = {}\n        self.failed = False\n",
    ),
    Edit(
        name="failed_job",
        reason="where no rank's exit status says so",
        file="horovod/runner/gloo_run.py",
        find="""        # fetch the result if running a func
        if settings.run_func_mode:
            results = [None] * settings.min_num_proc
""",
        replace="""        if driver.failed:
            raise RuntimeError('Horovod detected that every rank of the job has failed or was given up; the log above '
                               'says when and why.')

        # fetch the result if running a func
        if settings.run_func_mode:
            results = [None] * settings.min_num_proc
""",
    ),
)
