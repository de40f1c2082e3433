"""The edits of what starts ranks from Python, `horovod.run`, and of what ends them."""

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
        name="termination",
        reason="horovodrun that is told to end (SIGTERM) tells the ranks, and kills them 5 s later, whatever they are "
        "at: a rank whose steps take 3 s has not saved its checkpoint by then. HOROVOD_TERMINATION_TIME gives them "
        "more",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="""GRACEFUL_TERMINATION_TIME_S = 5
""",
        replace="""GRACEFUL_TERMINATION_TIME_S = 5
CHILDREN_TERMINATION_TIME_S = float(os.environ.get('HOROVOD_TERMINATION_TIME') or GRACEFUL_TERMINATION_TIME_S)
""",
    ),
    Edit(
        name="termination",
        reason="they are waited for as long; and their shell, which ends with them, has their exit status: it is not "
        "stopped before it can",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="""    gone, alive = psutil.wait_procs(p.children(), timeout=GRACEFUL_TERMINATION_TIME_S)
""",
        replace="""    gone, alive = psutil.wait_procs(p.children(), timeout=CHILDREN_TERMINATION_TIME_S)
    if not alive:
        psutil.wait_procs([p], timeout=1)
""",
    ),
    Edit(
        name="termination",
        reason="a shell that was stopped hears no SIGTERM, and was waited for for 5 s",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="""    # Kill shell itself.
    try:
        p.terminate()
""",
        replace="""    # Kill shell itself.
    try:
        p.kill()
""",
    ),
)
