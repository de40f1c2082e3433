"""Elastic jobs under the real `horovodrun`: a rank dies, another joins, and nothing is lost."""

import json
import re

import pytest
from launch import elastic_hosts, horovodrun

from hvd_hetero.engine.build import installed_build
from tests.repair import has_edit

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]


# Horovod tunes something after every few steps; who joins begins with what those that stay began with.
AUTOTUNE = {f"HOROVOD_AUTOTUNE{name}": str(value) for name, value in (
    ("", int(has_edit("fresh_settings"))), ("_WARMUP_SAMPLES", 0), ("_STEPS_PER_SAMPLE", 1),
)}  # fmt: skip


def elastic_job(tmp_path, ranks, kind, *options, **env):
    """What the worker reports of a job on two hosts, of which one comes back soon after it was given up."""
    launched = horovodrun(
        ranks, "elastic_worker.py", str(tmp_path), kind, *options, timeout_s=180, HOROVOD_GLOO_TIMEOUT_SECONDS="10",
        options=elastic_hosts(tmp_path, ranks), **(AUTOTUNE if kind == "TERM" else {}), **env,
    )  # fmt: skip
    result = re.findall(r"RESULT (.*)", launched.output)
    assert launched.returncode == 0 and len(result) == 1, launched.output[-6000:]
    return {**json.loads(result[0]), "output": launched.output}


@pytest.mark.parametrize(("ranks", "kind", "options"), [
    (3, "TERM", ()),
    pytest.param(3, "KILL", (), marks=pytest.mark.slow),
    pytest.param(3, "KILL", ("strategy=local",), marks=pytest.mark.slow),
    pytest.param(3, "TERM", ("strategy=local",), marks=pytest.mark.slow),
    pytest.param(3, "KILL", ("stream=yes",), marks=pytest.mark.slow),
    pytest.param(4, "KILL", ("topology=leader", "stream=yes"), marks=pytest.mark.skipif(
        not (has_edit("peer_death_with_process_sets") and has_edit("spared_hosts")),
        reason="this Horovod ends the survivors of a job with process sets, or those on the host of the dead",
    )),
    pytest.param(2, "KILL", (), marks=[pytest.mark.slow, pytest.mark.skipif(
        not (has_edit("cross_scope") and has_edit("spared_hosts")),
        reason="in this Horovod ranks do not find each other where a host's second rank has become rank 0",
    )]),
])
def test_a_rank_goes_and_another_joins(tmp_path, ranks, kind, options):
    found = elastic_job(tmp_path, ranks, kind, *options)
    assert found["sizes"] == {2: [2, 3], 3: [3, 2, 3], 4: [4, 3]}[ranks], "of 2 + 2 ranks, 2 + 1 go on"
    assert found["once"] == [True, True, True], "each sample of an epoch once in the committed history"
    assert ("Going back" in found["output"]) == (kind == "KILL"), "who leaves in order takes no step with it"
    assert found["alike"] and found["batches"] == 39, "law 5"
    if "strategy=local" not in options:  # whose learning rate follows staleness
        assert found["off"] < 1e-9, "the same as one process on the same global batches"
        assert found["factor"] == 1.0
