"""Every environment variable that this package reads or sets while a job runs; building Horovod reads more (`cli`)."""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvd_hetero.policy.patience import Patience

from .build import installed_build

# Read by a Horovod that `hvd-hetero build-horovod` built; see hvd_hetero/cli/edits.py for what each does.
EVENT_DRIVEN_CYCLE = "HOROVOD_EVENT_DRIVEN_CYCLE"
BLOCKING_WAIT = "HOROVOD_BLOCKING_WAIT"
CYCLE_TIME_MS = "HOROVOD_CYCLE_TIME"
CACHE_CAPACITY = "HOROVOD_CACHE_CAPACITY"
GLOO_ALLREDUCE = "HOROVOD_GLOO_ALLREDUCE"
FUSION_LIMIT = "HOROVOD_FUSION_LIMIT"
FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"

# Every cycle in which nothing is agreed costs each rank a small all-reduce. From 20 to 100 ms, Horovod's threads went
# from 7.4 to 5.2 ms of CPU per step on a rank with 0.2 cores (ci/bench mixed); what is enqueued starts a cycle anyway.
EVENT_DRIVEN_CYCLE_MS = "100"

# Bytes. What a step sends is in buckets already. Where the host runs ahead of a GPU they are all asked for at a time,
# and fused they travel when the last is there: a step of ci/gpu mixed took 91 ms, and 61 without.
FUSION_LIMIT_BYTES = str(2**20)
FUSION_THRESHOLD_BYTES = 2**27  # Horovod's own


@functools.cache  # every wait asks, and the answer is in a file
def repairs() -> frozenset[str]:
    """The names of the repairs in the installed Horovod; empty for one built otherwise."""
    build = installed_build()
    return frozenset(build["edits"]) if build else frozenset()


def prepare_wait() -> None:
    """Makes `horovod.torch.synchronize` sleep instead of spin, unless the user has set the variable. Horovod reads it
    at each wait, so this has an effect also after `hvd.init()`."""
    if "blocking_wait" in repairs():
        os.environ.setdefault(BLOCKING_WAIT, "1")


def prepare_init() -> None:
    """Sets variables that reduce Horovod's CPU time, unless the user has set them; is called before `hvd.init()`.

    Horovod's background thread negotiates once a cycle, on all ranks in lock-step. At the default cycle of 1 ms that
    costs a rank with a fifth of a core a good part of it. An event-driven cycle (a repair) starts when there is work,
    and so may be long; without the repair, 5 ms is a compromise between that cost and the latency it adds. Under MPI
    the cycle is not changed: MPI spins within the negotiation, so entering it early costs CPU instead of saving it. It
    is not changed in an elastic job without the repair `fresh_settings` either: ranks that stay and ranks that join
    would fuse different tensors.
    """
    for name in (CYCLE_TIME_MS, CACHE_CAPACITY):
        if os.environ.get(name) == "(None,)":  # of a horovod.run without a repair; Horovod takes it for 0, and spins
            del os.environ[name]
    if "gloo_hierarchy" in repairs():
        os.environ.setdefault(GLOO_ALLREDUCE, "hierarchical")
    if "fusion_limit" in repairs() and not (_fusion_is_chosen() or _sums_on_gpus()):
        os.environ.setdefault(FUSION_LIMIT, FUSION_LIMIT_BYTES)
    if under_mpi():
        return
    if "event_driven_cycle" in repairs():
        os.environ.setdefault(EVENT_DRIVEN_CYCLE, "1")
    if is_elastic() and "fresh_settings" not in repairs():
        return
    event_driven = "event_driven_cycle" in repairs() and os.environ[EVENT_DRIVEN_CYCLE] == "1"
    os.environ.setdefault(CYCLE_TIME_MS, EVENT_DRIVEN_CYCLE_MS if event_driven else "5")


def tensorflow_threads() -> int:
    """How many operations TensorFlow may run side by side where a script chooses nothing; 0: as many as there are CPUs.
    """
    return _leading_number(os.environ.get("TF_NUM_INTEROP_THREADS"), 0)


def _sums_on_gpus() -> bool:
    """Whether the installed Horovod is built with NCCL: the host waits for no gradient there, and copies none."""
    return bool(((installed_build() or {}).get("gpu") or {}).get("nccl"))


def _fusion_is_chosen() -> bool:
    """Whether the user has set Horovod's fusion threshold, or switched on Horovod's autotuning of it."""
    return FUSION_THRESHOLD in os.environ or _leading_number(os.environ.get("HOROVOD_AUTOTUNE"), 0) > 0


def is_first_worker() -> bool:
    """Whether this process is the first that an elastic job has started; True if the variable that tells is not set.

    The first one is rank 0 as the job begins. So any other that is rank 0 and does not have the job's state shows that
    the state is lost.
    """
    return int(os.environ.get("HOROVOD_ELASTIC_WORKER", 1)) <= 1


def under_mpi() -> bool:
    """True when mpirun started this process and nothing says that Horovod should use Gloo all the same."""
    started = any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))
    return started and os.environ.get("HOROVOD_CONTROLLER", "").lower() != "gloo"


def gloo_allreduce() -> str:
    """The all-reduce algorithm of this rank's Gloo: "ring", or with our repair the value of HOROVOD_GLOO_ALLREDUCE."""
    return os.environ.get(GLOO_ALLREDUCE, "ring") if "gloo_hierarchy" in repairs() else "ring"


