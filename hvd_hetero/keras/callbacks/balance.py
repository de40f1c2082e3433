"""Callbacks for mixed hardware: shares, one learning rate that follows the batch, and traces."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

from hvd_hetero.engine import script
from hvd_hetero.engine.port import gather_text, in_turn
from hvd_hetero.optimizers.latency_lr import NAMES, LatencyLR, Rule, agreed_latency_lr
from hvd_hetero.trace.own import own_trace

from ..balancer import Balancer
from ..factor import RateFactor, ask_from_now_on, factor_of
from .schedule import inner, learning_rate, set_learning_rate

ADAPTIVE = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Nadam", "RMSprop")
# What an `activity_regularizer` adds to the loss was their sum before: no weight makes such a part of it exact.
MEAN_OF_ACTIVITIES = tuple(int(part) for part in keras.__version__.split(".")[:2]) >= (3, 14)


class RebalanceCallback(keras.callbacks.Callback):
    """Shows who does how much: rank 0 tells each new plan, and "share" in the logs is this rank's samples of a batch.

    The balancing itself needs no callback. Epochs end here for data that no `BalancedDataset` gives.

    Args:
        verbose: 0 tells nothing.
    """

    def __init__(self, balancer: Balancer, verbose: int = 1) -> None:
        super().__init__()
        self.balancer, self.verbose = balancer, verbose
        self._told = 0  # version of the plan
        self._step, self._trained = -1, False  # before the epoch, and in it

    def on_train_begin(self, logs: Any = None) -> None:
        """Warns of what counts for too little, whatever a rank's weight is."""
        layers = [layer.name for layer in self.model._flatten_layers() if getattr(layer, "activity_regularizer", None)]
        if layers and not MEAN_OF_ACTIVITIES and self.balancer.size > 1 and self.balancer.rank == 0:
            names = ", ".join(layers)
            script.warn(
                "activity_regularizer: expected Keras 3.14 or newer, which takes the mean over samples. Received: "
                f"Keras {keras.__version__}, which takes their sum, and {names}: it counts for less than in one "
                "process, as each rank has a part of the samples. Update Keras, or give a regularizer that divides by "
                "keras.ops.shape(x)[0].",
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """What went before, such as a validation, is no part of a step."""
        self._step, self._trained = self.balancer.step, False
        self.balancer.resume()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tells a plan when it holds."""
        self._trained = True
        plan = self.balancer.plan
        if plan.version != self._told:
            self._told = plan.version
            if self.verbose and self.balancer.rank == 0:
                shares = ":".join(map(str, plan.shares))
                print(f"\nPlan {plan.version} from step {plan.step}: shares {shares} ({plan.reason})", flush=True)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs this rank's share, and ends the epoch.

        Raises:
            RuntimeError: nothing was exchanged in it, though the model has weights to train.
        """
        # A model with nothing to train exchanges nothing, of which Keras warns.
        if self._trained and self.balancer.step == self._step and self.model.trainable_weights:
            optimizer = self.model.optimizer
            reducer = vars(optimizer).get("_reducer")
            kind, lacks = "a plain" if reducer is None else "a distributed", ""
            if reducer is not None:
                lacks = " that was not applied" if reducer.balancer is self.balancer else " without this balancer"
            raise RuntimeError(
                "Expected gradients of all ranks in each step, weighted as the balancer says. Received: an epoch "
                f"without an exchange of it, with {kind} {type(optimizer).__name__}{lacks} as the model's optimizer. "
                "Compile the model with hvd.DistributedOptimizer(..., balancer=balancer), also after clone_model() and "
                "keras.models.load_model(), which leave a plain one (hvd.load_model does not)."
            )
        if logs is not None:
            logs["share"] = self.balancer.share
        self.balancer.end_epoch()


class LatencyAwareLearningRate(keras.callbacks.Callback):
    """Multiplies the learning rate by one factor for all ranks, during each update and only then.

    The factor makes up for the samples that ranks really put into a step being others than the learning rate was tuned
    for, and for staleness. It is 1 and stays 1 while the global batch is `base_batch_size`, however it is shared out.
    The optimizer's learning rate stays the script's own: other callbacks may read, set and save it, before this one in
    the list and after it. A LearningRateSchedule is an error. `fit` begins with a collective call. A fit that is broken
    off leaves the factor in effect until the next one with such a callback ends.

    A second one on the same optimizer goes on where the first one was, unless it names another `base_batch_size`, and
    the first has no effect any more. So does one of a job that is resumed, or whose ranks have changed: where the
    factor is on its way is part of the balancer's state, which checkpoints and commits have.

    Args:
        balancer: says how many samples entered, and how stale they are.
        rule: how the factor follows S, the effective batch over the base batch. "linear": S. "sqrt": its root.
            "adascale": a gain between 1 and S, from the gradient's noise (at least two ranks have to have samples).
            "auto": "sqrt" for Adam and its kin, "linear" for SGD. Or a function from S to the factor, with the same
            bits on all ranks.
        base_batch_size: the samples of the batch that the learning rate was tuned for (default: the global batch).
        warmup_steps: a factor above 1 starts at 1, and is reached after so many steps.
        ramp_steps: so many steps it takes to another factor.

    Raises:
        ValueError, TypeError: on every rank, when arguments are wrong on one, or differ, or a job goes on whose rate
            was tuned for another batch.
    """

    def __init__(
        self,
        balancer: Balancer,
        *,
        rule: str | Rule = "auto",
        base_batch_size: int | None = None,
        warmup_steps: int = 0,
        ramp_steps: int = 100,
    ) -> None:
        super().__init__()
        if not isinstance(balancer, Balancer):
            raise TypeError(f"balancer: expected an hvd.Balancer. Received: {balancer!r}.")
        self.balancer, self._rule = balancer, rule
        self._options: dict[str, Any] = {
            "base_batch_size": base_batch_size, "warmup_steps": warmup_steps, "ramp_steps": ramp_steps,
        }  # fmt: skip
        self._core: LatencyLR | None = None
        self._factor: RateFactor | None = None  # of the optimizer, in a fit
        self._waiting: dict[str, Any] = {}  # a state, until there is a core

    @property
    def factor(self) -> float:
        """What updates multiply the learning rate by; 1 before the first fit. It moves with an exchange, so before the
        update of a step it is that of the last one."""
        return 1.0 if self._core is None else self._core.factor

    def on_train_begin(self, logs: Any = None) -> None:
        """All ranks agree on the rule, and go on from where the optimizer is on rank 0: the ranks may have become
        others, and this callback may be another one."""
        optimizer, engine = self.model.optimizer, self.balancer.engine
        core = agreed_latency_lr(self.balancer, self._chosen, **self._options)
        if (factor := factor_of(optimizer)) is None:
            factor = ask_from_now_on(optimizer)
            self.model.make_train_function(force=True)  # what was traced before does not ask
        self.balancer.factors.add(factor)
        state = self._waiting or factor.state_dict() or self.state_dict()
        before = {"state": state, "loaded": bool(self._waiting) or factor.loaded}
        name = in_turn(engine, "hvd_hetero.latency_lr.state.")
        first = json.loads(gather_text(engine, json.dumps(before), name=name)[0])
        new = core.state_dict()
        # Another one than that of a callback before is no mistake, as it would be in a job that goes on.
        if first["state"] and (first["loaded"] or core.tuned_as(first["state"])):
            core.load_state_dict(first["state"])
        self._core, self._factor, self._waiting = core, factor, {}
        factor.follow(core, self.balancer, new=new)

    def on_train_end(self, logs: Any = None) -> None:
        """What is trained from now on, is without the factor."""
        if self._factor is not None:
            self._factor.rest()

    def _chosen(self) -> str | Rule:
        """The rule. Raises ValueError or TypeError for an optimizer that does not fit."""
        optimizer = self.model.optimizer
        set_learning_rate(optimizer, learning_rate(optimizer))
        reducer = vars(optimizer).get("_reducer")
        if reducer is not None and reducer.balancer is not self.balancer:
            raise ValueError(
                "LatencyAwareLearningRate: expected the balancer that the DistributedOptimizer has. Received: another. "
                "Construct both with the same one."
            )
        rule = rule_for(inner(optimizer)) if self._rule == "auto" else self._rule
        if rule == "adascale" and reducer is None:
            raise ValueError(
                "rule: expected another one where a tape reduces the gradients, whose noise is not measured. Received: "
                '"adascale". Compile with hvd.DistributedOptimizer(..., balancer=balancer), or choose another rule.'
            )
        return rule

    def state_dict(self) -> dict[str, Any]:
        """Where the factor is on its way, as plain numbers; empty before the first fit."""
        return self._waiting if self._core is None or self._waiting else self._core.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, which has to be the same on every rank; before a fit or in one. Seldom needed, as the
        balancer's state has it."""
        if self._core is not None and self._factor is not None and self._factor.follows(self._core):
            self._factor.load_state_dict(state)
        else:
            self._waiting = dict(state)


def rule_for(optimizer: Any) -> str:
    """The rule that suits a kind of optimizer."""
    kinds = {cls.__name__ for cls in type(optimizer).__mro__}
    if kinds & set(ADAPTIVE):
        return "sqrt"
    if "SGD" in kinds:
        return "linear"
    raise ValueError(
        f"rule: expected one of {', '.join(NAMES)}, or a function; \"auto\" knows SGD, and what adapts as Adam does. "
        f'Received: "auto" for {type(optimizer).__name__}.'
    )


class TraceCallback(keras.callbacks.Callback):
    """Writes a trace of the run: steps and plans by the balancer, and what `fit` logs for each epoch.

    Args:
        run: the folder, one file per rank in it.
        balancer: whose steps and plans are recorded; one made with `run=` has a trace of its own, which is then used.
    """

    def __init__(self, run: str, balancer: Balancer) -> None:
        super().__init__()
        if balancer.trace is None:
            balancer.trace = own_trace(run, ranks=balancer.engine.ranks, rank=balancer.rank)
        self.trace = balancer.trace

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Records that an epoch begins."""
        self.trace.event("epoch begins", epoch=epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the logs of an epoch, but for metrics that are no single number, as F1Score is."""
        numbers = {key: float(value) for key, value in (logs or {}).items() if np.ndim(value) == 0}
        self.trace.event("epoch ends", epoch=epoch, **numbers)

    def on_train_end(self, logs: Any = None) -> None:
        """Writes what is still in memory."""
        self.trace.flush()
