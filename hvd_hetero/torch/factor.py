"""Multiplies an optimizer's learning rates by the factor of its `LatencyAwareLR`, during an update alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Optimizers whose updates are in proportion to their learning rates, weight decay included.
PROPORTIONAL = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop,
)  # fmt: skip
PLACE = "_latency_lr"  # the attribute of the innermost optimizer that holds its `LatencyAwareLR`
BALANCED = "_balanced"  # the attribute of it that holds the balanced optimizer made last around it


def root_of(optimizer: Any) -> Any:
    """The innermost optimizer: the one that the script made, without those that wrap it."""
    while "_wrapped" in vars(optimizer):
        optimizer = optimizer._wrapped
    return optimizer


def attached(optimizer: Any) -> Any:
    """The `LatencyAwareLR` of an optimizer, or None."""
    return vars(root_of(optimizer)).get(PLACE)


def reduces(optimizer: Any) -> None:
    """Registers a balanced optimizer with the optimizer that it wraps, as the one that reduces its gradients from the
    next step on. That holds as long as the wrapped one lives, whichever of the two the script calls. If there is a
    `LatencyAwareLR` that needs it, the gradient's noise is measured from the first exchange on."""
    vars(root_of(optimizer))[BALANCED] = optimizer
    if (latency_lr := attached(optimizer)) is not None:
        latency_lr.measure()


def balanced(optimizer: Any) -> Any:
    """The balanced optimizer that reduces the gradients of `optimizer`, itself or a wrapper of it; None without one."""
    return vars(root_of(optimizer)).get(BALANCED)


@contextlib.contextmanager
def factor_applied(optimizer: Any) -> Iterator[None]:
    """A context in which a balanced optimizer's learning rates are multiplied by its `LatencyAwareLR`, if it has one.
    """
    latency_lr = attached(optimizer)
    if latency_lr is None:
        yield
        return
    if latency_lr.balancer is not optimizer._balancer:
        raise RuntimeError(
            "LatencyAwareLR: expected the balancer that the DistributedOptimizer has. Received: another. Construct "
            "both with the same one."
        )
    if latency_lr.balancer.strategies.lead and not optimizer._reducer.is_local:
        raise RuntimeError(
            "LatencyAwareLR: expected all optimizers of a balancer to make local steps where one does. Received: a "
            "synchronous step of one with a LatencyAwareLR, whose factor would move with the other's merges, on each "
            "rank at another step. Give both the same strategy, or each a balancer of its own."
        )
    with latency_lr.applied(optimizer):
        yield


def in_proportion(optimizer: Any, base: type[torch.optim.Optimizer]) -> bool:
    """Whether the updates of a balanced optimizer of class `base` are in proportion to its learning rates, and nothing
    else, such as a hook of the step, may read or write the rates meanwhile. False if a script compiles the step:
    PyTorch 2.4 would compile it anew for each rate."""
    if base not in PROPORTIONAL or torch.compiler.is_compiling():
        return False  # looks at no hooks: an optimizer that holds another one may lack PyTorch's attributes for them
    ours = attached(optimizer) is not None
    return not (len(optimizer._optimizer_step_pre_hooks) > ours or optimizer._optimizer_step_post_hooks)


def check_no_factor(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if there is a `LatencyAwareLR`: an optimizer without a balancer would not apply its factor."""
    if attached(optimizer) is not None:
        raise ValueError("balancer: expected the one that hvd.LatencyAwareLR was given. Received: None.")


@contextlib.contextmanager
def multiplied(groups: list[dict[str, Any]], factor: float) -> Iterator[None]:
    """A context in which each group's "lr" is multiplied by `factor`; afterwards it is, bit for bit, what it was."""
    if factor == 1.0:
        yield
        return
    saved = [(group, group["lr"]) for group in groups if "lr" in group]
    applied = [lr if isinstance(lr, torch.Tensor) else lr * factor for _, lr in saved]
    # A rate that is a tensor is changed in place: a captured CUDA graph reads its memory. Groups may share a tensor.
    tensors = {id(lr): (lr, lr.clone()) for _, lr in saved if isinstance(lr, torch.Tensor)}
    try:
        for (group, _), lr in zip(saved, applied, strict=True):
            group["lr"] = lr
        for lr, _ in tensors.values():
            lr.detach().mul_(factor)
        yield
        if any(group["lr"] is not lr for (group, _), lr in zip(saved, applied, strict=True)):
            raise RuntimeError(
                "LatencyAwareLR: expected learning rates to be written before optimizer.step() or after it. Received: "
                "one written within it, as by a hook of the step, where they are multiplied."
            )
    finally:
        for group, lr in saved:
            group["lr"] = lr
        for lr, value in tensors.values():
            lr.detach().copy_(value)
