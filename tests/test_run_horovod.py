"""Jobs that are started from Python, by `horovod.run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_hetero.engine.build import installed_build
from tests.repair import has_edit, needs

WORKER = Path(__file__).parent / "workers" / "run_worker.py"

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]


def results(*arguments: str) -> list[dict]:
    """What the ranks returned."""
    binaries = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [sys.executable, str(WORKER), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout.partition("RESULTS ")[2].splitlines()[0])


def one_process() -> list[float]:
    """The weights of the job without Horovod."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Linear(6, 1).double()
    x = torch.randn(96, 6, dtype=torch.float64)
    y, optimizer = x.sum(1, keepdim=True), torch.optim.SGD(model.parameters(), lr=0.1)
    for start in 3 * list(range(0, 96, 24)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[start : start + 24]), y[start : start + 24]).backward()
        optimizer.step()
    return [float(w) for p in model.parameters() for w in p.detach().ravel()]


def test_a_function_trains_as_a_script_does_and_its_ranks_sleep_while_nothing_is_to_do(tmp_path: Path) -> None:
    found = results(str(tmp_path))
    assert [(one["rank"], one["size"]) for one in found] == [(0, 2), (1, 2)]
    for one in found:
        assert one["weights"] == pytest.approx(one_process(), abs=1e-12)
        assert one["cycle_ms"] == ("100" if has_edit("event_driven_cycle") else "5")
        assert one["steps_traced"] == 12, "whoever ends a process at once loses nothing"


@needs("run_results")
def test_the_results_of_a_job_that_has_lost_a_rank_are_those_of_the_ranks_at_the_end(tmp_path: Path) -> None:
    found = results(str(tmp_path), "0")
    assert [(one["rank"], one["size"]) for one in found] == [(0, 2), (1, 2)]
    for one in found:
        assert one["weights"] == pytest.approx(one_process(), abs=1e-12)


@needs("termination")
@pytest.mark.parametrize("shell", ["env HERE=1", "exec"])  # bash becomes the command, as with exec
@pytest.mark.parametrize(("given_s", "code"), [("60", 75), ("0.1", 137)])
def test_a_rank_has_as_long_to_end_as_one_says(tmp_path: Path, shell: str, given_s: str, code: int) -> None:
    """From when horovodrun is told to end: it ends its ranks so."""
    (tmp_path / "rank.py").write_text("""if True:
        import signal, sys, time

        def end(*_):
            time.sleep(1.0)
            open("saved", "w").close()
            sys.exit(75)

        signal.signal(signal.SIGTERM, end)
        open("ready", "w").close()
        time.sleep(60.0)
    """)
    ends = f"""if True:
        import os, sys, threading, time
        from horovod.runner.common.util import safe_shell_exec

        told = threading.Event()

        def tell():
            while not os.path.exists("ready"):
                time.sleep(0.01)
            told.set()

        threading.Thread(target=tell).start()
        print("CODE", safe_shell_exec.execute("{shell} {sys.executable} rank.py", events=[told]))
    """
    env = {**os.environ, "HOROVOD_TERMINATION_TIME": given_s}
    done = subprocess.run(
        [sys.executable, "-c", ends], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert f"CODE {code}\n" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "saved").exists() == (code == 75)
