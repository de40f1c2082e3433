"""Plans, and when a new one pays.

A new plan replaces the current one if all of this holds (a plan that violates the bounds is replaced at once):

- The gain (T_now - T_new) / T_now exceeds a minimum, and exceeds what noise alone would make of it: z standard errors
  of 1 - T_new / T_now, with z >= 2 and z >= sqrt(2 ln n), about the largest of n normal errors, because T is the time
  of the slowest of n ranks. Both thresholds rise with the number of recent plans, since a machine whose speed drifts
  always offers another plan. After a change of speed, which was observed for a few steps only, the minimum is doubled.
- The minimum does not rise for a gain that lasts: one that the older half of the last observations offers as well as
  the newer half. So a plan that was made for a rank that was slow for a while does not stay when that has passed. But
  models may promise a gain that never comes, again and again: where a step takes much longer from some size on, say. So
  with each such plan that turned back, the next one needs a plan that has held for twice as long.
- Some rank's share moves by more than the dead band (flodl and OmniLearn: 5 %).
- The current plan has held for the cool-down, which is short for the first plans and right after a change of speed.

The plan that a job begins with knows nothing, as a rule, and ranks that are unlike lose most of their time with it. So
it is replaced sooner, after two observations of each rank at one number of samples, by a plan that gains much.

How far a plan moves, `trust_region` says; a move that reverses the last one is not halved if a speed has changed, or
if its gain lasts.

Where the trust region allows only a part of the way to the best shares, it is their gain that has to exceed the
thresholds; the plan itself never takes longer. Otherwise a small share might never grow: where a rank that was slow has
recovered, twice its share often gains less than the minimum, or nothing, as no other rank has a sample less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from operator import itemgetter
from typing import NamedTuple

from .partition import Bound, split, step_time_s
from .speed import SpeedModel
from .strategy import SYNCHRONOUS
from .trust_region import reachable, turns_back

FIRST_OBSERVATIONS = 2      # of each rank, of one size, before a plan that saves `ReplanRule.early_gain`
EARLY_PLANS = 2      # with fewer recent plans than this, the early cool-down applies
FEW_PLANS = 3        # from so many recent plans on, more standard errors of gain are required
DEARER = (1.0, 1.0, 2.5, 4.0)    # factor on the minimum gain, by the number of recent plans
LATELY = 15          # a plan counts as recent for so many cool-downs
SETTLED = 50         # observations of every rank, from which a gain may be called one that lasts


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The shares, the step from which they hold, and why. Every rank holds the identical plan.

    Attributes:
        version: 0 for the first plan; each new one adds 1.
        step: the first global batch that is dealt by this plan.
        shares: samples of a global batch, by rank.
        reason: why this plan was made, for people.
        predicted_step_s: predicted seconds of a step, for plans that are made to shorten it; None or 0: no prediction.
        strategy: SYNCHRONOUS or LOCAL, see `policy.strategy`.
    """

    version: int
    step: int
    shares: tuple[int, ...]
    reason: str
    predicted_step_s: float | None = None
    strategy: str = SYNCHRONOUS

    def __post_init__(self) -> None:
        if self.version < 0 or self.step < 0:
            raise ValueError(f"version and step: expected 0 or more. Received: {self.version} and {self.step}.")
        if not self.shares or min(self.shares) < 0:
            raise ValueError(f"shares: expected one of 0 or more for each rank. Received: {self.shares}.")


@dataclass(frozen=True, kw_only=True)
class ReplanRule:
    """When a new plan pays, and how far one plan may move the shares.

    Args:
        warmup_steps: no plan is made before this step, and no measurement from before it is used.
        minimum_observations: observations that are needed of every rank with a share, before a plan.
        minimum_gain: the fraction of a step's time that a plan has to save. More is required after many plans, and in
            any case more than errors of measurement explain.
        dead_band: some share has to move by more than this fraction of itself.
        cooldown_steps: steps between two plans.
        early_cooldown_steps: the same while recent plans are few, and after a change of speed.
        early_gain: the first plan is replaced sooner, after two observations of every rank at one number of samples and
            without a cool-down, by one that saves more than this fraction of a step's time. 1 or more: it never is. Nor
            is it while loaders work ahead: how slow they are does not show before what they had ready is used up.
        trust_region: a share grows in one plan by this factor at most, and shrinks by its square at most, unless its
            rank was measured with what it goes to; `math.inf`: no limit.

    Raises:
        ValueError: a negative number or no number, no observations required, or a trust region that is not above 1.
    """

    warmup_steps: int = 1
    minimum_observations: int = 5
    minimum_gain: float = 0.03
    dead_band: float = 0.05
    cooldown_steps: int = 20
    early_cooldown_steps: int = 7
    early_gain: float = 0.2
    trust_region: float = 2.0

    def __post_init__(self) -> None:
        for name, least in (("warmup_steps", 0), ("minimum_observations", 1), ("minimum_gain", 0), ("dead_band", 0),
                            ("cooldown_steps", 0), ("early_cooldown_steps", 0), ("early_gain", 0)):
            value = getattr(self, name)
            if not (isinstance(value, Real) and float(value) >= least):
                raise ValueError(f"{name}: expected a number, {least} or more. Received: {value!r}.")
        if not (isinstance(self.trust_region, Real) and self.trust_region > 1.0):
            raise ValueError("trust_region: expected a number above 1, the factor by which a share may grow. "
                             f"Received: {self.trust_region!r}.")

    def observations_needed(self, plan: Plan) -> int:
        """The observations that are needed of every rank with a share, before `plan` may be replaced."""
        soon = plan.version == 0 and self.early_gain < 1
        return min(FIRST_OBSERVATIONS, self.minimum_observations) if soon else self.minimum_observations


