"""The recipe of a wheel of Horovod: its key in the cache, the record that it carries, the environment of its build."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hvd_hetero.cli import cuda, toolchain
from hvd_hetero.cli.cuda import Gpu
from hvd_hetero.cli.edits import HOROVOD_VERSION, Edit, repairs, text_hash

FORMAT = 2  # of the record that a wheel carries (`Recipe.record`)
# The beginnings of the names of the variables of Horovod's build that a user may set: where libraries are. The other
# ones are removed, as they would change the wheel and not its key.
_KEPT_VARIABLES = ("HOROVOD_NCCL_", "HOROVOD_CUDA_HOME", "HOROVOD_ROCM_HOME")
_FLAGS = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")


def _variables() -> dict[str, str]:
    """The environment variables of the user that a build reads: compiler flags, and where libraries are."""
    chosen = [name for name in sorted(os.environ) if name in _FLAGS or name.startswith(_KEPT_VARIABLES)]
    return {name: os.environ[name] for name in chosen}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a wheel of Horovod is built from, and with which programs.

    Attributes:
        edits: the edits to make in the source.
        frameworks: "torch" and "tensorflow", as far as the wheel is for them → facts ("version", "cuda" and so on).
        compiler: the command of the C++ compiler.
        compiler_version: the first line that `compiler --version` prints.
        cmake: the path of cmake.
        cpu_flags: the extensions of the processor to compile for, such as "avx".
        mpi: the version of MPI; None: without MPI.
        gpu: the support of GPUs.
        plain: whether the repairs are left out (--plain).
        jobs: how many files to compile at a time.
    """

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
        """Everything that the wheel depends on, for JSON; a hash of it is the wheel's key in the cache.

        The number of jobs and the path of cmake do not change the wheel, and are left out.
        """
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
        """The record that the wheel carries, for JSON: see `engine.build.installed_build`.

        `edits_made` are the names of the edits in the wheel.
        """
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
            "built": {  # by Horovod's function → what it answers; the edit "quick_launch" reads the answers here
                "gloo_built": True,
                "mpi_built": bool(self.mpi),
                "nccl_built": 1 if self.gpu.nccl else 0,
                "ddl_built": False,
                "ccl_built": False,
            },
        }

    def summary(self) -> str:
        """Frameworks, communication libraries and GPU support of the wheel, in one line for people."""
        parts = [f"{name} {facts['version']}" for name, facts in self.frameworks.items()]
        parts.append("Gloo and MPI" if self.mpi else "Gloo")
        if (gpu := self.gpu.summary(self.frameworks.get("torch", {}).get("cuda"))) is not None:
            parts.append(gpu)
        if self.plain:
            parts.append("no repairs")
        return ", ".join(parts)

    def environment(self, source: Path) -> dict[str, str]:
        """The environment variables for the process that builds the wheel.

        Each part is asked for (HOROVOD_WITH_…) or excluded (HOROVOD_WITHOUT_…), so that one that does not compile is
        an error, and is not left out without notice.

        Args:
            source: the root of the edited source; files for the build may be written beside it.
        """
        # Horovod's log messages name their source file. The prefix map takes the path of the temporary folder out of
        # them; it cannot be given for a path with spaces, at which flags are split.
        mapped = f"-ffile-prefix-map={source}=horovod-{HOROVOD_VERSION}" if not re.search(r"\s", str(source)) else ""
        env = {n: v for n, v in os.environ.items() if not n.startswith("HOROVOD_") or n.startswith(_KEPT_VARIABLES)}
        env.update(
            HOROVOD_WITH_GLOO="1",
            HOROVOD_WITHOUT_MXNET="1",
            HOROVOD_CMAKE=self.cmake,
            HOROVOD_BUILD_ARCH_FLAGS=" ".join(f"-m{flag}" for flag in self.cpu_flags),
            CMAKE_POLICY_VERSION_MINIMUM="3.5",  # CMake 4 refuses the older minimum that Gloo asks for
            CXX=self.compiler,
            CXXFLAGS=f"{os.environ.get('CXXFLAGS', '')} {mapped}".strip(),
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
