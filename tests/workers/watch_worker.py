"""Ranks of which one stays away from step 3. Arguments: torch or keras; `stuck` (in a loop of its own) or `frozen`; a
folder for traces."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time

import numpy as np


def load_slowly() -> None:
    while True:
        time.sleep(0.1)


def main(framework: str, how: str, folder: str) -> None:
    hvd = importlib.import_module(f"hvd_hetero.{framework}")
    binding = importlib.import_module("hvd_hetero.engine.binding")
    hvd.init()
    engine = binding.engine_of("torch" if framework == "torch" else os.environ.get("KERAS_BACKEND", "torch"))
    balancer = hvd.Balancer(16, run=folder)
    for step in range(6):
        if step == 3 and hvd.rank() == 1:
            if how == "stuck":
                load_slowly()
            os.kill(os.getpid(), signal.SIGSTOP)
        engine.allreduce_async(np.ones(4, np.float32), name="gradient").wait()
    assert balancer.trace is not None


if __name__ == "__main__":
    main(*sys.argv[1:])
