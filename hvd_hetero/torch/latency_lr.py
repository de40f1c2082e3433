"""`LatencyAwareLR`: one learning rate for all ranks that follows the effective batch, whatever schedule it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hvd_hetero.optimizers.balancer import Balancer, check_balancer
from hvd_hetero.optimizers.latency_lr import Rule, agreed_latency_lr, rule_for

from .factor import PLACE, attached, balanced, multiplied, root_of

UNSEEN_STEPS = 10  # an error is raised once so many steps in a row were made without the factor


class LatencyAwareLR:
    """Multiplies the learning rate by one factor for all ranks, during each update and only then.

    The factor adapts the learning rate to the effective batch (the number of samples that really enter a step), if that
    is not the one that it was tuned for, and to staleness. It stays 1 while the global batch is `base_batch_size`,
    whatever the shares. What you or a scheduler write to `group["lr"]` is never overwritten, so every
    `torch.optim.lr_scheduler` works on top, made before or after.

        optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
        latency_lr = hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=256, warmup_steps=500)

    Constructing one is a collective call, before or after wrapping in `DistributedOptimizer`; with a second one on the
    same optimizer, the first has no effect any more. Its steps are counted in exchanges between ranks.

    Args:
        optimizer: the one that `hvd.DistributedOptimizer(optimizer, balancer=balancer)` returned, or will wrap.
        balancer: knows how many samples entered a step, and how stale they are.
        rule: how the factor follows S, the effective batch over the base batch. "linear": S. "sqrt": its root.
            "adascale": a gain between 1 and S, from the gradient's noise, which it measures in synchronous steps (at
            least two ranks have to have samples). "auto": "sqrt" for Adam and its kin, "linear" for SGD. Or a function
            from S to the factor, with the same bits on all ranks.
        base_batch_size: the samples of the batch that the learning rate was tuned for (default: the global batch).
        warmup_steps: a factor above 1 starts at 1, and is reached after so many steps.
        ramp_steps: the number of steps in which the factor moves to another value.

    Raises:
        ValueError, TypeError: on every rank, when arguments are wrong on one, or differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        balancer: Balancer,
        *,
        rule: str | Rule = "auto",
        base_batch_size: int | None = None,
        warmup_steps: int = 0,
        ramp_steps: int = 100,
    ) -> None:
        check_balancer(balancer)

        def chosen() -> str | Rule:
            _check(optimizer, balancer)
            return rule_for(optimizer) if rule == "auto" else rule

        self.balancer = balancer
        self._agreed = lambda: agreed_latency_lr(
            balancer, chosen, base_batch_size=base_batch_size, warmup_steps=warmup_steps, ramp_steps=ramp_steps
        )
        self._core = self._agreed()
        self._meter: Any = None  # measures the noise of this optimizer's gradient; None if the rule does not need it
        self._unseen, self._applying = 0, False
        self._root = root_of(optimizer)
        before = attached(optimizer)
        if before is not None:
            before.detach()
        vars(self._root)[PLACE] = self
        self.measure()
        # Wrapping keeps the hooks, so that this one sees the steps of the wrapped optimizer as well.
        self._watching = self._root.register_step_pre_hook(self._watch)
        balancer.dialogue.subscribe(self._advance)
        balancer.stateful_parts.add(self)
        balancer.engine.on_reset_end(self.rebuild)

    def rebuild(self) -> None:
        """Checks that the present ranks agree, and goes on, after an elastic reset. A collective call."""
        self._agreed()
        if attached(self._root) is self:
            self.balancer.dialogue.subscribe(self._advance)

    # What a script asks ---------------------------------------------------------------------------------------------

    @property
    def factor(self) -> float:
        """The factor by which updates multiply the learning rate. It changes with each exchange, so before a step's
        `backward()` it is that of the last step."""
        return self._core.factor

    @property
    def progress(self) -> float:
        """The sum of all factors so far: how many steps at the base batch this job's steps are worth."""
        return self._core.progress

    @property
    def noise_scale(self) -> float | None:
        """The batch, in samples, at which the gradient's noise equals its signal; None while not measured."""
        return self._core.noise.samples

    def due(self) -> int:
        """How many steps a schedule made for the base batch is behind: `for _ in range(lr.due()): scheduler.step()`."""
        return self._core.due()

    def state_dict(self) -> dict[str, Any]:
        """The state of the factor, with its warm-up and ramp, as plain numbers."""
        return self._core.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, which has to be the same on every rank."""
        self._core.load_state_dict(state)

    def detach(self) -> None:
        """Detaches this object from the optimizer, on which it has no effect any more."""
        self._watching.remove()
        self._meter = None
        self.balancer.dialogue.unsubscribe(self._advance)
        if vars(self._root).get(PLACE) is self:
            del vars(self._root)[PLACE]

    # What the exchange and the update ask ---------------------------------------------------------------------------

    def measure(self) -> None:
        """Starts measuring the noise of the gradient, if the rule needs it. Is called before an exchange, on all ranks.
        """
        optimizer = balanced(self._root)
        if self._core.measures_noise and optimizer is not None and optimizer._balancer is self.balancer:
            self._meter = optimizer._reducer.noise
            self._meter.measuring = True

    def _advance(self) -> None:
        self._core.hear(self.balancer, self._meter)

    def _watch(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raises RuntimeError when many steps in a row are made without the factor. Single ones are allowed: Horovod's
        broadcast_optimizer_state makes one."""
        self._unseen = 0 if self._applying else self._unseen + 1
        if self._unseen >= UNSEEN_STEPS:
            raise RuntimeError(
                "LatencyAwareLR: expected steps of hvd.DistributedOptimizer(optimizer, balancer=balancer). Received: "
                f"{self._unseen} steps of {type(optimizer).__name__} without it. Wrap the optimizer, and step that one."
            )

    @contextlib.contextmanager
    def applied(self, optimizer: Any) -> Iterator[None]:
        """A context in which the learning rates are multiplied by the factor."""
        self._applying = True
        try:
            with multiplied(optimizer.param_groups, self._core.factor):
                yield
        finally:
            self._applying = False


def _check(optimizer: Any, balancer: Balancer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer. Received: {optimizer!r}.")
    theirs = vars(optimizer).get("_balancer", balancer)
    if theirs is not balancer or "_handles" in vars(optimizer):
        other = "another" if theirs is not balancer else "none"
        raise ValueError(
            "optimizer: expected one that hvd.DistributedOptimizer(..., balancer=balancer) made with this balancer, or "
            f"will wrap. Received: {type(optimizer).__name__} with {other}."
        )
