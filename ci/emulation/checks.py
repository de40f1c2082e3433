"""What a cluster may be asked for; each refusal names what was expected and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from .quota import KERNEL_MINIMUM_US


def check_cluster(
    cores: Sequence[float],
    nodes: Sequence[int],
    link_mbit: Sequence[float] | None,
    period_us: int,
    network: str,
    quota: str,
) -> None:
    """Returns when such a cluster makes sense; otherwise ValueError says what does."""
    if not cores:
        raise ValueError("ranks: expected at least one EmulatedRank, received none")
    if list(nodes) != sorted(nodes) or set(nodes) != set(range(nodes[-1] + 1)):
        raise ValueError(
            f"ranks: expected nodes numbered from 0 without a gap and in rising order, received {list(nodes)}: "
            "horovodrun numbers the ranks node by node"
        )
    if link_mbit is not None and len(link_mbit) != (count := len(set(nodes))):
        raise ValueError(f"link_mbit: expected one number, or one for each of {count} nodes, received {link_mbit}")
    if link_mbit is not None and min(link_mbit) < 1:
        raise ValueError(f"link_mbit: expected at least 1 (a tbf of less stalls), received {min(link_mbit)}")
    if not 1_000 <= period_us <= 1_000_000:
        raise ValueError(f"period_us: expected 1000 to 1000000 (the kernel's bounds), received {period_us}")
    for name, value, known in (
        ("network", network, ("auto", "namespaces", "loopback")),
        ("quota", quota, ("auto", "cgroup", "duty")),
    ):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, received {value!r}")
    if network == "namespaces" and len(set(nodes)) == 1:
        raise ValueError('network="namespaces" wants at least two nodes; on one there is no link to emulate')
    for rank, share in enumerate(cores):
        check_cores(rank, share, period_us)


def check_cores(rank: int, cores: float, period_us: int) -> None:
    """Returns when a rank can be held to so much of a core; otherwise ValueError says to how much."""
    least = KERNEL_MINIMUM_US / period_us
    if not least <= cores <= 1024:
        raise ValueError(
            f"rank {rank}: expected at least {least:g} cores (the kernel's shortest quota, {KERNEL_MINIMUM_US} µs, "
            f"in a period of {period_us} µs), received {cores}; a longer period_us allows smaller shares"
        )
