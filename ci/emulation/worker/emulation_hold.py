"""What a rank of an emulated cluster imports to be held to its share of a core, and to be let go again.

`Cluster` puts this file's folder on PYTHONPATH, so a worker writes `from emulation_hold import hold, release`. It calls
`hold()` when its imports and `hvd.init()` are done (importing torch at 0.2 cores takes more than ten seconds) and
`release()` before it tears down. Outside an emulated cluster there is no such module; the variable
`HVD_EMULATION_HOLD` names this file.

`python emulation_hold.py COMMAND …` holds first and then becomes COMMAND: for commands whose source is not ours.
"""

from __future__ import annotations

import os
import socket
import sys

SOCKET_VARIABLE = "HVD_EMULATION_SOCKET"
# The first one found counts. Ours comes first: a rank that runs alone has RANK=0 whatever rank's speed it is given.
RANK_VARIABLES = ("HVD_EMULATION_RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")


def hold(rank: int | None = None) -> bool:
    """True once every thread of this process, and its children, get no more than the rank's cores; False outside an
    emulated cluster. Without `rank` the launcher's environment says which rank this is."""
    return _ask("hold", rank)


def release(rank: int | None = None) -> bool:
    """True once this process and its children run unlimited again; False outside an emulated cluster."""
    return _ask("release", rank)


def emulated_rank() -> int:
    """The emulated rank of this process, from the environment its launcher gave it."""
    for variable in RANK_VARIABLES:
        if os.environ.get(variable, "").isdecimal():
            return int(os.environ[variable])
    raise RuntimeError(
        f"hold(): expected the rank in one of {', '.join(RANK_VARIABLES)}; none is set. "
        "Start the process with Cluster.horovodrun or Cluster.processes, or pass hold(rank=…)."
    )


def _ask(verb: str, rank: int | None) -> bool:
    address = os.environ.get(SOCKET_VARIABLE)
    if not address:
        return False
    request = f"{verb} {emulated_rank() if rank is None else rank} {os.getpid()}"
    reply = ask(address, request)
    if reply != "ok":
        raise RuntimeError(f"{verb}(): the emulated cluster answered {reply!r} to {request!r}")
    return True


def ask(address: str, request: str) -> str:
    """The keeper's one-line answer to a one-line request. A path-named socket crosses network namespaces."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30.0)  # the keeper shares two busy cores with the ranks
        try:
            connection.connect(address)
            connection.sendall(request.encode() + b"\n")
            with connection.makefile("r") as answer:
                return answer.readline().strip()
        except OSError as error:
            raise RuntimeError(
                f"the emulated cluster's keeper does not answer at {address} ({error}): was the Cluster left already?"
            ) from error


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("emulation_hold.py: expected a command to run, received none")
    hold()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as problem:
        sys.exit(f"emulation_hold.py: cannot run {sys.argv[1]!r}: {problem}")
