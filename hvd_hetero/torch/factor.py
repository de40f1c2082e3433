"""A factor on learning rates that is there during an update alone, and the optimizer that asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Whose updates are in proportion to their learning rates, weight decay included.
PROPORTIONAL = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop,
)  # fmt: skip
PLACE = "_latency_lr"  # the attribute of the innermost optimizer that holds its `LatencyAwareLR`
BALANCED = "_balanced"  # and of the one that holds the optimizer made last of those that reduce its gradients


def root_of(optimizer: Any) -> Any:
    """The optimizer that a script made, under those that wrap it."""
    while "_wrapped" in vars(optimizer):
        optimizer = optimizer._wrapped
    return optimizer


def attached(optimizer: Any) -> Any:
    """Its `LatencyAwareLR`, or None."""
    return vars(root_of(optimizer)).get(PLACE)


def reduces(optimizer: Any) -> None:
    """Says that this balanced optimizer reduces gradients, from the next step on, and as long as the one that a script
    made lives, whichever of the two the script steps with. Its noise is measured where its `LatencyAwareLR` asks, from
    the first exchange on."""
    vars(root_of(optimizer))[BALANCED] = optimizer
    if (latency_lr := attached(optimizer)) is not None:
        latency_lr.measure()


def balanced(optimizer: Any) -> Any:
    """The optimizer that reduces the gradients of this one, which may be the one within it; None where none does."""
    return vars(root_of(optimizer)).get(BALANCED)


@contextlib.contextmanager
def factor_applied(optimizer: Any) -> Iterator[None]:
    """Within it, the learning rates of a balanced optimizer are multiplied by its `LatencyAwareLR`, if it has one."""
    latency_lr = attached(optimizer)
    if latency_lr is None:
        yield
        return
    if latency_lr.balancer is not optimizer._balancer:
        raise RuntimeError(
            "LatencyAwareLR: expected the balancer that the DistributedOptimizer has. Received: another. Construct "
            "both with the same one."
        )
    if latency_lr.balancer.strategies.lead and not optimizer._reducer.apart:
        raise RuntimeError(
            "LatencyAwareLR: expected all optimizers of a balancer to step apart where one does. Received: a "
            "synchronous step of one with a LatencyAwareLR, whose factor would move with the other's merges, on each "
            "rank at another step. Give both the same strategy, or each a balancer of its own."
        )
    with latency_lr.applied(optimizer):
        yield


def in_proportion(optimizer: Any, base: type[torch.optim.Optimizer]) -> bool:
    """Whether the updates of a balanced optimizer, which `base` makes, are in proportion to learning rates that nobody
    else looks at or writes meanwhile, as hooks of the step do. Not where a script compiles the step: PyTorch 2.4 would
    compile it anew for each rate."""
    ours = attached(optimizer) is not None
    hooks = len(optimizer._optimizer_step_pre_hooks) > ours or optimizer._optimizer_step_post_hooks
    return base in PROPORTIONAL and not hooks and not torch.compiler.is_compiling()


def check_no_factor(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError where there is a `LatencyAwareLR`, which an optimizer without a balancer would not ask."""
    if attached(optimizer) is not None:
        raise ValueError("balancer: expected the one that hvd.LatencyAwareLR was given. Received: None.")


@contextlib.contextmanager
def multiplied(groups: list[dict[str, Any]], factor: float) -> Iterator[None]:
    """Within it, each group's "lr" is multiplied; afterwards it is, bit for bit, what it was."""
    if factor == 1.0:
        yield
        return
    saved = [(group, group["lr"]) for group in groups if "lr" in group]
    applied = [lr if isinstance(lr, torch.Tensor) else lr * factor for _, lr in saved]
    # A tensor is changed in place: a captured graph reads its memory. Groups may share one.
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
