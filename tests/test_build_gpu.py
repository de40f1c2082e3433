"""`hvd-hetero build-horovod` and GPUs: what is built where, and what it says when something is missing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from building import fails, program, recipe

from hvd_hetero.cli import build_horovod, cuda, edits, toolchain
from hvd_hetero.cli.cuda import Gpu

pytestmark = pytest.mark.usefixtures("nothing_is_built_or_installed")


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the only programs there are: what a build for CPUs needs; PyTorch is there, and no TensorFlow."""
    folder = tmp_path / "tools"
    for name in ("g++", "make"):
        program(folder, name, f"echo {name} 14")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain, "cmake", lambda: ("cmake", "4.0"))
    monkeypatch.setattr(toolchain, "torch_facts", lambda: {"version": "2.13.0", "cxx11_abi": True, "cuda": None})
    monkeypatch.setattr(toolchain, "tensorflow_facts", lambda: None)
    return folder


def test_what_a_build_for_gpus_needs(
    tools: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected a PyTorch built for CUDA" in fails(["build-horovod", "--gpu", "nccl"], 3, capsys)
    here = {"version": "2", "cxx11_abi": True, "cuda": "12.8", "gpus": True}
    monkeypatch.setattr(toolchain, "torch_facts", lambda: dict(here))
    assert "because PyTorch is built for CUDA 12.8 and finds a GPU" in fails(["build-horovod"], 3, capsys)
    nccl = ["build-horovod", "--gpu", "nccl"]
    assert "expected the CUDA toolkit 12.x (nvcc), for --gpu nccl. Received: no nvcc" in fails(nccl, 3, capsys)
    program(tools, "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    assert "(nvcc), for --gpu nccl. Received: nvcc 13.0." in fails(nccl, 3, capsys), "of another major version"
    program(tools, "nvcc", "echo Cuda compilation tools, release 12.8, V12.8.93")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "nccl"))
    monkeypatch.setattr(cuda, "_nccl_of_torch", lambda: None)
    if not Path("/usr/include/nccl.h").exists():
        assert "expected NCCL's header (nccl.h)" in fails(["build-horovod", "--gpu", "auto"], 3, capsys)
    (tmp_path / "nccl" / "include").mkdir(parents=True)
    (tmp_path / "nccl" / "include" / "nccl.h").touch()
    assert cuda.gpu("auto", "12.8", True, gpus_here=True) == Gpu(cuda="12.8", nccl=True)
    assert cuda.gpu("auto", "12.8", True, gpus_here=False).nccl  # a host where one builds for others
    assert cuda.gpu("off", "12.8", True, gpus_here=True) == Gpu(cuda="12.8")
    assert cuda.gpu("auto", None, True, gpus_here=True) == Gpu()
    assert cuda.gpu("nccl", None, False, gpus_here=False).nccl  # TensorFlow alone
    monkeypatch.setattr(toolchain, "tensorflow_facts", lambda: {"version": "2.21.0", "cuda": None})
    assert "expected a TensorFlow built for CUDA, beside NCCL" in fails(["build-horovod"], 3, capsys)


