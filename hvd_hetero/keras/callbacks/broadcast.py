"""A callback that gives all ranks the same variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from ..function import broadcast_variables
from ..normalization import take_in_statistics
from ..reducer import reducer_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Overwrites the weights of the model and the variables of its optimizers with those of `root_rank`.

    Its optimizers are the one that it was compiled with, and those that are attributes of the model, as in a GAN, also
    within lists, tuples and dicts. The broadcast is before the first step; for a model that is built by that step, it
    is right after it.

    Each rank keeps its own random seeds, so that dropout and augmentation differ between ranks, unless a script gives
    all the same seed. Under a local strategy it also keeps gradients that its optimizer has accumulated for the next
    update, and what local steps have made of variables, until they are merged.

    Args:
        root_rank: the rank whose variables all get.
        device: an argument of Horovod without effect.
        local_variables: a variable, or several, that are not overwritten.
        process_set: the ranks (default: all).
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None, process_set: Any = None
    ) -> None:
        super().__init__()
        self.root_rank, self._process_set = root_rank, process_set
        given = [local_variables] if isinstance(local_variables, keras.Variable) else local_variables
        self._local = {id(variable) for variable in given or ()}
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """Excludes one more variable from the broadcast: each rank keeps its own value."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts the variables, if the model has any. A collective call then."""
        self.broadcast_done = False
        if self.model.built or self.model.weights:  # a model without a `call`, as a GAN, may consist of built models
            # A subclass of keras.Model without its own `build()` may be built without its layers, and a layer may also
            # never be called. So the variables that exist are broadcast now, and all of them after the first step.
            self._broadcast(whole=all(layer.built for layer in self.model._flatten_layers()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts after the first step, if the model was not completely built before it. A collective call then."""
        if not self.broadcast_done:
            self._broadcast(whole=True)

    def _broadcast(self, *, whole: bool) -> None:
        """Broadcasts the variables that exist. `whole`: all do, and the optimizer is built if need be."""
        optimizer = self.model.optimizer
        if whole and optimizer is not None and not optimizer.built:  # None if a custom train_step has the optimizers
            optimizer.build(self.model.trainable_variables)
        optimizers = optimizers_of(self.model)
        every = [*self.model.weights, *(v for each in optimizers for v in getattr(each, "variables", ()))]
        reducers = filter(None, map(reducer_of, optimizers))
        own = {id(v) for each in reducers if each.local is not None for v in each.local.own}
        variables = [v for v in every if id(v) not in self._local | own]
        broadcast_variables(variables, self.root_rank, self._process_set)
        take_in_statistics(self.model)
        self.broadcast_done = whole


def optimizers_of(model: Any) -> list[keras.optimizers.Optimizer]:
    """The optimizers of a model, each once: that which it was compiled with, and those of a `train_step`, which are its
    attributes, or within them."""
    found = [getattr(model, "optimizer", None), *_optimizers_in(vars(model))]
    return list({id(each): each for each in found if each is not None}.values())


def _optimizers_in(value: Any) -> Iterator[keras.optimizers.Optimizer]:
    """The optimizers that a value is or, of dicts, lists and tuples, holds, those within such containers included."""
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _optimizers_in(each)
