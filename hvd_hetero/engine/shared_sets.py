"""Process sets that this package and the user's script both use: Horovod allows only one for the same ranks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from . import own_threads

_used: set[tuple[int, ...]] = set()  # the global ranks of each process set that an engine of this package uses


def _module() -> Any:
    return importlib.import_module("horovod.common.process_sets")


def _existing(ranks: Sequence[int]) -> int | None:
    """The id of Horovod's process set of these global ranks; None if there is none."""
    for number, members in _module()._basics._get_process_set_ids_and_ranks().items():
        if tuple(members) == tuple(ranks):
            return int(number)
    return None


def _added(process_set: Any) -> Any:
    with own_threads.starting():
        return _module().add_process_set(process_set)


def process_set_of(ranks: Sequence[int]) -> Any:
    """Returns the process set of these global ranks: the existing one, or a new one. A collective call of all ranks.

    Engines use it from here on, so `remove_process_set` does not remove it.

    Raises:
        ValueError: Horovod can make no process sets after its initialisation.
    """
    number, module = _existing(ranks), _module()
    if number is not None:
        found = module.ProcessSet(list(ranks))
        found.process_set_id = number
    else:
        try:
            found = _added(list(ranks))
        except ValueError as error:
            if "shutting down" in str(error):  # a peer is gone, and no setting is wrong
                raise
            raise ValueError(
                f"Expected process sets that can be made after hvd.init(), for ranks {list(ranks)}. Received: {error} "
                'Set HOROVOD_DYNAMIC_PROCESS_SETS=1, or call hvd.init(process_sets="dynamic").'
            ) from error
    _used.add(tuple(ranks))
    return found


def forget() -> None:
    """Forgets which process sets are in use; is called when Horovod is shut down, which removes them all."""
    _used.clear()


def add_process_set(process_set: Any) -> Any:
    """Replaces Horovod's function of this name. If an engine of this package uses a process set of the same ranks, it
    returns that one instead of raising an error. A collective call of all ranks."""
    module = _module()
    if not isinstance(process_set, module.ProcessSet):
        process_set = module.ProcessSet(process_set)
    ranks = tuple(process_set.ranks or ())
    if ranks not in _used:
        return _added(process_set)
    process_set.process_set_id = _existing(ranks)
    return process_set


def remove_process_set(process_set: Any) -> bool:
    """Replaces Horovod's function of this name. A process set that an engine of this package uses is not removed; only
    the object `process_set` becomes invalid. A collective call of all ranks. Returns whether it was removed, or made
    invalid."""
    module = _module()
    if process_set.process_set_id is None or tuple(process_set.ranks or ()) not in _used:
        return bool(module.remove_process_set(process_set))
    process_set._invalidate()
    return True
