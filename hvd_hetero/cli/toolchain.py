"""What this environment offers for a build of Horovod: frameworks, C++ compiler, make, cmake, MPI, processor."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from hvd_hetero.cli.error import MissingFramework, MissingTool

FRAMEWORKS = ("torch", "tensorflow")
TIMEOUT_S = 120.0  # for a program's answer
_TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly")
_TORCH_PROBE = (
    "import json, torch; print(json.dumps({'version': torch.__version__, "
    "'cxx11_abi': bool(torch._C._GLIBCXX_USE_CXX11_ABI), 'cuda': torch.version.cuda, 'hip': torch.version.hip, "
    "'gpus': torch.cuda.is_available()}))"
)


def output(command: Sequence[str]) -> str | None:
    """What `command` prints on stdout and stderr together, stripped; None if it cannot run, fails, or is too slow."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def first_line(text: str | None) -> str:
    """The first line of `text` that is not blank, stripped; "" if there is none."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")


def package_version(*packages: str) -> str | None:
    """The version of the first of `packages` that is installed; None if none is."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def torch_facts() -> dict[str, object] | None:
    """What a build has to know of PyTorch, which a new process is asked for; None if it is not installed.

    Returns:
        "version", "cxx11_abi" (whether it uses the C++11 ABI), "cuda" and "hip" (the version that it is built for, or
        None) and "gpus" (whether it finds a GPU).

    Raises:
        MissingFramework: PyTorch is installed, and cannot be imported.
    """
    if package_version("torch") is None:
        return None
    answer = output([sys.executable, "-c", _TORCH_PROBE])
    if answer is None:
        raise MissingFramework(
            "expected PyTorch to be importable, for it is installed. Received: `import torch` fails in "
            f"{sys.executable}.\n  What to do: run `python -c 'import torch'` and repair what it says."
        )
    return dict(json.loads(answer.splitlines()[-1]))


def tensorflow_version() -> str | None:
    """The version of TensorFlow, whichever of its packages is installed; None if none is."""
    return package_version(*_TENSORFLOW_PACKAGES)


def tensorflow_facts() -> dict[str, object] | None:
    """What a build has to know of TensorFlow; None if it is not installed.

    It is read from TensorFlow's files, because importing TensorFlow takes seconds.

    Returns:
        "version", and "cuda" (the CUDA version that it is built for, or None).
    """
    version = tensorflow_version()
    if version is None:
        return None
    spec = importlib.util.find_spec("tensorflow")
    try:
        text = (Path(spec.origin).parent / "python/platform/build_info.py").read_text() if spec and spec.origin else ""
    except OSError:
        text = ""
    cuda = re.search(r"'cuda_version', '([^']+)'", text) if "('is_cuda_build', True)" in text else None
    return {"version": version, "cuda": cuda[1] if cuda else None}


def frameworks(asked: Sequence[str] | None) -> dict[str, dict[str, object]]:
    """The frameworks to build Horovod for: name → facts, as from `torch_facts` and `tensorflow_facts`.

    Args:
        asked: the names of frameworks, all of which must be installed; None: all that are installed.

    Raises:
        MissingFramework: one that was asked for is not installed, none is installed, or PyTorch cannot be imported.
    """
    ways = {"torch": torch_facts, "tensorflow": tensorflow_facts}
    found = {
        name: facts for name, find in ways.items() if (asked is None or name in asked) and (facts := find()) is not None
    }
    missing = [name for name in asked or () if name not in found]
    if missing or not found:
        wanted = " and ".join(missing) if missing else "PyTorch or TensorFlow"
        raise MissingFramework(
            f"expected {wanted} in the environment of {sys.executable}, and it is not installed there.\n"
            f"  What to do: install it first (`pip install {' '.join(missing) or 'torch'}`): Horovod is compiled "
            "against the frameworks that are there."
        )
    return found


def needs_met(found: Mapping[str, Mapping[str, object]], flags: Sequence[str], cuda: str | None = None) -> set[str]:
    """The words of `Edit.needs` that are true of a build; `edits.chosen` chooses the edits by them.

    Args:
        found: the frameworks of the build: name → facts, as from `frameworks`.
        flags: the flags of the processor, as from `cpu_flags`.
        cuda: the version of the CUDA compiler for Horovod's part for PyTorch; None: there is none.
    """
    torch = found.get("torch", {})
    # TensorFlow's packages for Linux have had the C++11 ABI since 2.10. With GPU support, the sources that both
    # libraries share are compiled differently for PyTorch.
    one_abi = bool(torch.get("cxx11_abi")) and not (cuda or torch.get("hip"))
    return {
        *found,
        *(["f16c"] if {"avx", "f16c"} <= set(flags) else []),
        *(["one_abi"] if one_abi else []),
        *(["no_cuda"] if torch.get("cuda") and cuda is None else []),
    }


OLDEST_GCC, OLDEST_CLANG = 11, 14