def decide(
    current: Plan,
    models: Sequence[SpeedModel],
    *,
    step: int,
    global_batch_size: int,
    bounds: Sequence[Bound] | None = None,
    rule: ReplanRule | None = None,
    previous: Sequence[Plan] = (),
    measured_step_s: float | None = None,
    micro_batch: Sequence[int | None] | None = None,
) -> Plan | None:
    """The plan that should hold from `step`, or None if the current one should stay.

    Called by the planner on rank 0, which announces the plan to the other ranks.

    Args:
        current: the plan that holds.
        models: speed models by rank.
        step: the step from which a new plan would hold.
        global_batch_size: samples of a global batch; if it differs from the sum of the current shares, or if a share
            violates its bounds, there is always a new plan.
        bounds: of shares, by rank; None: no bounds.
        rule: thresholds; None: the defaults.
        previous: the plans before the current one, oldest first.
        measured_step_s: seconds of a whole step, including communication, which no plan changes. The gain is a fraction
            of this time; None: of the slowest rank's compute time.
        micro_batch: by rank, the most samples of one pass; None: no limit.

    Raises:
        InfeasibleError: no shares within the bounds sum to the global batch.
    """
    rule = rule or ReplanRule()
    ranks = range(len(current.shares))
    if len(models) != len(ranks):
        raise ValueError(f"models: expected one for each of the plan's {len(ranks)} ranks. Received: {len(models)}.")
    limits = [Bound()] * len(ranks) if bounds is None else list(bounds)
    if not (sum(current.shares) == global_batch_size and all(map(Bound.allows, limits, current.shares))):
        shares = split(models, global_batch_size, limits, micro_batch=micro_batch)
        return _next_plan(current, shares, step, "the global batch or the bounds changed",
                          step_time_s(models, shares, micro_batch))

    moment = _moment_of(current, previous, models, step=step, rule=rule)
    if moment is None:
        return None
    if moment.early:      # two steps are too little to leave a rank out
        limits = [replace(limit, lower=max(limit.lower, limit.quantum)) if share else limit
                  for limit, share in zip(limits, current.shares, strict=True)]

    def reach(last: Sequence[int] | None) -> tuple[tuple[int, ...], bool]:
        return reachable(current.shares, models, limits, trust_region=rule.trust_region, last=last,
                         micro_batch=micro_batch)

    def lasts(shares: Sequence[int]) -> bool:
        return moment.settled and rule.minimum_gain < min(
            _gain_in_half(half, models, current.shares, shares, micro_batch, measured_step_s or 0.0) for half in (0, 1))

    last = None if moment.changed or not previous else previous[-1].shares
    shares, cut = reach(None if moment.settled else last)
    if moment.settled and not lasts(shares):
        shares, cut = reach(last)
    if all(abs(new - old) <= rule.dead_band * old for new, old in zip(shares, current.shares, strict=True)):
        return None
    (before, now_s), (after, new_s) = (_slowest(models, each, micro_batch) for each in (current.shares, shares))
    step_s = max(now_s, measured_step_s or 0.0)
    reason = f"rank {before} is slowest: it takes {now_s:.4g} s, with the new shares {new_s:.4g} s"

    def pays(gain_s: float, error: float, *, to: Sequence[int]) -> bool:
        """`error`: the standard error of `to`'s time, as a fraction of it."""
        least = rule.minimum_gain if lasts(to) else moment.minimum_gain(rule)
        return gain_s / step_s > max(least, moment.standard_errors(len(ranks)) * error * now_s / step_s)

    stretch = models[after].overhead_error * abs(shares[after] / max(current.shares[after], 1) - 1.0)
    # If that rank is limited by loading, only compute time beyond the loading time makes the prediction uncertain.
    compute_s = models[after].compute_s(shares[after], micro_batch[after] if micro_batch else None)
    stretch = max(0.0, compute_s * (1.0 + stretch) / new_s - 1.0)
    known = [models[rank].standard_error for rank in {before, after}]     # of one rank once: both times have its error
    if not pays(now_s - new_s, math.hypot(*known, stretch) * new_s / now_s, to=shares):
        if moment.early or not cut:
            return None
        aim = split(models, global_batch_size, limits, micro_batch=micro_batch)
        after, aim_s = _slowest(models, aim, micro_batch)
        error = math.hypot(*[models[rank].standard_error for rank in {before, after}]) * aim_s / now_s
        halved = turns_back(aim, current.shares, last) and not lasts(aim)
        if not pays((now_s - aim_s) * (0.5 if halved else 1.0), error, to=aim):
            return None
        reason = f"rank {before} is slowest: it takes {now_s:.4g} s, on the way to shares with {aim_s:.4g} s"
    return _next_plan(current, shares, step, reason, step_s - (now_s - new_s))


