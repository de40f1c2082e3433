"""`hvd-hetero build-horovod`: builds Horovod for the installed frameworks, with the repairs, and installs it.

The source is downloaded by pip, edited (`hvd_hetero.cli.edits`) and compiled to a wheel, which is kept in a cache.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hvd_hetero.cli import cuda, edits, toolchain
from hvd_hetero.cli.cache import LOG, Cache, default_folder, locked
from hvd_hetero.cli.error import CommandError, UsageError
from hvd_hetero.cli.progress import Progress
from hvd_hetero.cli.recipe import Recipe
from hvd_hetero.cli.wheel import build_wheel, download, install, is_installed, unpack
from hvd_hetero.engine.cache import key


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options, after parsing.

    Attributes:
        mpi: "auto" (with MPI if it is found), "on" or "off".
        gpu: "auto" (with NCCL if it is found), "nccl" or "off".
        frameworks: "torch", "tensorflow" or both; None: those that are installed.
        force: build even if the cache has the wheel.
        jobs: how many files to compile at a time; None: as many as there are cores.
        cache_dir: the folder of the cache; None: `default_folder()`.
        install: whether to install the wheel.
        plain: make only the edits that are needed to compile.
    """

    mpi: str = "auto"
    gpu: str = "auto"
    frameworks: tuple[str, ...] | None = None
    force: bool = False
    jobs: int | None = None
    cache_dir: Path | None = None
    install: bool = True
    plain: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("--mpi", choices=("auto", "on", "off"), default="auto", help="with MPI (auto: where found)")
    parser.add_argument("--gpu", choices=("auto", "nccl", "off"), default="auto", help="with NCCL (auto: where found)")
    parser.add_argument("--frameworks", metavar="LIST", help="torch, tensorflow or both (default: those found)")
    parser.add_argument("--force", action="store_true", help="build even if the cache holds the wheel")
    parser.add_argument("--jobs", type=int, metavar="N", help="compile N files at a time (default: all cores)")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="keep wheels here and not in the user's cache")
    parser.add_argument("--no-install", action="store_true", help="build and keep the wheel, but do not install it")
    parser.add_argument("--plain", action="store_true", help="only what is needed to compile: none of the repairs")


def options_from(arguments: argparse.Namespace) -> Options:
    """The options of a parsed command line.

    Raises:
        UsageError: --frameworks names an unknown framework or none, or --jobs is below 1.
    """
    frameworks: tuple[str, ...] | None = None
    if arguments.frameworks is not None:
        frameworks = tuple(dict.fromkeys(n.strip() for n in arguments.frameworks.split(",") if n.strip()))
        unknown = [name for name in frameworks if name not in toolchain.FRAMEWORKS]
        if unknown or not frameworks:
            raise UsageError(
                f"--frameworks expects {' or '.join(toolchain.FRAMEWORKS)}, or both with a comma between. "
                f"Received: {arguments.frameworks!r}."
            )
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UsageError(f"--jobs expects a number of 1 or more. Received: {arguments.jobs}.")
    return Options(
        mpi=arguments.mpi,
        gpu=arguments.gpu,
        frameworks=frameworks,
        force=arguments.force,
        jobs=arguments.jobs,
        cache_dir=arguments.cache_dir,
        install=not arguments.no_install,
        plain=arguments.plain,
    )


def recipe_for(options: Options) -> Recipe:
    """The recipe of a build in this environment: looks for the frameworks, the compiler, cmake, MPI, CUDA and NCCL.

    Raises:
        MissingFramework: a framework that is to be built for is not installed or cannot be imported.
        MissingTool: a tool or library that the build needs is missing.
    """
    frameworks = toolchain.frameworks(options.frameworks)
    torch = frameworks.get("torch", {})
    gpus_here = bool(torch.pop("gpus", False))  # removed: the wheel does not depend on whether this machine has a GPU
    torch_cuda = str(torch["cuda"]) if torch.get("cuda") else None
    compiler, compiler_version = toolchain.compiler()
    toolchain.make_program()
    cmake, _ = toolchain.cmake()
    cpu_flags = toolchain.cpu_flags()
    mpi = toolchain.mpi(options.mpi)
    gpu = cuda.gpu(options.gpu, torch_cuda, "torch" in frameworks, gpus_here=gpus_here)
    cuda.check_tensorflow(gpu, frameworks.get("tensorflow"))
    return Recipe(
        edits=edits.chosen(toolchain.needs_met(frameworks, cpu_flags, gpu.cuda), options.plain),
        frameworks=frameworks,
        compiler=compiler,
        compiler_version=compiler_version,
        cmake=cmake,
        cpu_flags=cpu_flags,
        mpi=mpi,
        gpu=gpu,
        plain=options.plain,
        jobs=options.jobs or len(os.sched_getaffinity(0)),
    )


