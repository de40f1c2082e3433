"""The end of a backward pass, which may be over the gradients of several optimizers."""

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
    """Who reduces gradients, as a backward pass sees it."""

    @property
    def number(self) -> int:
        """Its place in the order in which optimizers are made."""

    def end_pass(self, *, sends: bool) -> None:
        """All gradients of the pass are there. `sends`: they go out, if it was the last one before the exchange."""

    def after_pass(self) -> None:
        """The gradients of all reducers are sent: those of this one may be waited for."""


class BackwardPass:
    """The reducers of one backward pass. All of them send what they have before one waits: a rank without a sample,
    which comes to its exchanges in the order of its `step()`, may wait for any of them, and sends to others later. They
    wait in the order in which they were made, mostly that of `step()`: what ranks tell each other after an exchange,
    of sparse gradients or of parameters that differ, they then come to together."""

    def __init__(self) -> None:
        self._reducers: list[Reducer] = []
        torch.autograd.Variable._execution_engine.queue_callback(self._ends)

    def _ends(self) -> None:
        within = torch._C._current_autograd_node() is not None  # its end is not that of the backward pass around it
        for reducer in self._reducers:
            reducer.end_pass(sends=not within)
        if within:
            raise RuntimeError(REENTRANT.format("some in a backward pass within another"))
        for reducer in sorted(self._reducers, key=lambda reducer: reducer.number):
            reducer.after_pass()

    def add(self, reducer: Reducer) -> None:
        """Says that this pass has gradients of `reducer`."""
        self._reducers.append(reducer)


# By what PyTorch numbers them with. A pass that an exception ends takes its callbacks with it, and so this.
_UNDER_WAY: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()


def backward_pass() -> BackwardPass:
    """The backward pass that the caller, a hook, is called in."""
    number = torch._C._current_graph_task_id()
    found = _UNDER_WAY.get(number)
    if found is None:
        if torch._C._current_autograd_node() is None:  # who calls is a graph made of the backward pass
            raise RuntimeError(COMPILED)  # callbacks are forgotten there, or refused: nothing would be exchanged
        found = _UNDER_WAY[number] = BackwardPass()
    return found