def _is_old(version: str) -> bool:
    """Whether the first line of a compiler's --version names a g++ or clang++ that is too old for C++20.

    A compiler of another kind counts as new enough.
    """
    clang, gcc = re.search(r"clang version (\d+)", version), re.search(r"\) (\d+)\.\d+", version)
    return int(clang[1]) < OLDEST_CLANG if clang else int(gcc[1]) < OLDEST_GCC if gcc else False


def compiler() -> tuple[str, str]:
    """The C++ compiler to build with: CXX if it is set, else the first of c++, g++ and clang++ that is new enough.

    Returns:
        Its command, and the first line that it prints for --version.

    Raises:
        MissingTool: there is none that runs and is new enough.
    """
    chosen, too_old = os.environ.get("CXX", "").strip(), ""
    for command in (chosen,) if chosen else ("c++", "g++", "clang++"):
        try:
            words = shlex.split(command)
        except ValueError:  # CXX has an opening quote and no closing one
            break
        if version := first_line(output([*words, "--version"])):
            if not _is_old(version):
                return command, version
            too_old = too_old or version
    if too_old:
        raise MissingTool(
            f"expected g++ {OLDEST_GCC} or newer, or clang++ {OLDEST_CLANG} or newer, for C++20. Received: {too_old}.\n"
            "  What to do: install a newer one, and name it with CXX."
        )
    if chosen:
        raise MissingTool(
            f"CXX: expected the command of a C++ compiler that runs here. Received: {chosen!r}.\n"
            "  What to do: name another one, or unset CXX to have c++, g++ or clang++ found."
        )
    raise MissingTool(
        "expected a C++ compiler (c++, g++ or clang++; or CXX), and none runs here.\n"
        "  What to do: install one with C++20, for example `apt-get install g++ make` or `dnf install gcc-c++ make`."
    )


def make_program() -> str:
    """The path of make or gmake. Raises `MissingTool` if there is neither."""
    program = shutil.which("make") or shutil.which("gmake")
    if program is None:
        raise MissingTool(
            "expected `make`, with which cmake builds, and it is not there.\n"
            "  What to do: install it, for example `apt-get install make`."
        )
    return program


def cmake() -> tuple[str, str]:
    """The path and version of the first cmake of 3.13 or later: HOROVOD_CMAKE, this environment's, or that on PATH.

    Raises `MissingTool` if there is none.
    """
    beside = str(Path(sysconfig.get_path("scripts")) / "cmake")
    seen: list[str] = []
    for program in dict.fromkeys(filter(None, (os.environ.get("HOROVOD_CMAKE"), beside, shutil.which("cmake")))):
        match = re.search(r"version\s+(\d+)\.(\d+)(\S*)", output([program, "--version"]) or "")
        if match and (int(match[1]), int(match[2])) >= (3, 13):
            return program, f"{match[1]}.{match[2]}{match[3]}"
        if match:
            seen.append(f"{match[1]}.{match[2]}{match[3]}")
    raise MissingTool(
        f"expected cmake 3.13 or later. Received: {', '.join(seen) or 'none'}.\n"
        "  What to do: `pip install cmake` in this environment, or install your system's package."
    )


def mpi(option: str) -> str | None:
    """The version of the MPI to build with, as its launcher prints it; None: build without MPI.

    Args:
        option: the value of --mpi: "auto" (if it is found), "on" or "off".

    Raises:
        MissingTool: `option` is "on", and the compiler wrapper or the launcher is missing.
    """
    if option == "off":
        return None
    wrapper = next((p for p in ("mpicxx", "mpic++", "mpiCC") if shutil.which(p)), None)
    launcher = shutil.which("mpirun") or shutil.which("mpiexec")
    if wrapper and launcher and (version := first_line(output([launcher, "--version"]))):
        return version
    if option == "on":
        raise MissingTool(
            "expected an MPI with its compiler wrapper (mpicxx) and launcher (mpirun), for --mpi on. Received: "
            f"wrapper {wrapper or 'none'}, launcher {launcher or 'none'}.\n"
            "  What to do: install one, for example `apt-get install libopenmpi-dev openmpi-bin`, or say --mpi off "
            "(Gloo alone needs nothing)."
        )
    return None


def cpu_flags() -> tuple[str, ...]:
    """Those of "avx", "f16c" and "fma" that this processor has, by /proc/cpuinfo; empty if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    match = re.search(r"^flags\s*:\s*(.*)$", text, flags=re.MULTILINE)
    have = set(match[1].split()) if match else set()
    return tuple(flag for flag in ("avx", "f16c", "fma") if flag in have)


def python_facts() -> dict[str, str]:
    """The versions of Python and of the system's libraries that a compiled wheel depends on."""
    return {
        "python": platform.python_version(),
        "abi": str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag),
        "platform": sysconfig.get_platform(),
        "libc": " ".join(platform.libc_ver()).strip(),
    }
