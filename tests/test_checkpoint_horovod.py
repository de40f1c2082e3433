"""Checkpoints on real ranks: a job stopped by SIGTERM and resumed computes what it would have, bit for bit."""

import pytest
from launch import horovodrun

from hvd_hetero.engine.build import installed_build

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_stopped_at_random_steps_and_resumed(tmp_path, ranks):
    found = horovodrun(ranks, "checkpoint_worker.py", str(tmp_path), "10", timeout_s=120)
    assert found.returncode == 0 and "OK 10" in found.output, found.output[-6000:]
