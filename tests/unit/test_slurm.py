"""Node lists and task counts mean what they mean to SLURM: its manual pages, and what its code does with them."""

from __future__ import annotations

import pytest

from keras_dist_ext.cluster.slurm import expand_hosts, expand_task_counts, hosts_of_tasks, slurm_cluster
from keras_dist_ext.errors import ClusterError

# From slurm.conf(5), srun(1), scontrol(1), slurm_hostlist_create(3) and Slurm::Hostlist(3), where names are the
# manual's; the others are of the same kinds.
HOSTS = {
    "linux": "linux",
    "lx0": "lx0",
    "alpha,beta,gamma": "alpha beta gamma",
    "linux[1-3,6]": "linux1 linux2 linux3 linux6",
    "lx[15,18,32-33]": "lx15 lx18 lx32 lx33",
    "linux[00-03]": "linux00 linux01 linux02 linux03",
    "linux[0000-0002]": "linux0000 linux0001 linux0002",
    "node1,node[2-5,12]": "node1 node2 node3 node4 node5 node12",
    "node21,node[27-29]": "node21 node27 node28 node29",
    "tux[0-5,12,20-22]": "tux0 tux1 tux2 tux3 tux4 tux5 tux12 tux20 tux21 tux22",
    "rack[0-1]_blade[0-2]": "rack0_blade0 rack0_blade1 rack0_blade2 rack1_blade0 rack1_blade1 rack1_blade2",
    "rack[1-2]n[1-2]": "rack1n1 rack1n2 rack2n1 rack2n2",
    "n[9-10]": "n9 n10",
    "n[8-11]": "n8 n9 n10 n11",
    "n[99-101]": "n99 n100 n101",
    "n[1,10,2]": "n1 n10 n2",
    "n[10,9]": "n10 n9",
    "n10,n9": "n10 n9",
    "b2,a1": "b2 a1",
    "n[09-10]": "n09 n10",
    "n[009-011]": "n009 n010 n011",
    "n[098-101]": "n098 n099 n100 n101",
    "n[1-2,005-006]": "n1 n2 n005 n006",
    "n[01,2]": "n01 n2",
    "n[0]": "n0",
    "n[00]": "n00",
    "n[7-7]": "n7",
    "gpu-a100-[008-010]": "gpu-a100-008 gpu-a100-009 gpu-a100-010",
    "cn-[01-02].cluster": "cn-01.cluster cn-02.cluster",
    "node[1-2]-ib": "node1-ib node2-ib",
    "p-0.svc,p-1.svc": "p-0.svc p-1.svc",
    "nid[00001-00003]": "nid00001 nid00002 nid00003",
    "nid0000[2-4]": "nid00002 nid00003 nid00004",
    "n[1-2],m5,o[3-4,6,7-9]": "n1 n2 m5 o3 o4 o6 o7 o8 o9",
    "a[1-2],b[1-2]": "a1 a2 b1 b2",
    "login,n[1-2],gpu": "login n1 n2 gpu",
    "r[1,3]c[2,4]": "r1c2 r1c4 r3c2 r3c4",
    "r[01-02]c[1]n[08-09]": "r01c1n08 r01c1n09 r02c1n08 r02c1n09",
    "a[1-2]b[3-4]c[5-6]": "a1b3c5 a1b3c6 a2b3c5 a2b3c6 a1b4c5 a1b4c6 a2b4c5 a2b4c6",  # SLURM's own order
    "r[1-2]n[1-2].eu": "r1n1.eu r1n2.eu r2n1.eu r2n2.eu",
    "n[1-2],n[4-5]": "n1 n2 n4 n5",
    "n1 n2": "n1 n2",
    "n1\tn[2-3]": "n1 n2 n3",
    "n1, n2": "n1 n2",
    "[1-3]": "1 2 3",
    "10-0-0-[1-2]": "10-0-0-1 10-0-0-2",
    "ip-10-0-0-[99-101]": "ip-10-0-0-99 ip-10-0-0-100 ip-10-0-0-101",
    "compute-dy-gpu-[1-2],compute-st-gpu-1": "compute-dy-gpu-1 compute-dy-gpu-2 compute-st-gpu-1",
}


@pytest.mark.parametrize(("text", "names"), HOSTS.items())
def test_a_node_list_has_the_hosts_that_slurm_reads_in_it_in_its_order(text: str, names: str) -> None:
    assert expand_hosts(text) == names.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("n[1", "a bracket is not closed"),
        ("n1]", "a bracket is not closed"),
        ("n[1,2", "a bracket is not closed"),
        ("n[[1-2]]", "a bracket is not closed"),
        ("n[]", "'' is neither a number nor a range such as 1-4"),
        ("n[1-]", "'1-' is neither a number"),
        ("n[1,]", "'' is neither a number"),
        ("n[a-c]", "'a-c' is neither a number"),
        ("n[000x333]", "'000x333' is neither a number"),  # boxes of machines with three dimensions
        ("n[3-1]", "'3-1' does not ascend"),
        ("n[1-999999999]", "has more than 65536 numbers"),
        ("a[1-60000]b[1-60000]", "has more than 65536 hosts"),
        (",", "it names no host"),
    ],
)
def test_what_slurm_would_not_write_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ClusterError, match="SLURM_STEP_NODELIST is .*, which is not a node list of SLURM: ") as caught:
        expand_hosts(text)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", [1]),
        ("4", [4]),
        ("2(x3),1", [2, 2, 2, 1]),  # sbatch(1)
        ("2(x2)", [2, 2]),
        ("1(x1)", [1]),
        ("3,2(x2),1", [3, 2, 2, 1]),
        ("2,1", [2, 1]),
        ("16(x2),8(x2)", [16, 16, 8, 8]),
    ],
)
def test_tasks_per_node_are_read_in_all_forms(text: str, counts: list[int]) -> None:
    assert expand_task_counts(text) == counts


