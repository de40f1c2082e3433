"""Repairs of how the launcher reads its list of hosts, and tells its own host from others.

- "own_host": the launcher recognises its own host also where the host's name resolves to 127.0.1.1.
- "as_many_ranks": `horovodrun -np 2 -H host:4` starts two ranks, and hosts that get none need not be there.
- "hostfile_lines": a --hostfile may have empty lines and comments, and a host without `slots=` has one.
- "hosts_listed_twice": a host that is listed twice has the slots of both entries.
- "host_list_error": what is no list of hosts is named in the error.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

EDITS: Final = (
    Edit(
        name="own_host",
        reason="on Debian a host's own name resolves to 127.0.1.1, which is the address of no interface: horovodrun "
        "takes its own host for a remote one, starts the ranks there through ssh, and does not pass SIGTERM on to "
        "them. Any address in 127.* now counts as local",
        file="horovod/runner/util/network.py",
        find="""def filter_local_addresses(all_host_names):
    local_addresses = get_local_host_addresses()

""",
        replace="""def is_local_address(address):
    return address is not None and (address.startswith('127.') or address in get_local_host_addresses())


def filter_local_addresses(all_host_names):
""",
    ),
    Edit(
        name="own_host",
        reason="Part of own_host: filter_local_addresses, which picks out the remote hosts, uses the new test of an "
        "address",
        file="horovod/runner/util/network.py",
        find="        if not host_address or host_address not in local_addresses:\n",
        replace="        if not is_local_address(host_address):\n",
    ),
    Edit(
        name="own_host",
        reason="Part of own_host: the launcher, which starts a rank directly or through ssh, uses the new test of an "
        "address",
        file="horovod/runner/gloo_run.py",
        find="""        local_addresses = network.get_local_host_addresses()
        if host_address not in local_addresses:
""",
        replace="""        if not network.is_local_address(host_address):
""",
    ),
    Edit(
        name="as_many_ranks",
        reason="under Gloo, `horovodrun -np 2 -H host:4` starts four ranks, one for each slot, where mpirun starts "
        "two; and a listed host that gets no rank has to be reached through ssh. Now slots are filled in the order of "
        "the hosts until there are as many ranks as -np says, and the other hosts are left out",
        file="horovod/runner/launch.py",
        find="""def _run_static(args):
""",
        replace="""def needed_hosts(listed, num_proc):
    hosts.parse_hosts_and_slots(listed)  # says what it expects where that is no list of hosts
    needed, left = [], num_proc
    for host in hosts.parse_hosts(listed):
        if left > 0:
            needed.append(f'{host.hostname}:{min(host.slots, left)}')
            left -= host.slots
    return ','.join(needed) if left <= 0 else listed


def _run_static(args):
    args.hosts = needed_hosts(args.hosts, args.num_proc)
""",
    ),
    Edit(
        name="hostfile_lines",
        reason="an empty line in a --hostfile, a comment, or a host without slots= ends horovodrun with an IndexError, "
        "and a max_slots= before slots= is taken for it. The first two are passed over now, and such a host has one "
        "slot, as with Open MPI's mpirun where nothing else is known of it",
        file="horovod/runner/common/util/hosts.py",
        find="""            line = line.rstrip()
            hostname = line.split()[0]
            slots = line.split('=')[1]
""",
        replace="""            line = line.partition('#')[0].strip()
            if not line:
                continue
            hostname = line.split()[0]
            given = re.search(r'\\sslots *= *(\\S+)', line)
            slots = given[1] if given else 1
""",
    ),
    Edit(
        name="hosts_listed_twice",
        reason="`-H a:2,b:2,a:2`, as a script makes it that writes an entry for each slot, ends with 'rank < size' on "
        "some ranks. A host's entries are taken together now, as mpirun takes them",
        file="horovod/runner/common/util/hosts.py",
        find="""    return [HostInfo.from_string(host_string) for host_string in hosts_string.split(',')]
""",
        replace="""    found = {}
    for one in map(HostInfo.from_string, hosts_string.split(',')):
        found.setdefault(one.hostname, HostInfo(one.hostname, 0)).slots += one.slots
    return list(found.values())
""",
    ),
    Edit(
        name="hosts_listed_twice",
        reason="Part of hosts_listed_twice: the same where hosts are checked, for elastic jobs, and for mpirun",
        file="horovod/runner/common/util/hosts.py",
        find="""        host_names.append(hostname)
        host_to_slots[hostname] = int(slots)
""",
        replace="""        if hostname not in host_to_slots:
            host_names.append(hostname)
        host_to_slots[hostname] = host_to_slots.get(hostname, 0) + int(slots)
""",
    ),
    Edit(
        name="host_list_error",
        reason="the error for a host without its slots, or with another separator than a comma, does not say which "
        "host it is about. It does now",
        file="horovod/runner/common/util/hosts.py",
        find="""'format as : worker-0:2,worker-1:2.')
""",
        replace="""'format as : worker-0:2,worker-1:2. '
                             'Received: {host!r} in {hosts!r}.'.format(host=host, hosts=hosts))
""",
    ),
)
