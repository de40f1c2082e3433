"""Versions are compared when ranks come together: ours have to be the same, others are told."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from hvd_hetero import __version__
from hvd_hetero.engine import version
from hvd_hetero.engine.local import World
from hvd_hetero.engine.port import CollectiveError
from hvd_hetero.engine.version import FUSED, LOWEST, SUMS, check_lowest, check_versions, horovod_for, versions

SAME = {"hvd_hetero": "1.0", "torch": "2.0"}


def test_one_version_everywhere_says_nothing(capsys):
    World(3).run(lambda engine: check_versions(engine, SAME))
    assert capsys.readouterr().err == ""


def test_another_version_of_ours_is_an_error_on_all():
    found = World(3).run(
        lambda engine: check_versions(engine, {**SAME, "hvd_hetero": f"{1 + (engine.rank == 2)}.0"}), errors="return"
    )
    assert all(isinstance(error, RuntimeError) for error in found)
    assert {str(error) for error in found} == {
        "hvd_hetero: expected one version on all ranks. Received: ranks 0, 1: 1.0; rank 2: 2.0. Install the same on "
        "all."
    }


@pytest.mark.parametrize(("what", "first", "second"), [(SUMS, "ring", "hierarchical"), (FUSED, "1048576", "134217728")])
def test_ranks_that_sum_in_unlike_ways_are_an_error_on_all(what, first, second):
    found = World(2).run(
        lambda engine: check_versions(engine, {**SAME, what: (first, second)[engine.rank]}), errors="return"
    )
    assert {str(error) for error in found} == {
        f"{what}: expected one version on all ranks. Received: rank 0: {first}; rank 1: {second}. Build Horovod "
        "alike on all hosts, and set variables alike."
    }
    assert what in versions("torch")


def test_those_that_stay_go_on_without_a_rank_of_another_version_that_joins():
    def joined(engine, newcomers):
        mine = {"hvd_hetero": f"{1 + (engine.rank == 2)}.0"}
        check_versions(engine, mine, stays=engine.rank not in newcomers)

    found = World(3).run(lambda engine: joined(engine, {2}), errors="return")
    assert [type(error) for error in found] == [CollectiveError, CollectiveError, RuntimeError]
    assert len({str(error) for error in found}) == 1
    for newcomers in (set(), {0, 1, 2}):
        found = World(3).run(lambda engine, those=newcomers: joined(engine, those), errors="return")
        assert [type(error) for error in found] == [RuntimeError] * 3, "there is none to go on without"


def test_another_version_of_others_is_told_once(capsys):
    World(3).run(lambda engine: check_versions(engine, {**SAME, "torch": f"2.{engine.rank // 2}"}))
    assert capsys.readouterr().err == "hvd_hetero: torch differs between ranks: ranks 0, 1: 2.0; rank 2: 2.1.\n"


def test_versions_are_those_installed():
    pytest.importorskip("torch")
    found = versions("torch")
    assert found["hvd_hetero"] == __version__ and "+" not in found["torch"] and "not there" not in versions("not there")


def test_what_is_older_than_the_tests_know_is_refused(monkeypatch):
    monkeypatch.setattr(version.metadata, "version", {"torch": "2.3.1+cu121", "keras": "3.15.1"}.__getitem__)
    check_lowest("keras")
    with pytest.raises(ImportError, match=r"Expected torch 2.4 or newer. Received: 2.3.1\+cu121"):
        check_lowest("keras", "torch")


def test_pip_is_told_the_same():
    told = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', (Path(__file__).parents[1] / "setup.py").read_text()))
    assert all(told[name] == ".".join(map(str, lowest)) for name, lowest in LOWEST.items() if name in told)
    assert {"torch", "keras", "tensorflow-cpu"} <= set(told)


def test_without_horovod_an_import_says_how_to_build_it(monkeypatch):
    with pytest.raises(ImportError, match="No module named 'horovod.nothing'.*hvd-hetero build-horovod"):
        horovod_for("nothing")
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    for name in [name for name in sys.modules if name.startswith("hvd_hetero.torch")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="Expected Horovod, built for the torch that is installed.*build-horovod"):
        importlib.import_module("hvd_hetero.torch")


@pytest.mark.parametrize("name", ["tensorflow", "keras"])
def test_tensorflow_and_keras_are_compared_whatever_their_packages_are_called(monkeypatch, name):
    packages = {"tensorflow-cpu": "2.18.0", "keras": "3.10.0", "numpy": "2.0.0", "horovod": "0.28.1"}

    def version_of(package):
        if package not in packages:
            raise version.metadata.PackageNotFoundError(package)
        return packages[package]

    monkeypatch.setattr(version.metadata, "version", version_of)
    monkeypatch.setitem(sys.modules, "keras", sys)
    assert versions("tensorflow")[name] == packages[{"tensorflow": "tensorflow-cpu"}.get(name, name)]
