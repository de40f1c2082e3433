"""The planner: every rank keeps the same plans and measurements; rank 0 looks for a better plan and announces it."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from hvd_hetero.policy.ladder import TRY_STEPS, trial
from hvd_hetero.policy.partition import Bound, split
from hvd_hetero.policy.regime import last_shift, latest_regime
from hvd_hetero.policy.replan import Plan, decide
from hvd_hetero.policy.speed import Observation, SpeedModel, fit, passes_of

from .agreement import Terms
from .control import Announcement
from .loading_limits import LoadingLimits
from .selection import Selection
from .steadiness import Steadiness

WINDOW = 64  # observations kept per rank
SKIPPED = 2  # steps after a change of plan that are not observed: caches, JIT and allocators settle
# A speed that changes by more starts a new window. Less is left to the window to forget: the ranks of a machine that
# drifts change together, and a rank judged by its last steps alone would be compared with the others' past.
CHANGED = 0.3
LOOK_EVERY = 4  # steps between two looks at the speeds
LOOK_S = 1.2e-4  # a look takes for each rank, at the least, and all wait for rank 0 meanwhile
BUDGET = 0.005  # the part of the time that looks may take
APART = 10  # times as many batches take a try where ranks train apart
EARLY_STEPS = 40  # while the first plans are made it looks at every step, and looks may take `EARLY_BUDGET`
EARLY_BUDGET = 0.05
KEPT_STEPS = 4096  # plans that held no longer ago are kept: ranks that train apart may be so far behind


class Past:
    """The speed models of one rank, by what they rest on.

    The prior of a fit rests on what was measured before all of its window. The model of the last look would not do: the
    same few observations, heard again with every look, would be believed in the end, however little they tell.
    """

    def __init__(self) -> None:
        self._models: deque[tuple[int, SpeedModel]] = deque()  # the last step that each rests on

    def fit(self, window: Sequence[tuple[int, Observation]]) -> SpeedModel | None:
        """The model of what was measured, by step; the last one where that is nothing."""
        if not window:
            return self._models[-1][1] if self._models else None
        first, last = window[0][0], window[-1][0]
        while len(self._models) > 1 and self._models[1][0] < first:
            self._models.popleft()
        prior = self._models[0][1] if self._models and self._models[0][0] < first else None
        model = fit([seen for _, seen in window], prior=prior)
        while self._models and self._models[-1][0] >= last:  # heard again
            self._models.pop()
        self._models.append((last, model))
        return model


def _worth_keeping(plans: Sequence[Plan], step: int) -> list[Plan]:
    """Of plans those that held lately, before batch `step`, and of older ones those that `policy.ladder` looks at."""
    ends = [*(plan.step for plan in plans[1:]), math.inf]
    old = sum(end <= step - KEPT_STEPS for end in ends)
    out = [[share == 0 for share in plan.shares] for plan in plans[:old]]
    changes = [plans[index] for index in range(old) if index == 0 or out[index] != out[index - 1]]
    return [*changes, *plans[old:]]


class Planner:
    """Plans and what they rest on: `plans` are those of the last `KEPT_STEPS` batches, oldest first, and of older ones
    the first, and those with which a rank went out or came back.

    Args:
        terms: the bounds of all ranks, the global batch, the first shares, and when a new plan pays.
        clock: in seconds; tells what a look takes.
    """

    def __init__(self, terms: Terms, *, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self._looks_s: deque[float] = deque([0.0, 0.0], maxlen=2)
        self._terms, self._rule = terms, terms.rule
        self.size = len(terms.bounds)
        self.plans: list[Plan] = [Plan(version=0, step=0, shares=terms.first_shares, reason="first plan")]
        self.models: tuple[SpeedModel, ...] | None = None
        self.announcement: Announcement | None = None
        self._windows: tuple[deque[tuple[int, Observation]], ...] = tuple(
            deque(maxlen=WINDOW) for _ in range(self.size)
        )
        self._pasts = tuple(Past() for _ in range(self.size))
        self.loading = LoadingLimits(self.size)
        self._next_look = 0
        self._ahead = 0  # batches that passed before the last plan held
        self.steadiness = Steadiness(self.size)
        self._selection: Selection | None = None
        self._exchange_s: list[float] = []  # of a state, for a selection that is yet to be made
        self.apart: Callable[[int], bool] = lambda step: False  # whether ranks take a batch apart, waiting for nobody

    @property
    def selection(self) -> Selection | None:
        """What chooses between strategies; None unless the user asked for "auto"."""
        return self._selection

    @selection.setter
    def selection(self, selection: Selection) -> None:
        if self._selection is not None:  # of another optimizer
            self._exchange_s = self._selection.state_dict()
        self._selection = selection
        self._resume_selection()

    def _resume_selection(self) -> None:
        """Tells who selects strategies what was known before, and since when the present one holds."""
        if self._selection is not None:
            changes = [new.step for old, new in itertools.pairwise(self.plans) if old.strategy != new.strategy]
            self._selection.load_state_dict(self._exchange_s, since=changes[-1] if changes else None)

    def plan_at(self, step: int) -> Plan:
        """The plan that holds for global batch `step`."""
        return next(plan for plan in reversed(self.plans) if plan.step <= step)

    def observe(
        self, step: int, samples: Sequence[float], compute_s: Sequence[float], loading_s: Sequence[float] | None = None
    ) -> None:
        """Takes in what each rank needed for its samples of batch `step`; 0 where there is nothing to say. And what it
        needs for loading a sample beside that, at least."""
        if loading_s is not None:
            self.loading.observe(loading_s, version=self.plans[-1].version)
        settled = step >= self._rule.warmup_steps and (step - self.plan_at(step).step >= SKIPPED or step < SKIPPED)
        if not settled:
            return
        for window, number, seconds, cap in zip(
            self._windows, map(round, samples), compute_s, self._terms.micro_caps, strict=True
        ):
            if number > 0 and seconds > 0:
                passes = passes_of(number, cap)
                window.append((step, Observation(samples=number, compute_s=seconds, passes=passes)))

    def accept(self, announced: Announcement, step: int, *, dealt_ahead: int = 0) -> Plan | None:
        """The plan that arrived with the gradient of batch `step`, unless it is known already.

        It holds for batches more than `dealt_ahead` later: the others may have been dealt, on some rank.
        """
        self.announcement = None
        if announced.version <= self.plans[-1].version:
            return None
        plan = Plan(
            version=announced.version,
            step=step + 1 + dealt_ahead,
            shares=announced.shares,
            reason=announced.reason,
            predicted_step_s=announced.predicted_step_s,
            strategy=announced.strategy,
        )
        for window, before, now in zip(self._windows, self.plans[-1].shares, plan.shares, strict=True):
            if now and not before:  # what was measured before it went out is what is to be found out
                window.clear()
        self._ahead = dealt_ahead
        self.plans = [*_worth_keeping(self.plans, step), plan]
        self._next_look = plan.step + SKIPPED + self._rule.minimum_observations
        return plan

    def look(self, step: int, *, measured_step_s: float | None = None) -> None:
        """Fits the speeds and prepares an announcement, if it is time and a plan pays. For rank 0 alone.

        `measured_step_s` is what a whole step takes, with the communication that no plan changes.
        """
        if step < self._next_look or self.announcement is not None:
            return
        self._next_look = step + self._pause(step, measured_step_s or 0.0)
        began = self._clock()
        self._look(step, measured_step_s)
        self._looks_s.append(self._clock() - began)

    def _look(self, step: int, measured_step_s: float | None) -> None:
        recent = [[seen for _, seen in window] for window in self._windows]
        idle = [share == 0 for share in self.plans[-1].shares]
        if any(
            len(window) < self._rule.minimum_observations and not none
            for window, none in zip(recent, idle, strict=True)
        ):
            self._next_look = step + 1
            return
        fitted = [past.fit(window) for past, window in zip(self._pasts, self._comparable(), strict=True)]
        known = sorted((model for model in fitted if model), key=lambda model: model.seconds_per_sample)
        # A rank that never had a sample is taken for an ordinary one.
        self.models = self.loading.into(model or replace(known[len(known) // 2], observations=0) for model in fitted)
        plan = self._better(self.models, recent, step, measured_step_s)
        if plan is not None:
            self.announcement = Announcement(
                version=plan.version,
                shares=plan.shares,
                reason=plan.reason,
                predicted_step_s=plan.predicted_step_s or 0.0,
                strategy=plan.strategy,
            )

    def _pause(self, step: int, step_s: float) -> int:
        """Steps from one look to the next, so that looks take no more than their part of the time."""
        least, budget = (1, EARLY_BUDGET) if step < EARLY_STEPS else (LOOK_EVERY, BUDGET)
        step_s = max([step_s, *(window[-1][1].compute_s for window in self._windows if window)])
        look_s = max(LOOK_S * self.size, min(self._looks_s))  # the shorter of two: one may have been interrupted
        return max(least, math.ceil(look_s / (budget * step_s))) if step_s else least

    def _comparable(self) -> list[Sequence[tuple[int, Observation]]]:
        """Of each rank what was measured at its speed of now, and when: since the last plan that changed anybody's, and
        its own last change. Of a rank that had no sample since that plan, what was measured before it is all there is.
        """
        shift = last_shift(self._windows, [plan.step for plan in self.plans])
        comparable: list[Sequence[tuple[int, Observation]]] = []
        for window in self._windows:
            seen = [each for each in window if each[0] >= shift] or list(window)
            regime = latest_regime([observation for _, observation in seen], tolerance=CHANGED)
            comparable.append(seen[len(seen) - len(regime) :])
        return comparable

    def _better(
        self, models: Sequence[SpeedModel], recent: Sequence[Sequence[Observation]], step: int, step_s: float | None
    ) -> Plan | None:
        """A plan that pays: other shares first, then a rank that is tried again, then another strategy."""
        current = self.plans[-1]
        if self._terms.adaptive:
            # Where all wait for all, a stop costs everybody the same, whatever the shares.
            speeds = self.steadiness.alone(models) if self.apart(step) else models
            plan = decide(
                current,
                speeds,
                step=step,
                global_batch_size=self._terms.global_batch_size,
                bounds=self._terms.bounds,
                rule=self._rule,
                previous=self.loading.aware(self.plans[:-1]),
                micro_batch=self._terms.micro_caps,
                measured_step_s=step_s,
            ) or trial(
                self.plans, speeds, step=step, bounds=self._terms.bounds, micro_batch=self._terms.micro_caps,
                # Apart, the rank says what it measured once a round, and the others are far ahead by then.
                try_steps=(TRY_STEPS + self._ahead) * (APART if self.apart(step) else 1),
            )
            if plan is not None:
                return plan
        if self.selection is None:
            return None
        choice = self.selection.look(step, current.strategy, models, recent, current.shares, self._terms.micro_caps)
        if choice is None:
            return None
        return replace(
            current, version=current.version + 1, step=step, strategy=choice.strategy, reason=choice.reason,
            predicted_step_s=None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plans and measurements, as plain numbers."""
        return {
            "identities": list(self._terms.identities),
            "plans": [asdict(plan) for plan in self.plans],
            "windows": [
                [(step, seen.samples, seen.compute_s, seen.passes) for step, seen in window] for window in self._windows
            ],
            **self.loading.state_dict(),
            "steadiness": self.steadiness.state_dict(),
            "exchange_s": self._exchange_s if self.selection is None else self.selection.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Goes on from `state`. On other ranks with a new plan, which rests on what is known of them.

        Ranks are told by their hardware; where none is known, as many ranks as before are taken to be as before.
        """
        self._next_look = step + 1
        self.announcement = None
        self._pasts = tuple(Past() for _ in range(self.size))
        windows = [
            [(at, Observation(samples=n, compute_s=seconds, passes=passes)) for at, n, seconds, passes in saved]
            for saved in state["windows"]
        ]
        before, now = state["identities"], list(self._terms.identities)
        alike = before == now or (len(before) == len(now) and not set(before) & set(now))
        places = range(self.size) if alike else [before.index(each) if each in before else None for each in now]
        known = [[] if place is None else windows[place] for place in places]
        self.loading.load_state_dict(state, places)
        self.steadiness.load_state_dict(state.get("steadiness", {}), places)
        self._exchange_s = list(state.get("exchange_s", ())) if alike else []
        for window, saved in zip(self._windows, known, strict=True):
            window.clear()
            window.extend(saved)
        self.plans = [Plan(**{**plan, "shares": tuple(plan["shares"])}) for plan in state["plans"]]
        if not alike:
            self.plans = [self._plan_for_others(version=self.plans[-1].version + 1, step=max(step, 0))]
        elif not all(map(self._allows, [self.plan_at(step + 1), self.plans[-1]])):
            # What a rank may have was said anew, as where its memory has turned out to be too small. Measurements stay.
            last, held = self.plans[-1], [plan for plan in self.plans if plan.step <= step]
            new = self._plan_for_others(version=last.version + 1, step=step + 1)
            self.plans = [*held, replace(new, strategy=last.strategy, reason="other bounds or shares were given")]
        self._resume_selection()

    def _allows(self, plan: Plan) -> bool:
        """Whether a plan from a state keeps to the bounds, and to shares that were given for good."""
        given = None if self._terms.adaptive else self._terms.shares
        return all(map(Bound.allows, self._terms.bounds, plan.shares)) and given in (None, plan.shares)

    def _plan_for_others(self, *, version: int, step: int) -> Plan:
        """The first plan of a new set of ranks; the most equal shares where too little is known of some."""
        if not self._terms.adaptive or min(map(len, self._windows)) < self._rule.minimum_observations:
            return Plan(version=version, step=step, shares=self._terms.first_shares, reason="other ranks than before")
        self.models = self.loading.into(fit([seen for _, seen in window]) for window in self._comparable())
        terms = self._terms
        shares = split(self.models, terms.global_batch_size, terms.bounds, micro_batch=terms.micro_caps)
        return Plan(version=version, step=step, shares=shares, reason="other ranks, all of known speed")