class _Moment(NamedTuple):
    """What matters for the next plan in a job's plans so far, and in how much is known of the current one."""

    changed: bool      # a rank's speed has changed a short time ago
    lately: int      # the number of recent plans
    early: bool      # the job still has the plan that it began with, and little is known of it
    settled: bool      # so much is known that a gain may be called one that lasts

    @property
    def recent(self) -> int:
        """Recent plans, as far as they count after a change of speed."""
        return 0 if self.changed else self.lately

    def minimum_gain(self, rule: ReplanRule) -> float:
        """The least gain of a plan."""
        least = rule.minimum_gain * DEARER[min(self.lately, len(DEARER) - 1)]
        least *= 2.0 if self.changed and self.lately >= EARLY_PLANS else 1.0
        return max(least, rule.early_gain) if self.early else least

    def standard_errors(self, ranks: int) -> float:
        """So many standard errors a gain has to exceed, if a step ends with the slowest of `ranks` ranks."""
        return max(2.0, math.sqrt(2.0 * math.log(ranks))) * (1.0 if self.recent < FEW_PLANS else 1.5)


def _moment_of(current: Plan, previous: Sequence[Plan], models: Sequence[SpeedModel], *, step: int, rule: ReplanRule
               ) -> _Moment | None:
    """What matters at `step` for a plan after the current one; None if it is too soon for a plan."""
    counts = [model.observations for model, share in zip(models, current.shares, strict=True) if share > 0]
    plans = (*previous, current)
    moment = _Moment(
        changed=any(n <= rule.cooldown_steps and 2 * n <= max(counts) for n in counts),
        lately=sum(plan.step > step - LATELY * rule.cooldown_steps for plan in plans[1:]),
        early=False,
        settled=min(counts) >= SETTLED and step - current.step >= _settles_after(plans),
    )
    cooldown = rule.early_cooldown_steps if moment.recent < EARLY_PLANS else rule.cooldown_steps
    early = step - current.step < cooldown or min(counts) < rule.minimum_observations
    if step < rule.warmup_steps or (early and current.version > 0) or min(counts) < rule.observations_needed(current):
        return None
    return moment._replace(early=early, settled=moment.settled and not early)


def _settles_after(plans: Sequence[Plan]) -> int:
    """The steps after which a gain over the last of `plans` may be called one that lasts: the more, the more often a
    plan for such a gain has turned back."""
    turns = sum(new.step - now.step >= SETTLED and turns_back(new.shares, now.shares, old.shares)
                for old, now, new in zip(plans, plans[1:], plans[2:], strict=False))
    return SETTLED * (2**turns - 1)


def _next_plan(current: Plan, shares: tuple[int, ...], step: int, reason: str, predicted_step_s: float) -> Plan:
    return Plan(version=current.version + 1, step=step, shares=shares, reason=reason, predicted_step_s=predicted_step_s,
                strategy=current.strategy)


def _slowest(models: Sequence[SpeedModel], shares: Sequence[int], micro_batch: Sequence[int | None] | None
             ) -> tuple[int, float]:
    """The rank with the longest predicted time for its share, and that time."""
    caps = micro_batch or [None] * len(models)
    times = [m.time_s(b, cap) for m, b, cap in zip(models, shares, caps, strict=True)]
    return max(enumerate(times), key=itemgetter(1))


def _gain_in_half(half: int, models: Sequence[SpeedModel], current: Sequence[int], shares: Sequence[int],
                  micro_batch: Sequence[int | None] | None, step_s: float) -> float:
    """The fraction of a step of at least `step_s` seconds that `shares` save at the speeds of the older (0) or newer
    (1) half of the observations; 0.0 where these are not known."""
    then = [model.times(model.halves[half]) for model in models if model.halves]
    if len(then) < len(models):
        return 0.0
    now_s, new_s = (step_time_s(then, each, micro_batch) for each in (current, shares))
    return (now_s - new_s) / max(now_s, step_s)
