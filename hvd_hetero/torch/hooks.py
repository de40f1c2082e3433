"""Hooks on parameters, by which a reducer is called with their gradients as backward() computes them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .layout import check_type

# The owner of each parameter's hooks: the optimizer made last, which alone reduces the parameter's gradient.
_REDUCED_BY: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Owner(Protocol):
    """The owner of hooks: what reduces the parameters' gradients."""

    def replace(self, by: Any = None) -> None:
        """Gives way to `by`, another owner of the same parameters; None: to something that is no owner of hooks."""


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Makes the owners of these parameters' hooks give way, as something else reduces their gradients from now on."""
    for parameter in parameters:
        if (owner := _REDUCED_BY.pop(parameter, lambda: None)()) is not None:
            owner.replace()


class Hooks:
    """The hooks on the parameters of one owner. A parameter is hooked by the owner that was made last for it.

    Args:
        after: a method, called with a parameter after a gradient was added to its `p.grad`.
        before: a method, called with the gradient before it is added, from the call of `look_before` on.
    """

    def __init__(
        self, owner: Owner, *, after: Callable[[torch.Tensor], None], before: Callable[[Any], None]
    ) -> None:
        self._owner, self._after, self._before = weakref.ref(owner), _while_it_lives(after), _while_it_lives(before)
        self._known: dict[int, torch.nn.Parameter] = {}  # by id
        self.looks_before = False
        self._handles: list[Any] = []
        self._before_handles: list[Any] = []
        self._nodes: list[Any] = []  # autograd's nodes that add to `p.grad`

    def new_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Those of `parameters` that are not hooked yet.

        Raises:
            TypeError: for a parameter of a type that cannot be reduced.
        """
        new = [p for p in parameters if id(p) not in self._known]
        for parameter in new:
            check_type(parameter)
        return new

    def add(self, new: Sequence[torch.nn.Parameter]) -> None:
        """Hooks the parameters that `new_of` returned, also those that are frozen for now."""
        self._known |= {id(parameter): parameter for parameter in new}
        for parameter in new:
            before = _REDUCED_BY.get(parameter, lambda: None)()
            if before is not None:
                before.replace(self._owner())
            _REDUCED_BY[parameter] = self._owner
            with _thawed(parameter):
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._after))
        if self.looks_before:
            self._hook_before(new)

    def look_before(self) -> None:
        """Lets `before` be called from now on."""
        if not self.looks_before:
            self.looks_before = True
            self._hook_before(self._known.values())

    def _hook_before(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            with _thawed(parameter), torch.enable_grad():
                node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._nodes.append(node)  # kept alive, as its hook would die with it
            self._before_handles.append(node.register_prehook(self._before))

    def hook_anew(self) -> None:
        """Renews the hooks that call `before`: parameters that have moved or changed their type, as after
        `model.to(device)`, have new autograd nodes."""
        for handle in self._before_handles:
            handle.remove()
        self._before_handles, self._nodes = [], []
        if self.looks_before:
            self._hook_before(self._known.values())

    def thawed(self, groups: Sequence[Mapping[str, Any]]) -> int:
        """How many parameters of these groups require a gradient and are not hooked."""
        return sum(p.requires_grad and id(p) not in self._known for group in groups for p in group["params"])

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in (*self._handles, *self._before_handles):
            handle.remove()


def _while_it_lives(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """A function that calls `method` as long as its object lives. A parameter holds its hooks out of sight of Python's
    garbage collector, so all that a hook refers to, the model included, would live as long as the process."""
    found = weakref.WeakMethod(method)

    @torch.compiler.disable  # it runs within backward(), which may be within what a script compiles
    def call(gradient: Any) -> None:
        if (live := found()) is not None:
            live(gradient)

    return call  # type: ignore[no-any-return]


@contextlib.contextmanager
def _thawed(parameter: torch.nn.Parameter) -> Iterator[None]:
    """A context in which the parameter requires a gradient, without which PyTorch accepts no hook on it."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(not frozen)
