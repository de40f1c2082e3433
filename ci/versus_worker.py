"""One rank of `ci/versus`: trains with two versions of the package in turn, and prints what each took as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from typing import Any

from emulation.worker.emulation_hold import hold, release

WORKERS = {"torch": "bench_worker", "keras": "bench_keras_worker"}
STEPS = 5  # that one version makes before it is the other one's turn; one more before them is not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where the version of before lies")
    parser.add_argument("--before", required=True, help="its name; `alone`: no such package, but no exchange")
    parser.add_argument("--framework", choices=list(WORKERS), required=True)
    parser.add_argument("--shares", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    own, others = parser.parse_known_args()

    sys.path.insert(0, own.folder)
    worker: Any = importlib.import_module(WORKERS[own.framework])
    contenders = {}
    # Horovod is initialised once, with the settings of now.
    for name, package in (("now", "hvd_hetero"), ("before", own.before)):
        words = ["hetero", "--fixed", "--package", package]
        if package == "alone":
            words = ["alone", "--rank", os.environ["HOROVOD_RANK"]]
        words += ["--shares", own.shares, *others]
        contenders[name] = worker.Contender(worker.parser().parse_args(words))
        contenders[name].step()
    hold()
    spent: dict[str, dict[str, list[float]]] = {name: {"step_ms": [], "cpu_ms": []} for name in contenders}
    for block in range(-1, own.blocks):
        for name in sorted(contenders, reverse=block % 2 == 0):
            contenders[name].step()
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                contenders[name].step()
            if block >= 0:  # caches and allocators have settled
                spent[name]["step_ms"].append(1e3 * (time.perf_counter() - start) / STEPS)
                spent[name]["cpu_ms"].append(1e3 * (time.process_time() - cpu) / STEPS)
    release()
    print("BENCH " + json.dumps({"rank": contenders["now"].rank, **spent}), flush=True)


if __name__ == "__main__":
    main()
