"""`hvd-hetero build-horovod`: its cache, its progress, and what it says when something is missing."""

from __future__ import annotations

import importlib
import json
import os
import signal
import stat
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from hvd_hetero.cli import build_horovod, cuda, edits, toolchain, wheel
from hvd_hetero.cli.cuda import Gpu
from hvd_hetero.cli.edits import Edit
from hvd_hetero.cli.main import main
from hvd_hetero.cli.progress import Progress

REAL_BUILD = wheel.build_wheel


@pytest.fixture(autouse=True)
def nothing_is_built_or_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may touch the environment it runs in, also when what it expects to fail does not."""
    for name in ("download", "build_wheel", "install", "install_missing"):
        monkeypatch.setattr(build_horovod, name, lambda *_, name=name: pytest.fail(f"{name} was called"))


def recipe(**changes: object) -> wheel.Recipe:
    facts: dict[str, object] = {
        "edits": edits.chosen(["torch"]),
        "frameworks": {"torch": {"version": "2", "cxx11_abi": True, "cuda": None}},
        "compiler": "c++",
        "compiler_version": "gcc 12",
        "cmake": "cmake",
        "cpu_flags": ("avx",),
        "mpi": None,
        "gpu": Gpu(),
        "plain": False,
        "jobs": 2,
    }
    return wheel.Recipe(**{**facts, **changes})  # type: ignore[arg-type]


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fails(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command printed; it must end with `code`, and without a traceback."""
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.fixture
def torch_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "torch_facts", lambda: {"version": "2.13.0", "cxx11_abi": True, "cuda": None})
    monkeypatch.setattr(toolchain, "tensorflow_version", lambda: None)


def test_no_framework(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(toolchain, "package_version", lambda *_: None)
    assert "expected PyTorch or TensorFlow" in fails(["build-horovod"], 4, capsys)
    assert "expected tensorflow in" in fails(["build-horovod", "--frameworks", "tensorflow"], 4, capsys)


def test_an_unknown_framework_or_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Received: 'jax'" in fails(["build-horovod", "--frameworks", "jax"], 2, capsys)
    assert "Received: 0" in fails(["build-horovod", "--jobs", "0"], 2, capsys)


@pytest.mark.usefixtures("torch_there")
def test_no_compiler_make_cmake_or_mpi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("HOROVOD_CMAKE", raising=False)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda *_: str(tools))
    assert "expected a C++ compiler" in fails(["build-horovod"], 3, capsys)
    program(tools, "g++", "echo g++ 12.2")
    assert "expected `make`" in fails(["build-horovod"], 3, capsys)
    program(tools, "make", "echo make")
    program(tools, "cmake", "echo cmake version 3.5.1")
    assert "expected cmake 3.13 or later. Received: 3.5.1" in fails(["build-horovod"], 3, capsys)
    program(tools, "cmake", "echo cmake version 4.0.0")
    assert "expected an MPI" in fails(["build-horovod", "--mpi", "on"], 3, capsys)
    assert "expected a PyTorch built for CUDA" in fails(["build-horovod", "--gpu", "nccl"], 3, capsys)
    here = {"version": "2", "cxx11_abi": True, "cuda": "12.8", "gpus": True}
    monkeypatch.setattr(toolchain, "torch_facts", lambda: dict(here))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert "because PyTorch is built for CUDA 12.8 and finds a GPU" in fails(["build-horovod"], 3, capsys)
    assert "expected the CUDA toolkit (nvcc), for --gpu nccl" in fails(["build-horovod", "--gpu", "nccl"], 3, capsys)
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


