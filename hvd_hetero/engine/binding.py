"""Which engine: the one of the framework whose process this is."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import elastic, farewell
from .build import installed_build
from .environment import gloo_allreduce, is_elastic, prepare_init, prepare_wait, started, started_otherwise
from .port import Engine
from .stderr import tell
from .version import check_versions, versions

T = TypeVar("T")

# framework -> our module and its engine
_ENGINES = {
    "torch": ("horovod", "HorovodEngine"),
    "tensorflow": ("horovod_tensorflow", "TensorflowEngine"),
}


INIT_S = 120.0  # an elastic job tries for so long to bring its ranks together,
TRY_S = 30.0  # of which a try counts for no more: the rest is the driver's wait for hosts, which has its own bound
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
    """The engine on Horovod's binding of `framework`, "torch" or "tensorflow", once Horovod is initialised.

    One process uses one binding: each brings a Horovod of its own, which would have to be initialised by itself.
    """
    engine: Engine = _class(framework)(process_set)
    return engine


Methods = list[Callable[[], None]]

_prepares: dict[str, bool] = {}  # by framework: whether the script left it to this package
_again: dict[str, Callable[[], Methods]] = {}  # by framework: initialises as the script did


def init(framework: str, *args: Any, **kwargs: Any) -> None:
    """Initialises Horovod for a framework, with settings that suit ranks with little CPU where the user has set none.

    A Horovod that the script has initialised already goes on with the settings that it found then, but for how it
    waits. From here on, long waits of the ranks for each other are explained, and ended at last: see `engine.watch`.
    """
    _come_together(framework, *args, **kwargs)


def _come_together(framework: str, *args: Any, **kwargs: Any) -> Methods:
    """`init`; returns what is to be rebuilt where ranks have become others."""
    binding = importlib.import_module(_class(framework).binding)
    prepare_wait()
    waits = not binding.is_initialized()
    # Of its settings it reads some once in a process, also where ranks change: others would be taken for what it does.
    if _prepares.setdefault(framework, waits) and waits:
        prepare_init()
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
    return methods


def _initialise(horovod: Any, *args: Any, **kwargs: Any) -> None:
    """Initialises; again, in an elastic job, where a rank was lost in that moment."""
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
            text = "hvd_hetero: a rank was lost while ranks came together; they do so again."
            tell(text)
            horovod.shutdown()
            time.sleep(1.0)


def _check_alone() -> None:
    """In a job of one rank: raises RuntimeError if this process was started as one of several, each of which trains
    by itself and writes the same files. If a starter that Horovod does not know (torchrun, Slurm) did, only says so."""
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
            "Horovod's ranks with horovodrun, mpirun, or srun --mpi=pmix."
        )


def shutdown(framework: str) -> None:
    """Shuts Horovod down, once all ranks are through with what they do together."""
    farewell.say()
    importlib.import_module(_class(framework).binding).shutdown()


def _restart(framework: str, waiting: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Initialises Horovod as it was, on the ranks that there are now; what was made on engines is rebuilt on them.
    A collective call of those ranks, for which it waits within `waiting()`."""
    cls = _class(framework)
    importlib.import_module(cls.binding).shutdown()
    cls.forget()
    with waiting():
        methods = _again[framework]()
    cls.rebuild(methods)


def elastic_run(framework: str, train: Callable[..., T], *, gone: Callable[[Exception], bool]) -> Callable[..., T]:
    """`train(state, ...)` as `engine.elastic.run` calls it anew; `gone`: whether an error says that a peer is gone."""
    cls = _class(framework)
    horovod = importlib.import_module(cls.binding)
    restart = functools.partial(_restart, framework)

    def to_the_end(*args: Any, **kwargs: Any) -> T:
        cls.enter_train()
        result = train(*args, **kwargs)
        farewell.say()
        return result

    return elastic.run(
        functools.wraps(train)(to_the_end), restart=restart, size=horovod.size, recoverable=gone, explain=cls.explain
    )


def start() -> Engine:
    """The engine of all ranks, initialised; for programs that have no face of a framework."""
    # Torch starts faster, where Horovod was built for both. A Horovod that others built does not say for what.
    built = (installed_build() or {}).get("frameworks", {"torch": ""})
    framework = next((name for name in _ENGINES if name in built), "torch")
    init(framework)
    return engine_of(framework)
