"""The variables of a model or an optimizer, as elastic states and checkpoints save, restore and broadcast them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from .normalization import take_in_statistics

SEED = "seed_generator_state"  # the name of the variable with the state of a layer's random generator


class Variables:
    """Saves and restores the variables of a model or an optimizer, whose number must not change.

    `KerasState` makes one for each model and optimizer that it keeps.

    Args:
        owner: a model or an optimizer, built.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    @property
    def variables(self) -> list[Any]:
        """The variables that are the same on all ranks: the weights of a model, without the states of its random
        generators, or all variables of an optimizer."""
        return list(self.owner.weights if isinstance(self.owner, keras.Model) else self.owner.variables)

    @property
    def own(self) -> list[Any]:
        """The variables of a model that may differ between ranks: weights that are never trained, such as the
        statistics of BatchNormalization, and states of random generators. Empty for an optimizer.

        The weights of frozen layers are the same on all ranks, and not among them.
        """
        if not isinstance(self.owner, keras.Model):
            return []
        seeds = [v for v in self.owner.non_trainable_variables if v.path.endswith(SEED)]
        layers = self.owner._flatten_layers()
        frozen = {id(v) for layer in layers for v in layer._trainable_variables}
        return [*(v for v in self.owner.non_trainable_weights if id(v) not in frozen), *seeds]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of `variables`, by their index."""
        return {str(at): value_of(v) for at, v in enumerate(self.variables)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Assigns what `state_dict` returned.

        Raises:
            ValueError: the number or the shapes of the variables differ.
        """
        variables = self.variables
        shapes = [tuple(state[str(at)].shape) for at in range(len(state))]
        if shapes != [tuple(v.shape) for v in variables]:
            raise ValueError(
                f"Expected {len(variables)} variables of the shapes {[tuple(v.shape) for v in variables]}. Received: "
                f"{shapes}."
            )
        for at, variable in enumerate(variables):
            variable.assign(state[str(at)])
        self.written()

    def own_state(self) -> dict[int, np.ndarray]:
        """Copies of `own`, by their index among all variables of the model.

        That index stays the same when layers are frozen or thawed.
        """
        places = {id(v): at for at, v in enumerate(self.owner.variables)}
        return {places[id(v)]: value_of(v) for v in self.own}

    def load_own_state(self, state: Mapping[int, np.ndarray]) -> None:
        """Assigns what `own_state` returned."""
        variables = self.owner.variables
        for at, value in state.items():
            variables[at].assign(value)
        self.written()

    def written(self) -> None:
        """Refreshes what layers cache of their variables; must be called after variables were assigned."""
        if isinstance(self.owner, keras.Model):
            take_in_statistics(self.owner)


def check_built(name: str, owner: Any) -> None:
    """Raises ValueError for a model or an optimizer that is not built, so that its variables do not exist yet.

    Args:
        name: what the caller named it, for the message.
        owner: the model or optimizer.
    """
    received, unknown = "one that is not", []
    if isinstance(owner, keras.optimizers.Optimizer):
        what, how = "an optimizer", f"Call {name}.build(model.trainable_variables), of the model that it trains."
    else:
        what, how = "a model", f"Begin it with keras.Input(...), or call it once on a batch: {name}(x[:1])."
        unknown = _unbuilt(owner)
    if getattr(owner, "built", False) or _has_no_call(owner):
        if not unknown:
            return
        received = f"one that says so, but whose layers are not: {', '.join(unknown)}"
    raise ValueError(f"{name}: expected {what} that is built, whose variables are known. Received: {received}. {how}")


def _has_no_call(owner: Any) -> bool:
    """Whether an owner is a model without a `call`, such as a GAN, whose variables are those of its layers. Keras does
    not say of it that it is built, unless the script does."""
    return isinstance(owner, keras.Model) and type(owner).call is keras.Model.call and bool(owner.weights)


def _unbuilt(model: keras.Model) -> list[str]:
    """The names of layers that may still make variables, although the model says that it is built.

    `build(shape)` of a subclass of keras.Model sets `built` without building its layers. Layers that a call of the
    model has not built are never used, so a model that was called has none. Keras has no public name for whether it
    was called.
    """
    if getattr(model, "_called", False):
        return []
    makes_none = (keras.layers.Layer.build, keras.Model.build)
    layers = model._flatten_layers(include_self=False)
    return [layer.name for layer in layers if not layer.built and type(layer).build not in makes_none]


def value_of(variable: Any) -> np.ndarray:
    """A copy of a variable's value as a numpy array."""
    return np.array(keras.ops.convert_to_numpy(variable))
