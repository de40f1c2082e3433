"""Repairs of the launcher: `horovodrun`, and `horovod.run`, which starts ranks from Python.

- "run_settings": `horovod.run` leaves the cycle time and the cache capacity at their defaults.
- "run_results": `horovod.run` finds the results of the ranks also after the ranks of an elastic job have changed.
- "termination": on SIGTERM, ranks have HOROVOD_TERMINATION_TIME seconds (default 5) to end.
- "restored_handlers": after `horovod.run`, SIGINT and SIGTERM do what they did before.
- "two_signals": SIGINT and SIGTERM may come while another such signal is handled.
- "launcher_cache": the cache in ~/.horovod is written in one step, and where it cannot be, nothing is cached.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

EDITS: Final = (
    Edit(
        name="run_settings",
        reason="because of two stray commas, horovod.run sets HOROVOD_CYCLE_TIME and HOROVOD_CACHE_CAPACITY to the "
        "text '(None,)', which Horovod reads as 0: its background thread spins on every rank, and the response cache "
        "is off, so that every tensor is negotiated in full at every step",
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
        reason="in an elastic job whose ranks have changed, horovod.run fails with a 404 and all results are lost: it "
        "asks for the results of ranks 0, 1 and so on, but a worker stores its result under the rank that it was "
        "started with, because os.environ does not show that Horovod's library has set HOROVOD_RANK anew. The worker "
        "now reads the variable with C's getenv",
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
        reason="Part of run_results: imports ctypes, which gives access to C's getenv",
        file="horovod/runner/run_task.py",
        find="import sys\n\nfrom",
        replace="import ctypes\nimport sys\n\nfrom",
    ),
    Edit(
        name="termination",
        reason="on SIGTERM, horovodrun passes the signal on to its ranks and kills them 5 s later, whatever they are "
        "doing: a rank whose steps take 3 s cannot save its checkpoint in time. HOROVOD_TERMINATION_TIME now sets how "
        "many seconds they have",
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
        reason="Part of termination: horovodrun sends SIGTERM only to the children of the shell that it started. bash "
        "replaces itself by a single command, so that the rank is the shell's own process and was killed without a "
        "SIGTERM for it to handle; and a shell script that starts a rank ended at the signal, while the rank got none "
        "and trained on. The signal now goes to the commands that the shell waits for, or to the process itself if it "
        "has become the command",
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
        reason="Part of termination: the rank has HOROVOD_TERMINATION_TIME to end. Then the shell has the rest of "
        "that time, at least 1 s, to do what follows in its script and to end with the exit status of the rank, "
        "before it is killed",
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
        reason="Part of termination: upstream stops the shell, sends it SIGTERM, which a stopped process does not "
        "handle, and waits 5 s in vain; that wait may also take the exit status away from the code that started the "
        "shell, so that horovodrun ends with status 0. The shell is now killed at once",
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
        reason="Part of termination: processes that the shell has started since SIGTERM was sent are killed as well",
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
        name="restored_handlers",
        reason="after horovod.run has returned, SIGINT and SIGTERM still only tell the launcher, which is not there "
        "any more, that it is to end: Ctrl-C does nothing in the rest of the script or notebook. Both now do again "
        "what they did before",
        file="horovod/runner/gloo_run.py",
        find="""def launch_gloo(""",
        replace="""def with_handlers_restored(launch):
    @functools.wraps(launch)
    def launch_and_restore(*args, **kwargs):
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return launch(*args, **kwargs)
        finally:
            for number, handler in handlers.items():
                if handler is not None and handler is not signal.getsignal(number):
                    signal.signal(number, handler)
    return launch_and_restore


@with_handlers_restored
def launch_gloo(""",
    ),
    Edit(
        name="restored_handlers",
        reason="Part of restored_handlers: the same for elastic jobs",
        file="horovod/runner/gloo_run.py",
        find="""def launch_gloo_elastic(""",
        replace="""@with_handlers_restored
def launch_gloo_elastic(""",
    ),
    Edit(
        name="restored_handlers",
        reason="Part of restored_handlers: imports functools, for the decorator",
        file="horovod/runner/gloo_run.py",
        find="import errno\nimport math\n",
        replace="import errno\nimport functools\n",
    ),
    Edit(
        name="two_signals",
        reason="a second SIGTERM or Ctrl-C that comes while the first is handled waits for ever for the lock that the "
        "first holds, and horovodrun with it. Signals after the first do nothing now",
        file="horovod/runner/gloo_run.py",
        find="""    def set_event_on_signal(signum, frame):
        event.set()
""",
        replace="""    told = []

    def set_event_on_signal(signum, frame):
        if not told:
            told.append(signum)
            event.set()
""",
    ),
    Edit(
        name="launcher_cache",
        reason="where the home folder cannot be written to, horovodrun ends with a PermissionError before it starts "
        "anything. It now caches nothing there",
        file="horovod/runner/util/cache.py",
        find="""            if e.errno != errno.EEXIST:
                raise
""",
        replace="""            pass  # it is there, or there is no cache
""",
    ),
    Edit(
        name="launcher_cache",
        reason="Part of launcher_cache: the file is written beside the old one, and then takes its place, since "
        "another horovodrun that reads a half-written one ends with an EOFError",
        file="horovod/runner/util/cache.py",
        find="""        with open(self._cache_file, 'wb') as cf:
            cloudpickle.dump(content, cf, protocol=self._pickle_protocol)
""",
        replace="""        written = '{}.{}'.format(self._cache_file, os.getpid())
        try:
            with open(written, 'wb') as cf:
                cloudpickle.dump(content, cf, protocol=self._pickle_protocol)
            os.replace(written, self._cache_file)
        except OSError:
            pass
""",
    ),
    Edit(
        name="launcher_cache",
        reason="Part of launcher_cache: a file that is not there, or cannot be read, is an empty cache",
        file="horovod/runner/util/cache.py",
        find="""        if not os.path.isfile(self._cache_file) or \\
                self._cache_file_is_corrupt_and_deleted():
            self._dump({'parameters_hash': parameters_hash})

        content = self._load(self._cache_file)
""",
        replace="""        try:
            content = self._load(self._cache_file)
        except Exception:
            content = {}
""",
    ),
    Edit(
        name="launcher_cache",
        reason="Part of launcher_cache: says nothing about a file that is not read, as it will be replaced",
        file="horovod/runner/util/cache.py",
        find="""            try:
                content = cloudpickle.load(cf)
            except Exception as e:
                print(
                    'There is an error with reading cache file. You '
                    'can delete the corrupt file: {cache_file}.'.format(
                        cache_file=cache_file))
                raise
        return content
""",
        replace="""            return cloudpickle.load(cf)
""",
    ),
)
