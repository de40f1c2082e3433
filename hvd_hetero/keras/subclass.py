"""The class of a distributed optimizer: that of the user's, and what it does differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from . import backend


def distributed_class(base: type) -> type:
    """A subclass of `base` that reduces what it applies, and that Keras saves as `base`."""
    public = _public(base)
    cls = type(public.__name__, (base,), {**_methods(base), "__module__": _module(public), "__doc__": base.__doc__})
    name = keras.saving.get_registered_name(base)
    if ">" in name:
        # A user's own class: under its name Keras finds that class when it loads, and that name when it saves ours.
        package, _, registered = name.partition(">")
        for one in (cls, base):
            keras.saving.register_keras_serializable(package, registered)(one)
    return cls


def _public(base: type) -> type:
    """The class under whose name a model with an optimizer of class `base` is saved.

    The torch back end makes Keras's own optimizers of private classes, which no other back end could load.
    """
    own = getattr(keras.optimizers, base.__name__, None)
    return own if isinstance(own, type) and issubclass(base, own) else base


def _module(public: type) -> str:
    return "keras.optimizers" if getattr(keras.optimizers, public.__name__, None) is public else public.__module__


def _methods(base: type) -> dict[str, Any]:
    """What a distributed optimizer does differently from its base class."""

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
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
        """Returns when all ranks hold one model, in which every step of every rank counts once. A collective call.

        With `model`, its statistics (of BatchNormalization) become those of all ranks' samples as well, and the
        averages of the weights (`use_ema`) those of all ranks.
        """
        self._reducer.merge(model, self)

    def finalize_variable_values(self: Any, var_list: Sequence[Any]) -> None:
        """Overwrites the weights with their averages, if this optimizer keeps any, as `fit` does in the end: with those
        of all ranks, also where ranks have trained apart. Then it is a collective call."""
        self._reducer.merge_averages(self)
        base.finalize_variable_values(self, var_list)  # type: ignore[attr-defined]

    def reduce_anew(self: Any) -> None:
        """Makes a new reducer for the present ranks, after an elastic reset. A collective call."""
        before = vars(self).get("_reducer")
        if before is not None:
            before.close()
        self.__dict__["_reducer"] = self._reducer_of(at=None if before is None else before.weighing.at)
        self._reducer.follow(self)

    def from_config(cls: type, config: dict[str, Any], **arguments: Any) -> Any:
        """A plain optimizer: what makes one distributed is no part of a configuration."""
        return base.from_config(config, **arguments)  # type: ignore[attr-defined]

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # as a LossScaleOptimizer does to what it is put around
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
