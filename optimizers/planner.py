"""The planner: all ranks keep the same plans and measurements. Rank 0 looks for a better plan, and announces it to all.

A plan travels in the control vector of an exchange of gradients, or of a merge: `Dialogue` calls the planner.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from hvd_hetero.policy.ladder import TRY_STEPS, plans_to_keep, trial
from hvd_hetero.policy.partition import Bound, split
from hvd_hetero.policy.rank_match import match_ranks
from hvd_hetero.policy.replan import Plan, ReplanRule, decide
from hvd_hetero.policy.speed import Observation, SpeedModel

from .agreement import BalancerArguments
from .control import Announcement
from .loading_limits import LoadingLimits
from .look_schedule import LookSchedule
from .speed_measurements import SpeedMeasurements
from .steadiness import Steadiness
from .strategy_selector import StrategySelector

SKIPPED = 2  # steps after a change of plan that are not observed: caches, JIT and allocators settle
READY = 2  # so many batches of those that loaders have ready when a job begins are not observed either, at most
APART = 10  # a rank is tried again for this many times as many batches if ranks make local steps


class Planner:
    """Keeps the plans of a balancer and the measurements that they rest on, and finds better plans.

    Args:
        arguments: what all ranks agreed on: the bounds of their shares, the global batch, the first shares, and the
            rule for when a new plan pays.
        clock: returns seconds; measures how long a look takes.

    Attributes:
        plans: those that `plans_to_keep` keeps, oldest first.
        models: the speed model of each rank, as of the last look; None where none was made. Rank 0 alone looks; on the
            other ranks only a first plan for another set of ranks fits models.
        announcement: the plan that rank 0 sends with the next exchange; None if there is none.
        loading: how fast each rank can load samples.
        steadiness: how often and how long each rank stalls.
        is_local: tells whether ranks make local steps at a global batch, waiting for nobody; `install_local_phase` sets
            it.
    """

    def __init__(self, arguments: BalancerArguments, *, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._arguments, self._rule = arguments, arguments.rule
        self.size = len(arguments.bounds)
        self.plans: list[Plan] = [Plan(version=0, step=0, shares=arguments.first_shares, reason="first plan")]
        self.models: tuple[SpeedModel, ...] | None = None
        self.announcement: Announcement | None = None
        self._measurements = SpeedMeasurements(arguments.micro_caps)
        self._look_schedule = LookSchedule(self.size, clock=clock)
        self.loading = LoadingLimits(self.size)
        self._ahead = 0  # batches between the one at which the last plan was heard and the first for which it holds
        self.steadiness = Steadiness(self.size)
        self._strategy_selector: StrategySelector | None = None
        self._exchange_s: list[float] = []  # the saved state of a selection, until that is made
        self.is_local: Callable[[int], bool] = lambda step: False

    @property
    def strategy_selector(self) -> StrategySelector | None:
        """Chooses between synchronous and local steps; None unless the user asked for `strategy="auto"`."""
        return self._strategy_selector

    @strategy_selector.setter
    def strategy_selector(self, strategy_selector: StrategySelector) -> None:
        if self._strategy_selector is not None:  # made for another optimizer, which this one replaces
            self._exchange_s = self._strategy_selector.state_dict()
        self._strategy_selector = strategy_selector
        self._resume_strategy_selector()

    def without_local_steps(self) -> None:
        """Says that all steps are synchronous from now on, as no optimizer has a local strategy any more."""
        self.is_local = lambda step: False
        if self._strategy_selector is not None:
            self._exchange_s, self._strategy_selector = self._strategy_selector.state_dict(), None

    def _resume_strategy_selector(self) -> None:
        """Gives the selection the times of earlier exchanges, and the step since which the present strategy holds."""
        if self._strategy_selector is not None:
            changes = [new.step for old, new in itertools.pairwise(self.plans) if old.strategy != new.strategy]
            self._strategy_selector.load_state_dict(self._exchange_s, since=changes[-1] if changes else None)

    def plan_at(self, step: int) -> Plan:
        """The plan that holds for global batch `step`; the first one that is kept, if `step` comes before it."""
        return next((plan for plan in reversed(self.plans) if plan.step <= step), self.plans[0])

    def observe(
        self,
        step: int,
        samples: Sequence[float],
        compute_s: Sequence[float],
        loading_s: Sequence[float] | None = None,
        *,
        dealt_ahead: int = 0,
    ) -> None:
        """Takes in the measurements of all ranks for batch `step`, as their control vectors brought them.

        Args:
            samples: of each rank; 0 for not measured.
            compute_s: seconds of compute of each rank for these samples; 0 for not measured.
            loading_s: the least seconds per sample that each rank needs for loading while it computes; 0 if loading
                does not limit it.
            dealt_ahead: the batches that some rank has dealt ahead.
        """
        if loading_s is not None:
            self.loading.observe(loading_s, version=self.plans[-1].version)
        warmup_steps = self._rule.warmup_steps + min(dealt_ahead, READY)
        if step >= warmup_steps and (step - self.plan_at(step).step >= SKIPPED or step < SKIPPED):
            self._measurements.observe(step, samples, compute_s)

    def accept(self, announced: Announcement, step: int, *, dealt_ahead: int = 0) -> Plan | None:
        """Takes in a plan that arrived with the exchange of batch `step`. All ranks call it, with the same arguments.

        Args:
            dealt_ahead: the number of batches after `step` that some rank may have dealt by the earlier plan; the new
                plan holds for the batches after those.

        Returns:
            the new plan; None if it is known already.
        """
        self.announcement = None
        if announced.version <= self.plans[-1].version:
            return None
        plan = Plan(
            version=announced.version,
            step=step + 1 + dealt_ahead,
            shares=announced.shares,
            reason=announced.reason,
            predicted_step_s=announced.predicted_step_s or None,
            strategy=announced.strategy,
        )
        for rank, (before, now) in enumerate(zip(self.plans[-1].shares, plan.shares, strict=True)):
            if now and not before:  # the rank is tried again, to find out whether its old measurements still hold
                self._measurements.forget(rank)
        self._ahead = dealt_ahead
        self.plans = [*plans_to_keep(self.plans, step), plan]
        self._look_schedule.put_off(plan.step + SKIPPED + self._rule.minimum_observations)
        return plan

    def look(self, step: int, *, measured_step_s: float | None = None, dealt_ahead: int = 0) -> None:
        """Fits the speed models, and prepares an announcement if another plan pays. Does nothing before the next look
        is due. Rank 0 alone calls it, after each exchange that brings measurements.

        Args:
            measured_step_s: seconds of a whole step, with the communication, which no plan changes; None: not known.
            dealt_ahead: the batches that some rank has dealt ahead. With any, the first plan is not replaced early: how
                slowly a rank loads does not show before it has used up what it had ready.
        """
        if self._look_schedule.is_due(step) and self.announcement is None:
            with self._look_schedule.look(step, max(measured_step_s or 0.0, self._measurements.longest_s)):
                rule = replace(self._rule, early_gain=1.0) if dealt_ahead else self._rule
                self._look(step, measured_step_s, rule)

    def _look(self, step: int, measured_step_s: float | None, rule: ReplanRule) -> None:
        recent = self._measurements.recent
        working = [seen for seen, share in zip(recent, self.plans[-1].shares, strict=True) if share > 0]
        few = min(map(len, working)) < rule.minimum_observations
        # A few observations of unlike sizes always lie near a line, and so do not tell how noisy they are.
        if few and min(map(_most_alike, working)) < rule.observations_needed(self.plans[-1]):
            self._look_schedule.put_off(step + 1)
            return
        fitted = self._measurements.fit([plan.step for plan in self.plans])
        ordered = sorted((model for model in fitted if model), key=lambda model: model.seconds_per_sample)
        # A rank that never had a sample gets the model of the rank of median speed.
        median = replace(ordered[len(ordered) // 2], observations=0, measured=SpeedModel.measured)
        self.models = self.loading.into(model or median for model in fitted)
        plan = self._better_shares(self.models, step, measured_step_s, rule, few=few)
        if plan is None and not few:
            plan = self._better_strategy(self.models, recent, step)
        if plan is not None:
            self.announcement = Announcement(
                version=plan.version,
                shares=plan.shares,
                reason=plan.reason,
                predicted_step_s=plan.predicted_step_s or 0.0,
                strategy=plan.strategy,
            )

    def _better_shares(
        self, models: Sequence[SpeedModel], step: int, step_s: float | None, rule: ReplanRule, *, few: bool
    ) -> Plan | None:
        """A plan with better shares than the present one's, or else with a share for a rank that had none and is tried
        again; None if there is none. With `few` measurements, no rank is tried."""
        if not self._arguments.adaptive:
            return None
        # In synchronous steps, where a rank stalls all ranks wait as long, whatever the shares; not in local steps.
        speeds = self.steadiness.alone(models) if self.is_local(step) else models
        plan = decide(
            self.plans[-1],
            speeds,
            step=step,
            global_batch_size=self._arguments.global_batch_size,
            bounds=self._arguments.bounds,
            rule=rule,
            previous=self.loading.aware(self.plans[:-1]),
            micro_batch=self._arguments.micro_caps,
            measured_step_s=step_s,
        )
        if plan is not None or few:
            return plan
        # In local steps, a rank tells its measurements once a round, and others are far ahead by then.
        try_steps = (TRY_STEPS + self._ahead) * (APART if self.is_local(step) else 1)
        bounds, caps = self._arguments.bounds, self._arguments.micro_caps
        return trial(self.plans, speeds, step=step, bounds=bounds, micro_batch=caps, try_steps=try_steps)

    def _better_strategy(
        self, models: Sequence[SpeedModel], recent: Sequence[Sequence[Observation]], step: int
    ) -> Plan | None:
        """The present plan with another strategy, if that pays; else None."""
        if self.strategy_selector is None:
            return None
        current, caps = self.plans[-1], self._arguments.micro_caps
        choice = self.strategy_selector.look(step, current.strategy, models, recent, current.shares, caps)
        if choice is None:
            return None
        return replace(
            current, version=current.version + 1, step=step, strategy=choice.strategy, reason=choice.reason,
            predicted_step_s=None,
        )

    def state_dict(self) -> dict[str, Any]:
        """The plans and measurements, and the identities and kinds of the ranks' hardware, as plain numbers."""
        return {
            "identities": list(self._arguments.identities),
            "kinds": list(self._arguments.kinds),
            "plans": [asdict(plan) for plan in self.plans],
            "windows": self._measurements.state_dict(),
            **self.loading.state_dict(),
            "steadiness": self.steadiness.state_dict(),
            "exchange_s": self._exchange_s if self.strategy_selector is None else self.strategy_selector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Goes on from `state`, saved when batch `step` was the last one begun. If the ranks are others now, a new plan
        is made, from the measurements of those ranks that are known.

        `match_ranks` says which rank goes on with which measurements.
        """
        self._look_schedule.put_off(step + 1)
        self.announcement = None
        places = match_ranks(
            list(itertools.zip_longest(state["identities"], state["kinds"])),
            list(itertools.zip_longest(self._arguments.identities, self._arguments.kinds)),
        )
        alike = places == list(range(len(state["windows"])))
        self._measurements.load_state_dict(state["windows"], places)
        self.loading.load_state_dict(state, places)
        self.steadiness.load_state_dict(state["steadiness"], places)
        self._exchange_s = list(state["exchange_s"]) if alike else []
        self.plans = [Plan(**{**plan, "shares": tuple(plan["shares"])}) for plan in state["plans"]]
        if not alike:
            self.plans = [self._plan_for_others(version=self.plans[-1].version + 1, step=max(step, 0))]
        elif not all(map(self._allows, [self.plan_at(step + 1), self.plans[-1]])):
            # The script gives other bounds than in the saved job, as after a rank ran out of memory. Measurements stay.
            last, held = self.plans[-1], [plan for plan in self.plans if plan.step <= step]
            new = self._plan_for_others(version=last.version + 1, step=step + 1)
            self.plans = [*held, replace(new, strategy=last.strategy, reason="other bounds or shares were given")]
        self._resume_strategy_selector()

    def _allows(self, plan: Plan) -> bool:
        """Whether a plan from a saved state keeps to the present bounds, and to the shares if the user has fixed them.
        """
        given = None if self._arguments.adaptive else self._arguments.shares
        return all(map(Bound.allows, self._arguments.bounds, plan.shares)) and given in (None, plan.shares)

    def _plan_for_others(self, *, version: int, step: int) -> Plan:
        """The first plan of a new set of ranks, from their speed models. If shares are fixed, or too little is known of
        some rank's speed, it has the shares that a new job begins with."""
        known = min(map(len, self._measurements.recent)) >= self._rule.minimum_observations
        if not self._arguments.adaptive or not known:
            shares = self._arguments.first_shares
            return Plan(version=version, step=step, shares=shares, reason="other ranks than before")
        self.models = self.loading.into(filter(None, self._measurements.fit([plan.step for plan in self.plans])))
        arguments = self._arguments
        shares = split(self.models, arguments.global_batch_size, arguments.bounds, micro_batch=arguments.micro_caps)
        return Plan(version=version, step=step, shares=shares, reason="other ranks, all of known speed")


def _most_alike(seen: Sequence[Observation]) -> int:
    """The number of observations of the size that occurs most often."""
    return max(Counter(observation.size for observation in seen).values(), default=0)
