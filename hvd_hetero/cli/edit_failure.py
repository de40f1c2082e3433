"""Repairs of what an elastic job loses when a worker fails: the worker, all workers of its host, or the job.

- "spared_hosts": a host with healthy workers is kept, and the failed worker alone is started again, unless it fails
  again and again.
- "left_in_order": a worker that was told to end, and did so in order, does not count as failed.
- "failed_job": horovodrun ends with an error, and not with status 0, if all ranks of the job were given up.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit
from hvd_hetero.engine.termination import EXIT_STATUS_LEFT

_REGISTRATION = "horovod/runner/elastic/registration.py"
_DRIVER = "horovod/runner/elastic/driver.py"

EDITS: Final = (
    Edit(
        name="spared_hosts",
        reason="when one worker of an elastic job fails, the driver gives up (blacklists) its whole host and ends the "
        "healthy workers there too; if other hosts have failed as well, the last copies of the job's state are lost "
        "with them. A host with a worker that is ready is now kept, and the failed worker alone is started again, "
        "unless it has failed a short while before",
        file=_REGISTRATION,
        find="""        for host, slot in failures:
            self._host_manager.blacklist(host)
""",
        replace="""        ready = {host for (host, slot), state in self._states.items() if state == READY}
        for host, slot in sorted(failures, key=lambda key: (key[1] == 0, key)):
            alone = all(other == host for other, _ in failures)
            if host not in ready or not self._driver.spare(host, slot, self._states, alone):
                self._driver.give_up(host)
""",
    ),
    Edit(
        name="spared_hosts",
        reason="Part of spared_hosts: the driver's decision whether a failed worker is started again. If so, its old "
        "process is ended, since it may be frozen, and a worker that has the job's state is chosen as rank 0, from "
        "which all others take it. If the worker has failed repeatedly, its host is given up after all: at once if "
        "the job can go on without that host, or else after three restarts. A host that is given up is logged as a "
        "warning, with how many slots are left: where these are too few, the job would wait without a word",
        file=_DRIVER,
        find="    def world_size(self):\n",
        replace="""    def spare(self, host, slot, states, alone):
        now = time.time()
        last, count = self._restarted.get((host, slot), (0, 0))
        left = (host, slot) in self._left
        again = not left and now - last < SPARED_AGAIN_SECS * 2 ** max(0, count - 1)
        with self._wait_hosts_cond:  # which discovery holds, too
            elsewhere = self._slots_without(host) >= self._min_num_proc and any(
                state == READY and name != host for (name, _), state in states.items())
        if again and (alone and elsewhere or count >= MOST_SPARED_AGAIN):
            return False
        first = {}
        for name, ready in sorted(key for key, state in states.items() if state == READY):
            first.setdefault(name, ready)
        with self._wait_hosts_cond:
            hosts_now = self._host_manager.current_hosts
            order = sorted(hosts_now.host_assignment_order, key=lambda name: first.get(name, float('inf')))
            if not order or order[0] not in first:
                return False
            hosts_now.host_assignment_order[:] = order
            self._holder = order[0], first[order[0]]
        logging.info('start worker anew: %s[%s]', host, slot)
        if not left:
            self._restarted[(host, slot)] = now, count + 1
        self._current_workers.pop((host, slot), None)
        if (host, slot) in self._ends:
            self._ends[(host, slot)].set()
        return True

    def give_up(self, host):
        if not self._host_manager.is_blacklisted(host):
            with self._wait_hosts_cond:
                left = self._slots_without(host)
            short = '' if left >= self._min_num_proc else (
                ': the job waits for others, for %d s at most' % self._timeout)
            logging.warning('Host %s is given up, as none of its ranks goes on, or one of them has failed again and '
                            'again. The other hosts have %d slots, and --min-np asks for %d%s.',
                            host, left, self._min_num_proc, short)
        self._host_manager.blacklist(host)

    def _slots_without(self, host):
        hosts_now = self._host_manager.current_hosts
        return sum(hosts_now.get_slots(name) for name in hosts_now.available_hosts if name != host)

    def world_size(self):
""",
    ),
    Edit(
        name="spared_hosts",
        reason="Part of spared_hosts: gives rank 0 to the chosen worker that has the job's state, also if it is not "
        "the first of its host",
        file=_DRIVER,
        find="        host_assignments, host_assignments_list = self._get_host_assignments(current_hosts)\n",
        replace="""        host_assignments, host_assignments_list = self._get_host_assignments(current_hosts)
        for slot_info in host_assignments[host_assignments_list[0].hostname]:
            slot = (slot_info.hostname, slot_info.local_rank)
            if slot == self._holder and slot in active_slots:
                first = host_assignments_list[0]
                first.rank, slot_info.rank = slot_info.rank, first.rank
""",
    ),
    Edit(
        name="left_in_order",
        reason="a worker that ends in order after SIGTERM, as when its machine is reclaimed, counts as failed: "
        "upstream gives up (blacklists) its host with all healthy workers on it, and with spared_hosts alone that "
        "would happen after a few such ends. An end in order, which hvd_hetero reports by an exit status of its own, "
        "no longer counts as one of the failures that make the driver give up a host",
        file=_DRIVER,
        find="            rendezvous_id = self._worker_registry.record_failure(",
        replace="""            if exit_code == LEFT_IN_ORDER:
                self._left.add((slot_info.hostname, slot_info.local_rank))
            rendezvous_id = self._worker_registry.record_failure(""",
    ),
    Edit(
        name="spared_hosts",
        reason="Part of spared_hosts: imports READY, the state of a worker that has not failed and waits for its new "
        "rank",
        file=_DRIVER,
        find="from horovod.runner.elastic.registration import WorkerStateRegistry\n",
        replace="from horovod.runner.elastic.registration import READY, WorkerStateRegistry\n",
    ),
    Edit(
        name="spared_hosts",
        reason="Part of spared_hosts: adds an event of its own to each worker's process, so that one worker can be "
        "ended without the others of its host",
        file=_DRIVER,
        find="[shutdown_event, host_event])",
        replace="[shutdown_event, host_event, own_event])",
    ),
    Edit(
        name="spared_hosts",
        reason="Part of spared_hosts: the limits. A worker fails repeatedly if it fails within 120 s of its last "
        "restart, which doubles with each further restart; after three restarts that counts also where other hosts "
        "have failed at the same moment, which may have been the cause. Also the exit status that left_in_order needs",
        file=_DRIVER,
        find="ELASTIC_TIMEOUT_SECS = 600\n",
        replace="ELASTIC_TIMEOUT_SECS = 600\nSPARED_AGAIN_SECS = 120\nMOST_SPARED_AGAIN = 3\n"
        f"LEFT_IN_ORDER = {EXIT_STATUS_LEFT}\n",
    ),
    *(
        Edit(
            name="failed_job",
            reason="an elastic horovodrun ends with status 0, as if it had succeeded, when it stops because all "
            "workers have failed or were given up, and no worker has ended by itself. It now ends with an error",
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
        reason="Part of failed_job: the driver's method that records the failure of the job and stops it",
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
        reason="Part of failed_job: the driver's record starts as not failed",
        file=_DRIVER,
        find="        self._worker_clients = {}\n",
        replace="        self._worker_clients = {}\n        self.failed = False\n",
    ),
    Edit(
        name="failed_job",
        reason="Part of failed_job: horovodrun raises an error if the driver has recorded a failure, also if no "
        "worker's exit status shows one",
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
