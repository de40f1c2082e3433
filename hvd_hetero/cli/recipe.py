"""All that a wheel of Horovod depends on: its key, what it says about itself, the environment of its build."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hvd_hetero.cli import cuda, toolchain
from hvd_hetero.cli.cuda import Gpu
from hvd_hetero.cli.edits import HOROVOD_VERSION, Edit, repairs, text_hash

FORMAT = 2  # of what a wheel says about itself
# where libraries are; every other variable of Horovod's build would change the wheel behind the cache's back
_KEPT_VARIABLES = ("HOROVOD_NCCL_", "HOROVOD_CUDA_HOME", "HOROVOD_ROCM_HOME")
_FLAGS = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")


def _variables() -> dict[str, str]:
    """The variables that a build reads, but for those that the recipe sets itself."""
    chosen = [name for name in sorted(os.environ) if name in _FLAGS or name.startswith(_KEPT_VARIABLES)]
    return {name: os.environ[name] for name in chosen}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides what the wheel will be, and with which programs it is made."""

    edits: tuple[Edit, ...]
    frameworks: Mapping[str, Mapping[str, object]]
    compiler: str
    compiler_version: str
    cmake: str
    cpu_flags: tuple[str, ...]
    mpi: str | None
    gpu: Gpu
    plain: bool
    jobs: int

    def facts(self) -> dict[str, object]:
        """What the wheel depends on; the number of jobs and cmake's place are not among it."""
        return {
            "horovod": HOROVOD_VERSION,
            "record": FORMAT,
            "edits": text_hash(self.edits),
            "frameworks": {name: dict(facts) for name, facts in self.frameworks.items()},
            "compiler": self.compiler_version,
            "variables": _variables(),
            "cpu_flags": list(self.cpu_flags),
            "mpi": self.mpi,
            "gpu": asdict(self.gpu),
            **toolchain.python_facts(),
        }

    def record(self, edits_made: Sequence[str]) -> dict[str, object]:
        """What the wheel says about itself at run time."""
        return {
            "format": FORMAT,
            "horovod": HOROVOD_VERSION,
            "plain": self.plain,
            "edits": list(edits_made),
            "repairs": text_hash(repairs(self.edits)),
            "frameworks": {name: facts["version"] for name, facts in self.frameworks.items()},
            "mpi": self.mpi,
            "gpu": asdict(self.gpu),
            "cpu_flags": list(self.cpu_flags),
            "built": {  # by Horovod's names for what can be asked
                "gloo_built": True,
                "mpi_built": bool(self.mpi),
                "nccl_built": 1 if self.gpu.nccl else 0,
                "ddl_built": False,
                "ccl_built": False,
            },
        }

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{name} {facts['version']}" for name, facts in self.frameworks.items()]
        parts.append("Gloo and MPI" if self.mpi else "Gloo")
        if (gpu := self.gpu.summary(self.frameworks.get("torch", {}).get("cuda"))) is not None:
            parts.append(gpu)
        if self.plain:
            parts.append("no repairs")
        return ", ".join(parts)

    def environment(self, source: Path) -> dict[str, str]:
        """The environment of the build; a part that fails is an error there and never left out in silence."""
        # the log's messages name their source file: not by a folder that is gone. Flags are split at spaces
        name = f"-ffile-prefix-map={source}=horovod-{HOROVOD_VERSION}" if not re.search(r"\s", str(source)) else ""
        env = {n: v for n, v in os.environ.items() if not n.startswith("HOROVOD_") or n.startswith(_KEPT_VARIABLES)}
        env.update(
            HOROVOD_WITH_GLOO="1",
            HOROVOD_WITHOUT_MXNET="1",
            HOROVOD_CMAKE=self.cmake,
            HOROVOD_BUILD_ARCH_FLAGS=" ".join(f"-m{flag}" for flag in self.cpu_flags),
            CMAKE_POLICY_VERSION_MINIMUM="3.5",  # CMake 4 refuses the older minimum that Gloo asks for
            CXX=self.compiler,
            CXXFLAGS=f"{os.environ.get('CXXFLAGS', '')} {name}".strip(),
            MAKEFLAGS=f"-j{self.jobs}",
        )
        env["HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI"] = "1"
        for name, variable in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
            env[f"HOROVOD_WITH_{variable}" if name in self.frameworks else f"HOROVOD_WITHOUT_{variable}"] = "1"
        if self.gpu.cuda:
            env.update(cuda.toolkit_environment())
        if self.gpu.nccl:
            env.update(cuda.nccl_environment(source.parent), HOROVOD_GPU_OPERATIONS="NCCL")
        return env
