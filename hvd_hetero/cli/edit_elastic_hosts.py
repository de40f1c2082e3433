"""Repairs of how the driver of elastic jobs (in horovodrun) finds hosts and waits for them.

- "lone_host": a driver that waits for a second host says so, and how to do without one.
- "late_discovery": a discovery script that hangs holds nobody up, and is ended after a minute.
- "early_hosts": a host that comes while ranks are starting is used, and not only once hosts change again.
- "ended_waits": SIGTERM and Ctrl-C end the wait for hosts.
- "discovery_error": a discovery script that fails at once, or prints no hosts, is named in the error.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_DRIVER = "horovod/runner/elastic/driver.py"
_DISCOVERY = "horovod/runner/elastic/discovery.py"

EDITS: Final = (
    Edit(
        name="lone_host",
        reason="an elastic job on one host, started without --network-interfaces, seems to hang: the driver waits "
        "silently, until the elastic timeout, for a second host with which to find out over which network interfaces "
        "hosts reach each other. It now logs a warning that says so, and what to do",
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
        reason="Part of lone_host: remembers that the warning was given, so that it is given once in each wait",
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
        reason="the driver of an elastic job runs the host discovery script while it holds the lock of its waits for "
        "hosts: if the script hangs, workers that are being assigned new ranks hang with it, and the job cannot end. "
        "The script now runs without the lock",
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
        reason="Part of late_discovery: a discovery script that still runs when the job ends is ended",
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
        reason="Part of late_discovery: splits the search for hosts (find), which needs no lock, from the update of "
        "the driver's list with the hosts found; and adds the method that ends a running discovery script",
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
        reason="Part of late_discovery: update_available_hosts takes the hosts that were found before, if it is given "
        "them, instead of running the script itself",
        file=_DISCOVERY,
        find="        host_slots = self._discovery.find_available_hosts_and_slots()\n",
        replace="        host_slots = self.find() if found is None else found\n",
    ),
    Edit(
        name="late_discovery",
        reason="Part of late_discovery: a discovery script that hangs is ended after 60 s. That counts as a failure "
        "of the script: the known hosts stay as they are",
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
        reason="Part of late_discovery: the event that ends a running discovery script at the end of the job, and the "
        "60 s that a script may take",
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
        name="early_hosts",
        reason="ranks of an elastic job are told of a change of hosts once, when it is found. One that comes while "
        "they are starting, which takes a framework's time to load, reaches nobody, and the new host stays idle until "
        "hosts change again. The driver now tells them of it as soon as the first rank listens",
        file=_DRIVER,
        find="""                if update_res != HostUpdateResult.no_update:
                    self._notify_workers_host_changes(self._host_manager.current_hosts, update_res)
                    self._wait_hosts_cond.notify_all()
""",
        replace="""                self._untold_changes |= update_res
                if self._untold_changes != HostUpdateResult.no_update:
                    if not self._notify_workers_host_changes(self._host_manager.current_hosts, self._untold_changes):
                        self._untold_changes = HostUpdateResult.no_update
                if update_res != HostUpdateResult.no_update:
                    self._wait_hosts_cond.notify_all()
""",
    ),
    Edit(
        name="early_hosts",
        reason="Part of early_hosts: says that workers are still to be told, as none listens yet",
        file=_DRIVER,
        find="""            logging.debug('no coordinator client, skipping notifications')
            return
""",
        replace="""            logging.debug('no coordinator client, notifying later')
            return True
""",
    ),
    Edit(
        name="early_hosts",
        reason="Part of early_hosts: the changes that no worker has been told of",
        file=_DRIVER,
        find="        self._worker_clients = {}\n",
        replace="        self._worker_clients = {}\n        self._untold_changes = HostUpdateResult.no_update\n",
    ),
    Edit(
        name="ended_waits",
        reason="an elastic horovodrun does not react to SIGTERM or Ctrl-C while it waits for the number of slots that "
        "--min-np asks for: it goes on waiting until the elastic timeout. It now checks every second whether it was "
        "told to end",
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
        reason="Part of ended_waits: the driver's event that is set when horovodrun is told to end",
        file=_DRIVER,
        find="        self._worker_clients = {}\n",
        replace="        self._worker_clients = {}\n        self.told_to_end = threading.Event()\n",
    ),
    Edit(
        name="ended_waits",
        reason="Part of ended_waits: gives the driver the event that horovodrun's signal handlers set",
        file="horovod/runner/gloo_run.py",
        find="        create_worker = _create_elastic_worker_fn(exec_command, run_command, env, event)\n",
        replace="""        create_worker = _create_elastic_worker_fn(exec_command, run_command, env, event)
        driver.told_to_end = event
""",
    ),
    Edit(
        name="discovery_error",
        reason="where the first run of a discovery script fails, horovodrun ends with 'see above error messages', and "
        "there are none: the exception of the thread is cut off by the end of the process. It is logged first now",
        file=_DRIVER,
        find="""                    self._shutdown.set()
                    self._wait_hosts_cond.notify_all()
                    raise
""",
        replace="""                    logging.error('The hosts of the job could not be found: %s', e)
                    self._shutdown.set()
                    self._wait_hosts_cond.notify_all()
                    return
""",
    ),
    Edit(
        name="discovery_error",
        reason="Part of discovery_error: a line of the script that is no host with its slots is named, where the error "
        "was one of Python's about None or about a text that is no number",
        file=_DISCOVERY,
        find="""            host = line
            if ':' in line:
                host, slots = line.split(':')
                host_slots[host] = int(slots)
            # Make sure the host is not empty. The discovery script might
            # return empty string when all workers are not ready or available.
            elif host:
                host_slots[host] = self._default_slots
        return host_slots
""",
        replace="""            host, colon, slots = line.strip().partition(':')
            if host and not colon and self._default_slots is not None:
                slots = str(self._default_slots)
            # An empty line is no host: the script may print none when all workers are not ready.
            if host and slots.strip().isdecimal():
                host_slots[host] = int(slots)
            elif host or colon:
                raise ValueError('Expected the discovery script {} to print lines such as worker-0:2, or worker-0 with '
                                 '--slots-per-host. Received: {!r}.'.format(self._discovery_script, line))
        return host_slots
""",
    ),
)
