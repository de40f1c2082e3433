"""Initialises Horovod for a framework, makes engines on its binding, and restarts it in an elastic job."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import elastic, farewell, own_threads
from .build import installed_build
from .environment import gloo_allreduce, is_elastic, launched, prepare_init, prepare_wait, started, started_otherwise
from .port import Engine
from .stderr import tell
from .version import check_versions, versions

T = TypeVar("T")

# framework -> our module and its engine
_ENGINES = {
    "torch": ("horovod", "HorovodEngine"),
    "tensorflow": ("horovod_tensorflow", "TensorflowEngine"),
}


INIT_S = 120.0  # seconds for which an elastic job retries a failed initialisation
TRY_S = 30.0  # the most that a try counts of these: the rest is the driver's wait for hosts, which has its own limit
UNLIKE = (
    "hvd_hetero: the first exchange of the ranks failed. Where none of them is gone: the Gloo of this one sums by "
    "{!r}, which has to be the same on all. Build Horovod alike on all hosts (hvd-hetero doctor), and set "
    "HOROVOD_GLOO_ALLREDUCE alike, or not at all."
)


def _class(framework: str) -> Any:
    if framework not in _ENGINES:
        raise ValueError(f"framework: expected one of {', '.join(_ENGINES)}. Received: {framework!r}.")
    module, name = _ENGINES[framework]
    return getattr(importlib.import_module(f"hvd_hetero.engine.{module}"), name)


def engine_of(framework: str, process_set: Any = None) -> Engine:
    """Returns the engine on Horovod's binding for `framework` ("torch" or "tensorflow"); Horovod must be initialised.

    A process uses one binding only: each contains a Horovod of its own, which would need its own initialisation.

    Args:
        process_set: Horovod's process set; None for all ranks.
    """
    engine: Engine = _class(framework)(process_set)
    return engine


Methods = list[Callable[[], None]]

_prepares: dict[str, bool] = {}  # by framework: whether Horovod was first initialised by this package, not the script
_again: dict[str, Callable[[], Methods]] = {}  # by framework: initialises again, with the script's arguments
_together: set[str] = set()  # the frameworks whose ranks have come together, unless Horovod was shut down since


def init(framework: str, *args: Any, **kwargs: Any) -> None:
    """Initialises Horovod for a framework, and starts the watchdog of long waits: see `engine.watch`.

    Sets environment variables of Horovod that suit ranks with little CPU, unless the user has set them. If the script
    has initialised Horovod before, only the way in which it waits (spin or sleep) still changes. A collective call; as
    with Horovod, one that is made again changes nothing, and waits for nobody.

    Args:
        framework: "torch" or "tensorflow".
        args, kwargs: those of `horovod.init`.

    Raises:
        RuntimeError: this process imports the script of a rank that has started it.
    """
    _check_process()
    binding = importlib.import_module(_class(framework).binding)
    if framework in _together and binding.is_initialized():
        binding.init(*args, **kwargs)
    else:
        _come_together(framework, *args, **kwargs)


def _check_process() -> None:
    """Raises RuntimeError in a process that imports the script once more because a rank has started it ("spawn",
    "forkserver"), as to load data: it would come to the other ranks in that one's place, and wait for what never comes.

    In a job of one rank it may initialise a Horovod of its own, as without this package.
    """
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)  # as `multiprocessing.spawn` asks
    if importing and (launched() or is_elastic()):
        raise RuntimeError(
            "Expected init() in the process of a rank. Received: a call in one that the rank has started, as to load "
            "data, and that imports the script once more. Put init() and all that follows it into a function, and call "
            'that under `if __name__ == "__main__":`. From Python 3.14 on, a script whose loaders have num_workers '
            "needs that."
        )


def _come_together(framework: str, *args: Any, **kwargs: Any) -> Methods:
    """Does what `init` does first, and returns the methods to be called after an elastic reset: see
    `agree_on_rebuilds`."""
    _together.discard(framework)
    binding = importlib.import_module(_class(framework).binding)
    prepare_wait()
    waits = not binding.is_initialized()
    # Horovod reads some settings only once in a process, even across elastic resets. If the script has initialised it
    # first, setting them now would make the variables differ from what Horovod does.
    if _prepares.setdefault(framework, waits) and waits:
        prepare_init()
    if not waits:
        own_threads.forget()
    with own_threads.starting(anew=waits):
        _initialise(binding, *args, **kwargs)
    if binding.size() == 1 and not (is_elastic() or args or kwargs.get("comm")):
        _check_alone()
    stays = framework in _again
    _again[framework] = functools.partial(_come_together, framework, *args, **kwargs)
    engine = _class(framework)()
    try:
        engine.watch()
    except engine.failure:
        if not is_elastic():
            tell(UNLIKE.format(gloo_allreduce()))
        raise
    check_versions(engine, versions(framework), stays=stays)
    methods: Methods = engine.agree_on_rebuilds()
    _together.add(framework)
    return methods


def _initialise(horovod: Any, *args: Any, **kwargs: Any) -> None:
    """Calls `horovod.init`. In an elastic job, retries for up to `INIT_S` if a rank is lost meanwhile.

    Raises:
        RuntimeError: the initialisation failed.
    """
    tried_s = 0.0
    while True:
        began_s = time.monotonic()
        try:
            horovod.init(*args, **kwargs)
            return
        except ValueError as error:
            if "initialization failed" not in str(error):
                raise
            tried_s += min(TRY_S, time.monotonic() - began_s)
            if not is_elastic() or tried_s > INIT_S:
                raise RuntimeError(
                    "Expected to reach all ranks, and the same process sets on all. Received: a failed initialisation; "
                    "the log above says what failed. Check that all hosts reach each other (horovodrun "
                    "--network-interfaces), and that no process set of init() is of all ranks or given twice."
                ) from error
            tell("hvd_hetero: a rank was lost while ranks came together; they do so again.")
            horovod.shutdown()
            time.sleep(1.0)


def _check_alone() -> None:
    """In a job of one rank: checks that this process was not meant to be one of several ranks.

    Such processes would each train alone and write the same files. Prints a warning if torchrun or Slurm, which start
    no Horovod ranks, has started several processes.

    Raises:
        RuntimeError: a launcher of Horovod ranks or MPI says that it has started several.
    """
    if told := started():
        name, size = told
        raise RuntimeError(
            f"Expected {size} ranks, which {name} says were started. Received: a Horovod of one. Where variables alone "
            "start ranks, set HOROVOD_CONTROLLER and HOROVOD_CPU_OPERATIONS to gloo, as horovodrun does; or start them "
            f"by the MPI that Horovod was built with; where each process is a job of its own, unset {name}."
        )
    if told := started_otherwise():
        name, size = told
        tell(
            f"hvd_hetero: {name} says that {size} processes were started, and each is a Horovod job of one rank: start "
            "Horovod's ranks with horovodrun, or by the MPI that Horovod was built with (mpirun, srun --mpi=pmix)."
        )


def shutdown(framework: str) -> None:
    """Shuts Horovod down, after waiting for the other ranks where that is needed: see `farewell`."""
    farewell.say()
    cls = _class(framework)
    importlib.import_module(cls.binding).shutdown()
    cls.forget()


def _restart(framework: str, waiting: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Shuts Horovod down, initialises it on the present ranks, and rebuilds the objects that depend on the ranks.

    A collective call of the present ranks.

    Args:
        waiting: returns a context manager that is active while this rank waits for the others.
    """
    cls = _class(framework)
    importlib.import_module(cls.binding).shutdown()
    cls.forget()
    with waiting():
        methods = _again[framework]()
    cls.rebuild(methods)


