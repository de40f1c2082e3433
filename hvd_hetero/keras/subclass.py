"""The class of a distributed optimizer: a subclass of the user's class that reduces gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from . import backend


def distributed_class(base: type) -> type:
    """Makes a subclass of `base` whose `apply` reduces gradients over all ranks first. Keras saves it as `base`.

    `DistributedOptimizer` gives its objects the attributes `_reducer`, `_reducer_of` and `_factor`.
    """
    public = _public(base)
    cls = type(public.__name__, (base,), {**_methods(base), "__module__": _module(public), "__doc__": base.__doc__})
    name = keras.saving.get_registered_name(base)
    if ">" in name:
        # A user's own class: Keras saves the subclass under the same registered name, and loads `base` by that name.
        package, _, registered = name.partition(">")
        for one in (cls, base):
            keras.saving.register_keras_serializable(package, registered)(one)
    return cls


def _public(base: type) -> type:
    """The class under whose name a model with an optimizer of class `base` is saved.

    With the torch back end, Keras's own optimizers are of private classes, which no other back end could load. Their
    public class is returned instead.
    """
    own = getattr(keras.optimizers, base.__name__, None)
    return own if isinstance(own, type) and issubclass(base, own) else base


def _module(public: type) -> str:
    return "keras.optimizers" if getattr(keras.optimizers, public.__name__, None) is public else public.__module__


def _methods(base: type) -> dict[str, Any]:
    """The attributes that a distributed optimizer's class overrides or adds, by name."""

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduces the gradients, and updates the variables with them; under a local strategy, ends the local step."""
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        if len(grads) != len(variables):
            base.apply(self, grads, trainable_variables)  # type: ignore[attr-defined]  # says what is wrong
            return
        grads = self._reducer.reduced(grads, variables, self._iterations, among=self._trainable_variables)
        with self._factor.applied(self, grads) as rate:
            base.apply(self, grads, trainable_variables)  # type: ignore[attr-defined]
        self._reducer.updated(self, variables, rate)

    def merge(self: Any, model: keras.Model | None = None) -> None:
        """Merges the models of all ranks under a local strategy, and returns when all hold the same. A collective call.

        Every local step of every rank counts once in the merged model. Does nothing with synchronous steps.

        Args:
            model: its statistics (of BatchNormalization) are averaged as well, and so are the averages of the weights
                (`use_ema`). None: neither is.
        """
        self._reducer.merge(model, self)

    def finalize_variable_values(self: Any, var_list: Sequence[Any]) -> None:
        """Overwrites the weights with their moving averages, if the optimizer keeps any (`use_ema`); `fit` ends so.

        With a local strategy, the averages of all ranks are merged before, which is a collective call.
        """
        self._reducer.merge_averages(self)
        base.finalize_variable_values(self, var_list)  # type: ignore[attr-defined]

    def reduce_anew(self: Any) -> None:
        """Replaces the reducer by a new one for the present ranks; the engine calls it after an elastic reset.

        A collective call.
        """
        before = vars(self).get("_reducer")
        if before is not None:
            before.close()
        self.__dict__["_reducer"] = self._reducer_of(at=None if before is None else before.gradient_exchange.at)
        self._reducer.follow(self)

    def from_config(cls: type, config: dict[str, Any], **arguments: Any) -> Any:
        """Makes a plain optimizer of class `base`, as a configuration does not say how an optimizer is distributed."""
        return base.from_config(config, **arguments)  # type: ignore[attr-defined]

    def set_attribute(self: Any, name: str, value: Any) -> None:
        """Sets an attribute; raises ValueError if a LossScaleOptimizer is being put around this optimizer."""
        if name == "loss_scale_factor" and value is None:  # what a LossScaleOptimizer does to its inner optimizer
            raise ValueError(
                "Expected hvd.DistributedOptimizer outermost, so that all ranks skip the same steps. Received: a "
                "LossScaleOptimizer around it, as compile() makes for a model of the policy mixed_float16. Pass "
                "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...)."
            )
        base.__setattr__(self, name, value)  # type: ignore[call-arg]

    return {
        "apply": backend.uncompiled(apply),
        "merge": merge,
        "finalize_variable_values": finalize_variable_values,
        "_reduce_anew": reduce_anew,
        "from_config": classmethod(from_config),
        "_unpickle_model": staticmethod(base._unpickle_model),  # type: ignore[attr-defined]  # as `from_config`
        "__setattr__": set_attribute,
    }
