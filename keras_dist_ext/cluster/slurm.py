"""Read the cluster that SLURM's `srun` describes to each of its tasks: on which host each task is.

Names are expanded as SLURM does (src/common/hostlist.c), and tasks put on hosts as it does
(src/common/slurm_step_layout.c): the same on every task, from variables that are the same on every task.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from keras_dist_ext.cluster.spec import Cluster, task_count
from keras_dist_ext.errors import ClusterError

__all__ = ["expand_hosts", "expand_task_counts", "hosts_of_tasks", "slurm_cluster"]

FIRST_PORT = 8888  # of a host; its next task has the next one, as with TensorFlow's SlurmClusterResolver
_MOST_HOSTS = 65536  # of a range, as in SLURM
_NODES, _COUNTS, _NUM_TASKS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"


def slurm_cluster(environ: Mapping[str, str]) -> Cluster:
    """Read what `srun` gives each of its tasks.

    Args:
        environ: where its variables are.

    Raises:
        ClusterError: it does not describe a cluster, or does not say which task is where.
    """
    for name in (_NODES, _COUNTS, "SLURM_PROCID"):
        if not environ.get(name):
            raise ClusterError(
                f"SLURM started several tasks, but {name} is not set. Start with srun, or set TF_CONFIG."
            )
    num_tasks, own = task_count(environ, _NUM_TASKS), task_count(environ, "SLURM_PROCID")
    if own >= num_tasks:
        raise ClusterError(
            f"SLURM_PROCID calls this task {own}, counted from 0, but {_NUM_TASKS} is {num_tasks}. Start with srun, or "
            "set TF_CONFIG."
        )
    hosts, counts = expand_hosts(environ[_NODES]), expand_task_counts(environ[_COUNTS])
    if len(hosts) != len(counts) or sum(counts) != num_tasks:
        raise ClusterError(
            f"SLURM's variables do not go together: {_NODES}={environ[_NODES]!r} has {len(hosts)} hosts, "
            f"{_COUNTS}={environ[_COUNTS]!r} has {sum(counts)} tasks on {len(counts)}, and {_NUM_TASKS} is "
            f"{num_tasks}. Start with srun, or set TF_CONFIG."
        )
    on_hosts = hosts_of_tasks(hosts, counts, environ)
    used = dict.fromkeys(hosts, 0)
    addresses = []
    for host in on_hosts:
        addresses.append(f"{host}:{FIRST_PORT + used[host]}")
        used[host] += 1
    if on_hosts[own] != (environ.get("SLURMD_NODENAME") or on_hosts[own]):
        raise ClusterError(
            f"SLURM's variables put task {own} on {on_hosts[own]}, but it runs on {environ['SLURMD_NODENAME']}: "
            f"{_NODES}={environ[_NODES]!r}, {_COUNTS}={environ[_COUNTS]!r}, "
            f"SLURM_DISTRIBUTION={environ.get('SLURM_DISTRIBUTION')!r}. Set TF_CONFIG."
        )
    return Cluster("SLURM", worker=tuple(addresses), task_type="worker", task_index=own, rpc_layer="grpc")


def expand_hosts(text: str) -> list[str]:
    """Return the names of a node list, in SLURM's order.

        >>> expand_hosts("n[9-10],gpu[008-010,12],login")
        ['n9', 'n10', 'gpu008', 'gpu009', 'gpu010', 'gpu12', 'login']
        >>> expand_hosts("rack[1-2]n[1-2]-ib")
        ['rack1n1-ib', 'rack1n2-ib', 'rack2n1-ib', 'rack2n2-ib']

    Args:
        text: of SLURM_STEP_NODELIST.

    Raises:
        ClusterError: it is no node list.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:\[[^\[\]]*\]|[^\[\],\s]|[\[\]])+", text):
        hosts += _expanded(part, text)
        if len(hosts) > _MOST_HOSTS:
            _refuse(text, f"it has more than {_MOST_HOSTS} hosts")
    if not hosts:
        _refuse(text, "it names no host")
    return hosts