def elastic_run(framework: str, train: Callable[..., T], *, gone: Callable[[Exception], bool]) -> Callable[..., T]:
    """Wraps the function of an elastic job, for one framework: see `engine.elastic.run`.

    Args:
        framework: "torch" or "tensorflow".
        train: the script's function `train(state, ...)`.
        gone: returns whether an exception says that a peer is gone.
    """
    cls = _class(framework)
    restart = functools.partial(_restart, framework)

    def size() -> int:
        # Not a method of the binding, which holds Horovod's library: `horovod.run` pickles what a script has decorated.
        return int(importlib.import_module(cls.binding).size())

    def to_the_end(*args: Any, **kwargs: Any) -> T:
        cls.begin_train()
        farewell.begin()
        result = train(*args, **kwargs)
        farewell.say()
        return result

    return elastic.run(
        functools.wraps(train)(to_the_end), restart=restart, size=size, recoverable=gone, explain=cls.explain
    )


def start() -> Engine:
    """Initialises Horovod and returns the engine of all ranks, for programs that use no framework, as `probe`."""
    # torch is preferred, because it starts faster. A Horovod without a build record does not tell its frameworks.
    built = (installed_build() or {}).get("frameworks", {"torch": ""})
    framework = next((name for name in _ENGINES if name in built), "torch")
    init(framework)
    return engine_of(framework)
