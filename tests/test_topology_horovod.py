"""Levels and codecs on real Horovod, under the real `horovodrun`: few launches, many checks in each."""

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
    "routes_keep_the_laws", "training_composes", "links_that_change", "law_1_without_a_balancer",
    "errors_on_every_rank", "a_script_may_have_the_same_process_sets", "operations_without_a_name",
]  # fmt: skip
HOSTS = {3: "localhost:2,127.0.0.1:1", 4: "localhost:2,127.0.0.1:2"}


def run_checks(ranks, checks, **options):
    launched = horovodrun(ranks, "topology_worker.py", *checks, **options)
    passed = re.findall(r"OK (\w+)", launched.output)
    assert launched.returncode == 0 and passed == checks, launched.output[-6000:]


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_levels_and_codecs_under_gloo(ranks):
    run_checks(ranks, CHECKS, options=("-H", HOSTS[ranks]))


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(
    not (installed_build() or {}).get("mpi") or not shutil.which("mpirun"), reason="Horovod was built without MPI"
)
@pytest.mark.parametrize("ranks", [3, 4])
def test_levels_and_codecs_under_mpi(ranks):
    run_checks(ranks, CHECKS, controller="mpi")


def test_process_sets_that_are_not_enabled_are_an_error_and_not_a_hang():
    run_checks(3, ["process_sets_off"], options=("-H", HOSTS[3]))


def test_a_rank_that_ends_first_does_not_end_the_last_sum_of_another_node():
    launched = horovodrun(3, "end_worker.py")
    assert launched.returncode == 0 and launched.output.count("OK through") == 3, launched.output[-6000:]
