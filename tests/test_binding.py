"""Initialising Horovod: who chooses its settings."""

import sys
import types

import pytest

from hvd_hetero.engine import binding


class Engine:
    """One of a framework that is there."""

    binding = "a_binding"

    def watch(self):
        pass

    def settle(self):
        return []


@pytest.mark.parametrize(("before", "prepared"), [(False, [0, 1]), (True, [])])
def test_settings_are_chosen_by_whoever_initialises_first_for_good(monkeypatch, before, prepared):
    """A process that initialises again, as ranks change, and one that joins have them alike."""
    state = {"there": before, "round": 0}
    chosen = []
    horovod = types.SimpleNamespace(is_initialized=lambda: state["there"], init=lambda: state.update(there=True))
    monkeypatch.setitem(sys.modules, "a_binding", horovod)
    monkeypatch.setattr(binding, "_class", lambda framework: Engine)
    monkeypatch.setattr(binding, "check_versions", lambda engine, mine: None)
    monkeypatch.setattr(binding, "prepare_wait", lambda: None)
    monkeypatch.setattr(binding, "prepare_init", lambda: chosen.append(state["round"]))
    monkeypatch.setattr(binding, "_prepares", {})
    monkeypatch.setattr(binding, "_again", {})
    for state["round"] in range(2):
        binding.init("torch")
        state["there"] = False  # as after a shutdown
    assert chosen == prepared
