"""What this package sets for Horovod."""

import os

import pytest

from hvd_hetero.engine import environment
from hvd_hetero.engine.environment import run_folder


@pytest.mark.parametrize(("elastic", "repairs", "cycle_ms"), [
    (False, set(), "5"),
    (False, {"event_driven_cycle"}, "100"),
    (True, {"event_driven_cycle", "fresh_settings"}, "100"),
    # A Horovod that initialises once more writes the default of a setting that is fixed into another one.
    (True, {"event_driven_cycle"}, None),
    (True, set(), None),
])  # fmt: skip
def test_the_cycle_is_long_where_that_harms_nothing(monkeypatch, elastic, repairs, cycle_ms):
    for name in ("HOROVOD_ELASTIC", "HOROVOD_CYCLE_TIME", "HOROVOD_EVENT_DRIVEN_CYCLE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    if elastic:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setattr(environment, "repairs", lambda: frozenset(repairs))
    environment.prepare_init()
    assert os.environ.get("HOROVOD_CYCLE_TIME") == cycle_ms


@pytest.mark.parametrize(("chosen", "repairs", "limit", "fused"), [
    ({}, {"fusion_limit"}, "1048576", 2**20),
    ({}, set(), None, 2**27),
    ({"HOROVOD_FUSION_LIMIT": "5"}, {"fusion_limit"}, "5", 5),
    ({"HOROVOD_FUSION_LIMIT": "5"}, set(), "5", 2**27),  # a Horovod without it does not ask
    ({"HOROVOD_FUSION_LIMIT": "none"}, {"fusion_limit"}, "none", 2**27),
    ({"HOROVOD_FUSION_LIMIT": "5", "HOROVOD_FUSION_THRESHOLD": "3"}, {"fusion_limit"}, "5", 3),
    ({"HOROVOD_FUSION_THRESHOLD": "67108864"}, {"fusion_limit"}, None, 2**26),
    ({"HOROVOD_AUTOTUNE": "1"}, {"fusion_limit"}, None, 2**27),
    ({"HOROVOD_AUTOTUNE": "0"}, {"fusion_limit"}, "1048576", 2**20),
    ({"HOROVOD_AUTOTUNE": "false"}, {"fusion_limit"}, "1048576", 2**20),
])  # fmt: skip
def test_large_tensors_travel_by_themselves_unless_a_user_has_chosen(monkeypatch, chosen, repairs, limit, fused):
    monkeypatch.setattr(environment, "installed_build", lambda: {"edits": [], "gpu": {"cuda": None, "nccl": False}})
    for name in ("HOROVOD_FUSION_LIMIT", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_AUTOTUNE", "HOROVOD_CYCLE_TIME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "repairs", lambda: frozenset(repairs))
    environment.prepare_init()
    assert os.environ.get("HOROVOD_FUSION_LIMIT") == limit and environment.fused_bytes() == fused


def test_what_horovod_run_sets_by_mistake_is_not_taken_for_a_users_choice(monkeypatch):
    """Horovod 0.28.1's `horovod.run` writes tuples of None, which its library reads as 0."""
    monkeypatch.setattr(environment, "repairs", lambda: frozenset({"event_driven_cycle"}))
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    monkeypatch.setenv("HOROVOD_EVENT_DRIVEN_CYCLE", "1")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "(None,)")
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "(None,)")
    environment.prepare_init()
    assert os.environ["HOROVOD_CYCLE_TIME"] == "100" and "HOROVOD_CACHE_CAPACITY" not in os.environ
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3")
    environment.prepare_init()
    assert os.environ["HOROVOD_CYCLE_TIME"] == "3"


def test_nccl_fuses_as_much_as_ever(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_LIMIT", "")
    monkeypatch.delenv("HOROVOD_FUSION_LIMIT")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setattr(environment, "repairs", lambda: frozenset({"fusion_limit"}))
    monkeypatch.setattr(environment, "installed_build", lambda: {"edits": [], "gpu": {"cuda": "13.0", "nccl": True}})
    environment.prepare_init()
    assert "HOROVOD_FUSION_LIMIT" not in os.environ


def test_each_balancer_of_a_process_has_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("HVD_HETERO_RUN", str(tmp_path / "run") + "/")
    found = [run_folder((0, 1), 0) for _ in range(3)]
    assert found == [str(tmp_path / name) for name in ("run", "run-2", "run-3")]
    assert run_folder((0, 1), 1) == str(tmp_path / "run"), "another rank's, as where ranks are threads"
    assert [run_folder((2, 3), rank) for rank in (0, 1)] == [str(tmp_path / "run-of-2_3")] * 2
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert [run_folder((0, 1), 0) for _ in range(2)] == [str(tmp_path / "run")] * 2, "made anew where ranks change"
    monkeypatch.delenv("HVD_HETERO_RUN")
    assert run_folder((0, 1), 0) is None
