"""`import hvd_hetero.keras as hvd`: Horovod for Keras 3, and training on mixed hardware.

Functions, optimizers and callbacks of `horovod.keras` and `horovod.tensorflow.keras` have the same names, arguments and
meanings here, with Keras's back ends "tensorflow" and "torch", except that functions return numpy arrays. Arguments
that only this package has are passed by name. A name of Horovod's that is missing here raises an error that says what
takes its place: see `absent`.
"""

from typing import TYPE_CHECKING, Any

from hvd_hetero.engine.checkpoint_file import CheckpointError
from hvd_hetero.engine.shared_sets import add_process_set, remove_process_set
from hvd_hetero.optimizers.compression import Compression
from hvd_hetero.optimizers.departure import PeerError
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.outer import Outer
from hvd_hetero.optimizers.parameter_guard import DivergedError
from hvd_hetero.policy.ladder import Rung
from hvd_hetero.policy.replan import ReplanRule
from hvd_hetero.policy.topology import Topology

from . import absent as _absent
from . import backend, callbacks, elastic
from .balancer import Balancer
from .checkpoint import Checkpoint
from .dataset import BalancedDataset
from .evaluation import EvaluationDataset
from .function import (
    allgather,
    allgather_object,
    barrier,
    broadcast,
    broadcast_object,
    broadcast_variables,
    init,
    shutdown,
)
from .normalization import SyncBatchNormalization
from .optimizer import DistributedOptimizer
from .reduction import allreduce, reducescatter
from .saving import load_model
from .tape import DistributedGradientTape

_horovod = backend.horovod
# The same objects whichever Horovod it is: `from … import` would have to name one.
Average = _horovod.Average
Max = _horovod.Max
Min = _horovod.Min
ProcessSet = _horovod.ProcessSet
Sum = _horovod.Sum
ccl_built = _horovod.ccl_built
cross_rank = _horovod.cross_rank
cross_size = _horovod.cross_size
cuda_built = _horovod.cuda_built
ddl_built = _horovod.ddl_built
global_process_set = _horovod.global_process_set
gloo_built = _horovod.gloo_built
gloo_enabled = _horovod.gloo_enabled
is_initialized = _horovod.is_initialized
local_rank = _horovod.local_rank
local_size = _horovod.local_size
mpi_built = _horovod.mpi_built
mpi_enabled = _horovod.mpi_enabled
mpi_threads_supported = _horovod.mpi_threads_supported
nccl_built = _horovod.nccl_built
rank = _horovod.rank
rocm_built = _horovod.rocm_built
size = _horovod.size
start_timeline = _horovod.start_timeline
stop_timeline = _horovod.stop_timeline

__all__ = [
    "Average",
    "BalancedDataset",
    "Balancer",
    "Checkpoint",
    "CheckpointError",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "DivergedError",
    "EvaluationDataset",
    "LocalSGD",
    "Max",
    "Min",
    "Outer",
    "PeerError",
    "ProcessSet",
    "ReplanRule",
    "Rung",
    "Sum",
    "SyncBatchNormalization",
    "Topology",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

if not TYPE_CHECKING:  # a type checker knows the names that are here

    def __getattr__(name: str) -> Any:
        raise AttributeError(_absent.absent(__name__, name))