def _expanded(part: str, text: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\[\]]*)\]", part)  # text, ranges, text, ranges, ..., text
    if any("[" in piece or "]" in piece for piece in pieces):
        _refuse(text, "a bracket is not closed")
    ranges = [list(_numbers(piece, text)) for piece in pieces[1::2]]
    if not ranges:
        return iter([part])
    # SLURM counts the last bracket fastest; of the others, the one before it slowest.
    slow = [*range(len(ranges) - 1)][::-1]
    places = [*slow, len(ranges) - 1]
    products = itertools.product(*(ranges[place] for place in places))
    numbers = ([product[places.index(place)] for place in range(len(ranges))] for product in products)
    words = (itertools.chain(*zip(pieces[::2], [*chosen, ""], strict=True)) for chosen in numbers)
    return ("".join(word) for word in itertools.islice(words, _MOST_HOSTS + 1))


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """The numbers in a bracket, each as wide as the first of its range."""
    for one in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", one)
        if match is None:
            _refuse(text, f"{one!r} is neither a number nor a range such as 1-4")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 <= last - first < _MOST_HOSTS:
            _refuse(text, f"{one!r} does not ascend, or has more than {_MOST_HOSTS} numbers")
        yield from (f"{number:0{len(match[1])}}" for number in range(first, last + 1))


def _refuse(text: str, why: str) -> NoReturn:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    raise ClusterError(
        f"{_NODES} is {shown!r}, which is not a node list of SLURM: {why}. Correct it, or set TF_CONFIG."
    )


def expand_task_counts(text: str) -> list[int]:
    """Return the number of tasks of each host.

        >>> expand_task_counts("2(x3),1")
        [2, 2, 2, 1]

    Args:
        text: of SLURM_STEP_TASKS_PER_NODE.

    Raises:
        ClusterError: it is something else.
    """
    counts: list[int] = []
    for one in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", one.strip())
        times = int(match[2] or 1) if match else 0
        if match is None or not int(match[1]) or not 0 < times <= _MOST_HOSTS:
            raise ClusterError(
                f"{_COUNTS} is {text[:200]!r}, where {one[:50]!r} is not a number of tasks such as 4, or 4(x2) for two "
                "hosts. Correct it, or set TF_CONFIG."
            )
        counts += [int(match[1])] * times
    return counts


def hosts_of_tasks(hosts: Sequence[str], counts: Sequence[int], environ: Mapping[str, str]) -> list[str]:
    """Return the host of each task, as `srun --distribution` puts them.

    Args:
        hosts: in SLURM's order.
        counts: tasks of each.
        environ: where SLURM_DISTRIBUTION is; without it, SLURM fills one host after the other.

    Raises:
        ClusterError: the variables do not say which task is where.
    """
    given = environ.get("SLURM_DISTRIBUTION", "")
    kind, _, size = re.split("[:,]", given.strip().lower())[0].partition("=")
    block = max(counts)
    if kind == "cyclic":
        block = 1
    elif kind == "plane":
        size = size or environ.get("SLURM_DIST_PLANESIZE", "")
        if not re.fullmatch("0*[1-9][0-9]{0,8}", size):
            raise ClusterError(
                f"SLURM_DISTRIBUTION is {given!r}, but SLURM_DIST_PLANESIZE is {size!r}, which is not the size of a "
                "plane. Give srun --distribution=plane=SIZE, or set TF_CONFIG."
            )
        block = int(size)
    elif kind not in ("", "*", "block") and len(hosts) > 1:
        raise ClusterError(
            f"SLURM_DISTRIBUTION is {given!r}, and only the hostfile says which task is on which host, so this task "
            "cannot know the addresses of the others. Use srun --distribution=block, cyclic or plane=SIZE, or set "
            "TF_CONFIG."
        )
    if block < max(counts) and len(set(counts)) > 1 and environ.get("SLURM_OVERCOMMIT", "0") != "0":
        raise ClusterError(
            f"SLURM_DISTRIBUTION is {given!r} with --overcommit, and {_COUNTS} is {environ.get(_COUNTS)!r}: which task "
            "is on which host depends on the CPUs of each. Use srun --distribution=block, or set TF_CONFIG."
        )
    left, placed = list(counts), []
    while any(left):
        for place, host in enumerate(hosts):
            num_here = min(block, left[place])
            left[place] -= num_here
            placed += [host] * num_here
    return placed
