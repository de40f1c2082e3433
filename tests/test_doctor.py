"""What is installed is read without importing it, and `hvd-hetero doctor` says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from building import program

from hvd_hetero.cli import doctor, edits, toolchain
from hvd_hetero.cli.main import COMMANDS, main
from hvd_hetero.engine import build
from tests.repair import has_edit

RECORD = json.dumps({"format": 1, "horovod": "0.28.1", "edits": ["stall_inspector"], "frameworks": {}})


def fake_horovod(folder: Path, record: str | None) -> None:
    package = folder / "horovod"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
    if record is not None:
        (package / build.BUILD_RECORD).write_text(record)


def first_on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What is in the folder hides what is installed, and what another test has imported."""
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.delitem(sys.modules, "horovod", raising=False)


def test_the_installed_build_is_read_without_importing_horovod(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first_on_path(monkeypatch, tmp_path)
    fake_horovod(tmp_path, None)
    assert build.installed_build() == {"edits": []}
    fake_horovod(tmp_path, "not json")
    assert build.installed_build() == {"edits": []}
    fake_horovod(tmp_path, RECORD)
    assert has_edit("stall_inspector") and not has_edit("blocking_wait")


def test_no_horovod_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    assert build.installed_build() is None and not has_edit("stall_inspector")


def test_the_doctor_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_on_path(monkeypatch, tmp_path)
    fake_horovod(tmp_path, RECORD)
    main(["doctor", "--no-load"])
    said = capsys.readouterr().out
    assert "has      stall_inspector" in said
    assert f"MISSING  rendezvous_scope: {doctor.WITHOUT['rendezvous_scope']}" in said
    main(["doctor", "--no-load", "--json"])
    assert "stall_inspector" in json.loads(capsys.readouterr().out)["present"]
    main(["doctor", "--no-load", "--json", str(tmp_path / "doctor.json")])
    assert "stall_inspector" in json.loads((tmp_path / "doctor.json").read_text())["present"]
    assert "has      stall_inspector" in capsys.readouterr().out


def test_the_doctor_sees_that_nothing_can_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_on_path(monkeypatch, tmp_path)
    fake_horovod(tmp_path, RECORD)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda *_: str(tmp_path))
    main(["doctor", "--no-load"])
    said = capsys.readouterr().out
    assert "note: to build Horovod: expected a C++ compiler" in said
    assert "note: to build Horovod: expected cmake 3.13 or later" in said
    assert "note: to build Horovod: expected `make`" in said and "all is well" not in said
    for name in ("c++", "make", "cmake"):
        program(tmp_path, name, "echo 'as expected, version 14.2.0'")
    main(["doctor", "--no-load"])
    assert "to build Horovod" not in capsys.readouterr().out


def test_commands_print_where_the_output_has_no_dash_and_nobody_may_read_on() -> None:
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    here = {**usual, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "hvd_hetero.cli.main", "plan", "--speeds", "8,3", "--global-batch-size", "11"]
    done = subprocess.run(command, env=here, capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"") and b"?" in done.stdout
    for words in ("doctor --no-load", "doctor --help", "--version"):
        said = f"{sys.executable} -m hvd_hetero.cli.main {words}"
        closed = f"(sleep 0.1; {said}) | head -c 0; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", closed], env=usual, capture_output=True, timeout=100)
        assert (done.returncode, done.stderr) == (141, b""), words
        done = subprocess.run(["bash", "-c", f"{said} > /dev/full"], env=usual, capture_output=True, timeout=100)
        name = "hvd-hetero doctor" if "doctor" in words else "hvd-hetero"
        assert done.returncode == 1, words
        assert done.stderr.decode() == f"{name}: the output cannot be written: No space left on device\n"