@pytest.mark.parametrize("text", ["", "two", "2(x)", "2(x0)", "0", "2x3", "-1", "2(x9999999)", "1,,2"])
def test_what_is_no_number_of_tasks_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="SLURM_STEP_TASKS_PER_NODE is .* is not a number of tasks such as 4, or 4"):
        expand_task_counts(text)


# Of three hosts a, b, c. The second of a plane is the example in slurm_step_layout.c.
@pytest.mark.parametrize(
    ("counts", "variables", "tasks"),
    [
        ([2, 2, 2], {}, "aabbcc"),
        ([2, 2, 2], {"SLURM_DISTRIBUTION": "block"}, "aabbcc"),
        ([2, 2, 2], {"SLURM_DISTRIBUTION": "*"}, "aabbcc"),
        ([2, 2, 2], {"SLURM_DISTRIBUTION": "block:cyclic"}, "aabbcc"),
        ([2, 2, 2], {"SLURM_DISTRIBUTION": "block,Pack"}, "aabbcc"),
        ([2, 2, 2], {"SLURM_DISTRIBUTION": "cyclic"}, "abcabc"),
        ([2, 2, 2], {"SLURM_DISTRIBUTION": "cyclic:block:fcyclic"}, "abcabc"),
        ([2, 1, 1], {"SLURM_DISTRIBUTION": "cyclic"}, "abca"),  # srun(1): tasks one and four on the first node
        ([2, 1, 1], {"SLURM_DISTRIBUTION": "block"}, "aabc"),
        ([1, 1, 1], {"SLURM_DISTRIBUTION": "cyclic"}, "abc"),
        ([4, 1, 1], {"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}, "aabcaa"),
        ([4, 4, 4], {"SLURM_DISTRIBUTION": "plane=2"}, "aabbccaabbcc"),
        ([3, 3, 1], {"SLURM_DISTRIBUTION": "plane=2"}, "aabbcab"),
        ([2, 2, 2], {"SLURM_DISTRIBUTION": "plane=9"}, "aabbcc"),
    ],
)
def test_tasks_are_on_the_hosts_on_which_slurm_puts_them(
    counts: list[int], variables: dict[str, str], tasks: str
) -> None:
    assert hosts_of_tasks("abc", counts, variables) == list(tasks)


@pytest.mark.parametrize(
    ("counts", "variables", "message"),
    [
        ([2, 2], {"SLURM_DISTRIBUTION": "arbitrary"}, "only the hostfile says which task is on which host"),
        ([1, 1], {"SLURM_DISTRIBUTION": "arbitrary"}, "only the hostfile says which task is on which host"),
        ([2, 2], {"SLURM_DISTRIBUTION": "plane"}, "SLURM_DIST_PLANESIZE is '', which is not the size of a plane"),
        ([2, 2], {"SLURM_DISTRIBUTION": "plane=0"}, "SLURM_DIST_PLANESIZE is '0'"),
        ([2, 4], {"SLURM_DISTRIBUTION": "cyclic", "SLURM_OVERCOMMIT": "1"}, "depends on the CPUs of each"),
    ],
)
def test_a_distribution_that_the_variables_do_not_tell_is_refused_on_every_task(
    counts: list[int], variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ClusterError, match=f"{message}.*set TF_CONFIG"):
        hosts_of_tasks("ab", counts, variables)
    assert hosts_of_tasks("a", [4], {"SLURM_DISTRIBUTION": "arbitrary"}) == list("aaaa")


def environ_of(task: int, **variables: str) -> dict[str, str]:
    return {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": str(task), **variables}


def test_all_tasks_read_the_same_cluster_with_a_port_for_each_task_of_a_host() -> None:
    given = {"SLURM_STEP_NODELIST": "n[9-10]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    cyclic = {**given, "SLURM_DISTRIBUTION": "cyclic"}
    for task, host in enumerate(["n9", "n10", "n9", "n10"]):
        cluster = slurm_cluster(environ_of(task, SLURMD_NODENAME=host, **cyclic))
        assert cluster.worker == ("n9:8888", "n10:8888", "n9:8889", "n10:8889")
        assert (cluster.task_type, cluster.task_index, cluster.rpc_layer) == ("worker", task, "grpc")
    assert slurm_cluster(environ_of(0, SLURMD_NODENAME="", **given)).worker == (
        "n9:8888",
        "n9:8889",
        "n10:8888",
        "n10:8889",
    )


@pytest.mark.parametrize(
    ("nodes", "counts", "message"),
    [
        ("n[1-3]", "2(x2)", r"has 3 hosts, SLURM_STEP_TASKS_PER_NODE='2\(x2\)' has 4 tasks on 2, .*NUM_TASKS is 4"),
        ("n[1-2]", "2,1", "has 3 tasks on 2, and SLURM_STEP_NUM_TASKS is 4"),
    ],
)
def test_variables_that_do_not_go_together_are_refused(nodes: str, counts: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        slurm_cluster(environ_of(0, SLURM_STEP_NODELIST=nodes, SLURM_STEP_TASKS_PER_NODE=counts))
