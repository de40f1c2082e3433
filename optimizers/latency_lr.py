"""One learning-rate factor for all ranks, from what all ranks know: the effective batch, staleness, and noise.

Ranks that applied different learning rates to the same gradient would stop being replicas of one model, and nothing
would bring them together again. So a slow rank's lateness reaches the learning rate through the aggregate alone:

    factor = ramp(rule(S)) * damping(tau)      S = the batch that stands / the batch that was tuned for

The factor moves at exchanges, which all ranks count alike, and on numbers out of the summed control vector; every rank
therefore computes the same bits. While the global batch stands it does not move, whoever takes how much of it:

- A short last batch of an epoch is no change. Its gradient is noisier, as it would be on one process.
- A batch that stays short for `WINDOW` steps in a row – a rank is out, and nobody took over its share – is one, and the
  factor goes there in a ramp; so it does when a resumed job has another global batch.
- Passes that are summed into one gradient (`backward_passes_per_step`) are not counted: the sum over them is Horovod's
  meaning of the argument, and has multiplied the step already.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hvd_hetero.engine.port import in_turn
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
from .argument import check_whole
from .balancer import Balancer

Rule = Callable[[float], float]
RULES: dict[str, Rule] = {"linear": linear, "sqrt": sqrt}
NAMES = (*RULES, "adascale")
WINDOW = 10  # steps without one whole batch, after which the batch is taken to be smaller
PROBES = (0.25, 0.5, 1.0, 2.0, 8.0)  # scales at which all ranks' rules have to give the same
RECENT_MERGES = 64  # whose staleness says what is usual
USUAL = 0.9  # of them are no more stale than that


class LatencyLR:
    """The factor by which a learning rate tuned for `base_batch_size` samples is multiplied.

    Args:
        rule: "linear", "sqrt", "adascale", or a function from S to the factor.
        base_batch_size: samples of the batch that the learning rate was tuned for; None: `global_batch_size`.
        global_batch_size: samples of a whole global batch now.
        warmup_steps: a factor above 1 starts at 1 and is reached after so many steps.
        ramp_steps: so many steps it takes to another factor; 1: at once.
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
        self.progress = 0.0  # the sum of all factors: steps of a job at the tuned batch that this one's are worth
        self._due = 0  # scheduler steps given out
        self._stale: deque[float] = deque(maxlen=RECENT_MERGES)
        self._declared = self._standing = float(global_batch_size)
        self._recent: deque[float] = deque([self._declared] * WINDOW, maxlen=WINDOW)
        target = self._target()
        start = min(1.0, target) if warmup_steps else target
        self._ramp = Ramp(value=start, target=target, steps_left=warmup_steps)
        self.factor = self._ramp.value

    @property
    def measures_noise(self) -> bool:
        """Whether the rule asks for the gradient's noise."""
        return self.rule == "adascale"

    def advance(
        self,
        *,
        samples: float,
        global_batch_size: float,
        steps: int = 1,
        staleness: float = 0.0,
        noise: NoiseSums | None = None,
    ) -> float:
        """The factor for the next update. Called once per exchange, on all ranks with the same numbers.

        Args:
            samples: of the last global batch heard of, over all ranks.
            steps: updates that the exchange was about; none for one in which ranks only come to an end together.
            global_batch_size: samples of a whole global batch.
            staleness: mean of what was merged last, in merges.
            noise: the sums of a step that was not handed in before.
        """
        if steps < 1:  # nothing of what comes after it is late
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
        for _ in range(steps if self.steps else steps - 1):  # the first step is where a warm-up starts
            self._ramp = self._ramp.next()
        if staleness > 0:  # else it may have been a synchronous step, which says nothing of merges
            self._stale.append(float(staleness))
        self.factor = self._ramp.value * damping(staleness, self._usual_staleness())
        self.steps += steps
        self.progress += steps * self.factor
        return self.factor

    def due(self) -> int:
        """How many steps a schedule tuned for the tuned batch should make now, to be where this job is.

        AdaScale's schedules count by `progress`: a step that is worth r of the tuned ones moves them on by r.
        """
        steps = math.floor(self.progress) - self._due
        self._due += steps
        return steps

    def _declare(self, global_batch_size: float) -> None:
        """There is another global batch now; what was heard of the one before says nothing about it."""
        self._declared = self._standing = global_batch_size
        self._recent.extend([global_batch_size] * WINDOW)

    def _usual_staleness(self) -> float:
        """What merges are seldom beyond. A middle one would not do: half of all are beyond that."""
        known = sorted(self._stale)
        return known[int(USUAL * (len(known) - 1))] if known else 0.0

    def _target(self) -> float:
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
        """The position of the ramp and the batch sizes and noise scale that it depends on, as plain numbers."""
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
        """Whether `state` is of a learning rate tuned for the batch that was named here, if one was."""
        return not self._base_given or bool(state["base_batch_size"] == self.base_batch_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, on every rank the same; to another global batch's factor in a ramp, from the next step.

        Where no `base_batch_size` was given, the state's is taken: the learning rate is still tuned for that one.
        """
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


def agreed_latency_lr(
    balancer: Balancer,
    chosen: Callable[[], str | Rule],
    *,
    base_batch_size: int | None,
    warmup_steps: int,
    ramp_steps: int,
) -> LatencyLR:
    """A `LatencyLR` with the rule that `chosen` returns. A collective call.

    Raises:
        ValueError, TypeError: on every rank, when arguments are wrong on one, or differ.
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

    name = in_turn(balancer.engine, "hvd_hetero.latency_lr.")
    agree_text(balancer.engine, describe, title="LatencyAwareLR", name=name)
    return made[0]


def _probed(rule: Rule) -> list[float]:
    """What a user's rule gives. Whatever it raises becomes a ValueError, of which the other ranks hear."""
    try:
        return [float(rule(scale)) for scale in PROBES]
    except Exception as error:
        raise ValueError(f"rule: expected a function from the scale to a factor. Received: {error!r} of it.") from error
