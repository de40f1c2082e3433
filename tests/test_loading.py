"""Loading processes outlive a SIGTERM to all processes of a job, and end with their rank or their loop."""

import contextlib
import gc
import multiprocessing.popen_fork
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from hvd_hetero.engine.local import SoloEngine

hvd = pytest.importorskip("hvd_hetero.torch", reason="build it with hvd-hetero build-horovod")

TORCH = """
import multiprocessing, os, signal, sys
import torch
import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        return torch.tensor([index, begun])

def begin(worker):  # the script's own
    global begun
    begun = 1

balancer = hvd.Balancer(4, engine=SoloEngine(), adaptive=False)
options = dict(balancer=balancer, num_workers=2, worker_init_fn=begin)
if sys.argv[1] == "training":
    loader = hvd.BalancedDataLoader(Data(), **options)
else:
    loader = hvd.EvaluationDataLoader(Data(), **options)
seen = []
for number, batch in enumerate(loader):
    if number == 2:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGTERM)
    seen += batch.tolist()
assert sorted(seen) == [[index, 1] for index in range(80)]
left = iter(loader)  # its workers are still there when the rank ends
next(left)
print("OK", *(worker.pid for worker in multiprocessing.active_children()), flush=True)
"""

KERAS = """
import os, signal
from concurrent.futures.process import BrokenProcessPool
import numpy as np
from hvd_hetero.keras.loading import processes, take
from hvd_hetero.keras.source import ArraySource

pool = processes(2, ArraySource(np.arange(9.0), None, None))

def first():
    return [pool.submit(take, np.array([index])).result()[0].tolist() for index in range(9)]

assert first() == [[float(index)] for index in range(9)]
workers = list(pool._processes)
for pid in workers:
    os.kill(pid, signal.SIGTERM)
assert first() == [[float(index)] for index in range(9)] and list(pool._processes) == workers
os.kill(workers[0], signal.SIGKILL)
try:
    while True:
        first()
except BrokenProcessPool:
    print("OK", *workers, flush=True)
"""


@pytest.mark.parametrize(("program", "arguments"), [(TORCH, ["training"]), (TORCH, ["evaluation"]), (KERAS, [])])
def test_they_outlive_sigterm_and_end_with_the_rank(program, arguments):
    """The rank ends though one of them is left, or has died; and with it the last of them, who hold its output."""
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0 and ended.stdout.startswith("OK"), ended.stderr[-3000:]
    assert len(ended.stdout.split()) >= 2


STUCK = """
import os, sys, time
import torch
import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        os.write(1, b"reads\\n")  # at once: unbuffered, print writes a line and its end one after another
        time.sleep(3600)

if __name__ == "__main__":
    make = {"training": hvd.BalancedDataLoader, "evaluation": hvd.EvaluationDataLoader}[sys.argv[1]]
    balancer = hvd.Balancer(4, engine=SoloEngine())
    next(iter(make(Data(), balancer=balancer, num_workers=2, multiprocessing_context=sys.argv[2])))
"""


@pytest.mark.parametrize("kind, context, to", [
    ("training", "fork", "all"), ("evaluation", "fork", "rank"), ("training", "forkserver", "all"),
])
def test_those_stuck_in_what_they_read_end_with_a_rank_that_sigterm_ends(kind, context, to, tmp_path):
    program = tmp_path / "stuck.py"
    program.write_text(STUCK)
    rank = subprocess.Popen(
        [sys.executable, program, kind, context], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert rank.stdout.readline() == rank.stdout.readline() == "reads\n"
        (os.killpg if to == "all" else os.kill)(rank.pid, signal.SIGTERM)
        rank.communicate(timeout=60)  # until nobody holds its output
        assert rank.returncode == -signal.SIGTERM
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)


class Numbers(torch.utils.data.Dataset):
    def __init__(self, burns):
        self.burns = burns

    def __len__(self):
        return 80

    def __getitem__(self, index):
        if self.burns and index == 20:
            raise OSError("disk on fire")
        return torch.tensor([index])


class Stream(Numbers, torch.utils.data.IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(80))


@pytest.mark.parametrize("data, make", [
    (Numbers, hvd.BalancedDataLoader), (Stream, hvd.BalancedDataLoader), (Numbers, hvd.EvaluationDataLoader),
])
@pytest.mark.parametrize("burns", ["loader", "loop"])
@pytest.mark.parametrize("persistent", [False, True])
def test_they_end_when_an_exception_ends_the_loop(data, make, burns, persistent, monkeypatch):
    """Although it holds what loads in a cycle, which makes PyTorch end them by a signal, seconds later."""
    before = set(multiprocessing.active_children())
    killed = []  # which takes PyTorch 5 s each
    monkeypatch.setattr(multiprocessing.popen_fork.Popen, "kill", lambda self: killed.append(self.pid))

    def loop():
        options = dict(num_workers=2, persistent_workers=persistent)
        loader = make(data(burns == "loader"), balancer=hvd.Balancer(4, engine=SoloEngine()), **options)
        try:
            for batch in loader:
                if burns == "loop":
                    raise OSError("rank on fire")
                assert len(batch) == 4
        except OSError as error:
            held = error  # in this frame, which it holds
            return str(held)

    assert "on fire" in loop()
    gc.collect()
    assert not killed
    assert set(multiprocessing.active_children()) == before


class Stuck(Numbers):
    def __getitem__(self, index):
        if index >= 4:
            time.sleep(3600)
        return torch.tensor([index])


class StuckStream(Stuck, Stream):
    pass


@pytest.mark.parametrize("data", [Stuck, StuckStream])
def test_one_that_is_stuck_in_what_it_reads_ends_with_the_loop(data, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    before = set(multiprocessing.active_children())
    loader = hvd.BalancedDataLoader(
        data(False), balancer=hvd.Balancer(4, engine=SoloEngine()), num_workers=1, shuffle=False
    )
    for _ in loader:
        break
    left = set(multiprocessing.active_children()) - before
    for process in left:  # PyTorch 2.4 does not wait for those it ends
        process.join(10)
    assert not [process for process in left if process.is_alive()]