def run(options: Options, progress: Progress | None = None) -> Path:
    """Builds the wheel unless the cache has it, installs it if asked to, and prints and returns its path in the cache.

    The stages are shown by `progress`; None: on stderr. Raises the subclass of `CommandError` for what has failed.
    """
    show = progress if progress is not None else Progress()
    try:
        return _run(options, show)
    finally:
        show.end_line()


def _run(options: Options, show: Progress) -> Path:
    show.stage("looking at the environment")
    recipe = recipe_for(options)
    cache = Cache((options.cache_dir or default_folder()).expanduser().absolute())
    name = key(recipe.facts())
    with cache.lock(name, lambda: show.stage("waiting for another build, or install, of the same wheel")):
        wheel = cache.wheel(name)
        if wheel is None or options.force:
            wheel = _build(recipe, cache, name, show)
            cache.prune()
        else:
            show.stage(f"found in the cache: {wheel.parent.name}")
        if options.install:
            _install(wheel, show, force=options.force)
    show.done(f"Horovod {edits.HOROVOD_VERSION} {'installed' if options.install else 'built'} for {recipe.summary()}")
    print(wheel)
    return wheel


def _install(wheel: Path, show: Progress, *, force: bool) -> None:
    """Installs `wheel` unless it is installed; with `force`, in any case."""
    # Several hosts may share one environment and install into it at once; each install removes the one before.
    place = Path(sysconfig.get_path("purelib")) / ".hvd_hetero-horovod.lock"
    with locked(place, lambda: show.stage("waiting for another install into this environment")):
        if force or not is_installed(wheel):
            show.stage("installing")
            install(wheel)


def _build(recipe: Recipe, cache: Cache, name: str, show: Progress) -> Path:
    """Builds the wheel in a temporary folder, and returns its path in the cache.

    Raises `CommandError` if a disk is full, or a subclass of it for what else has failed.
    """
    entry = cache.entry(name)
    try:
        with tempfile.TemporaryDirectory(prefix="hvd-hetero-horovod-") as folder:
            built, record = _build_in(Path(folder), recipe, entry, show)
            return cache.store(name, built, record)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CommandError(
            f"expected room for a build in {tempfile.gettempdir()}, and for its wheel in {cache.folder}. Received: "
            f"{error.strerror}.\n  What to do: make room, or name other folders with TMPDIR and --cache-dir."
        ) from error


def _build_in(place: Path, recipe: Recipe, entry: Path, show: Progress) -> tuple[Path, dict[str, object]]:
    """Builds the wheel in the folder `place`; its log goes to `entry`. Returns the wheel, and the cache's record."""
    show.stage(f"downloading horovod {edits.HOROVOD_VERSION}")
    source = unpack(download(place / "sdist"), place / "source")
    show.stage(f"editing the source: {', '.join(edits.names(recipe.edits))}")
    record = recipe.record(edits.apply(recipe.edits, source))
    # Each process writes a log of its own, because a file system without locks lets two builds run at once.
    log = entry / f"{LOG}.{os.getpid()}"
    show.stage(f"compiling for {recipe.summary()}, {recipe.jobs} at a time")
    try:
        built = build_wheel(source, place / "wheel", recipe, record, log, show.line)
    finally:
        if log.exists():
            os.replace(log, entry / LOG)
    return built, {**record, "depends_on": recipe.facts()}


def command(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit code 0; failures are raised as a `CommandError`."""
    # The compilers have a process group of their own, which signals to this process do not reach. So a signal raises
    # SystemExit here, upon which `build_wheel` ends them.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]  # nohup ignores SIGHUP
    for number in heard:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        run(options_from(arguments))
    finally:
        for number in heard:
            signal.signal(number, before[number])
    return 0
