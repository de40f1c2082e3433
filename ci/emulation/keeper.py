"""The process beside a cluster that holds ranks to their shares, and that clears up should the cluster's owner die.

Started by `Cluster` as `python keeper.py ORDERS`; it ends when its standard input does, which happens however its owner
ends; an owner in good order says `stop` there first, and clears up itself.

Ranks and owner speak to it over a Unix socket, one line each way: `hold RANK PID`,
`release RANK PID`, `cores RANK CORES`, `stop RANK 1` or `0`; it answers `ok` or what was wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from emulation import leftovers
from emulation.quota import CgroupQuota, DutyQuota, Quota


def main(orders: dict) -> None:
    """Returns when the owner has said `stop` or died; in the latter case nothing of its cluster is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what ends the owner is for the owner to handle; then our input ends
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(orders["socket"])
    listener.listen(64)
    quota: Quota
    if orders["quota"] == "duty":
        quota = DutyQuota(orders["cores"], orders["period_us"])
    else:
        root = Path(orders["cgroup_root"])
        quota = CgroupQuota(orders["quota"], root, orders["name"], orders["cores"], orders["period_us"])
    print("ready", flush=True)
    orderly = False
    try:
        orderly = serve(listener, quota)
    finally:
        quota.close()
        if not orderly:
            leftovers.remove(orders["name"])


def serve(listener: socket.socket, quota: Quota) -> bool:
    """True when the owner said `stop`, False when standard input just ended; until then it answers and ticks."""
    asking: list[socket.socket] = []
    while True:
        readable, _, _ = select.select([sys.stdin, listener, *asking], [], [], quota.tick_s)
        quota.tick()
        if sys.stdin in readable:
            return os.read(sys.stdin.fileno(), 16).startswith(b"stop")
        if listener in readable:
            asking.append(listener.accept()[0])
        # Never wait for one: a rank may have been stopped between its connecting and its asking.
        for connection in [connection for connection in asking if connection in readable]:
            asking.remove(connection)
            with connection, contextlib.suppress(OSError):  # whoever asked may be gone
                reply = answer(connection.recv(256).decode(errors="replace").split(), quota)
                connection.sendall(reply.encode() + b"\n")


def answer(words: list[str], quota: Quota) -> str:
    """What to reply: "ok" when the request was carried out, otherwise one line saying why not."""
    try:
        verb, rank, value = words
        if verb == "hold":
            quota.hold(int(rank), int(value))
        elif verb == "release":
            quota.release(int(rank), int(value))
        elif verb == "cores":
            quota.set_cores(int(rank), float(value))
        elif verb == "stop":
            quota.stop(int(rank), value == "1")
        else:
            return f"error: unknown request {verb!r}"
    except (OSError, ValueError, KeyError) as error:
        return f"error: {type(error).__name__}: {error}".replace("\n", " ")
    return "ok"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
