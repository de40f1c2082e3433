"""The variables of a model or an optimizer, as a job keeps them and hands them to ranks that join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from .normalization import take_in_statistics

SEED = "seed_generator_state"  # the name of the variable that a layer draws random numbers from


class Variables:
    """Variables of a model or an optimizer, whose number does not change."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    @property
    def variables(self) -> list[Any]:
        """Those that ranks share: of a model its weights, and not what each rank draws random numbers from."""
        return list(self.owner.weights if isinstance(self.owner, keras.Model) else self.owner.variables)

    @property
    def own(self) -> list[Any]:
        """Those of a model that are each rank's own: statistics of its samples, and where its random numbers are."""
        if not isinstance(self.owner, keras.Model):
            return []
        seeds = [v for v in self.owner.non_trainable_variables if v.path.endswith(SEED)]
        return [*self.owner.non_trainable_weights, *seeds]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of them, by place."""
        return {str(at): array_of(v) for at, v in enumerate(self.variables)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Assigns what `state_dict` returned. Raises ValueError for other variables."""
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
        """Copies of this rank's own, by their places among all variables: which layers are frozen may change."""
        places = {id(v): at for at, v in enumerate(self.owner.variables)}
        return {places[id(v)]: array_of(v) for v in self.own}

    def load_own_state(self, state: Mapping[int, np.ndarray] | Sequence[np.ndarray]) -> None:
        """Assigns what `own_state` returned; or, of an earlier version's file, the values of what is this rank's own.
        """
        variables = self.owner.variables if isinstance(state, Mapping) else self.own
        for at, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            variables[at].assign(value)
        self.written()

    def written(self) -> None:
        """Refreshes what layers compute from their variables; to be called after these were assigned."""
        if isinstance(self.owner, keras.Model):
            take_in_statistics(self.owner)


def check_built(name: str, owner: Any) -> None:
    """Raises ValueError for a model or an optimizer whose variables are not known yet."""
    received, unknown = "one that is not", []
    if isinstance(owner, keras.optimizers.Optimizer):
        what, how = "an optimizer", f"Call {name}.build(model.trainable_variables), of the model that it trains."
    else:
        what, how = "a model", f"Begin it with keras.Input(...), or call it once on a batch: {name}(x[:1])."
        unknown = _unbuilt(owner)
    if getattr(owner, "built", False):
        if not unknown:
            return
        received = f"one that says so, but whose layers are not: {', '.join(unknown)}"
    raise ValueError(f"{name}: expected {what} that is built, whose variables are known. Received: {received}. {how}")


def _unbuilt(model: keras.Model) -> list[str]:
    """The layers, by their names, that may still make variables. `build(shape)` of a subclass of keras.Model makes none
    of those of its layers, and says that it is built.

    What a model that was called has not built, it has no use for. Keras has no public name for whether it was.
    """
    if getattr(model, "_called", False):
        return []
    makes_none = (keras.layers.Layer.build, keras.Model.build)
    layers = model._flatten_layers(include_self=False)
    return [layer.name for layer in layers if not layer.built and type(layer).build not in makes_none]


def array_of(variable: Any) -> np.ndarray:
    """A copy of a variable's values."""
    return np.array(keras.ops.convert_to_numpy(variable))
