"""Texts, bytes and objects, which ranks gather, scatter and broadcast; long ones in several operations."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from .port import Engine

PIECE_BYTES = 1 << 24  # the most bytes that one operation carries: see `broadcast_in_pieces`


def gather_text(engine: Engine, text: str, *, name: str) -> list[str]:
    """Returns the texts of all ranks, by rank; line breaks within a text become spaces. A collective call."""
    row = np.frombuffer(f"{' '.join(text.splitlines())}\n".encode(), dtype=np.uint8).copy()
    whole = np.asarray(engine.allgather_async(row, name=name).wait())
    return whole.tobytes().decode().splitlines()


def _piece_bytes(lengths: np.ndarray) -> int:
    """The most bytes of each rank that one operation carries, where a rank has `lengths[rank]` to be carried in all."""
    return PIECE_BYTES if lengths.sum() <= PIECE_BYTES else max(PIECE_BYTES // len(lengths), 1)


def gather_bytes(engine: Engine, mine: bytes, *, name: str, root: int | None = None) -> list[bytes]:
    """Gathers the bytes of all ranks. A collective call, in several operations if they are long, as
    `broadcast_in_pieces`.

    Returns:
        The bytes of each rank, by rank. If `root` is given, on that rank only; an empty list on the others.
    """
    lengths = np.asarray(engine.allgather_async(np.array([len(mine)]), name=f"{name}.lengths").wait())
    step = _piece_bytes(lengths)
    row, found = np.frombuffer(mine, np.uint8), [bytearray() for _ in lengths]
    for at in range(0, max(int(lengths.max()), 1), step):
        piece = row[at : at + step].copy()
        if root is None:
            whole = np.asarray(engine.allgather_async(piece, name=name).wait())
        else:
            splits = [len(piece) if rank == root else 0 for rank in range(engine.size)]
            whole = np.asarray(engine.alltoall_async(piece, splits=splits, name=name).wait())
            if engine.rank != root:
                continue
        ends: np.ndarray = np.cumsum(np.clip(lengths - at, 0, step))
        for one, part in zip(found, np.split(whole, ends[:-1]), strict=True):
            one += part.data
    return list(map(bytes, found)) if root in (None, engine.rank) else []


def scatter_bytes(engine: Engine, parts: Sequence[bytes], *, root: int, name: str) -> bytes:
    """Returns `parts[rank]` of rank `root`, where `rank` is the caller's. Other ranks' `parts` are ignored.

    A collective call, in several operations if the parts are long, as `broadcast_in_pieces`.
    """
    lengths = np.array([len(part) for part in parts] if engine.rank == root else [0] * engine.size)
    engine.broadcast_async(lengths, root=root, name=f"{name}.lengths").wait()
    step = _piece_bytes(lengths)
    mine = bytearray()
    for at in range(0, max(int(lengths.max()), 1), step):
        pieces = [part[at : at + step] for part in parts] if engine.rank == root else [b""] * engine.size
        row = np.frombuffer(b"".join(pieces), np.uint8).copy()
        sent = engine.alltoall_async(row, splits=list(map(len, pieces)), name=name).wait()
        mine += np.asarray(sent).data
    return bytes(mine)


def broadcast_bytes(engine: Engine, mine: bytes, *, root: int, name: str) -> bytes:
    """Returns the bytes of rank `root`, on all ranks; `mine` is ignored on the others. A collective call, in several
    operations if they are long, as `broadcast_in_pieces`. No rank holds more in memory than these bytes and a piece."""
    said = np.array([len(mine)])
    engine.broadcast_async(said, root=root, name=f"{name}.length").wait()
    length = int(said[0])
    row = np.frombuffer(mine, np.uint8)
    found = io.BytesIO(b"" if engine.rank == root else bytes(length))  # which it overwrites, and returns without a copy
    for at in range(0, max(length, 1), PIECE_BYTES):
        end = min(at + PIECE_BYTES, length)
        piece = row[at:end].copy() if engine.rank == root else np.zeros(end - at, np.uint8)
        engine.broadcast_async(piece, root=root, name=name).wait()
        if engine.rank != root:
            found.write(piece.data)
    return mine if engine.rank == root else found.getvalue()


def broadcast_in_pieces(engine: Engine, array: np.ndarray, *, root: int, name: str) -> None:
    """Overwrites an array of uint8 in place with the array of rank `root`. A collective call.

    An array of more than `PIECE_BYTES` is sent in several operations, because Horovod counts elements in 32 bits, and
    Gloo limits an operation to 30 s, which some 100 MB may take on a slow link.

    Raises:
        `engine.failure`: on every rank, if the lengths of the arrays differ.
    """
    if len(array) > PIECE_BYTES:  # an empty array whose shape holds the length: the ranks compare shapes
        engine.broadcast_async(np.zeros((0, len(array)), np.uint8), root=root, name=name).wait()
    for at in range(0, max(len(array), 1), PIECE_BYTES):
        engine.broadcast_async(array[at : at + PIECE_BYTES], root=root, name=name).wait()


def place_of(engine: Engine, root_rank: int) -> int:
    """The place of a global rank among the engine's ranks. Raises ValueError if it is not one of them."""
    if root_rank not in engine.ranks:
        raise ValueError(f"root_rank: expected one of {engine.ranks}. Received: {root_rank}.")
    return engine.ranks.index(root_rank)


def broadcast_object(engine: Engine, obj: Any, *, root_rank: int, name: str, pickle: Any) -> Any:
    """Returns the object of a global rank, on all ranks; what the others pass is ignored. A collective call.

    Args:
        pickle: has the functions `dumps` and `loads`, as the module `pickle` has.

    Raises:
        ValueError: `root_rank` is not one of the engine's ranks.
    """
    root = place_of(engine, root_rank)
    mine = pickle.dumps(obj) if engine.rank == root else b""
    content = broadcast_bytes(engine, mine, root=root, name=name)
    return obj if engine.rank == root else pickle.loads(content)


def gather_objects(engine: Engine, obj: Any, *, name: str, pickle: Any) -> list[Any]:
    """Returns the objects of all ranks, by rank. A collective call; `pickle` as for `broadcast_object`."""
    return list(map(pickle.loads, gather_bytes(engine, pickle.dumps(obj), name=name)))
