"""The steps from Horovod's sdist to an installed wheel, through pip: download, unpack, compile, install."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from hvd_hetero.cli.edits import HOROVOD_VERSION
from hvd_hetero.cli.error import BuildFailed, DownloadFailed, MissingTool
from hvd_hetero.cli.recipe import Recipe
from hvd_hetero.engine.build import BUILD_RECORD

PIP = (sys.executable, "-m", "pip")
_LAST_LINES = 25


def _tail(text: str) -> str:
    return "\n".join("  | " + line for line in text.strip().splitlines()[-_LAST_LINES:])


def _pip(arguments: Sequence[str]) -> str | None:
    """Runs pip. Returns None if it succeeds, else its output. Raises `MissingTool` if the environment has no pip."""
    if importlib.util.find_spec("pip") is None:
        raise MissingTool(
            f"expected pip in the environment of {sys.executable}, and there is none.\n"
            "  What to do: `python -m ensurepip`; in an environment of uv, `uv pip install pip`."
        )
    command = [*PIP, *arguments, "--disable-pip-version-check"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return None if done.returncode == 0 else done.stdout


def download(folder: Path) -> Path:
    """Downloads the sdist of Horovod into `folder` and returns its path.

    Raises `DownloadFailed` if pip fails, or downloads something else.
    """
    wanted = f"horovod=={HOROVOD_VERSION}"
    source_only = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    said = _pip(["download", *source_only, "--dest", str(folder), wanted])
    if said is not None:
        raise DownloadFailed(
            f"expected pip to download {wanted}, and it failed:\n{_tail(said)}\n"
            "  What to do: check the network and pip's settings (`pip config list`); "
            f"`pip download --no-deps --no-binary horovod {wanted}` must work."
        )
    if (sdist := next(iter(folder.glob("horovod-*.tar.gz")), None)) is None:
        raise DownloadFailed(
            f"expected pip to bring horovod-{HOROVOD_VERSION}.tar.gz. Received: "
            f"{', '.join(p.name for p in folder.glob('*')) or 'nothing'}."
        )
    return sdist


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks `sdist` into `folder` and returns the root of the source.

    Raises `DownloadFailed` if the archive cannot be unpacked, or is not that of Horovod.
    """
    try:
        with tarfile.open(sdist) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python before 3.10.12 and 3.11.4
            archive.extractall(folder)
    except (tarfile.TarError, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise  # the disk is full: nothing is wrong with the archive
        raise DownloadFailed(f"expected {sdist.name} to be a whole archive. Received: {error}.") from error
    root = folder / f"horovod-{HOROVOD_VERSION}"
    if not (root / "setup.py").is_file():
        raise DownloadFailed(f"expected {sdist.name} to hold horovod-{HOROVOD_VERSION}/setup.py, and it does not.")
    return root


def build_wheel(
    source: Path,
    folder: Path,
    recipe: Recipe,
    record: Mapping[str, object],
    log: Path,
    watch: Callable[[str], None],
) -> Path:
    """Builds a wheel from the edited source and returns its path. If that is interrupted, it ends the compilers.

    Args:
        source: the root of the source; `record` is written into it.
        folder: where the wheel is put.
        recipe: gives the environment of the build, and the frameworks that the wheel must have a library for.
        record: the record that the wheel carries.
        log: the file that the output is written to.
        watch: is called with each line of the output.

    Raises:
        BuildFailed: the build fails, or the wheel lacks the library for a framework.
    """
    (source / "horovod" / BUILD_RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    command = [*PIP, "wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder), str(source)]
    code, shown = _run(command, recipe.environment(source), log, watch)
    wheel = next(iter(folder.glob("horovod-*.whl")), None)
    left_out = [name for name in recipe.frameworks if wheel is None or not _has_library(wheel, name)]
    if code != 0 or wheel is None or left_out:
        raise BuildFailed(
            f"expected a wheel of Horovod {HOROVOD_VERSION} with a library for {' and '.join(recipe.frameworks)}, and "
            f"the build ended with exit code {code}, without {' and '.join(left_out) or 'none'}.\n"
            f"{_tail(shown)}\n"
            f"  The whole log: {log.parent / log.stem}\n"
            "  What to do: look for the first error in the log; --mpi off, --gpu off and --frameworks leave parts out."
        )
    return wheel


def _run(
    command: Sequence[str], environment: Mapping[str, str], log: Path, watch: Callable[[str], None]
) -> tuple[int, str]:
    """Runs `command`, with its output in the file `log`, and returns its exit code, and the errors in the output with
    its end. If that is interrupted, it ends what it has started."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    errors: deque[str] = deque(maxlen=_LAST_LINES)
    with log.open("w", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            after = False
            for line in process.stdout:
                file.write(line)
                last.append(line)
                found = " error" in line.lower() or line.lower().lstrip().startswith("error")
                if found or after:
                    errors.append(line)
                after = found  # the line after an error counts too: CMake puts the cause there
                watch(line)
            code = process.wait()
        finally:
            if process.poll() is None:
                _stop(process)
    return code, "".join(last) if not errors else "".join(errors) + "  …\n" + "".join(list(last)[-8:])


def _has_library(wheel: Path, framework: str) -> bool:
    """Whether `wheel` has the compiled library for `framework`: with a broken cmake a build can succeed without it."""
    with zipfile.ZipFile(wheel) as archive:
        return any(name.startswith(f"horovod/{framework}/mpi_lib") for name in archive.namelist())


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends a build and its compilers, which are one process group: by SIGTERM, and by SIGKILL 5 s later."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    except ProcessLookupError:
        pass


def is_installed(wheel: Path) -> bool:
    """Whether the installed Horovod came from exactly this wheel, by the SHA-256 that pip recorded as it installed."""
    try:
        origin = metadata.distribution("horovod").read_text("direct_url.json")
        kept = json.loads(origin or "{}").get("archive_info", {})
    except (metadata.PackageNotFoundError, ValueError):
        return False
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return kept.get("hashes", {}).get("sha256") == digest or kept.get("hash") == f"sha256={digest}"


def install(wheel: Path) -> None:
    """Installs `wheel`, in place of any installed Horovod. Raises `BuildFailed` if pip fails."""
    said = _pip(["install", "--no-deps", "--force-reinstall", str(wheel)])
    if said is not None:
        raise BuildFailed(
            f"expected pip to install {wheel.name}, and it failed:\n{_tail(said)}\n"
            f"  What to do: `pip install --no-deps --force-reinstall {wheel}` shows it again."
        )
