"""Callbacks for mixed hardware: they show shares, adapt the learning rate to the batch, and write traces."""

from __future__ import annotations

import json
import os
from typing import Any

import keras
import numpy as np

from hvd_hetero.engine import script
from hvd_hetero.engine.payload import gather_text
from hvd_hetero.engine.port import rotating_name
from hvd_hetero.optimizers.balancer import check_balancer
from hvd_hetero.optimizers.latency_lr import LatencyLR, Rule, agreed_latency_lr, rule_for
from hvd_hetero.trace.own import own_trace

from ..balancer import Balancer
from ..factor import RateFactor, ask_from_now_on, factor_of, inner
from ..reducer import reducer_of
from .metrics import is_numeric
from .schedule import learning_rate, set_learning_rate

# An older Keras adds the sum of an `activity_regularizer` over samples to the loss, which no weighted mean makes exact.
MEAN_OF_ACTIVITIES = tuple(int(part) for part in keras.__version__.split(".")[:2]) >= (3, 14)


class RebalanceCallback(keras.callbacks.Callback):
    """Shows the shares: rank 0 prints each new plan, and "share" in the logs is this rank's samples of a global batch.

    The balancing itself needs no callback. For data that comes from no `BalancedDataset`, this callback also tells the
    balancer when an epoch ends.

    Args:
        balancer: the balancer of the model's optimizer.
        verbose: 0 prints nothing.
    """

    def __init__(self, balancer: Balancer, verbose: int = 1) -> None:
        super().__init__()
        check_balancer(balancer)
        self.balancer, self.verbose = balancer, verbose
        self._told = 0  # version of the plan that was printed last
        self._step, self._trained = -1, False  # the balancer's step before the epoch; whether the epoch had a batch

    def on_train_begin(self, logs: Any = None) -> None:
        """Warns of an `activity_regularizer` under an older Keras, as its part of the loss is then too small."""
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
        """Resumes the measurement of compute time, so that what came before, such as a validation, does not count."""
        self._step, self._trained = self.balancer.step, False
        self.balancer.step_timer.run()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Prints a new plan on rank 0, once it holds."""
        self._trained = True
        plan = self.balancer.plan
        if plan.version != self._told:
            self._told = plan.version
            if self.verbose and self.balancer.rank == 0:
                shares = ":".join(map(str, plan.shares))
                print(f"\nPlan {plan.version} from step {plan.step}: shares {shares} ({plan.reason})", flush=True)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs this rank's share, and tells the balancer that the epoch ends.

        Raises:
            RuntimeError: no gradients were exchanged in this epoch, although the model has weights to train.
        """
        # A model without trainable weights exchanges nothing; Keras warns of it.
        if self._trained and self.balancer.step == self._step and self.model.trainable_weights:
            optimizer = self.model.optimizer
            reducer = reducer_of(optimizer)
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
    """Multiplies the learning rate by a factor, the same on all ranks, during each update and only then.

    The factor adapts the learning rate to the number of samples that really enter a step, if they differ from those
    that it was tuned for, and to staleness. It stays 1 while the global batch is `base_batch_size`, whatever the
    shares. The optimizer's learning rate itself is not changed: other callbacks may read, set and save it, before or
    after this one. `fit` begins with a collective call. If a fit is interrupted by an error, the factor stays in effect
    until the end of the next fit with such a callback.

    A second callback on the same optimizer continues from the factor of the first, unless it has another
    `base_batch_size`, and the first one has no effect any more. The callback of a resumed job, or after a change of
    ranks, continues as well: the state of the factor is part of the balancer's state, which checkpoints and commits
    include.

    Args:
        balancer: knows how many samples entered a step, and how stale they are.
        rule: the factor as a function of S, the effective batch over the base batch. "linear": S. "sqrt": its root.
            "adascale": a gain between 1 and S, from the gradient's noise (at least two ranks must have samples).
            "auto": "sqrt" for Adam and similar optimizers, "linear" for SGD. Or a function from S to the factor, which
            must return the same bits on all ranks.
        base_batch_size: samples of the batch that the learning rate was tuned for (default: the global batch).
        warmup_steps: a factor above 1 starts at 1, and is reached after so many steps.
        ramp_steps: the number of steps in which the factor moves to another value.

    Raises:
        ValueError, TypeError: on every rank, when `fit` begins, if arguments are wrong on any rank or differ between
            ranks, if the optimizer has a LearningRateSchedule, or if a resumed job has another `base_batch_size`.
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
        check_balancer(balancer)
        self.balancer, self._rule = balancer, rule
        self._options: dict[str, Any] = {
            "base_batch_size": base_batch_size, "warmup_steps": warmup_steps, "ramp_steps": ramp_steps,
        }  # fmt: skip
        self._core: LatencyLR | None = None
        self._factor: RateFactor | None = None  # that of the optimizer, from the first fit on
        self._waiting: dict[str, Any] = {}  # a loaded state, until the next fit begins

    @property
    def factor(self) -> float:
        """The present factor of the learning rate; 1 before the first fit.

        It changes in the exchange of a step: before that, it is the factor of the last step.
        """
        return 1.0 if self._core is None else self._core.factor

    def on_train_begin(self, logs: Any = None) -> None:
        """Puts the factor into effect, with the same rule and state on all ranks. A collective call.

        The state is that of rank 0: a loaded one, or that of the optimizer, as ranks may have joined, and an earlier
        callback may have set it.
        """
        optimizer, engine = self.model.optimizer, self.balancer.engine
        core = agreed_latency_lr(self.balancer, self._chosen, **self._options)
        if (factor := factor_of(optimizer)) is None:
            factor = ask_from_now_on(optimizer)
            self.model.make_train_function(force=True)  # a function that was traced before would ignore the factor
        self.balancer.factors.add(factor)
        state = self._waiting or factor.state_dict() or self.state_dict()
        before = {"state": state, "loaded": bool(self._waiting) or factor.loaded}
        name = rotating_name(engine, "hvd_hetero.latency_lr.state.")
        first = json.loads(gather_text(engine, json.dumps(before), name=name)[0])
        new = core.state_dict()
        # A base batch other than an earlier callback's is allowed, and drops its state. In a resumed job, it raises.
        if first["state"] and (first["loaded"] or core.tuned_as(first["state"])):
            core.load_state_dict(first["state"])
        self._core, self._factor, self._waiting = core, factor, {}
        factor.follow(core, self.balancer, new=new)

    def on_train_end(self, logs: Any = None) -> None:
        """Takes the factor out of effect, for training without this callback."""
        if self._factor is not None:
            self._factor.rest()

    def _chosen(self) -> str | Rule:
        """The rule, with "auto" resolved. Raises ValueError or TypeError if the optimizer does not fit."""
        optimizer = self.model.optimizer
        set_learning_rate(optimizer, learning_rate(optimizer))
        reducer = reducer_of(optimizer)
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
        """The state of the factor, as plain numbers; empty before the first fit."""
        return self._waiting if self._core is None or self._waiting else self._core.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`, which must be the same on every rank; may be called before a fit or within one.

        Seldom needed, as the balancer's state includes this one.
        """
        if self._core is not None and self._factor is not None and self._factor.follows(self._core):
            self._factor.load_state_dict(state)
        else:
            self._waiting = dict(state)