@pytest.mark.parametrize("option", ["auto", "off"])
def test_a_torch_for_cuda_where_there_is_neither_a_gpu_nor_a_compiler_for_it(
    option: str, tools: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What `pip install torch` brings to a machine without a GPU."""
    facts = {"version": "2.13.0+cu130", "cxx11_abi": True, "cuda": "13.0", "hip": None, "gpus": False}
    monkeypatch.setattr(toolchain, "torch_facts", lambda: dict(facts))
    monkeypatch.setattr(toolchain, "tensorflow_facts", lambda: {"version": "2.21.0", "cuda": None})
    plain = build_horovod.recipe_for(build_horovod.Options(gpu=option))
    assert plain.gpu == Gpu() and "HOROVOD_GPU_OPERATIONS" not in plain.environment(tmp_path)
    assert {"no_cuda", "compiled_once"} <= set(edits.names(plain.edits)) and "for CPUs alone" in plain.summary()
    program(tools, "nvcc", "echo Cuda compilation tools, release 12.8, V12.8.93")
    assert build_horovod.recipe_for(build_horovod.Options(gpu=option)) == plain, "a toolkit of another major version"
    # The toolkit comes: another wheel, whose part for PyTorch takes tensors on GPUs.
    program(tools, "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    with_cuda = build_horovod.recipe_for(build_horovod.Options(gpu="off"))
    assert with_cuda.facts() != plain.facts() and "GPUs through host memory" in with_cuda.summary()
    assert not {"no_cuda", "compiled_once"} & set(edits.names(with_cuda.edits))


def test_the_toolkit_is_that_of_the_compiler_wherever_that_is(
    tools: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A `nvcc` on PATH may be a script that runs that of the toolkit, as ccache's is."""
    release = 'case "$1" in --version) echo Cuda compilation tools, release 13.0, V13.0.88;; '
    home = tmp_path / "cuda-13.0"
    (home / "bin").mkdir(parents=True)
    compiler = program(home / "bin", "nvcc", release + f"--dryrun) echo '#$ TOP={home}/bin/..' >&2;; esac")
    built = recipe(gpu=Gpu(cuda="13.0"))

    def places() -> set[str]:
        environment = built.environment(tmp_path)
        return {environment[name] for name in ("CUDA_HOME", "HOROVOD_CUDA_HOME", "CUDAToolkit_ROOT")}

    program(tools, "nvcc", f'exec {compiler} "$@"')
    assert places() == {str(home)}
    other = tmp_path / "mine"
    (other / "bin").mkdir(parents=True)
    program(other / "bin", "nvcc", release + "esac")
    monkeypatch.setenv("CUDA_HOME", str(other))
    assert places() == {str(other)}, "what the user names comes first"
    assert "CUDAToolkit_ROOT" not in recipe().environment(tmp_path)


def test_nccl_is_that_of_pytorch_unless_the_user_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOROVOD_NCCL_HOME", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    with_nccl = recipe(gpu=Gpu(cuda="13.0", nccl=True))
    package = tmp_path / "site-packages" / "nvidia" / "nccl"
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert "HOROVOD_NCCL_LIB" not in with_nccl.environment(tmp_path / "source")
    for name in ("include/nccl.h", "lib/libnccl.so.2"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    importlib.invalidate_caches()
    env = with_nccl.environment(tmp_path / "source")
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL" and env["HOROVOD_NCCL_INCLUDE"] == str(package / "include")
    assert (Path(env["HOROVOD_NCCL_LIB"]) / "libnccl.so").resolve() == package / "lib" / "libnccl.so.2"
    assert "'$ORIGIN/../../nvidia/nccl/lib'" in env["LDFLAGS"]
    monkeypatch.setenv("HOROVOD_NCCL_HOME", "there")
    env = with_nccl.environment(tmp_path / "source")
    assert env["HOROVOD_NCCL_HOME"] == "there" and "HOROVOD_NCCL_LIB" not in env


@pytest.mark.parametrize(
    ("said", "cuda_version"),
    [
        ("[('is_cuda_build', False), ('is_rocm_build', False)]", None),
        ("[('cuda_version', '12.5.1'), ('is_cuda_build', True), ('is_rocm_build', False)]", "12.5.1"),
        (None, None),
    ],
)
def test_tensorflow_is_read_not_imported(
    said: str | None, cuda_version: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "tensorflow"
    (package / "python" / "platform").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('imported')")
    if said is not None:
        (package / "python" / "platform" / "build_info.py").write_text(f"build_info = OrderedDict({said})")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(toolchain, "package_version", lambda *_: "2.21.0")
    assert toolchain.tensorflow_facts() == {"version": "2.21.0", "cuda": cuda_version}
