"""How a merge of local SGD moves the model: outer optimizers, and a correction for steps that were made meanwhile.

A rank that went from the model z to its own parameters x contributes the progress Delta = x - z: it points the way that
the model goes, unlike a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from hvd_hetero.codecs.verbs import verbs_of


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The outer optimizer: how the merged progress Delta of the ranks moves the model z that they share.

        m <- mu m + Delta;    z <- z + eta (Delta + mu m)        (nesterov)
        m <- mu m + Delta;    z <- z + eta m                     (otherwise)

    Plain averaging, the default, is eta = 1 and mu = 0. DiLoCo (Douillard et al. 2023, arXiv:2311.08105) takes
    Nesterov with eta = 0.7 and mu = 0.9.

    Args:
        learning_rate: eta, above 0.
        momentum: mu, in [0, 1).
        nesterov: whether to use Nesterov's form; it needs a momentum.

    Raises:
        ValueError: a number out of its range or no number, or Nesterov without a momentum.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.learning_rate, Real) and 0 < self.learning_rate < float("inf")):
            raise ValueError(f"learning_rate: expected a number above 0. Received: {self.learning_rate!r}.")
        if not (isinstance(self.momentum, Real) and 0 <= self.momentum < 1):
            raise ValueError(f"momentum: expected a number in [0, 1). Received: {self.momentum!r}.")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: expected a momentum above 0 with it. Received: momentum 0.")

    def move(self, z: Any, delta: Any, state: dict[str, Any]) -> None:
        """Moves the model `z`, in place, by the merged progress `delta`. `state` keeps the momentum m between calls; it
        is empty at first."""
        step = delta
        if self.momentum:
            kept = state.get("momentum")
            momentum = verbs_of(delta).copied(delta) if kept is None else self.momentum * kept + delta
            state["momentum"] = momentum
            step = delta + self.momentum * momentum if self.nesterov else momentum
        z += step if self.learning_rate == 1.0 else self.learning_rate * step

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether this optimizer can go on from the saved `state`: both have a momentum, or neither has. An empty state
        fits any."""
        return not state or bool(self.momentum) == ("momentum" in state)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if this optimizer cannot go on from the saved `state`: see `fits`."""
        if not self.fits(state):
            raise ValueError(
                f"outer: expected the state of {self}. Received: one with {', '.join(sorted(state)) or 'nothing'}."
            )


def compensated(progress: Any, moved_by: Any, *, strength: float, lr_sum: float) -> Any:
    """Estimates what `progress` would be had its steps started from the model after the merge: delay compensation.

    DC-ASGD (Zheng et al. 2017, arXiv:1609.08326) corrects a gradient g that is late, as the model has moved by w
    meanwhile, to g + lambda g * g * w, elementwise, with g * g for the diagonal of the Hessian. The progress of k steps
    of SGD is -eta k g for their mean gradient g, so the corrected progress is

        progress - lambda progress^2 / (eta k) * w

    The correction of an element is clipped to the element's size, so that none more than doubles or changes its sign.
    The formula holds for plain SGD alone: progress with momentum, or of Adam, is not in proportion to a gradient.

    Args:
        progress: the change of this rank's parameters, flat.
        moved_by: w, the move of the model from where the progress was made to where it is added.
        strength: lambda, 0 or more.
        lr_sum: eta k, the sum of the learning rates of the steps; where it is 0, nothing is corrected.

    Returns:
        the corrected progress; `progress` itself if there is nothing to correct.
    """
    if strength == 0.0 or lr_sum <= 0.0:
        return progress
    most = abs(progress)
    change = (strength / lr_sum) * progress * progress * moved_by
    return progress - change.clip(-most, most)
