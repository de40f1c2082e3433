"""`hvd-hetero doctor`: what is installed, which repairs Horovod has, and what each missing repair means for a job."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_hetero.cli import edits, toolchain
from hvd_hetero.cli.cache import default_folder
from hvd_hetero.cli.console import add_json_option, write_or_show
from hvd_hetero.cli.error import CommandError
from hvd_hetero.engine.build import installed_build
from hvd_hetero.engine.version import LOWEST, too_old

# By the name of an edit (`Edit.name`): what a user meets on a Horovod without it, and how to avoid that.
WITHOUT = {
    "process_set_interface": "a job on hosts whose name resolves to 127.0.x.x dies with `Connection refused`, whatever "
    "--network-interfaces says; an entry in the hosts file helps",
    "stall_inspector": "under Gloo nothing is reported when a rank waits for another for a long time",
    "allgather_with_joined": "ranks may abort when one gathers (sparse gradients, too) while another has joined",
    "vectorised_half": "sums of fp16 under Gloo are 4 to 6 times slower: Compression.fp16 can lose time",
    "half_assignment": "under Gloo some sums of fp16 are silently wrong (14744 + 14744 gives 14744)",
    "rendezvous_scope": "elastic jobs under Gloo now and then fail to start again: stale addresses",
    "peer_death_with_process_sets": "when a rank dies in a job with process sets, the others abort: no elastic "
    "recovery, no reports",
    "fresh_settings": "with HOROVOD_CYCLE_TIME, HOROVOD_FUSION_THRESHOLD or HOROVOD_AUTOTUNE set, ranks that join an "
    "elastic job sum other tensors than those that stay: wrong sums, the end of a process, or a job that stands still",
    "cross_scope": "process sets that have some of a node's ranks, and elastic jobs that lost a node's first one, may "
    "never come together",
    "failed_init": "one more death while an elastic job recovers from another ends the whole job",
    "connect_timeout": "where a rank is lost while ranks of an elastic job come together, others wait for it for 150 s",
    "failure_disconnects": "ranks on other nodes hear of a death only after Gloo's time-out, 30 s",
    "absent_workers": "an elastic job waits for ever for a rank that is frozen or cannot be reached",
    "stale_workers": "an elastic job may wait for ever for a host that was given up and came back, give up one whose "
    "old workers end late, or have two processes with one rank",
    "spared_hosts": "one dead rank of an elastic job costs all ranks of its host",
    "left_in_order": "a rank that leaves an elastic job on SIGTERM twice in two minutes costs all ranks of its host",
    "lone_host": "an elastic job on one host waits without a word for a second one",
    "late_discovery": "while a discovery script hangs, ranks do not come together, and the job does not end",
    "early_hosts": "a host that an elastic job finds while its ranks are starting stays idle until hosts change again",
    "ended_waits": "horovodrun does not end on SIGTERM or Ctrl-C while it waits for hosts",
    "discovery_error": "what is wrong with a discovery script is not told",
    "hostfile_lines": "an empty line or a comment in a --hostfile ends horovodrun with an IndexError",
    "hosts_listed_twice": "a host that is listed twice makes ranks end with 'rank < size'",
    "host_list_error": "what is wrong in a list of hosts is not named",
    "two_signals": "horovodrun hangs if a second signal comes while it handles the first",
    "as_many_ranks": "under Gloo, horovodrun starts a rank in each slot of the hosts, also where -np names fewer",
    "restored_handlers": "after horovod.run, Ctrl-C does nothing in the rest of the script",
    "one_output": "horovodrun -np 1 with --output-filename starts nothing",
    "kept_output": "with --output-filename, what a rank said before it failed is overwritten by the next in its place",
    "any_output": "a rank that prints a byte that is not UTF-8, or whose output nobody reads any more (| head), stands "
    "still",
    "heard_end": "an elastic job waits for ever for a rank that could not be started, or that failed while nobody "
    "reads what horovodrun prints (| head)",
    "last_words": "a failed horovodrun ends with a traceback of its own, which hides the one of the rank",
    "launcher_cache": "horovodrun ends at once where the home folder cannot be written to, or beside another one",
    "failed_job": "an elastic job whose ranks were all given up ends with status 0, as if it had succeeded",
    "run_settings": "horovod.run makes Horovod's thread spin on every rank, but under hvd_hetero's init()",
    "run_results": "horovod.run of an elastic job that has lost a rank ends with a 404, and without results",
    "termination": "horovodrun that is told to end kills its ranks 5 s later, also those that are saving a checkpoint",
    "own_host": "horovodrun starts ranks of its own host through ssh, and does not tell them that they are to end, "
    "where the hosts file calls it 127.0.1.1, as Debian's does",
    "in_place_copy": "an in-place all-reduce of one tensor under Gloo costs one copy more",
    "gloo_loop": "Gloo's threads wake 100 times a second each, and spin while they wait for one another",
    "sum_at_once": "with TensorFlow and one thread for operations, sums often begin only when all gradients are there",
    "gloo_send_buffer": "after sums of a few values other collectives stall, 40 ms to seconds each",
    "released_when_done": "Horovod's thread waits for Python's lock to free tensors of torch, and on a Python with "
    "python/cpython#112275 (before 3.12, except late releases) a DataLoader's workers may never begin",
    "copy_beside_backward": "without NCCL, sums come back to a GPU after the backward pass, and not beside it",
    "quick_launch": "each horovodrun loads a framework to look at itself, seconds before anything starts",
    "blocking_wait": "waiting takes a whole core: hvd_hetero polls with sleeps, which costs some latency",
    "event_driven_cycle": "the background threads wake every HOROVOD_CYCLE_TIME ms: a trade of CPU time for latency",
    "fusion_limit": "large gradients are copied together and travel as one, once a GPU has computed the last of them",
    "gloo_hierarchy": "Gloo reduces in one ring over all ranks: more CPU time, more bytes between nodes, and "
    "sums whose last bits depend on timing",
}
_VARIABLES = {
    "blocking_wait": "HOROVOD_BLOCKING_WAIT=1",
    "event_driven_cycle": "HOROVOD_EVENT_DRIVEN_CYCLE=1",
    "fusion_limit": "HOROVOD_FUSION_LIMIT=1048576",
    "gloo_hierarchy": "HOROVOD_GLOO_ALLREDUCE=hierarchical",
}
_PROBE = """
import importlib, json, sys
for name in (sys.argv[1], 'horovod.' + sys.argv[1]):
    try:
        hvd = importlib.import_module(name)
    except Exception as error:
        print(json.dumps({'failed': name, 'error': f'{type(error).__name__}: {error}'.splitlines()[0]}))
        sys.exit()