def test_help_is_quick_and_imports_no_framework() -> None:
    code = "import sys; from hvd_hetero.cli.main import parser; print(parser().format_help()); " + (
        "assert not {'torch', 'tensorflow', 'horovod', 'rich'} & set(sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0 and all(name in said.stdout for name in COMMANDS), said.stderr


def test_the_doctor_sees_a_horovod_built_for_something_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_on_path(monkeypatch, tmp_path)
    versions = {"torch": "2.13.0", "tensorflow": "2.21.0", "horovod": "0.28.1"}
    monkeypatch.setattr(toolchain, "package_version", lambda *names: versions.get(names[0]))
    fake_horovod(tmp_path, json.dumps({**json.loads(RECORD), "frameworks": {"torch": "2.12.0"}}))
    assert main(["doctor", "--no-load"]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM: Horovod was built for torch 2.12.0, and 2.13.0 is there" in said
    assert "PROBLEM: Horovod was built without tensorflow" in said
    # Its package does not always say for which hardware it is, where torch itself does.
    for built_for, told in (("2.13.0+cu130", False), ("2.13.0+cpu", False), ("2.12.0+cu130", True)):
        fake_horovod(tmp_path, json.dumps({**json.loads(RECORD), "frameworks": {"torch": built_for}}))
        main(["doctor", "--no-load"])
        assert (f"built for torch {built_for}, and 2.13.0 is there" in capsys.readouterr().out) == told


def test_the_doctor_names_what_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_on_path(monkeypatch, tmp_path)
    versions = {"torch": "2.3.1", "keras": "3.10.0", "horovod": "0.28.1"}
    monkeypatch.setattr(toolchain, "package_version", lambda *names: versions.get(names[0]))
    monkeypatch.setattr(toolchain, "tensorflow_version", lambda: None)
    fake_horovod(tmp_path, RECORD)
    assert main(["doctor", "--no-load"]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM: Expected torch 2.4 or newer. Received: 2.3.1." in said and "Expected keras" not in said


def test_the_doctor_sees_repairs_that_have_changed_since(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_on_path(monkeypatch, tmp_path)
    monkeypatch.setattr(toolchain, "package_version", lambda *names: {"torch": "2.13.0"}.get(names[0]))
    monkeypatch.setattr(toolchain, "tensorflow_version", lambda: None)
    now = doctor.expected_repairs(["torch"])
    record = {**json.loads(RECORD), "edits": edits.names(now), "frameworks": {"torch": "2.13.0"}}
    for text, told in ((edits.text_hash(now), False), (edits.text_hash(now[1:]), True)):
        fake_horovod(tmp_path, json.dumps({**record, "repairs": text}))
        main(["doctor", "--no-load"])
        assert ("repairs of another version of hvd_hetero" in capsys.readouterr().out) == told


@pytest.mark.parametrize(
    ("torch", "horovod", "told"),
    [
        ("raise OSError('libcudart.so.13: no such file')", "raise ImportError('no torch')",
         "PROBLEM: torch cannot be imported (OSError: libcudart.so.13: no such file): repair torch first"),
        ("", "raise ImportError('libmpi.so.40: no such file')",
         "PROBLEM: horovod.torch cannot be imported (ImportError: libmpi.so.40: no such file): repair that, or run"),
        ("", "import os; os._exit(1)", "PROBLEM: horovod.torch cannot be imported: run"),
        ("", "gloo_built = mpi_built = nccl_built = lambda: False",
         "PROBLEM: horovod.torch was built without Gloo and MPI, and starts no ranks: run"),
        ("", "gloo_built = nccl_built = lambda: False; mpi_built = lambda: True",
         "note: horovod.torch was built without Gloo: no elastic jobs, and ranks wait busily: run"),
    ],
)  # fmt: skip
def test_the_doctor_says_what_to_do_where_horovod_does_not_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    torch: str, horovod: str, told: str,
) -> None:  # fmt: skip
    first_on_path(monkeypatch, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "package_version", lambda *names: {"torch": "2.13.0"}.get(names[0]))
    monkeypatch.setattr(toolchain, "tensorflow_version", lambda: None)
    for place, text in (("torch", torch), ("horovod", ""), ("horovod/torch", horovod)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "__init__.py").write_text(text)
    status = main(["doctor"])
    said = capsys.readouterr().out
    assert told in said and "all is well" not in said
    assert status == told.startswith("PROBLEM")
