"""Keras jobs whose ranks come and go, and that are stopped and resumed, under the real `horovodrun`."""

import json
import re

import pytest
from launch import elastic_hosts, horovodrun
from test_keras_horovod import BACKENDS, QUIET, marked

from hvd_hetero.engine.build import installed_build

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]


def result_of(launched):
    result = re.findall(r"RESULT (.*)", launched.output)
    assert launched.returncode == 0 and len(result) == 1, launched.output[-6000:]
    return json.loads(result[0])


@pytest.mark.parametrize("kind", ["KILL", pytest.param("TERM", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", [marked(backend) for backend in BACKENDS])
def test_fit_goes_on_when_a_rank_goes_and_another_joins(tmp_path, backend, kind):
    launched = horovodrun(
        3, "keras_elastic_worker.py", "elastic", str(tmp_path), kind, timeout_s=180, options=elastic_hosts(tmp_path),
        HOROVOD_GLOO_TIMEOUT_SECONDS="10", KERAS_BACKEND=backend, **QUIET,
    )  # fmt: skip
    found = result_of(launched)
    assert found["sizes"] == [3, 2, 3]
    assert found["alike"] and found["batches"] == 39 and found["epochs"] == 3
    assert found["counted"] == 39, "learning rates go on from what was committed"
    assert found["off"] < 1e-9, "the same as one process on the same global batches: each sample of an epoch once"


@pytest.mark.slow
@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="TensorFlow's tapes")
def test_a_traced_step_goes_on_when_a_rank_goes_and_another_joins(tmp_path):
    """With one tape weighted by a balancer, and another that is not."""
    launched = horovodrun(
        3, "keras_elastic_worker.py", "loop", str(tmp_path), "KILL", timeout_s=180, options=elastic_hosts(tmp_path),
        HOROVOD_GLOO_TIMEOUT_SECONDS="10", KERAS_BACKEND="tensorflow", **QUIET,
    )  # fmt: skip
    found = result_of(launched)
    assert found["sizes"] == [3, 2, 3] and found["traced"][-2:] == [2, 3]
    assert found["alike"] and found["batches"] == 39
    assert found["off"] < 1e-9, "the same as one process on the same global batches: each sample of an epoch once"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_stopped_and_resumed_is_the_same_bit_for_bit(tmp_path, backend):
    launched = horovodrun(
        2, "keras_elastic_worker.py", "resume", str(tmp_path), timeout_s=180, KERAS_BACKEND=backend, **QUIET
    )
    assert result_of(launched)["off"] == [0.0] * 4


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", [marked(backend) for backend in BACKENDS])
def test_what_is_kept_between_two_updates_goes_on_bit_for_bit(tmp_path, backend, which):
    """Gradients that are added up, random numbers that were given no seed, and what a tape's codec has not sent. And so
    do averages of the weights, which take their place at the end alone, and a rate that follows the batch."""
    launched = horovodrun(
        2, "keras_elastic_worker.py", "between", str(tmp_path), which, timeout_s=180, KERAS_BACKEND=backend, **QUIET
    )
    found = result_of(launched)
    taped = found.pop("taped")
    stopped, gone_back, past = {"some": (1, 1, 1), "all": (3, 2, 2)}[which]
    assert found == {"stopped": [0.0] * stopped, "gone back": [0.0] * gone_back, "past an update": [0.0] * past}
    if backend == "tensorflow":
        assert taped.pop("resumed") == 0.0
        assert taped == pytest.approx({"gone back": 0.0, "both": 0.0}, abs=1e-12), "sent with what comes next"