@pytest.mark.parametrize("option", ["auto", "off"])
def test_a_torch_for_cuda_where_there_is_neither_a_gpu_nor_a_compiler_for_it(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What `pip install torch` brings to a machine without a GPU."""
    facts = {"version": "2.13.0+cu130", "cxx11_abi": True, "cuda": "13.0", "hip": None, "gpus": False}
    monkeypatch.setattr(toolchain, "torch_facts", lambda: dict(facts))
    monkeypatch.setattr(toolchain, "tensorflow_version", lambda: "2.21.0")
    monkeypatch.setattr(toolchain, "cmake", lambda: ("cmake", "4.0"))
    for name in ("g++", "make"):
        program(tmp_path, name, f"echo {name} 14")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("CXX", raising=False)
    recipe = build_horovod.recipe_for(build_horovod.Options(gpu=option))
    assert recipe.gpu == Gpu() and "HOROVOD_GPU_OPERATIONS" not in recipe.environment(tmp_path)
    assert {"no_cuda", "compiled_once"} <= set(edits.names(recipe.edits)) and "for CPUs alone" in recipe.summary()
    # The toolkit comes: another wheel, whose part for PyTorch takes tensors on GPUs.
    program(tmp_path, "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    with_cuda = build_horovod.recipe_for(build_horovod.Options(gpu="off"))
    assert with_cuda.facts() != recipe.facts() and "GPUs through host memory" in with_cuda.summary()
    assert not {"no_cuda", "compiled_once"} & set(edits.names(with_cuda.edits))


@pytest.mark.usefixtures("torch_there")
def test_a_cache_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    said = fails(["build-horovod", "--cache-dir", str(tmp_path / "file" / "cache")], 1, capsys)
    assert "expected to write the cache" in said


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source of one file in place of Horovod's, and one edit that replaces "old" in it."""
    root = tmp_path / "little" / "horovod-0.28.1"
    (root / "horovod").mkdir(parents=True)
    (root / "setup.py").write_text("old")
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(root, root.name)
    monkeypatch.setattr(build_horovod, "download", lambda _: archive)
    monkeypatch.setattr(build_horovod, "install_missing", lambda _: None)
    only = Edit(name="an_edit", reason="r", file="setup.py", find="old", replace="new")
    monkeypatch.setattr(edits, "chosen", lambda *_: (only,))


@pytest.mark.usefixtures("torch_there", "little")
def test_a_changed_source_is_not_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Edit(name="gone", reason="it was needed", file="setup.py", find="a text that is gone", replace="x")
    monkeypatch.setattr(edits, "chosen", lambda *_: (other,))
    said = fails(["build-horovod", "--no-install", "--cache-dir", str(tmp_path / "cache")], 6, capsys)
    assert "edit 'gone' expected its text 1 time(s) in setup.py, and found it 0 time(s)" in said
    assert "it was needed" in said and "Nothing was built" in said


@pytest.mark.usefixtures("torch_there", "little")
def test_a_failed_build_shows_its_end_and_keeps_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = program(tmp_path, "pip", "echo '[ 10%] Building CXX'; echo 'a.cc:1:2: error: no such thing'; exit 3")
    monkeypatch.setattr(build_horovod, "build_wheel", REAL_BUILD)
    monkeypatch.setattr(wheel, "PIP", (str(pip),))
    said = fails(["build-horovod", "--no-install", "--cache-dir", str(tmp_path / "cache")], 7, capsys)
    assert "exit code 3" in said and "error: no such thing" in said
    log = Path(next(line for line in said.splitlines() if "The whole log:" in line).split(": ", 1)[1])
    assert "no such thing" in log.read_text()
    assert [p.name for p in log.parent.iterdir()] == ["build.log"]


@pytest.mark.usefixtures("torch_there", "little")
def test_a_wheel_is_built_once_and_then_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[str] = []

    def pretend(source: Path, folder: Path, _recipe: object, record: object, _log: Path, _watch: object) -> Path:
        built.append((source / "setup.py").read_text())
        folder.mkdir()
        (folder / "horovod-0.28.1-x.whl").write_text(json.dumps(record))
        return folder / "horovod-0.28.1-x.whl"

    monkeypatch.setattr(build_horovod, "build_wheel", pretend)
    arguments = ["build-horovod", "--no-install", "--cache-dir", str(tmp_path / "cache")]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert main(arguments) == 0
    assert capsys.readouterr().out == first and built == ["new"]
    assert main([*arguments, "--force"]) == 0 and built == ["new", "new"]
    assert json.loads(Path(first.strip()).read_text())["edits"] == ["an_edit"]


@pytest.mark.usefixtures("torch_there", "little")
def test_a_build_that_is_ended_ends_its_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = program(tmp_path, "pip", f"sleep 60 & echo $! > {tmp_path}/pid; echo started; wait")
    monkeypatch.setattr(build_horovod, "build_wheel", REAL_BUILD)
    monkeypatch.setattr(wheel, "PIP", (str(pip),))
    monkeypatch.setattr(Progress, "line", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        main(["build-horovod", "--no-install", "--cache-dir", str(tmp_path / "cache")])
    compiler = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    deadline = time.monotonic() + 10
    while compiler.exists() and compiler.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not compiler.exists() or compiler.read_text().split()[2] == "Z"


def test_a_wheel_without_a_compiled_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod").mkdir()
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("horovod/torch/mpi_ops.py", "")
    pip = program(tmp_path, "pip", f"mkdir -p {tmp_path}/w; cp {tmp_path}/empty.whl {tmp_path}/w/horovod-0-x.whl")
    monkeypatch.setattr(wheel, "PIP", (str(pip),))
    with pytest.raises(wheel.BuildFailed, match="without torch"):
        wheel.build_wheel(tmp_path, tmp_path / "w", recipe(), {}, tmp_path / "build.log.1", lambda _: None)


def test_pip_that_cannot_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheel, "PIP", (str(program(tmp_path, "pip", "echo no route to host; exit 1")),))
    with pytest.raises(wheel.DownloadFailed, match="no route to host"):
        wheel.download(tmp_path)
    monkeypatch.setattr(wheel, "PIP", (str(program(tmp_path, "pip", "exit 0")),))
    with pytest.raises(wheel.DownloadFailed, match="Received: "):
        wheel.download(tmp_path / "empty")
    broken = tmp_path / "horovod-0.28.1.tar.gz"
    broken.write_bytes(b"not an archive")
    with pytest.raises(wheel.DownloadFailed, match="a whole archive"):
        wheel.unpack(broken, tmp_path / "out")


def test_the_environment_of_the_build_is_ours_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "mpi")
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", "there")
    env = recipe(mpi=None).environment(tmp_path)
    assert "HOROVOD_CPU_OPERATIONS" not in env and "HOROVOD_WITHOUT_GLOO" not in env
    assert env["HOROVOD_NCCL_HOME"] == "there" and env["HOROVOD_WITHOUT_MPI"] == "1"
    assert env["HOROVOD_WITH_PYTORCH"] == "1" and env["HOROVOD_WITHOUT_TENSORFLOW"] == "1"


def test_nccl_is_that_of_pytorch_unless_the_user_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOROVOD_NCCL_HOME", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    with_nccl = recipe(gpu=Gpu(cuda="13.0", nccl=True))
    package = tmp_path / "site-packages" / "nvidia" / "nccl"
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
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
