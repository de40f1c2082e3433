"""Whose gradients a reducer sees, and how it comes to see them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .layout import check_type

# Who reduces a parameter's gradient: the optimizer made last, as its step() would otherwise see what another one did.
_REDUCED_BY: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Owner(Protocol):
    """Whose hooks these are."""

    def replace(self, by: Any = None) -> None:
        """Gives way to another owner of the same parameters; None: to somebody else."""


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Somebody else sees to the gradients of these parameters."""
    for parameter in parameters:
        if (owner := _REDUCED_BY.pop(parameter, lambda: None)()) is not None:
            owner.replace()


class Hooks:
    """The hooks on the parameters of one owner; of a parameter with several, the last one has them.

    Args:
        after: a method, called with a parameter once a gradient was added to its `p.grad`.
        before: a method, called with the gradient before it is added, once `look_before` was.
    """

    def __init__(
        self, owner: Owner, *, after: Callable[[torch.Tensor], None], before: Callable[[Any], None]
    ) -> None:
        self._owner, self._after, self._before = weakref.ref(owner), _while_it_lives(after), _while_it_lives(before)
        self._known: dict[int, torch.nn.Parameter] = {}  # by id
        self.looks_before = False
        self._handles: list[Any] = []
        self._before_handles: list[Any] = []
        self._nodes: list[Any] = []  # that add to `p.grad`

    def new_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Those that are not known.

        Raises:
            TypeError: for a parameter of a type that cannot be reduced.
        """
        new = [p for p in parameters if id(p) not in self._known]
        for parameter in new:
            check_type(parameter)
        return new

    def add(self, new: Sequence[torch.nn.Parameter]) -> None:
        """Takes what `new_of` returned; also what is frozen for now."""
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
        """Calls `before` from now on."""
        if not self.looks_before:
            self.looks_before = True
            self._hook_before(self._known.values())

    def _hook_before(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            with _thawed(parameter), torch.enable_grad():
                node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._nodes.append(node)  # kept, or its hook would go with it
            self._before_handles.append(node.register_prehook(self._before))

    def hook_anew(self) -> None:
        """Parameters are elsewhere, or of another type, and have other nodes since, as after `model.to(device)`."""
        for handle in self._before_handles:
            handle.remove()
        self._before_handles, self._nodes = [], []
        if self.looks_before:
            self._hook_before(self._known.values())

    def thawed(self, groups: Sequence[Mapping[str, Any]]) -> int:
        """How many of these parameter groups require a gradient and are not known."""
        return sum(p.requires_grad and id(p) not in self._known for group in groups for p in group["params"])

    def remove(self) -> None:
        """Sees no gradient any more."""
        for handle in (*self._handles, *self._before_handles):
            handle.remove()


def _while_it_lives(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Calls a method as long as its object lives. A hook is held by its parameter, out of sight of Python's garbage
    collector: what it holds itself, and what that holds, would live for as long as the process, the model included."""
    found = weakref.WeakMethod(method)

    @torch.compiler.disable  # it runs within backward(), which may be within what a script compiles
    def call(gradient: Any) -> None:
        if (live := found()) is not None:
            live(gradient)

    return call  # type: ignore[no-any-return]


@contextlib.contextmanager
def _thawed(parameter: torch.nn.Parameter) -> Iterator[None]:
    """Requires a gradient, or PyTorch hooks nothing into it."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(not frozen)
