"""What tests of questions between ranks share: a time limit, and a process that is not there."""

from hvd_hetero.engine.peer import Peer

LIMIT_S = 20.0


def stranger(rank):
    """A rank of another host, which nobody asks."""
    return Peer(
        rank=rank, host="node", identity="another host's", address="192.0.2.7", port=9, pid=7, born="", token=""
    )  # fmt: skip
