"""The methods of a distributed optimizer that differ from those of its base class."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_hetero.engine import script

from .factor import factor_applied, in_proportion, multiplied, reduces
from .plain import load_in_place


class Distributed(torch.optim.Optimizer):
    """What type checkers know of a distributed optimizer: the methods that the optimizer it was made of lacks.

    The optimizer is no instance of this class: its class is made of `methods_of`, or is Horovod's.
    """

    def synchronize(self) -> None:
        """Returns when the gradients are reduced."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step()` does not wait for gradients, after `synchronize()`."""
        yield

    def merge(self, model: torch.nn.Module | None = None) -> None:
        """With a local strategy, returns when all ranks hold one model. Not a method of Horovod's own optimizer."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes of an update."""


def methods_of(base: type[torch.optim.Optimizer]) -> dict[str, Callable[..., Any]]:
    """The methods, by name, of a class of distributed optimizers that is derived from `base`."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        self._wrapped._opt_called = True  # a scheduler made before wrapping looks here whether a step was made
        reducer = self._reducer
        reducer.check_in_use(self.param_groups)
        if closure is None and self._should_synchronize:
            self.synchronize()
        lr = part = 1.0
        evaluate = reducer.evaluated
        if is_local := reducer.is_local:
            if _is_to_be_skipped(self):
                return None
            part = reducer.local.before_step(by_rate=in_proportion(self, base))
            evaluate = reducer.passed
        called = () if closure is None else (lambda: evaluate(closure),)
        with factor_applied(self):
            if is_local:
                lr = _rate(self)
            with multiplied(self.param_groups, part):
                result = base.step(self, *called)
        reducer.finished(lr=lr)
        return result

    # Keeps PyTorch from wrapping this step to run step hooks: base.step is wrapped already, and they would run twice.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self: Any) -> None:
        """Returns when the gradients are reduced. They are after backward() already, except on a rank without samples.
        """
        self._reducer.flush()

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients. After a backward pass that an exception ended this is a collective call, as part of its
        gradients may have been sent to the other ranks."""
        self._reducer.forget()
        base.zero_grad(self, *args, **kwargs)

    def merge(self: Any, model: torch.nn.Module | None = None) -> None:
        """Returns when all ranks hold one model, in which every step of every rank counts once. A collective call.

        With `model`, its buffers (running statistics of BatchNorm) become those of all ranks' samples as well.
        """
        with torch.inference_mode(False):  # later steps write to the tensors that it makes
            self._reducer.merge(model)

    @contextlib.contextmanager
    def skip_synchronize(self: Any) -> Iterator[None]:
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load_in_place(self, lambda: base.load_state_dict(self, state_dict))
        # Shares them again also if the script has loaded a state into the wrapped one, which then made new dicts.
        vars(self._wrapped).update({name: vars(self)[name] for name in ("state", "param_groups") if name in vars(self)})
        self._reducer.follow(self)

    def rebuild(self: Any) -> None:
        """Makes a new reducer for the present ranks, after an elastic reset. A collective call.

        Also if another optimizer has replaced this one, as a rank that joins makes both, one after the other. That one,
        if it is made anew as well, replaces this one again.
        """
        before = self._reducer
        before.close()
        # With parameters that are frozen for now as well, as one model of a GAN is while the other is trained.
        self._reducer = self._reducer_of(before.parameters, before.passes, at=before.at)
        if before.released:
            self._reducer.replace()
            return
        # These gradients are of passes that no longer count: of a step broken off, or in which a commit was made.
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad = None
        self._reducer.follow(self)
        reduces(self)

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        self._reducer.passes = passes

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        if "_reducer" in self.__dict__ and self._reducer.local is not None:
            raise ValueError(
                "add_param_group: expected all parameters when the optimizer was made, with a local strategy. "
                "Received: new ones. Make a new DistributedOptimizer after optimizer.merge()."
            )
        base.add_param_group(self, param_group)
        if "_reducer" in self.__dict__:
            try:
                self._reducer.add([p for p in self.param_groups[-1]["params"] if p.requires_grad])
            except Exception:
                self.param_groups.pop()  # nobody would reduce its gradients
                raise

    def __reduce__(self: Any) -> Any:
        return (_unwrapped, (base, dict(self.__getstate__())))

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        script.warn(
            "Expected a DistributedOptimizer to stay the only one of its kind. Received: a copy of it, which is the "
            f"plain {base.__name__} and reduces nothing. Make a DistributedOptimizer of the copy to train with it.",
            RuntimeWarning,
        )
        make, (kind, state) = self.__reduce__()
        return make(kind, copy.deepcopy(state, memo))

    return {
        "step": step,
        "synchronize": synchronize,
        "zero_grad": zero_grad,
        "merge": merge,
        "_rebuild": rebuild,
        "skip_synchronize": skip_synchronize,
        "load_state_dict": load_state_dict,
        "set_backward_passes_per_step": set_backward_passes_per_step,
        "add_param_group": add_param_group,
        "__reduce__": __reduce__,
        "__deepcopy__": __deepcopy__,
    }


def _is_to_be_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a `GradScaler` that calls `step()` has found values that are not finite: it calls that of a fused
    optimizer all the same, which then changes nothing, and leaves out that of others."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _rate(optimizer: torch.optim.Optimizer) -> float:
    """The largest learning rate of the groups, as that of layers frozen for now may be 0; 1 if no group has one."""
    return max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=1.0)


def _unwrapped(base: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    """Makes the plain optimizer of class `base` that a pickled or copied balanced optimizer becomes."""
    optimizer: Any = object.__new__(base)
    optimizer.__setstate__(state)
    return optimizer  # type: ignore[no-any-return]