def fused_bytes() -> int:
    """The most bytes that this rank's Horovod fuses into one all-reduce. It must be the same on all ranks: each decides
    by itself what it fuses."""
    threshold = _leading_number(os.environ.get(FUSION_THRESHOLD), FUSION_THRESHOLD_BYTES)
    limit = _leading_number(os.environ.get(FUSION_LIMIT), 0) if "fusion_limit" in repairs() else 0
    return min(limit, threshold) if limit > 0 else threshold


def _leading_number(text: str | None, default: int) -> int:
    """The number that C's strtol reads at the beginning of a variable."""
    if text is None:
        return default
    found = re.match(r"\s*([+-]?\d+)", text)
    return int(found[1]) if found else 0


def waits_without_spinning() -> bool:
    """True when `horovod.torch.synchronize` sleeps; upstream's spins."""
    return "blocking_wait" in repairs() and os.environ.get(BLOCKING_WAIT) == "1"


def is_elastic() -> bool:
    """True when an elastic horovodrun started this process: ranks may leave and join."""
    return os.environ.get("HOROVOD_ELASTIC", "0") == "1"


_runs: Counter[tuple[str, int]] = Counter()  # balancers of this process, by their folder and rank


def run_folder(ranks: Sequence[int], rank: int) -> str | None:
    """The folder for a balancer's trace if the script names none: made of `HVD_HETERO_RUN`; None if that is not set.

    A trace has one file for each rank, so each further balancer of this process needs another folder: "-2" and so on
    is appended. Not in an elastic job, where a balancer that is made again continues its files. If the ranks are not
    0, 1, …, their numbers are appended as well.

    Args:
        ranks: the global ranks that train together.
        rank: this rank's index among them.
    """
    folder = os.environ.get("HVD_HETERO_RUN", "").rstrip("/")
    if not folder:
        return None
    if tuple(ranks) != tuple(range(len(ranks))):
        folder = f"{folder}-of-{'_'.join(map(str, ranks))}"
    if is_elastic():
        return folder
    _runs[folder, rank] += 1
    number = _runs[folder, rank]
    return folder if number == 1 else f"{folder}-{number}"


def launcher_host_name() -> str | None:
    """What horovodrun calls this rank's host (the name in its `-H`), or None without it and under MPI."""
    return os.environ.get("HOROVOD_HOSTNAME") or None


def rendezvous_address() -> str | None:
    """The address of horovodrun's rendezvous server, or None under MPI."""
    return os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or None


def patience() -> Patience | None:
    """The watchdog's limits, from the variables of Horovod's own stall check; None if that check is switched off.

    `horovodrun --no-stall-check`, `--stall-check-warning-time-seconds` and `--stall-check-shutdown-time-seconds` set
    the variables. For one that is not set, the default of `Patience` holds. A shutdown time of 0 means never, as in
    Horovod.

    Raises:
        ValueError: a time is not a number, or is below 0.
    """
    if _leading_number(os.environ.get("HOROVOD_STALL_CHECK_DISABLE"), 0) > 0:
        return None
    warn_s, bound_s = _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS"), _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    chosen = Patience(fixed_warn_s=warn_s or None)
    return chosen if bound_s is None else replace(chosen, bound_s=bound_s or math.inf)


def _seconds(name: str) -> float | None:
    """The value of a variable, in seconds; None if it is not set. Raises ValueError if it is no number, or negative."""
    text = os.environ.get(name, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{name}: expected seconds, 0 or more. Received: {text!r}.")
    return seconds


def started() -> tuple[str, int] | None:
    """The name and value of the variable by which horovodrun, or else MPI, says how many ranks it has started; None if
    it says one or nothing."""
    if "HOROVOD_SIZE" in os.environ:
        return _told_of_several("HOROVOD_SIZE")
    return _told_of_several("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if under_mpi() else None


def started_otherwise() -> tuple[str, int] | None:
    """The name and value of the variable by which torchrun or Slurm says how many processes it has started; None if it
    says one or nothing, or if this process is the rank of a job of its own, which horovodrun has started."""
    if "HOROVOD_SIZE" in os.environ:
        return None
    return _told_of_several(*(["WORLD_SIZE"] if "TORCHELASTIC_RUN_ID" in os.environ else []), "SLURM_STEP_NUM_TASKS")


def _told_of_several(*names: str) -> tuple[str, int] | None:
    sizes = ((name, _leading_number(os.environ.get(name), 1)) for name in names)
    return next(((name, size) for name, size in sizes if size > 1), None)


def launched() -> bool:
    """True when a launcher (horovodrun, mpirun) started this process as one of several ranks."""
    return under_mpi() or int(os.environ.get("HOROVOD_SIZE") or 1) > 1


def gloo_interface() -> str:
    """The network interface that Gloo was told to take; "" where it was not."""
    return os.environ.get("HOROVOD_GLOO_IFACE", "")


def visible_gpus() -> str | None:
    """The text of CUDA_VISIBLE_DEVICES; None where it is not set, so that every GPU is visible."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def numbers_gpus_by_bus() -> bool:
    """True when CUDA numbers GPUs as NVML does. Otherwise the fastest comes first ("CUDA Environment Variables" in
    NVIDIA's programming guide)."""
    return os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def cache_folder() -> Path:
    """`hvd_hetero` in the user's cache: XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification says to ignore a relative path
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hvd_hetero"
