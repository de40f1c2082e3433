"""What the running environment offers a build: frameworks, compiler, cmake, MPI, processor."""

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
_TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly")
_TORCH_PROBE = (
    "import json, torch; print(json.dumps({'version': torch.__version__, "
    "'cxx11_abi': bool(torch._C._GLIBCXX_USE_CXX11_ABI), 'cuda': torch.version.cuda, 'hip': torch.version.hip, "
    "'gpus': torch.cuda.is_available()}))"
)


def output(command: Sequence[str], timeout_s: float = 120.0) -> str | None:
    """What the command printed on both channels, or None when it cannot be run or fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def first_line(text: str | None) -> str:
    """The first line that says something, or an empty string."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")


def package_version(*packages: str) -> str | None:
    """The version of the first of the packages that is installed, or None."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def torch_facts() -> dict[str, object] | None:
    """PyTorch's version, C++ ABI and CUDA version, and whether it finds a GPU; None when not installed.

    It is asked in a process of its own.
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
    """TensorFlow's version, or None when not installed."""
    return package_version(*_TENSORFLOW_PACKAGES)


def tensorflow_facts() -> dict[str, object] | None:
    """TensorFlow's version and CUDA version, from its files, since it takes seconds to import; None: not installed."""
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
    """The frameworks to build for, with what is known of each; those found when none was asked for by name."""
    found: dict[str, dict[str, object]] = {}
    if asked is None or "torch" in asked:
        facts = torch_facts()
        if facts is not None:
            found["torch"] = facts
    if asked is None or "tensorflow" in asked:
        facts = tensorflow_facts()
        if facts is not None:
            found["tensorflow"] = facts
    missing = [name for name in asked or () if name not in found]
    if missing or not found:
        wanted = " and ".join(missing) if missing else "PyTorch or TensorFlow"
        raise MissingFramework(
            f"expected {wanted} in the environment of {sys.executable}, and it is not installed there.\n"
            f"  What to do: install it first (`pip install {' '.join(missing) or 'torch'}`): Horovod is compiled "
            "against the frameworks that are there."
        )
    return found


def present(found: Mapping[str, Mapping[str, object]], flags: Sequence[str], cuda: str | None = None) -> set[str]:
    """What edits may need, of these frameworks, flags of the processor and CUDA compiler for PyTorch's part."""
    from packaging.version import Version  # where a build goes on without it, it is installed first

    torch, tensorflow = found.get("torch", {}), found.get("tensorflow", {})
    # TensorFlow's packages for Linux have had the C++11 ABI since 2.10. For GPUs, PyTorch's part is compiled otherwise.
    new_enough = Version(str(tensorflow.get("version", "0"))) >= Version("2.10")
    one_abi = bool(torch.get("cxx11_abi")) and new_enough and not (cuda or torch.get("hip"))
    return {
        *found,
        *(["f16c"] if {"avx", "f16c"} <= set(flags) else []),
        *(["one_abi"] if one_abi else []),
        *(["no_cuda"] if torch.get("cuda") and cuda is None else []),
    }


OLDEST_GCC, OLDEST_CLANG = 11, 14


def _is_old(version: str) -> bool:
    """Whether a compiler that introduces itself like this is too old; one of another kind may do."""
    clang, gcc = re.search(r"clang version (\d+)", version), re.search(r"\) (\d+)\.\d+", version)
    return int(clang[1]) < OLDEST_CLANG if clang else int(gcc[1]) < OLDEST_GCC if gcc else False


def compiler() -> tuple[str, str]:
    """The C++ compiler's command and version; raises `MissingTool`."""
    chosen, too_old = os.environ.get("CXX", "").strip(), ""
    for command in (chosen,) if chosen else ("c++", "g++", "clang++"):
        try:
            words = shlex.split(command)
        except ValueError:  # a quote without an end
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
    """The path of make; raises `MissingTool`."""
    program = shutil.which("make") or shutil.which("gmake")
    if program is None:
        raise MissingTool(
            "expected `make`, with which cmake builds, and it is not there.\n"
            "  What to do: install it, for example `apt-get install make`."
        )
    return program


def cmake() -> tuple[str, str]:
    """The path and version of a cmake of 3.13 or later: HOROVOD_CMAKE, this environment's, or the system's."""
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
    """The version of the MPI to build with, or None; `option` is "auto", "on" or "off"."""
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
    """Those of "avx", "f16c" and "fma" that this processor has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    match = re.search(r"^flags\s*:\s*(.*)$", text, flags=re.MULTILINE)
    have = set(match[1].split()) if match else set()
    return tuple(flag for flag in ("avx", "f16c", "fma") if flag in have)


def python_facts() -> dict[str, str]:
    """What of the interpreter and the system a compiled wheel depends on."""
    return {
        "python": platform.python_version(),
        "abi": str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag),
        "platform": sysconfig.get_platform(),
        "libc": " ".join(platform.libc_ver()).strip(),
    }
