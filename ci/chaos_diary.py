"""What the jobs that `ci/chaos` disturbs have in common: their size, their pace, and what their processes write."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

SAMPLES, WHOLE, COMMIT_EVERY = 480, 24, 5
SAMPLE_S = {0: 0.004, 1: 0.008, 2: 0.004}  # by node


def sample_seconds() -> float:
    """What this rank's host computes for a sample."""
    host = os.environ.get("HOROVOD_HOSTNAME", "")
    return SAMPLE_S[int(host[-1]) if host.startswith("node") else 0]


class Diary:
    """What happened to this process, as JSON lines; nothing of it waits in memory."""

    def __init__(self, folder: Path, hvd: Any) -> None:
        self._path, self._hvd = folder / f"process-{os.getpid()}.jsonl", hvd

    def __call__(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, "t_s": time.time(), "pid": os.getpid(), "rank": self._hvd.rank()}
        with open(self._path, "a") as file:
            file.write(json.dumps({**line, "size": self._hvd.size(), **fields}) + "\n")
