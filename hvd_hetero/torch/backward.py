"""Acts at the end of a backward pass, which may compute the gradients of several optimizers."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from .step import REENTRANT

COMPILED = (
    "Expected backward() of PyTorch's engine, which tells of its end. Received: one in compiled autograd, which does "
    "not. Leave torch._dynamo.config.compiled_autograd False."
)


class Reducer(Protocol):
    """What reduces the gradients of one optimizer, as a backward pass sees it."""

    @property
    def number(self) -> int:
        """The optimizer's place in the order in which optimizers are made."""

    def end_pass(self, *, sends: bool) -> None:
        """Ends the pass, as all its gradients are there. If `sends`, they are sent after the last pass before the
        exchange."""

    def after_pass(self) -> None:
        """Waits for this reducer's gradients, now that those of all reducers of the pass are sent."""


class BackwardPass:
    """The reducers of one backward pass.

    All of them send their gradients before any of them waits: a rank without a sample makes its exchanges in the order
    of its `step()` calls, so it may wait for any one of them before it sends for the others. They wait in the order in
    which they were made, mostly that of `step()`: ranks then reach in the same order the collective calls that follow
    an exchange, as those about sparse gradients or about parameters that differ."""

    def __init__(self) -> None:
        self._reducers: list[Reducer] = []
        torch.autograd.Variable._execution_engine.queue_callback(self._ends)

    def _ends(self) -> None:
        within = torch._C._current_autograd_node() is not None  # nested: the backward pass around it has not ended
        for reducer in self._reducers:
            reducer.end_pass(sends=not within)
        if within:
            raise RuntimeError(REENTRANT.format("some in a backward pass within another"))
        for reducer in sorted(self._reducers, key=lambda reducer: reducer.number):
            reducer.after_pass()

    def add(self, reducer: Reducer) -> None:
        """Adds a reducer of whose parameters this pass computes gradients."""
        self._reducers.append(reducer)


# By PyTorch's number of the pass. PyTorch drops the callbacks of a pass that an exception ends, and so its entry here.
_UNDER_WAY: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()


def backward_pass() -> BackwardPass:
    """The backward pass within which the caller, a hook, runs."""
    number = torch._C._current_graph_task_id()
    found = _UNDER_WAY.get(number)
    if found is None:
        if torch._C._current_autograd_node() is None:  # the caller is a compiled graph of the backward pass
            raise RuntimeError(COMPILED)  # PyTorch drops or refuses callbacks there: nothing would be exchanged
        found = _UNDER_WAY[number] = BackwardPass()
    return found
