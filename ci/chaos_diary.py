"""What the jobs that `ci/chaos` disturbs have in common: their size, their pace, and what their processes write."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAMPLES, WHOLE, COMMIT_EVERY = 480, 24, 5
SAMPLE_S = {0: 0.004, 1: 0.008, 2: 0.004}  # by node


def sample_seconds(folder: Path) -> float:
    """What this rank's host computes for a sample, at the pace that a file `pace` asks of it, if there is one."""
    node = os.environ["CHAOS_HOSTS"].split(",").index(os.environ["HOROVOD_HOSTNAME"])
    try:
        slower = json.loads((folder / "pace").read_text())[node]
    except FileNotFoundError:
        slower = 1.0
    return SAMPLE_S[node] * float(slower)


def pause(began_s: float, lasts_s: float) -> None:
    """Waits until what began then has lasted so long: what a slow machine computes meanwhile is a part of it."""
    time.sleep(max(0.0, began_s + lasts_s - time.monotonic()))


def wrong_use(epoch: int, used: Sequence[Sequence[Any]]) -> list[str]:
    """What is wrong with the samples that ranks have used in an epoch, which is to hold each once."""
    counts = Counter(index for at, indices in used if at == epoch for index in indices)
    lost, doubled = SAMPLES - len(counts), sum(count > 1 for count in counts.values())
    return [f"epoch {epoch}: {lost} samples lost, {doubled} doubled"] if lost or doubled else []


class Diary:
    """What happened to this process, as JSON lines; nothing of it waits in memory."""

    def __init__(self, folder: Path, hvd: Any) -> None:
        self._path, self._hvd = folder / f"process-{os.getpid()}.jsonl", hvd

    def __call__(self, kind: str, **fields: Any) -> None:
        host = os.environ.get("HOROVOD_HOSTNAME", "")
        line = {"kind": kind, "t_s": time.time(), "pid": os.getpid(), "host": host, "rank": self._hvd.rank()}
        with open(self._path, "a") as file:
            file.write(json.dumps({**line, "size": self._hvd.size(), **fields}) + "\n")
