"""The edits of `horovod.run`, which starts ranks from Python."""

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
)
