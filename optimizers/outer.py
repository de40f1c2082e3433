"""What a merge does to the model: outer optimizers, and what becomes of progress made meanwhile.

Ascending differences everywhere: a rank that went from z to x brings Delta = x - z.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_hetero.codecs.verbs import verbs_of


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How what the ranks have done, taken together, moves the model they share.

        m <- mu m + Delta;    z <- z + eta (Delta + mu m)        (nesterov)
        m <- mu m + Delta;    z <- z + eta m                     (otherwise)

    Plain averaging, the default, is eta = 1 and mu = 0. DiLoCo (Douillard et al. 2023, arXiv:2311.08105) takes
    Nesterov with eta = 0.7 and mu = 0.9.

    Args:
        learning_rate: eta, above 0.
        momentum: mu, in [0, 1).
        nesterov: needs a momentum.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate: expected a number above 0. Received: {self.learning_rate}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: expected a number in [0, 1). Received: {self.momentum}.")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: expected a momentum above 0 with it. Received: momentum 0.")

    def move(self, z: Any, delta: Any, state: dict[str, Any]) -> None:
        """Moves `z`, in place; `state` holds the momentum between calls and starts empty."""
        step = delta
        if self.momentum:
            kept = state.get("momentum")
            momentum = verbs_of(delta).copied(delta) if kept is None else self.momentum * kept + delta
            state["momentum"] = momentum
            step = delta + self.momentum * momentum if self.nesterov else momentum
        z += step if self.learning_rate == 1.0 else self.learning_rate * step

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Returns for a saved state that this optimizer can go on from; else ValueError."""
        if bool(self.momentum) != ("momentum" in state) and state:
            raise ValueError(
                f"outer: expected the state of {self}. Received: one with {', '.join(sorted(state)) or 'nothing'}."
            )


def compensated(progress: Any, moved_by: Any, *, strength: float, lr_sum: float) -> Any:
    """`progress`, as it would have been had it started where the merge ended: an array like it.

    DC-ASGD (Zheng et al. 2017, arXiv:1609.08326) corrects a gradient g that is late by a move w of the model to
    g + lambda g * g * w, elementwise, with g * g for the diagonal of the Hessian. Progress of several steps of SGD is
    -eta k g for their mean gradient g, so

        progress - lambda progress^2 / (eta k) * w

    of which no element may more than double or vanish. The formula holds for plain SGD alone: progress with momentum,
    or of Adam, is no gradient.

    Args:
        moved_by: w, from where the progress was made to where it will count.
        strength: lambda, 0 or more.
        lr_sum: eta k, the sum of the learning rates of the steps; above 0.
    """
    if strength == 0.0 or lr_sum <= 0.0:
        return progress
    most = abs(progress)
    change = (strength / lr_sum) * progress * progress * moved_by
    return progress - change.clip(-most, most)
