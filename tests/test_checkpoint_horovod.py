"""Checkpoints on real ranks: a job stopped by SIGTERM and resumed computes what it would have, bit for bit."""

import re

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


def test_the_example_goes_on_where_it_was_stopped(tmp_path):
    """From a file that only rank 0 has read; shares may differ between the runs, and with them the rounding."""

    def losses(steps, name):
        words = ("--steps", str(steps), "--checkpoint", str(tmp_path / name))
        found = horovodrun(2, "../../examples/torch_char_lm.py", *words, timeout_s=120)
        assert found.returncode == 0, found.output[-6000:]
        told = re.findall(r"step +(\d+) +validation loss (\S+)", found.output)
        return {int(step): float(loss) for step, loss in told}

    whole = losses(40, "whole")
    assert list(losses(20, "parts")) == [20]
    rest = losses(40, "parts")
    assert list(rest) == [40] and rest[40] == pytest.approx(whole[40], abs=2e-3) and whole[40] < whole[20] - 0.1