class TraceCallback(keras.callbacks.Callback):
    """Writes a trace of the run: the steps and plans of the balancer, and the logs of each epoch of `fit`.

    Args:
        run: the folder, in which each rank writes a file. If the balancer has a trace already, as one that was made
            with `run=`, that one is continued, and rank 0 warns where it is in another folder.
        balancer: the balancer whose steps and plans are recorded.
    """

    def __init__(self, run: str, balancer: Balancer) -> None:
        super().__init__()
        check_balancer(balancer)
        if balancer.trace is None:
            balancer.trace = own_trace(run, ranks=balancer.engine.ranks, rank=balancer.rank)
        elif balancer.rank == 0 and os.path.realpath(run) != os.path.realpath(os.path.dirname(balancer.trace.path)):
            script.warn(
                f"run: expected the folder of the balancer's trace, {os.path.dirname(balancer.trace.path)}, which is "
                f"continued. Received: {run}. Give Balancer(run=), or HVD_HETERO_RUN, or this callback's run alone."
            )
        self.balancer = balancer  # and not its trace, which has a file: KerasTuner copies callbacks

    @property
    def trace(self) -> Any:
        """The trace that this callback writes: the balancer's."""
        return self.balancer.trace

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Records the beginning of an epoch."""
        self.trace.event("epoch begins", epoch=epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the logs of an epoch, without what is not a single number, such as F1Score and texts."""
        logs = logs or {}
        numbers = {key: float(value) for key, value in logs.items() if is_numeric(value) and np.ndim(value) == 0}
        self.trace.event("epoch ends", epoch=epoch, **numbers)

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the records that are still in memory."""
        self.trace.flush()
