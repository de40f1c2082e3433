"""Says what takes the place of Horovod's names that the Keras face does not have."""

from __future__ import annotations

from collections.abc import Mapping

_GROUPED = "Call the operation for each value, or once for one array of them all."
_NUMBER = "Use hvd.{}(), whose value a tf.function keeps from when it was traced."
# By name of `horovod.keras`, `horovod.tensorflow.keras` or `horovod.tensorflow`: what a script does instead.
ABSENT: Mapping[str, str] = {
    "Adasum": "Use op=hvd.Average or hvd.Sum.",
    "Product": "Multiply what hvd.allgather returns: hvd.allgather([value]).prod(0).",
    "alltoall": "Take this rank's part of what hvd.allgather or hvd.allgather_object returns.",
    "broadcast_": "Use hvd.broadcast_variables(variables, root_rank=0), or hvd.broadcast for a value.",
    "broadcast_global_variables": "Use hvd.broadcast_variables(model.variables, root_rank=0), or the callback "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0).",
    "broadcast_object_fn": "Use hvd.broadcast_object.",
    "check_num_rank_power_of_2": "It is for Adasum, which is not here either: use op=hvd.Average or hvd.Sum.",
    "gpu_available": 'Use tf.config.list_physical_devices("GPU").',
    "grouped_allgather": _GROUPED,
    "grouped_allreduce": _GROUPED,
    "grouped_reducescatter": _GROUPED,
    "is_homogeneous": "Compare what hvd.allgather_object(hvd.local_size()) returns.",
    "join": "With a balancer all ranks have equally many batches. To stop when one rank says so, use "
    "hvd.callbacks.StopTogetherCallback(), or balancer.ask_to_stop() and balancer.stopping.",
    "local_rank_op": _NUMBER.format("local_rank"),
    "local_size_op": _NUMBER.format("local_size"),
    "rank_op": _NUMBER.format("rank"),
    "size_op": _NUMBER.format("size"),
    "process_set_included_op": "Use process_set.included().",
    "PartialDistributedGradientTape": "Take the gradients of local layers from the tf.GradientTape(persistent=True) "
    "itself, and those of the others from hvd.DistributedGradientTape.",
    "PartialDistributedOptimizer": "Give local layers an optimizer of their own, which is not distributed, in a "
    "train_step.",
    "TensorFlowState": "Use hvd.elastic.TensorFlowKerasState(model, optimizer).",
}


def absent(module: str, name: str) -> str:
    """The text of an AttributeError for a name that `module` does not have."""
    text = f"module {module!r} has no attribute {name!r}"
    return f"{text}, which Horovod has. {ABSENT[name]}" if name in ABSENT else text
