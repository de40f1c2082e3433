"""What this environment offers for a build of Horovod with GPU support: CUDA's compiler, and NCCL."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_hetero.cli.error import MissingTool
from hvd_hetero.cli.toolchain import output

_NCCL_PLACE = "nvidia/nccl"  # under site-packages: where pip puts the NCCL that PyTorch depends on


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """How a wheel of Horovod handles tensors on GPUs: by NCCL, through host memory, or not at all.

    Attributes:
        cuda: the version of the CUDA compiler that compiles Horovod's CUDA part; None: there is no such part, and the
            wheel handles tensors in host memory alone.
        nccl: whether NCCL sums tensors on GPUs; otherwise, they are copied to host memory and summed there.
    """

    cuda: str | None = None
    nccl: bool = False

    def summary(self, torch_cuda: object) -> str | None:
        """The GPU support in a few words for people; None if neither the wheel nor PyTorch is for GPUs.

        Args:
            torch_cuda: the CUDA version that PyTorch is built for; None: PyTorch is for CPUs, or is not installed.
        """
        if self.nccl:
            return f"NCCL (CUDA {self.cuda})"
        if self.cuda:
            return f"GPUs through host memory (CUDA {self.cuda})"
        return f"for CPUs alone (--gpu nccl needs the CUDA toolkit, {torch_cuda})" if torch_cuda else None


def gpu(option: str, torch_cuda: str | None, torch_there: bool, *, gpus_here: bool) -> Gpu:
    """Decides which GPU support to build.

    "auto" builds with NCCL if PyTorch is built for CUDA and there is a GPU, or else all that such a build needs. A
    PyTorch for CUDA alone is no reason, because pip installs it on machines without a GPU too. A CUDA toolkit of
    another major version than PyTorch's counts as missing, since its headers and runtime differ from PyTorch's.

    Args:
        option: the value of --gpu: "auto", "nccl" or "off".
        torch_cuda: the CUDA version that PyTorch is built for; None: PyTorch is for CPUs, or not part of the build.
        torch_there: whether PyTorch is among the frameworks that Horovod is built for.
        gpus_here: whether PyTorch finds a GPU on this machine.

    Raises:
        MissingTool: the build is to have NCCL, and PyTorch for CUDA, the CUDA toolkit or NCCL's header is missing.
    """
    if option == "nccl" and torch_there and torch_cuda is None:
        raise MissingTool(
            "expected a PyTorch built for CUDA, for --gpu nccl. Received: a PyTorch for CPUs.\n"
            "  What to do: install PyTorch's CUDA build, or say --gpu off."
        )
    # If PyTorch is built for CUDA and there is an nvcc, Horovod compiles its CUDA part, whatever the option says.
    here = _nvcc()[0] if torch_cuda is not None or option == "nccl" else None
    version = here if torch_cuda is None or (here and _major(here) == _major(torch_cuda)) else None
    if option == "off" or (option == "auto" and (torch_cuda is None or not (gpus_here or (version and _has_nccl())))):
        return Gpu(cuda=version)
    why = "for --gpu nccl" if option == "nccl" else f"because PyTorch is built for CUDA {torch_cuda} and finds a GPU"
    if version is None:
        wanted = f" {_major(torch_cuda)}.x" if torch_cuda else ""
        raise MissingTool(
            f"expected the CUDA toolkit{wanted} (nvcc), {why}. Received: {f'nvcc {here}' if here else 'no nvcc'}.\n"
            "  What to do: install the toolkit of that version and put its bin folder on PATH, or say --gpu off: then "
            "Horovod is for tensors in host memory alone."
        )
    if not _has_nccl():
        raise MissingTool(
            f"expected NCCL's header (nccl.h), {why}. Received: none in HOROVOD_NCCL_HOME, this environment's "
            f"{_NCCL_PLACE}, {_home()} or /usr.\n"
            "  What to do: install NCCL's development package (libnccl-dev) or set HOROVOD_NCCL_HOME, or say --gpu "
            "off: then gradients travel through host memory."
        )
    return Gpu(cuda=version, nccl=True)


def check_tensorflow(found: Gpu, facts: Mapping[str, object] | None) -> None:
    """Raises `MissingTool` if Horovod is to have NCCL and the installed TensorFlow is for CPUs.

    Horovod's library for TensorFlow would compile in that case, but could not be loaded.

    Args:
        found: the GPU support that is to be built.
        facts: the version and the CUDA version of TensorFlow (`tensorflow_facts`); None: the build is not for it.
    """
    if found.nccl and facts is not None and not facts.get("cuda"):
        raise MissingTool(
            f"expected a TensorFlow built for CUDA, beside NCCL. Received: TensorFlow {facts['version']} for CPUs.\n"
            "  What to do: say --frameworks torch (Keras runs on PyTorch as well: KERAS_BACKEND=torch), install "
            "TensorFlow's build for GPUs, or say --gpu off."
        )


def toolkit_environment() -> dict[str, str]:
    """Environment variables that make PyTorch's and CMake's own searches find the CUDA toolkit of the nvcc found here.

    They name the folder that nvcc itself reports: an `nvcc` on PATH may be a wrapper, with no toolkit beside it.
    """
    home = str(_nvcc()[1])
    return {"CUDA_HOME": home, "HOROVOD_CUDA_HOME": home, "CUDAToolkit_ROOT": home}


def nccl_environment(place: Path) -> dict[str, str]:
    """Environment variables that make Horovod's build use the NCCL of PyTorch, so that a process loads only one NCCL.

    Empty if PyTorch brings no NCCL, or if the user has chosen one with a variable HOROVOD_NCCL_….

    Args:
        place: a folder that lasts as long as the build; a link to the library is put there.
    """
    found = _nccl_of_torch()
    if found is None or any(name.startswith("HOROVOD_NCCL_") for name in os.environ):
        return {}
    libraries = place / "nccl"
    libraries.mkdir(exist_ok=True)
    link = libraries / "libnccl.so"  # the linker looks for this name; pip's package has libnccl.so.2 alone
    link.unlink(missing_ok=True)
    link.symlink_to(next((found / "lib").glob("libnccl.so.*")))
    # PyTorch has loaded the library by the time it is needed, TensorFlow has not: so Horovod's libraries get a run path
    # to it, relative to their own place in the same site-packages.
    rpath = f"-Wl,-rpath,'$ORIGIN/../../{_NCCL_PLACE}/lib'"
    return {
        "HOROVOD_NCCL_INCLUDE": str(found / "include"),
        "HOROVOD_NCCL_LIB": str(libraries),
        "HOROVOD_NCCL_LINK": "SHARED",
        "LDFLAGS": f"{os.environ.get('LDFLAGS', '')} {rpath}".strip(),
    }


def _home() -> Path:
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))


def _nvcc() -> tuple[str | None, Path]:
    """The version of nvcc (None: not found), and the folder of its toolkit.

    nvcc is looked for in HOROVOD_CUDA_HOME, CUDA_HOME, on PATH, and in /usr/local/cuda, in this order.
    """
    named = [os.environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if os.environ.get(name)]
    places = [*(str(Path(home) / "bin" / "nvcc") for home in named), "nvcc", str(_home() / "bin" / "nvcc")]
    nvcc = next(filter(None, map(shutil.which, places)), None)
    version = re.search(r"release\s+(\S+),", output([nvcc, "--version"]) or "") if nvcc else None
    if nvcc is None or version is None:
        return None, _home()
    said = re.search(r"^#\$ TOP=(.+)$", output([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]) or "", re.MULTILINE)
    home = Path(said[1]) if said else Path(nvcc).parent.parent
    return version[1], home.resolve()


def _major(version: str) -> str:
    return version.partition(".")[0]


def _nccl_of_torch() -> Path | None:
    """The folder of the NCCL that pip installed for PyTorch, if it has both header and library; else None."""
    try:
        spec = importlib.util.find_spec(_NCCL_PLACE.replace("/", "."))
    except ImportError:
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "include" / "nccl.h").is_file() and any((Path(folder) / "lib").glob("libnccl.so.*")):
            return Path(folder)
    return None


def _has_nccl() -> bool:
    """Whether NCCL's header is found where the user says, in the CUDA toolkit, in /usr, or in PyTorch's NCCL."""
    home = os.environ.get("HOROVOD_NCCL_HOME")
    folders = [Path(home) / "include"] if home else []
    folders += [_home() / "include", Path("/usr/include")]
    return any((folder / "nccl.h").is_file() for folder in folders) or _nccl_of_torch() is not None
