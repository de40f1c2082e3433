"""Process sets that this package and a script both use: Horovod has one at most of the same ranks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

_used: set[tuple[int, ...]] = set()  # ranks of those that engines are on


def _module() -> Any:
    return importlib.import_module("horovod.common.process_sets")


def _existing(ranks: Sequence[int]) -> int | None:
    """The number of the process set of these global ranks, if there is one."""
    for number, members in _module()._basics._get_process_set_ids_and_ranks().items():
        if tuple(members) == tuple(ranks):
            return int(number)
    return None


def process_set_of(ranks: Sequence[int]) -> Any:
    """The process set of these global ranks: the one that there is, or a new one. It stays. All ranks call it."""
    number, module = _existing(ranks), _module()
    if number is not None:
        found = module.ProcessSet(list(ranks))
        found.process_set_id = number
    else:
        try:
            found = module.add_process_set(list(ranks))
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
    """The ranks have become others, and nothing is used any more."""
    _used.clear()


def add_process_set(process_set: Any) -> Any:
    """Horovod's; where a topology has made a process set of the same ranks, that one. All ranks call it."""
    module = _module()
    if not isinstance(process_set, module.ProcessSet):
        process_set = module.ProcessSet(process_set)
    ranks = tuple(process_set.ranks or ())
    if ranks not in _used:
        return module.add_process_set(process_set)
    process_set.process_set_id = _existing(ranks)
    return process_set


def remove_process_set(process_set: Any) -> bool:
    """Horovod's; one that a topology uses stays, and only `process_set` is no longer valid. All ranks call it."""
    module = _module()
    if process_set.process_set_id is None or tuple(process_set.ranks or ()) not in _used:
        return bool(module.remove_process_set(process_set))
    process_set._invalidate()
    return True
