"""Repairs of the launcher: `horovodrun`, and `horovod.run`, which starts ranks from Python.

- "run_settings": `horovod.run` leaves the cycle time and the cache capacity at their defaults.
- "run_results": `horovod.run` finds the results of the ranks also after the ranks of an elastic job have changed.
- "own_host": the launcher recognises its own host also where the host's name resolves to 127.0.1.1.
- "termination": on SIGTERM, ranks have HOROVOD_TERMINATION_TIME seconds (default 5) to end.
- "kept_output": with --output-filename, a process that replaces a failed one appends to its files.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

EDITS: Final = (
    Edit(
        name="run_settings",
        reason="horovod.run sets HOROVOD_CYCLE_TIME and HOROVOD_CACHE_CAPACITY to the text '(None,)', for two commas "
        "too many. Horovod reads that as 0: its thread spins on every rank, and answers are not kept",
        file="horovod/runner/__init__.py",
        find="""        self.cycle_time_ms = None,
        self.cache_capacity = None,
""",
        replace="""        self.cycle_time_ms = None
        self.cache_capacity = None
""",
    ),
    Edit(
        name="run_results",
        reason="horovod.run asks for the results of ranks 0, 1 and so on. A rank stores its own under the number that "
        "it was started with, as os.environ does not show what the library sets: after a change of an elastic job's "
        "ranks horovod.run fails with a 404, and the results of all are lost",
        file="horovod/runner/run_task.py",
        find="""    rank, size = get_env_rank_and_size()
    put_data_into_kvstore(addr, port, 'runfunc_result', str(rank), ret_val)
""",
        replace="""    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    now = getenv(b'HOROVOD_RANK')
    rank = now.decode() if now else str(get_env_rank_and_size()[0])
    put_data_into_kvstore(addr, port, 'runfunc_result', rank, ret_val)
""",
    ),
    Edit(
        name="run_results",
        reason="what asks the library's environment",
        file="horovod/runner/run_task.py",
        find="import sys\n\nfrom",
        replace="import ctypes\nimport sys\n\nfrom",
    ),
    Edit(
        name="own_host",
        reason="Debian's hosts file gives a host's own name the address 127.0.1.1, which no interface has: horovodrun "
        "takes its own host for another one, starts its ranks through ssh, and does not tell them that they are to end",
        file="horovod/runner/util/network.py",
        find="""def filter_local_addresses(all_host_names):
    local_addresses = get_local_host_addresses()

""",
        replace="""def is_local_address(address):
    return address is not None and (address.startswith('127.') or address in get_local_host_addresses())


def filter_local_addresses(all_host_names):
""",
    ),
    Edit(
        name="own_host",
        reason="who looks which hosts are others",
        file="horovod/runner/util/network.py",
        find="        if not host_address or host_address not in local_addresses:\n",
        replace="        if not is_local_address(host_address):\n",
    ),
    Edit(
        name="own_host",
        reason="who starts ranks",
        file="horovod/runner/gloo_run.py",
        find="""        local_addresses = network.get_local_host_addresses()
        if host_address not in local_addresses:
""",
        replace="""        if not network.is_local_address(host_address):
""",
    ),
    Edit(
        name="termination",
        reason="horovodrun that is told to end (SIGTERM) tells the ranks, and kills them 5 s later, whatever they are "
        "at: a rank whose steps take 3 s has not saved its checkpoint by then. HOROVOD_TERMINATION_TIME gives them "
        "more",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="""GRACEFUL_TERMINATION_TIME_S = 5
""",
        replace="""COMMAND_TERMINATION_TIME_S = max(0.0, float(os.environ.get('HOROVOD_TERMINATION_TIME') or 5))


SHELLS = ('sh', 'ash', 'bash', 'dash', 'ksh', 'mksh', 'zsh', 'busybox')


def is_shell(process):
    try:  # a script has its own name
        return process.name() in SHELLS or os.path.basename(process.exe()) in SHELLS
    except psutil.Error:
        return True


def commands_of(process):
    try:
        children = process.children() if is_shell(process) else []
    except psutil.NoSuchProcess:
        children = []
    return [command for child in children for command in commands_of(child)] or [process]


def is_running(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(processes, timeout):
    # psutil's own wait may take the exit status from who has started the process, to whom it is 0 then.
    end = time.monotonic() + timeout
    while any(map(is_running, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    return list(filter(is_running, processes))
""",
    ),
    Edit(
        name="termination",
        reason="a shell that has a single command becomes that, where it is bash: then it is the rank, and was stopped "
        "and killed without a word. And a script that starts a rank ends at once by SIGTERM, and the rank, which heard "
        "nothing, trained on: of a shell, what it waits for is told",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="""    # Terminate children gracefully.
    for child in p.children():
""",
        replace="""    # Terminate the command gracefully, which the shell may have become.
    command = commands_of(p)
    end = time.monotonic() + COMMAND_TERMINATION_TIME_S
    for child in command:
""",
    ),
    Edit(
        name="termination",
        reason="it is waited for as long as is given; and the shell, which ends with it or has more to do then, has "
        "its exit status: it is not stopped before it can",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="""    gone, alive = psutil.wait_procs(p.children(), timeout=GRACEFUL_TERMINATION_TIME_S)
""",
        replace="""    alive = wait_for_end(command, COMMAND_TERMINATION_TIME_S)
    if not alive:
        wait_for_end([p], max(1, end - time.monotonic()))
""",
    ),
    Edit(
        name="termination",
        reason="a shell that was stopped hears no SIGTERM, and was waited for for 5 s; and that wait may take its exit "
        "status from who has started it, so that horovodrun ends with 0",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="""    # Kill shell itself.
    try:
        p.terminate()
    except psutil.NoSuchProcess:
        pass

    try:
        p.wait(timeout=GRACEFUL_TERMINATION_TIME_S)
    except psutil.TimeoutExpired:
        try:
            p.kill()
        except psutil.NoSuchProcess:
            pass
""",
        replace="""    # Kill shell itself.
    try:
        p.kill()
    except psutil.NoSuchProcess:
        pass
""",
    ),
    Edit(
        name="termination",
        reason="what a shell has begun since is ended as well",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="""    for child in alive:
""",
        replace="""    try:
        alive = [*alive, *p.children()]
    except psutil.NoSuchProcess:
        pass
    for child in alive:
""",
    ),
    Edit(
        name="kept_output",
        reason="with --output-filename, the process that takes the place of one that has failed overwrites what that "
        "one has said: why it failed is in no file",
        file="horovod/runner/gloo_run.py",
        find="""            stdout_file = open(os.path.join(output_dir_rank, 'stdout'), 'w')
            stderr_file = open(os.path.join(output_dir_rank, 'stderr'), 'w')
""",
        replace="""            mode = 'a' if index in written else 'w'
            written.add(index)
            stdout_file = open(os.path.join(output_dir_rank, 'stdout'), mode)
            stderr_file = open(os.path.join(output_dir_rank, 'stderr'), mode)
""",
    ),
    Edit(
        name="kept_output",
        reason="which files are of this job",
        file="horovod/runner/gloo_run.py",
        find="""    terminate_all_event = None if settings.elastic else threading.Event()
""",
        replace="""    terminate_all_event = None if settings.elastic else threading.Event()
    written = set()
""",
    ),
)
