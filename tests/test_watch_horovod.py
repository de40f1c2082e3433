"""The watchdog on real ranks: a job of which one rank stays away says which, where it is, and ends by itself."""

import json
import re

import pytest
from launch import horovodrun

from hvd_hetero.engine.build import installed_build

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]


@pytest.mark.parametrize(("face", "controller"), [
    ("torch", "gloo"),
    pytest.param("torch", "mpi", marks=pytest.mark.slow),
    pytest.param("keras", "gloo", marks=pytest.mark.slow),
])
def test_a_rank_that_stays_away_is_named_and_ended(tmp_path, face, controller):
    found = horovodrun(
        3, "watch_worker.py", face, "stuck", str(tmp_path), controller=controller, timeout_s=60,
        KERAS_BACKEND="tensorflow",
        options=("--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", "4"),
    )  # fmt: skip
    assert found.returncode != 0
    for rank in (0, 2):
        assert re.search(rf'rank {rank} \(host \S+, process \d+\) has waited \d+ s for the others in "gradient", at '
                         r"watch_worker.py:\d+ in main", found.output), found.output[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "rank-00000.jsonl").read_text().splitlines()]
    waits = [line["fields"] for line in lines if isinstance(line, dict) and line.get("event") == "wait"]
    assert waits and all(wait["operation"] == "gradient" and wait["missing"] == [1] for wait in waits), lines
    assert re.search(r"rank 1 .* has not come: it is at watch_worker.py:\d+ in load_slowly", found.output)
    assert re.search(r"rank 1 .* ends with an error: .* has waited 4 s for this rank", found.output)


@pytest.mark.slow
@pytest.mark.parametrize(("face", "timeout_s"), [("torch", 4), ("keras", 4), ("torch", 30)])  # 30: Gloo's default
def test_a_rank_that_is_frozen_is_named(tmp_path, face, timeout_s):
    found = horovodrun(
        3, "watch_worker.py", face, "frozen", str(tmp_path), timeout_s=60 + timeout_s, KERAS_BACKEND="tensorflow",
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(timeout_s),
    )  # fmt: skip
    assert found.returncode != 0
    assert re.search(r'HorovodInternalError: "gradient" failed: rank 1 \(host \S+, process \d+\) does not answer: its '
                     "process is stopped", found.output), found.output[-4000:]
