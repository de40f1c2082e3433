"""`hvd-hetero build-horovod`: its cache, its progress, and what it says when something is missing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
from building import fails, program, recipe

from hvd_hetero.cli import build_horovod, edits, toolchain, wheel
from hvd_hetero.cli.cache import KEPT
from hvd_hetero.cli.edits import Edit
from hvd_hetero.cli.main import main
from hvd_hetero.cli.progress import Progress
from hvd_hetero.engine.cache import key

REAL_BUILD = wheel.build_wheel
pytestmark = pytest.mark.usefixtures("nothing_is_built_or_installed")


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
    program(tools, "c++", "echo 'c++ (Debian 10.2.1-6) 10.2.1 20210110'")
    assert "expected g++ 11 or newer, or clang++ 14 or newer, for C++20. Received: c++ (Debian 10.2" in fails(
        ["build-horovod"], 3, capsys
    )
    program(tools, "clang++", "echo Debian clang version 13.0.1-6")
    assert "g++ 11 or newer" in fails(["build-horovod"], 3, capsys)
    program(tools, "g++", "echo 'g++ (Debian 12.2.0-14) 12.2.0'")
    monkeypatch.setenv("CXX", "no-compiler -O2")
    said = fails(["build-horovod"], 3, capsys)
    assert "CXX: expected the command of a C++ compiler that runs here. Received: 'no-compiler -O2'" in said
    monkeypatch.setenv("CXX", "g++ -DX='a")
    assert "CXX: expected the command of a C++ compiler that runs here" in fails(["build-horovod"], 3, capsys)
    monkeypatch.delenv("CXX")
    assert "expected `make`" in fails(["build-horovod"], 3, capsys)
    program(tools, "make", "echo make")
    program(tools, "cmake", "echo cmake version 3.5.1")
    assert "expected cmake 3.13 or later. Received: 3.5.1" in fails(["build-horovod"], 3, capsys)
    program(tools, "cmake", "echo cmake version 4.0.0")
    assert "expected an MPI" in fails(["build-horovod", "--mpi", "on"], 3, capsys)


@pytest.mark.usefixtures("torch_there")
def test_a_cache_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    said = fails(["build-horovod", "--cache-dir", str(tmp_path / "file" / "cache")], 1, capsys)
    assert "expected to write the cache" in said


@pytest.fixture
def little(nothing_is_built_or_installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source of one file in place of Horovod's, and one edit that replaces "old" in it."""
    root = tmp_path / "little" / "horovod-0.28.1"
    (root / "horovod").mkdir(parents=True)
    (root / "setup.py").write_text("old")
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(root, root.name)
    monkeypatch.setattr(build_horovod, "download", lambda _: archive)
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
def test_a_disk_that_fills_up_during_a_build_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build_horovod, "unpack", full)
    said = fails(["build-horovod", "--no-install", "--cache-dir", str(tmp_path / "cache")], 1, capsys)
    assert f"expected room for a build in {tempfile.gettempdir()}, and for its wheel in {tmp_path}/cache" in said


def pretended_wheel(_source: Path, folder: Path, _recipe: object, record: object, *_: object) -> Path:
    """In place of `build_wheel`: a file that holds the record alone."""
    folder.mkdir()
    (folder / "horovod-0.28.1-x.whl").write_text(json.dumps(record))
    return folder / "horovod-0.28.1-x.whl"


@pytest.mark.usefixtures("torch_there", "little")
def test_a_wheel_is_built_once_and_then_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[str] = []

    def pretend(source: Path, folder: Path, *others: object) -> Path:
        built.append((source / "setup.py").read_text())
        return pretended_wheel(source, folder, *others)

    monkeypatch.setattr(build_horovod, "build_wheel", pretend)
    for number in range(KEPT):
        (tmp_path / "cache" / key(number)).mkdir(parents=True)
        (tmp_path / "cache" / key(number) / "horovod-0.28.1-x.whl").touch()
    arguments = ["build-horovod", "--no-install", "--cache-dir", str(tmp_path / "cache")]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert len(list((tmp_path / "cache").glob("*/*.whl"))) == KEPT, "what was used first is gone"
    assert main(arguments) == 0
    assert capsys.readouterr().out == first and built == ["new"]
    assert main([*arguments, "--force"]) == 0 and built == ["new", "new"]
    assert json.loads(Path(first.strip()).read_text())["edits"] == ["an_edit"]


@pytest.mark.usefixtures("torch_there", "little")
def test_a_wheel_is_locked_until_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that no other build removes it from the cache meanwhile."""
    locked: list[bool] = []

    def install(wheel: Path) -> None:
        with wheel.parent.with_suffix(".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.append(True)

    monkeypatch.setattr(build_horovod, "build_wheel", pretended_wheel)
    monkeypatch.setattr(build_horovod, "is_installed", lambda _: False)
    monkeypatch.setattr(build_horovod, "install", install)
    monkeypatch.setattr(build_horovod.sysconfig, "get_path", lambda _: str(tmp_path))
    assert main(["build-horovod", "--cache-dir", str(tmp_path / "cache")]) == 0 and locked == [True]


@pytest.mark.usefixtures("torch_there", "little")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_build_that_is_ended_ends_its_compilers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    pip = program(tmp_path, "pip", f"sleep 60 & echo $! > {tmp_path}/pid; echo started; wait")
    monkeypatch.setattr(build_horovod, "build_wheel", REAL_BUILD)
    monkeypatch.setattr(wheel, "PIP", (str(pip),))
    monkeypatch.setattr(Progress, "line", lambda *_: os.kill(os.getpid(), number))
    try:
        with pytest.raises(SystemExit):
            main(["build-horovod", "--no-install", "--cache-dir", str(tmp_path / "cache")])
    finally:
        signal.signal(signal.SIGHUP, before)
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


def test_a_failed_build_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where CMake does so in the line after, and much comes later."""
    (tmp_path / "horovod").mkdir()
    said = "echo 'CMake Error at Find.cmake:290 (message):'; echo '  Could NOT find CUDAToolkit'; seq 1000; exit 1"
    monkeypatch.setattr(wheel, "PIP", (str(program(tmp_path, "pip", said)),))
    with pytest.raises(wheel.BuildFailed, match=r"exit code 1, without torch[^…]*Could NOT find CUDAToolkit"):
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
    assert f"-ffile-prefix-map={tmp_path}=" in env["CXXFLAGS"]
    assert "prefix-map" not in recipe().environment(tmp_path / "with a space")["CXXFLAGS"]  # flags are split there
