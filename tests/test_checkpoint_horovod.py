"""Checkpoints on real ranks: a job stopped by SIGTERM and resumed computes what it would have, bit for bit."""

import json
import re

import pytest
from launch import elastic_hosts, horovodrun

from hvd_hetero.cli.main import main
from hvd_hetero.engine.build import installed_build

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_stopped_at_random_steps_and_resumed(tmp_path, ranks):
    found = horovodrun(ranks, "checkpoint_worker.py", str(tmp_path), "10", timeout_s=120)
    assert found.returncode == 0 and "OK 10" in found.output, found.output[-6000:]


def test_the_example_goes_on_where_it_was_stopped_and_its_trace_tells_of_both_runs(tmp_path, capsys):
    """From a file that only rank 0 has read; shares may differ between the runs, and with them the rounding."""

    def losses(steps, name):
        words = ("--steps", str(steps), "--report-every", "10", "--context", "32", "--checkpoint", str(tmp_path / name))
        found = horovodrun(2, "../../examples/torch_char_lm.py", *words, timeout_s=120,
                           HVD_HETERO_RUN=str(tmp_path / f"{name}.run"))
        assert found.returncode == 0, found.output[-6000:]
        told = re.findall(r"step +(\d+) +validation loss (\S+)", found.output)
        return {int(step): float(loss) for step, loss in told}

    whole = losses(20, "whole")
    assert list(losses(10, "parts")) == [10]
    rest = losses(20, "parts")
    assert list(rest) == [20] and rest[20] == pytest.approx(whole[20], abs=2e-3) and whole[20] < whole[10] - 0.1

    assert main(["report", str(tmp_path / "parts.run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == 20 and report["waiting"]["steps"] == 10 and len(report["ranks"]) == 2
    for rank in report["ranks"]:
        assert rank["host"] and rank["parts"]["compute"] > 0.3 and sum(rank["parts"].values()) < 1.01
    assert main(["plan", str(tmp_path / "parts.run"), "--json"]) == 0
    found = {way["title"]: way for way in json.loads(capsys.readouterr().out)["forecasts"]}
    assert sum(found["best shares"]["shares"]) == 64
    assert found["best shares"]["step_s"] <= 1.001 * found["equal shares"]["step_s"]


def test_the_elastic_example_goes_on_from_its_checkpoint_in_another_job(tmp_path):
    """Begun as an elastic job, and gone on with as a plain one, of more epochs."""
    pytest.importorskip("sklearn")

    def epochs(number, options=()):
        words = ("--epochs", str(number), "--checkpoint", str(tmp_path / "digits"))
        found = horovodrun(2, "../../examples/torch_elastic.py", *words, options=options, timeout_s=120)
        assert found.returncode == 0, found.output[-6000:]
        told = re.findall(r"epoch (\d+), (\d+) batches: accuracy (\S+), 2 ranks", found.output)
        return [(int(epoch), int(batches)) for epoch, batches, _ in told], [float(accuracy) for *_, accuracy in told]

    batches = -(-1438 // 64)  # four fifths of the digits, and a short last batch
    begun, _ = epochs(2, elastic_hosts(tmp_path, 2))
    assert begun == [(0, batches), (1, 2 * batches)]
    # The newest checkpoint is that of batch 40: the job goes on from there, and repeats what came after it.
    rest, accuracy = epochs(5)
    assert rest == [(epoch, (epoch + 1) * batches) for epoch in range(1, 5)]
    assert accuracy[-1] > 0.93

