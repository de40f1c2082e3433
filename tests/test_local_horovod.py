"""Local SGD on real Horovod, under the real `horovodrun`: few launches, many checks in each."""

import re
import shutil

import pytest
from launch import horovodrun

from hvd_hetero.engine.build import installed_build

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]

CHECKS = [
    "law_1", "ranks_meet_elsewhere", "composes", "a_stopped_rank", "a_rank_that_misses_merges", "a_rank_that_fails",
    "going_back_ends_what_is_under_way", "parameters_that_differ",
]


def run_checks(ranks, checks, **options):
    launched = horovodrun(ranks, "local_worker.py", *checks, **options)
    passed = re.findall(r"OK (\w+)", launched.output)
    assert launched.returncode == 0 and passed == checks, launched.output[-6000:]


def test_local_sgd_under_gloo():
    run_checks(3, CHECKS, options=("-H", "localhost:2,127.0.0.1:1"))


def test_a_rank_that_is_stopped_for_twenty_seconds():
    run_checks(3, ["a_rank_stopped_for_long"])


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(
    not (installed_build() or {}).get("mpi") or not shutil.which("mpirun"), reason="Horovod was built without MPI"
)
def test_local_sgd_under_mpi():
    run_checks(2, [check for check in CHECKS if check != "composes"], controller="mpi")
