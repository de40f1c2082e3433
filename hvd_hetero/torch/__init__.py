"""`import hvd_hetero.torch as hvd`: everything of `horovod.torch`, and training on mixed hardware.

Every public name of `horovod.torch` is here with its meaning unchanged. Added are `Balancer`, `BalancedDataLoader`,
`BalancedBatchSampler`, `EvaluationDataLoader`, `LatencyAwareLR`, `LocalSGD`, `Topology`, `Checkpoint` and what goes
with them, and keyword arguments of `DistributedOptimizer`; `Compression`, `SyncBatchNorm` and `elastic` do more than
Horovod's.
"""

from . import needed  # noqa: F401, first of all

# isort: split
from horovod.torch import (  # noqa: F401  # modules, for who names them
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    ccl_built,
    check_extension,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    functions,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_ops,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    reducescatter,
    reducescatter_async,
    rocm_built,
    size,
    sparse_allreduce_async,
    start_timeline,
    stop_timeline,
)

from hvd_hetero.engine.checkpoint_file import CheckpointError
from hvd_hetero.engine.shared_sets import add_process_set, remove_process_set
from hvd_hetero.optimizers.departure import PeerError
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.outer import Outer
from hvd_hetero.optimizers.parameter_guard import DivergedError
from hvd_hetero.policy.ladder import Rung
from hvd_hetero.policy.replan import ReplanRule
from hvd_hetero.policy.topology import Topology

from . import compression, elastic  # noqa: F401
from .balancer import Balancer
from .batch_sampler import BalancedBatchSampler
from .checkpoint import Checkpoint
from .compression import Compression
from .evaluation import EvaluationDataLoader
from .function import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    init,
    shutdown,
    synchronize,
)
from .latency_lr import LatencyAwareLR
from .loader import BalancedDataLoader
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "BalancedBatchSampler",
    "BalancedDataLoader",
    "Balancer",
    "Checkpoint",
    "CheckpointError",
    "Compression",
    "DistributedOptimizer",
    "DivergedError",
    "EvaluationDataLoader",
    "HorovodInternalError",
    "LatencyAwareLR",
    "LocalSGD",
    "Max",
    "Min",
    "Outer",
    "PeerError",
    "ProcessSet",
    "Product",
    "ReplanRule",
    "Rung",
    "Sum",
    "SyncBatchNorm",
    "Topology",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
