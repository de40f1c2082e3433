"""Merges the optimizer states of all ranks into one, when synchronous steps follow local steps."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.payload import broadcast_bytes, gather_text
from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.statistic import merge_statistics

from .content import SAFE, loaded, saved
from .statistic import statistic_of

Place = tuple[int, str]  # a parameter's number and the name of what is kept for it


def all_finite(kept: Iterable[Any]) -> bool:
    """Whether all floating-point and complex tensors among these values, also those in lists and tuples, are finite."""
    tensors = list(_tensors(kept))
    return not tensors or verbs_of(tensors[0]).all_finite(tensors)


def _tensors(kept: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in kept:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            values = value.coalesce().values() if value.is_sparse else value
            yield torch.view_as_real(values) if values.is_complex() else values


@torch.no_grad()
def average_state(optimizer: torch.optim.Optimizer, *, weight: float, engine: Engine, name: str) -> None:
    """Gives all ranks the same optimizer state. A collective call.

    Tensors, also of complex numbers, become the mean over ranks, weighted by `weight` (this rank's samples), and counts
    of steps the largest. A rank that lacks some, because it never had a sample, gets them. Sparse tensors stay sparse.
    If a parameter's state holds values that have no mean, such as 8-bit codes, all ranks take its whole state from the
    rank with the most samples. A history, such as LBFGS keeps, is of no use on other ranks: it is dropped, with all
    that is kept beside it, and begins anew. Options of groups that differ between ranks, as where an optimizer
    estimates its rate from gradients, become those of the rank with the most samples.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if any(map(_is_history, optimizer.state.get(p, {}).values())):
            del optimizer.state[p]
    _take_options(optimizer, weight=weight, engine=engine, name=f"{name}.options")
    whole = _taken_whole(optimizer, parameters, weight=weight, engine=engine, name=name)
    kept: dict[Place, torch.Tensor] = {}
    for index, p in enumerate(parameters):
        if index in whole:
            continue
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) or key == "step" and type(value) is int:  # some count with integers
                kept[index, key] = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
    mine = [
        [*place, list(value.shape), str(value.dtype), value.device == parameters[place[0]].device]
        for place, value in kept.items()
    ]
    said = [json.loads(line) for line in gather_text(engine, json.dumps(mine), name=f"{name}.places")]
    for index, key, shape, dtype, is_beside in chain(*said):
        if (index, key) not in kept:
            # A count of steps is on the host, unless the optimizer is a fused or capturable one.
            device = parameters[index].device if is_beside else "cpu"
            kind = getattr(torch, dtype.split(".")[1])
            if key != "step" and shape == list(parameters[index].shape):
                # In the parameter's memory format, which fused optimizers depend on.
                new = torch.zeros_like(parameters[index], dtype=kind, requires_grad=False)
            else:
                new = torch.zeros(shape, dtype=kind, device=device)
            kept[index, key] = new
            optimizer.state[parameters[index]][key] = new if new.is_floating_point() or key != "step" else 0
    counts = {place: value for place, value in sorted(kept.items()) if place[1] == "step"}
    means = [value for (_, key), value in sorted(kept.items()) if key != "step" and not _is_whole(value)]
    merge_statistics(
        [statistic_of(value) for value in means], [], [statistic_of(each, torch.int64) for each in counts.values()],
        weight=weight, engine=engine, name=name,
    )  # fmt: skip
    for (index, key), count in counts.items():
        state = optimizer.state[parameters[index]]
        if isinstance(state[key], int):
            state[key] = int(count)


