"""`load_model`: loads a saved model, and makes its optimizer a distributed one again."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvd_hetero.optimizers.compression import Compression

from .normalization import SyncBatchNormalization
from .optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    *,
    safe_mode: bool = True,
    **distributed: Any,
) -> Any:
    """Loads a saved model, and makes its optimizer, with its state, a distributed one again. A collective call.

    `SyncBatchNormalization` layers get the balancer and the process set. An optimizer that accumulates gradients goes
    on from its last update: gradients that were added up since then are not part of a saved model.

    Args:
        filepath: the file, as of `keras.models.load_model`.
        custom_optimizers: a script's own classes of optimizers.
        custom_objects: a script's own classes and functions, by their names.
        compression: as of `DistributedOptimizer`.
        legacy_opts: an argument of Horovod without effect.
        safe_mode: as of `keras.models.load_model`; False also loads files that hold code, such as a Lambda layer.
        distributed: further arguments of `DistributedOptimizer`, by their names.

    Raises:
        TypeError: custom_optimizers that are no classes of optimizers.
    """
    classes = _checked(custom_optimizers)
    objects = {**{cls.__name__: cls for cls in classes}, **(custom_objects or {})}
    model = keras.models.load_model(filepath, custom_objects=objects, safe_mode=safe_mode)
    for layer in model._flatten_layers():
        if isinstance(layer, SyncBatchNormalization):
            layer.take(distributed.get("balancer"), distributed.get("process_set"))
    if getattr(model, "optimizer", None) is not None:  # a model that was not compiled has none
        if str(filepath).endswith((".h5", ".hdf5")):
            with keras.saving.custom_object_scope(objects):
                model.optimizer = _of_hdf5(model, filepath)
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **distributed)
    return model


def _of_hdf5(model: Any, filepath: Any) -> Any:
    """The optimizer of a model that was loaded from an HDF5 file, with its state.

    Keras builds the optimizer of such a file for an empty list of variables, and drops its state, so that `fit` fails.
    """
    optimizer = model.optimizer
    if not optimizer.built or optimizer._trainable_variables or not model.trainable_variables:
        return optimizer
    made = type(optimizer).from_config(optimizer.get_config())
    made.build(model.trainable_variables)
    legacy = importlib.import_module("keras.src.legacy.saving.legacy_h5_format")  # there is no public name
    with importlib.import_module("h5py").File(filepath, "r") as file:
        saved = legacy.load_optimizer_weights_from_hdf5_group(file)
        for variable, value in zip(made.variables, saved, strict=True):  # set_weights() leaves out an inner optimizer's
            variable.assign(value)
    return made


def _checked(classes: Any) -> Sequence[type]:
    """The list of a script's optimizer classes, empty for None; raises TypeError for what is no such class."""
    found = list(() if classes is None else classes)
    if any(not isinstance(cls, type) or not issubclass(cls, keras.optimizers.Optimizer) for cls in found):
        raise TypeError(
            f"custom_optimizers: expected a list of classes of optimizers. Received: {classes!r}. Pass other classes "
            "and functions as custom_objects=, by their names."
        )
    return found
