"""Computes one learning-rate factor, the same on all ranks, from the effective global batch, staleness and noise.

If ranks applied different learning rates to the same gradient, their models would differ from then on. So the factor
depends only on numbers that all ranks share, not on how late this rank is:

    factor = ramp(rule(S)) * damping(tau)      S = the effective batch / the batch that the rate was tuned for

with tau the mean staleness. The factor changes only at exchanges, which all ranks count alike, and follows from the
summed control vectors; so every rank computes the same bits. S does not depend on the shares:

- A short last batch of an epoch does not change S. Its gradient is noisier, as it would be in one process.
- A batch that stays short for `WINDOW` exchanges in a row changes S: some rank is out, and no other rank took over its
  share. The factor then goes to its new value in a ramp, as it does when a resumed job has another global batch.
- Backward passes that are summed into one gradient (`backward_passes_per_step`) do not change S: Horovod defines the
  gradient as their sum, which has multiplied the step already.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hvd_hetero.engine.port import rotating_name
from hvd_hetero.policy.scaling import (
    NoiseScale,
    NoiseSums,
    Ramp,
    adascale,
    damping,
    linear,
    noise_and_signal,
    sqrt,
    standing_batch,
)

from .agreement import agree_text
from .argument import check_state, check_whole
from .balancer import Balancer
from .noise import NoiseMeter

Rule = Callable[[float], float]
RULES: dict[str, Rule] = {"linear": linear, "sqrt": sqrt}
NAMES = (*RULES, "adascale")
# What divides a gradient by its size, in PyTorch or Keras, by the names of classes.
ADAPTIVE = {
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "NAdam", "Nadam", "RAdam",
    "RMSprop", "ScheduleFreeAdamW", "SparseAdam",
}  # fmt: skip
WINDOW = 10  # so many exchanges in a row without a whole batch mean that the effective batch is smaller
PROBES = (0.25, 0.5, 1.0, 2.0, 8.0)  # values of S at which the rules of all ranks have to agree
RECENT_MERGES = 64  # the usual staleness is that of so many last merges
USUAL = 0.9  # the quantile of their staleness that counts as usual


class LatencyLR:
    """The factor by which a learning rate tuned for `base_batch_size` samples is multiplied.

    `LatencyAwareLR` (torch) and `RateFactor` (Keras) call `hear` after each exchange, and multiply by `factor`.

    Args:
        rule: "linear", "sqrt", "adascale", or a function from S to the factor; see `policy.scaling`.
        base_batch_size: samples of the batch that the learning rate was tuned for; None: `global_batch_size`.
        global_batch_size: samples of a whole global batch now.
        warmup_steps: steps over which a factor above 1 rises from 1 at the beginning of training; 0: none.
        ramp_steps: steps over which the factor moves to another value later; 1: at once.

    Attributes:
        factor: the factor for the next update.
        noise: the smoothed noise scale of the gradient, for "adascale".
        steps: number of updates so far.
        progress: sum of the factors of all updates: how many steps at the tuned batch they are worth.

    Raises:
        ValueError, TypeError: an argument is out of range, or the rule returns no positive finite number.
    """

    def __init__(
        self,
        *,
        rule: str | Rule,
        global_batch_size: float,
        base_batch_size: int | None = None,
        warmup_steps: int = 0,
        ramp_steps: int = 100,
    ) -> None:
        if not callable(rule) and rule not in NAMES:
            raise ValueError(
                f"rule: expected one of {', '.join(NAMES)}, or a function of the scale. Received: {rule!r}."
            )
        for name, value, least in (
            ("base_batch_size", 1 if base_batch_size is None else base_batch_size, 1),
            ("warmup_steps", warmup_steps, 0),
            ("ramp_steps", ramp_steps, 1),
        ):
            check_whole(name, value, least=least)
        self.rule = rule
        self.ramp_steps = ramp_steps
        self._base_given = base_batch_size is not None
        self.base_batch_size = float(global_batch_size if base_batch_size is None else base_batch_size)
        self.noise = NoiseScale()
        self.steps = 0
        self.progress = 0.0
        self._due = 0  # scheduler steps that `due` has returned so far
        self._stale: deque[float] = deque(maxlen=RECENT_MERGES)  # staleness of the last merges
        self._declared = self._standing = float(global_batch_size)  # a whole global batch, and the effective one
        self._recent: deque[float] = deque([self._declared] * WINDOW, maxlen=WINDOW)
        target = self._target()
        start = min(1.0, target) if warmup_steps else target
        self._ramp = Ramp(value=start, target=target, steps_left=warmup_steps)
        self.factor = self._ramp.value

    @property
    def measures_noise(self) -> bool:
        """Whether the rule needs the gradient's noise, which then has to be measured and passed to `advance`."""
        return self.rule == "adascale"

    def hear(self, balancer: Balancer, meter: NoiseMeter | None) -> None:
        """Advances by what all ranks said in the exchange of `balancer` that has just completed.

        Args:
            meter: of the gradient's noise; None: it is not measured.
        """
        said = balancer.dialogue
        self.advance(
            samples=said.entered,
            global_batch_size=balancer.global_batch_size,
            steps=said.steps,
            staleness=said.mean_staleness,
            noise=None if meter is None else meter.take(),
        )

    def advance(
        self,
        *,
        samples: float,
        global_batch_size: float,
        steps: int = 1,
        staleness: float = 0.0,
        noise: NoiseSums | None = None,
    ) -> float:
        """Returns the factor for the next update. Called once per exchange, on all ranks with the same arguments.

        Args:
            samples: samples of the last global batch that the exchange told of, over all ranks.
            global_batch_size: samples of a whole global batch.
            steps: updates since the last exchange; 0 for a merge that only ends a phase of local steps.
            staleness: mean staleness of the contributions to the last merge, in merges; 0 for synchronous steps.
            noise: the noise sums of a step, each passed once; None: there are no new ones.
        """
        if steps < 1:  # all ranks go on from one model, so nothing is stale
            self.factor = self._ramp.value
            return self.factor
        if global_batch_size != self._declared:
            self._declare(float(global_batch_size))
        self._recent.append(float(samples))
        self._standing = standing_batch(self._standing, self._recent, self._declared)
        found = None if noise is None else noise_and_signal(noise)
        if found is not None:
            self.noise = self.noise.seen(*found)
        self._ramp = self._ramp.towards(self._target(), self.ramp_steps)
        for _ in range(steps if self.steps else steps - 1):  # the first update has the warm-up's first factor
            self._ramp = self._ramp.next()
        if staleness > 0:  # 0 may be a synchronous step, which is no merge
            self._stale.append(float(staleness))
        self.factor = self._ramp.value * damping(staleness, self._usual_staleness())
        self.steps += steps
        self.progress += steps * self.factor
        return self.factor

    def due(self) -> int:
        """Returns how many steps a learning-rate schedule should make now, beyond those that earlier calls returned.

        For a schedule made for the tuned batch, which counts by `progress` (as AdaScale's do): an update that is worth
        r steps at the tuned batch moves it on by r.
        """
        steps = math.floor(self.progress) - self._due
        self._due += steps
        return steps

    def _declare(self, global_batch_size: float) -> None:
        """Takes over another global batch size, and forgets the batches heard of before."""
        self._declared = self._standing = global_batch_size
        self._recent.extend([global_batch_size] * WINDOW)

    def _usual_staleness(self) -> float:
        """The staleness that few merges exceed (the quantile `USUAL`); 0.0 before any merge.

        The median would not do: half of all merges would count as unusually stale.
        """
        known = sorted(self._stale)
        return known[int(USUAL * (len(known) - 1))] if known else 0.0

    def _target(self) -> float:
        """The factor that the ramp goes to: the rule at the present S. Raises ValueError if it is not positive."""
        scale = self._standing / self.base_batch_size
        if self.rule == "adascale":
            samples = self.noise.samples
            return adascale(scale, None if samples is None else samples / self.base_batch_size)
        rule = self.rule if callable(self.rule) else RULES[self.rule]
        factor = rule(scale)
        if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ValueError(f"rule: expected a finite number above 0 for scale {scale}. Received: {factor!r}.")
        return float(factor)

    def state_dict(self) -> dict[str, Any]:
        """The factor's ramp, the batch sizes and the noise scale that it follows, and the counts, as plain numbers."""
        return {
            "base_batch_size": self.base_batch_size,
            "global_batch_size": self._declared,
            "standing": self._standing,
            "recent": list(self._recent),
            "stale": list(self._stale),
            "noise": asdict(self.noise),
            "ramp": asdict(self._ramp),
            "factor": self.factor,
            "steps": self.steps,
            "progress": self.progress,
            "due": self._due,
        }

    def tuned_as(self, state: dict[str, Any]) -> bool:
        """Whether `state` has the `base_batch_size` that was given to this object; True if none was given."""
        return not self._base_given or bool(state["base_batch_size"] == self.base_batch_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, which has to be the same on every rank.

        If the global batch is another one now, the factor moves to its new value in a ramp from the next step on. If no
        `base_batch_size` was given, that of `state` is taken: the learning rate is still tuned for it.

        Raises:
            TypeError, ValueError: `state` is not that of a learning rate's factor, or has another `base_batch_size`
                than the one given.
        """
        check_state(state, *self.state_dict(), of="a learning rate's factor")
        if not self.tuned_as(state):
            raise ValueError(
                f"Expected the state of a learning rate tuned for base_batch_size {self.base_batch_size:g}. "
                f"Received: one for {state['base_batch_size']:g}."
            )
        self.base_batch_size = float(state["base_batch_size"])
        self._declared, self._standing = state["global_batch_size"], state["standing"]
        self._recent = deque(state["recent"], maxlen=WINDOW)
        self._stale = deque(state["stale"], maxlen=RECENT_MERGES)
        self.noise = NoiseScale(**state["noise"])
        self._ramp = Ramp(**state["ramp"])
        self.factor, self.steps = float(state["factor"]), int(state["steps"])
        self.progress, self._due = float(state["progress"]), int(state["due"])


def rule_for(optimizer: Any) -> str:
    """The rule that "auto" means for an optimizer of PyTorch or Keras: "sqrt" for Adam and its kin, "linear" for SGD.

    Raises:
        ValueError: it is neither.
    """
    kinds = {cls.__name__ for cls in type(optimizer).__mro__}
    if kinds & ADAPTIVE or "betas" in getattr(optimizer, "defaults", ()):
        return "sqrt"
    if kinds & {"SGD", "ASGD"}:
        return "linear"
    raise ValueError(
        f"rule: expected one of {', '.join(NAMES)}, or a function; \"auto\" knows SGD, and what adapts as Adam does. "
        f"Received: \"auto\" for {type(optimizer).__name__}."
    )


def agreed_latency_lr(
    balancer: Balancer,
    chosen: Callable[[], str | Rule],
    *,
    base_batch_size: int | None,
    warmup_steps: int,
    ramp_steps: int,
) -> LatencyLR:
    """Makes a `LatencyLR` after a check that all ranks make the same one. A collective call.

    Args:
        balancer: knows the engine and the global batch size.
        chosen: returns the rule; what it raises is raised on every rank.
        base_batch_size, warmup_steps, ramp_steps: see `LatencyLR`.

    Raises:
        ValueError, TypeError: on every rank, when arguments are wrong on one, or differ between ranks.
    """
    made: list[LatencyLR] = []

    def describe() -> str:
        rule = chosen()
        named = _probed(rule) if callable(rule) else rule
        core = LatencyLR(
            rule=rule,
            base_batch_size=base_batch_size,
            global_batch_size=balancer.global_batch_size,
            warmup_steps=warmup_steps,
            ramp_steps=ramp_steps,
        )
        made.append(core)
        return (
            f"rule={named}, base_batch_size={core.base_batch_size:g}, warmup_steps={warmup_steps}, "
            f"ramp_steps={ramp_steps}"
        )

    name = rotating_name(balancer.engine, "hvd_hetero.latency_lr.")
    agree_text(balancer.engine, describe, title="LatencyAwareLR", name=name)
    return made[0]


def _probed(rule: Rule) -> list[float]:
    """The values of a user's rule at `PROBES`. Any error in it becomes a ValueError, which all ranks then raise."""
    try:
        return [float(rule(scale)) for scale in PROBES]
    except Exception as error:
        raise ValueError(f"rule: expected a function from the scale to a factor. Received: {error!r} of it.") from error
