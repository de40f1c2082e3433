"""Repairs of how the driver of elastic jobs (in horovodrun) keeps track of its workers.

- "absent_workers": a worker that is not ready within the elastic timeout counts as failed, and is ended.
- "stale_workers": a process of an earlier round (a host that comes back, a worker that ends late, a process that could
  not be ended) is no longer taken for the worker that has its slot now.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_REGISTRATION = "horovod/runner/elastic/registration.py"
_DRIVER = "horovod/runner/elastic/driver.py"
_RENDEZVOUS = "horovod/runner/elastic/rendezvous.py"

EDITS: Final = (
    Edit(
        name="absent_workers",
        reason="after a change of ranks in an elastic job, once one worker is ready for its new rank, the driver "
        "waits for all others without limit: a worker that is frozen, or whose host cannot be reached, keeps the job "
        "waiting for ever. Such a worker now counts as failed after the elastic timeout, and its process is ended",
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
        reason="Part of absent_workers: the timer that records a failure for every assigned worker that is not ready "
        "after the elastic timeout",
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
        reason="Part of absent_workers: remembers for which round of rank assignment (rendezvous) the timer was "
        "started, so that it is started once for each",
        file=_REGISTRATION,
        find="        self._rendezvous_id = 0\n",
        replace="        self._rendezvous_id = 0\n        self._expected_in = None\n",
    ),
    Edit(
        name="absent_workers",
        reason="Part of absent_workers: gives the timer the driver's --elastic-timeout",
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
        reason="the driver of an elastic job assumes that every slot of the last assignment has a running worker. If "
        "a host was given up (blacklisted) and is back before the next assignment, no workers are started on it, and "
        "the job waits for workers that are gone. A slot now counts as running only if its host has not been given up "
        "since its worker was started",
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
        reason="Part of stale_workers: if a worker of an earlier round ended late, upstream recorded that as a "
        "failure of the worker that has its slot now, and gave up (blacklisted) a healthy host. The end of a worker "
        "now counts only while the slot is still its own",
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
        reason="Part of stale_workers: the driver's record of which worker has which slot; also the attributes that "
        "spared_hosts and left_in_order need",
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
        reason="Part of stale_workers: the method that tells whether a worker is the one that has its slot now",
        file=_DRIVER,
        find="    def has_rank_assignment(self, host, slot):\n",
        replace="""    def is_current(self, host, slot, worker):
        return self._current_workers.get((host, slot), (None,))[0] == worker

    def has_rank_assignment(self, host, slot):
""",
    ),
    Edit(
        name="stale_workers",
        reason="Part of stale_workers: a worker gets its number in the variable HOROVOD_ELASTIC_WORKER when it is "
        "started",
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
        reason="Part of stale_workers: a worker adds its number (HOROVOD_ELASTIC_WORKER) to the request when it asks "
        "the rendezvous server for its rank",
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
        reason="Part of stale_workers: a process that could not be ended, because it was frozen or its host could not "
        "be reached for a while, asked for the rank of its slot later and got that of the worker that has the slot by "
        "then: two processes had one rank. The rendezvous server now reads the worker's number from the request, to "
        "refuse such a process",
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
        reason="Part of stale_workers: a worker that no longer has its slot gets no rank. This is checked before and "
        "after the wait in record_ready, because the slot may go to another worker while this one waits for the others",
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
        reason="Part of stale_workers: imports INVALID_SLOT_INFO, the answer for a worker that has no rank in the job "
        "any more",
        file=_RENDEZVOUS,
        find="from horovod.runner.common.util import codec\n",
        replace="from horovod.runner.common.util import codec\n"
        "from horovod.runner.common.util.hosts import INVALID_SLOT_INFO\n",
    ),
)