print(json.dumps({'gloo': bool(hvd.gloo_built()), 'mpi': bool(hvd.mpi_built()), 'nccl': bool(hvd.nccl_built())}))
"""
REBUILD = "run `hvd-hetero build-horovod`"


@dataclass
class Diagnosis:
    """What `examine` found in the running environment.

    Attributes:
        python: Python's version and the path of the interpreter.
        installed: package → version, or None if it is not installed.
        tools: what a build of Horovod would use ("compiler", "make" and so on), or what is wrong with it.
        horovod: the record of Horovod's build (`installed_build`); None: Horovod is not installed.
        loads: framework → the back ends of a Horovod that could be imported for it, such as "gloo, mpi".
        present: the names of the edits that are expected in Horovod and are in it.
        missing: the names of those that are not in it → what that means (`WITHOUT`).
        problems: what prevents training; the exit code is then 1.
        notes: what is worth knowing and prevents nothing.
    """

    python: str
    installed: dict[str, str | None]
    tools: dict[str, str]
    horovod: dict[str, Any] | None
    loads: dict[str, str] = field(default_factory=dict)
    present: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def expected_repairs(frameworks: Sequence[str]) -> tuple[edits.Edit, ...]:
    """The edits of the kinds "repair" and "speed" that a build for `frameworks` on this machine would have."""
    met = toolchain.needs_met({name: {} for name in frameworks}, toolchain.cpu_flags())
    return edits.repairs(edits.chosen(met))


def examine(load: bool) -> Diagnosis:
    """Examines the running environment.

    Args:
        load: whether to import Horovod for each framework too, each in a new process.
    """
    installed = {
        "torch": toolchain.package_version("torch"),
        "tensorflow": toolchain.tensorflow_version(),
        "keras": toolchain.package_version("keras"),
        "horovod": toolchain.package_version("horovod"),
        "mpi4py": toolchain.package_version("mpi4py"),
    }
    tools, missing = _tools()
    found = Diagnosis(
        python=f"{toolchain.python_facts()['python']} ({sys.executable})",
        installed=installed,
        tools=tools,
        horovod=installed_build(),
    )
    found.notes += [f"to build Horovod: {tools[name]}" for name in missing]
    frameworks = [name for name in toolchain.FRAMEWORKS if installed[name]]
    versions = {name: version for name in LOWEST if (version := installed.get(name)) is not None}
    found.problems += filter(None, (too_old(name, version) for name, version in versions.items()))
    if not frameworks:
        found.problems.append("neither PyTorch nor TensorFlow is installed: install one, then build Horovod for it")
    if found.horovod is None:
        found.problems.append(f"Horovod is not installed: {REBUILD}")
        return found
    if installed["horovod"] != edits.HOROVOD_VERSION:
        found.notes.append(
            f"Horovod is {installed['horovod']}; hvd_hetero was made for {edits.HOROVOD_VERSION}: {REBUILD}"
        )
    repairs = expected_repairs(frameworks)
    wanted = edits.names(repairs)
    found.present = [name for name in wanted if name in found.horovod["edits"]]
    found.missing = {name: WITHOUT.get(name, "") for name in wanted if name not in found.horovod["edits"]}
    built_for = found.horovod.get("frameworks", {})
    same = found.horovod.get("repairs") == edits.text_hash(repairs)
    if set(built_for) == set(frameworks) and not (same or found.missing):
        found.notes.append(f"Horovod has repairs of another version of hvd_hetero, by the same names: {REBUILD}")
    for name in frameworks:
        version = built_for.get(name)
        if built_for and version is None:
            found.problems.append(f"Horovod was built without {name}, which is installed: {REBUILD}")
            continue
        if version is not None and not _same(version, installed[name]):
            found.problems.append(f"Horovod was built for {name} {version}, and {installed[name]} is there: {REBUILD}")
        if load:
            _check_import(name, found)
    return found


def _same(built_for: str, installed: str | None) -> bool:
    """Whether two versions of a framework are the same.

    One of them may lack the suffix that names the hardware ("+cpu", "+cu130"); two suffixes have to be equal.
    """
    first, second = built_for.partition("+"), (installed or "").partition("+")
    return first[0] == second[0] and (first[2] == second[2] or not first[2] or not second[2])


def _tools() -> tuple[dict[str, str], list[str]]:
    """See `Diagnosis.tools`; and the names of those without which a build would end with an error.

    The text of such a tool is the first line of that error. That of one that a build can do without is "none".
    """
    ways: dict[str, Callable[[], str | None]] = {
        "compiler": lambda: toolchain.compiler()[1],
        "make": toolchain.make_program,
        "cmake": lambda: toolchain.cmake()[1],
        "mpi": lambda: toolchain.mpi("auto"),
        "processor": lambda: " ".join(toolchain.cpu_flags()) or "no AVX",
        "cache": lambda: str(default_folder()),
    }
    tools: dict[str, str] = {}
    missing: list[str] = []
    for name, find in ways.items():
        try:
            tools[name] = find() or "none"
        except CommandError as error:
            tools[name] = str(error).splitlines()[0]
            missing.append(name)
    return tools, missing


def _check_import(name: str, found: Diagnosis) -> None:
    """Imports Horovod for the framework `name` in a new process, and adds its back ends or a problem to `found`."""
    answer = toolchain.output([sys.executable, "-c", _PROBE, name])
    if answer is None:
        found.problems.append(
            f"horovod.{name} cannot be imported: {REBUILD} (`python -c 'import horovod.{name}'` shows the error)"
        )
        return
    built = json.loads(answer.splitlines()[-1])
    if failed := built.get("failed"):
        todo = f"repair {name} first" if failed == name else f"repair that, or {REBUILD}"
        found.problems.append(f"{failed} cannot be imported ({built['error']}): {todo}")
        return
    found.loads[name] = ", ".join(part for part in ("gloo", "mpi", "nccl") if built[part]) or "no back end"
    if not (built["gloo"] or built["mpi"]):
        found.problems.append(f"horovod.{name} was built without Gloo and MPI, and starts no ranks: {REBUILD}")
    elif not built["gloo"]:
        found.notes.append(f"horovod.{name} was built without Gloo: no elastic jobs, and ranks wait busily: {REBUILD}")


def as_text(found: Diagnosis) -> str:
    """The diagnosis as text for people, of several lines."""
    lines = [f"Python      {found.python}"]
    lines += [f"{name:<11} {version or '–'}" for name, version in found.installed.items()]
    lines += ["", *(f"{name:<11} {value}" for name, value in found.tools.items())]
    if found.horovod is not None:
        ours = "built by hvd-hetero" if "format" in found.horovod else "not built by hvd-hetero"
        lines += ["", f"Horovod     {ours}" + (", without repairs (--plain)" if found.horovod.get("plain") else "")]
        lines += [f"  horovod.{name} loads: {parts}" for name, parts in found.loads.items()]
        for name in found.present:
            lines.append(f"  has      {name}" + (f"  (on with {_VARIABLES[name]})" if name in _VARIABLES else ""))
        lines += [f"  MISSING  {name}: {meaning}" for name, meaning in found.missing.items()]
        if found.missing:
            lines.append(f"  hvd_hetero works without them; to have them, {REBUILD}")
    lines += ["", *(f"note: {note}" for note in found.notes), *(f"PROBLEM: {problem}" for problem in found.problems)]
    lines += ["all is well"] if not (found.problems or found.notes or found.missing) else []
    return "\n".join(lines).rstrip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add_json_option(parser)
    parser.add_argument("--no-load", action="store_true", help="do not import Horovod to see whether it loads")


def command(arguments: argparse.Namespace) -> int:
    """Prints the diagnosis, or writes it as JSON. Returns the exit code: 1 if there are problems, else 0."""
    found = examine(load=not arguments.no_load)
    write_or_show(vars(found), arguments.json, show=lambda: print(as_text(found)))
    return 1 if found.problems else 0
