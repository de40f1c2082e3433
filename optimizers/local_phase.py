"""Decides which steps are local steps under a local strategy: all after the warm-up, or those that the plan says."""

from __future__ import annotations

from collections.abc import Callable

from hvd_hetero.policy.strategy import LOCAL

from .balancer import Balancer
from .local_sgd import LocalSGD
from .strategy_selector import StrategySelector


def install_local_phase(rule: LocalSGD, balancer: Balancer) -> Callable[[int], bool]:
    """Returns a function that tells whether global batch `step` is taken with a local step, the same on all ranks.

    It becomes `planner.is_local`. If `rule.when` is "faster" (`strategy="auto"`), the planner also gets a
    `StrategySelector`, by which rank 0 chooses between the strategies.

    Args:
        rule: the numbers of the local strategy.
        balancer: whose planner is set up.
    """
    planner = balancer.planner
    if rule.when == "always":
        planner.is_local = lambda step: step >= rule.warmup_steps
    else:
        planner.strategy_selector = StrategySelector(
            planner.steadiness, round_steps=rule.round_steps, bound_rounds=rule.most_rounds,
            first_step=max(rule.warmup_steps, balancer.step + 1),
        )
        planner.is_local = lambda step: planner.plan_at(max(step, 0)).strategy == LOCAL
    return planner.is_local