def _taken_whole(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], *, weight: float, engine: Engine, name: str
) -> set[int]:
    """Gives all ranks one rank's state of each parameter whose state cannot be averaged. Returns these parameters'
    numbers.

    They are the parameters with tensors that have no mean, and those with other values that differ between ranks. The
    state is that of the rank with the most samples among those that hold any, as a rank may never have had a gradient
    of a parameter. A state that cannot be saved stays each rank's own."""
    states = [optimizer.state.get(p, {}) for p in parameters]
    others = {i: rest for i, state in enumerate(states) if (rest := _without_mean(state))}
    with_tensors = [i for i, rest in others.items() if any(isinstance(each, torch.Tensor) for each in rest.values())]
    plain = {i: zlib.crc32(repr(sorted(rest.items())).encode()) for i, rest in others.items() if i not in with_tensors}
    try:
        saved({i: dict(states[i]) for i in with_tensors})
    except Exception:  # tried before the collective calls, so that no rank waits for what cannot come
        with_tensors = []
    said = [json.loads(line) for line in gather_text(
        engine, json.dumps([weight, with_tensors, sorted(plain.items())]), name=f"{name}.whole"
    )]  # fmt: skip
    values = [dict(map(tuple, each)) for _, _, each in said]
    differ = {index for each in values for index in each if len({one.get(index) for one in values}) > 1}
    roots: dict[int, int] = {}
    for rank in sorted(range(len(said)), key=lambda rank: (said[rank][0], -rank)):
        roots.update(dict.fromkeys([*said[rank][1], *(differ & set(values[rank]))], rank))
    for root in sorted(set(roots.values())):
        chosen = [index for index in roots if roots[index] == root]
        mine = saved({index: dict(states[index]) for index in chosen}) if engine.rank == root else b""
        content = broadcast_bytes(engine, mine, root=root, name=f"{name}.content.{root}")
        for index, state in loaded(content).items() if engine.rank != root else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    before = states[index].get(key)
                    # Scalars stay on the host, unless this optimizer (fused or capturable) holds its own on a GPU.
                    there = parameters[index].device if value.ndim else value.device
                    state[key] = value.to(before.device if isinstance(before, torch.Tensor) else there)
            optimizer.state[parameters[index]] = state
    return set(roots)


def _take_options(optimizer: torch.optim.Optimizer, *, weight: float, engine: Engine, name: str) -> None:
    """Gives all ranks those options of the optimizer's groups that differ between ranks, from the rank with the most
    samples. Options that cannot be saved, such as functions, stay each rank's own."""
    groups = optimizer.param_groups
    mine = {f"{i} {key}": value for i, group in enumerate(groups) for key, value in group.items() if _is_plain(value)}
    sums = {place: zlib.crc32(repr(_numbers(value)).encode()) for place, value in mine.items()}
    said = [json.loads(line) for line in gather_text(engine, json.dumps([weight, sums]), name=name)]
    root = max(range(len(said)), key=lambda rank: (said[rank][0], -rank))
    differ = [place for place, found in said[root][1].items() if any(each.get(place) != found for _, each in said)]
    if not differ:
        return
    content = saved({place: mine[place] for place in differ}) if engine.rank == root else b""
    content = broadcast_bytes(engine, content, root=root, name=f"{name}.content")
    for place, value in loaded(content).items() if engine.rank != root else ():
        number, key = place.split(" ", 1)
        before = groups[int(number)].get(key)
        if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
            before.copy_(value)  # in place, as a captured CUDA graph reads its memory
        else:
            groups[int(number)][key] = value


def _is_plain(value: Any) -> bool:
    return all(type(each) in SAFE for each in (value if type(value) is tuple else (value,)))


def _numbers(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _without_mean(state: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a parameter's state that are neither averaged over ranks nor, as counts of steps, made the largest.
    Empty if some of them are of a type that is not saved."""
    rest = {key: value for key, value in state.items() if not _has_mean(key, value)}
    return rest if all(isinstance(each, (torch.Tensor, int, float, str, tuple)) for each in rest.values()) else {}


def _has_mean(key: str, value: Any) -> bool:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return not _is_whole(value) or key == "step"
    return value is None or key == "step" and type(value) is int


def _is_whole(value: torch.Tensor) -> bool:
    """Whether these are whole numbers or bools, which have no mean of their type."""
    return not (value.is_floating_point() or value.is_complex())


def _is_history(value: Any) -> bool:
    return isinstance(value, list) and (not value or any(isinstance(each, torch.Tensor) for each in value))
