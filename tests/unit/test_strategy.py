"""pick_strategy takes what is there, says why, and refuses what is not available before TensorFlow would hang."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import tensorflow as tf

from keras_dist_ext.cluster.spec import Cluster
from keras_dist_ext.errors import ClusterError, StrategyError
from keras_dist_ext.strategy import builders
from keras_dist_ext.strategy.decision import NAMES, Decision, decide
from keras_dist_ext.strategy.packs import bytes_per_pack_of
from keras_dist_ext.strategy.pick import StrategyChoice, pick_strategy
from keras_dist_ext.strategy.resources import Resources, find_resources, list_devices

ONE_CPU = ("CPU:0",)
TWO_GPUS = ("CPU:0", "GPU:0", "GPU:1")
TWO_WORKERS = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURMD_NODENAME": "n1",
}


def resources_of(environ, devices=ONE_CPU, **arguments):
    return find_resources(environ, device_lister=lambda: devices, **arguments)


def tf_config(config):
    return {"TF_CONFIG": json.dumps(config)}


def cluster_with(task=None, **jobs):
    return tf_config({"cluster": jobs, "task": task or {"type": "worker", "index": 0}})


# What auto takes, and why.


@pytest.mark.parametrize(
    ("devices", "name", "chosen", "reason"),
    [
        (ONE_CPU, "one_device", ("CPU:0",), "1 CPU device, no TF_CONFIG"),
        (("CPU:0", "CPU:1"), "mirrored", ("CPU:0", "CPU:1"), "2 CPU devices, no TF_CONFIG"),
        (("CPU:0", "GPU:0"), "one_device", ("GPU:0",), "1 GPU, no TF_CONFIG"),
        (TWO_GPUS, "mirrored", ("GPU:0", "GPU:1"), "2 GPUs, no TF_CONFIG"),
    ],
)
def test_auto_without_a_cluster_takes_all_gpus_or_else_all_cpu_devices(devices, name, chosen, reason):
    assert decide("auto", resources_of({}, devices)) == Decision(name, reason, chosen)


def test_auto_takes_a_device_or_several_that_are_named():
    assert decide("auto", Resources(TWO_GPUS), devices=["CPU:0"]).name == "one_device"
    mixed = decide("auto", Resources(TWO_GPUS), devices=["/gpu:1", "CPU:0"])
    assert mixed == Decision("mirrored", "1 GPU and 1 CPU device, no TF_CONFIG", ("GPU:1", "CPU:0"))


def test_auto_takes_the_tpu_that_the_environment_names():
    resources = resources_of({"TPU_NAME": "grpc://10.0.0.9:8470"})
    assert decide("auto", resources) == Decision("tpu", "TPU grpc://10.0.0.9:8470, no TF_CONFIG")
    assert resources_of({"COLAB_TPU_ADDR": "10.0.0.9:8470"}).tpu == "grpc://10.0.0.9:8470"
    assert resources_of({}, ("CPU:0", "TPU:0")).tpu == "local"
    assert resources_of({"TPU_NAME": "one"}, tpu="other").tpu == "other"


def test_auto_takes_the_cluster_that_tf_config_describes():
    assert decide("auto", resources_of(tf_config(TWO_WORKERS))) == Decision(
        "multi_worker", "TF_CONFIG lists 2 workers, this is worker 1"
    )
    chief = resources_of(cluster_with({"type": "chief", "index": "0"}, chief=["a:1"], worker=["b:1"]))
    assert decide("auto", chief).reason == "TF_CONFIG lists 2 workers, this is chief 0"


def test_auto_takes_parameter_servers_where_the_cluster_has_them():
    resources = resources_of(
        cluster_with({"type": "chief", "index": 0}, chief=["a:1"], worker=["b:1", "c:1"], ps=["d:1"])
    )
    assert decide("auto", resources) == Decision(
        "parameter_server", "TF_CONFIG lists 2 workers and 1 ps, this is chief 0"
    )


def test_a_single_worker_and_an_evaluator_work_alone():
    single = resources_of(cluster_with(worker=["a:1"]), TWO_GPUS)
    assert decide("auto", single) == Decision("mirrored", "2 GPUs, TF_CONFIG lists 1 worker", ("GPU:0", "GPU:1"))
    evaluator = resources_of(cluster_with({"type": "evaluator", "index": 0}, worker=["a:1", "b:1"]))
    assert decide("auto", evaluator).reason == "1 CPU device, TF_CONFIG says evaluator 0, which runs by itself"
    assert decide("mirrored", evaluator).name == "mirrored"


def test_auto_takes_the_cluster_of_a_slurm_step():
    resources = resources_of(SLURM)
    assert resources.cluster == Cluster(
        "SLURM", worker=("n1:8888", "n1:8889", "n2:8888"), task_type="worker", task_index=1, rpc_layer="grpc"
    )
    assert decide("auto", resources) == Decision("multi_worker", "SLURM lists 3 workers, this is worker 1")
    assert resources_of({**SLURM, **cluster_with(worker=["a:1"])}).cluster.source == "TF_CONFIG"


def test_reading_an_injected_environment_leaves_the_real_one_as_it_was(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "7")
    before = dict(os.environ)
    resources_of(SLURM)
    resources_of(tf_config(TWO_WORKERS))
    assert dict(os.environ) == before


def test_a_slurm_step_of_one_task_works_alone():
    assert resources_of({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}) == Resources(ONE_CPU)


def test_a_cluster_resolver_comes_before_tf_config():
    pods = [
        SimpleNamespace(metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase="Running", host_ip=host))
        for name, host in [("pod-1", "10.0.0.2"), ("pod-0", "10.0.0.1")]
    ]
    client = SimpleNamespace(list_pod_for_all_namespaces=lambda label_selector: SimpleNamespace(items=pods))
    resolver = tf.distribute.cluster_resolver.KubernetesClusterResolver(override_client=client)
    resolver.task_type, resolver.task_id = "worker", 0
    resources = resources_of({"TF_CONFIG": "not read"}, cluster_resolver=resolver)
    assert resources.cluster.worker == ("10.0.0.1:8470", "10.0.0.2:8470")
    assert decide("auto", resources).reason == "KubernetesClusterResolver lists 2 workers, this is worker 0"


def test_a_resolver_that_finds_no_cluster_is_named():
    pod = SimpleNamespace(metadata=SimpleNamespace(name="pod-0"), status=SimpleNamespace(phase="Pending"))
    client = SimpleNamespace(list_pod_for_all_namespaces=lambda label_selector: SimpleNamespace(items=[pod]))
    resolver = tf.distribute.cluster_resolver.KubernetesClusterResolver(override_client=client)
    with pytest.raises(
        ClusterError, match='KubernetesClusterResolver does not describe a cluster: Pod "pod-0" is not running'
    ):
        resources_of({}, cluster_resolver=resolver)


@pytest.mark.parametrize(
    ("resolver", "message"),
    [
        ("a:1,b:1", "str does not describe a cluster: 'str' object has no attribute 'cluster_spec'"),
        (
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": ["a:1", "b:1"]}), task_type="worker"
            ),
            "SimpleClusterResolver calls this process a worker, but not which one. Set its task id",
        ),
    ],
)
def test_a_resolver_that_does_not_say_all_is_refused(resolver, message):
    with pytest.raises(ClusterError, match=message):
        resources_of({}, cluster_resolver=resolver)


# What is refused, and what the message names.


def test_an_unknown_name_is_refused_with_the_list_and_a_close_match():
    with pytest.raises(
        StrategyError, match=r"no strategy 'MirroredStrategy'; did you mean 'mirrored'\? There are"
    ) as e:
        decide("MirroredStrategy", Resources(ONE_CPU))
    assert all(name in str(e.value) for name in NAMES)
    with pytest.raises(StrategyError, match=r"no strategy 'xyz'\. There are auto, one_device"):
        decide("xyz", Resources(ONE_CPU))
    with pytest.raises(StrategyError, match="name is of type list; give a string, one of auto"):
        decide(["mirrored"], Resources(ONE_CPU))


@pytest.mark.parametrize("device", ["GPU:0", "/gpu:0", "/device:GPU:0", "/job:localhost/replica:0/task:0/device:GPU:0"])
def test_every_way_to_write_a_device_is_understood(device):
    assert decide("one_device", Resources(TWO_GPUS), devices=[device]).devices == ("GPU:0",)


def test_the_devices_that_tensorflow_lists_can_be_given_as_they_are():
    logical = tf.config.list_logical_devices("CPU")
    assert decide("mirrored", Resources(list_devices()), devices=logical).devices == (
        "CPU:0",
        "CPU:1",
        "CPU:2",
        "CPU:3",
    )


@pytest.mark.parametrize(
    ("devices", "num_replicas", "message"),
    [
        (
            ["CPU:0", "GPU:7"],
            None,
            "GPU:7, which this process does not have; .* hang. TensorFlow has CPU:0, GPU:0, GPU:1",
        ),
        (["GPU:0", "/gpu:0"], None, "devices names GPU:0 more than once"),
        ("GPU:0", None, r"devices is the string 'GPU:0'; give a list: devices=\['GPU:0'\]"),
        ([], None, "devices is empty; name at least one. TensorFlow has CPU:0, GPU:0, GPU:1"),
        (["the fast one"], None, "'the fast one' is not the name of a device. TensorFlow has CPU:0"),
        (["/job:worker/task:1/device:GPU:0"], None, "is not the name of a device"),
        (["GPU:0", "GPU:1"], 3, "num_replicas is 3, but devices names 2: GPU:0, GPU:1. Give one of the two"),
        (
            None,
            3,
            "num_replicas is 3, but there are fewer GPUs. TensorFlow has CPU:0, GPU:0, GPU:1.*CUDA_VISIBLE_DEVICES",
        ),
        (None, 0, "num_replicas must be an integer >= 1, or None, got 0"),
        (None, True, "num_replicas must be an integer >= 1, or None, got True"),
        (None, 1.5, "num_replicas must be an integer >= 1, or None, got 1.5"),
    ],
)
def test_devices_that_are_not_available_are_refused_with_those_there_are(devices, num_replicas, message):
    with pytest.raises(StrategyError, match=message):
        decide("mirrored", Resources(TWO_GPUS), devices=devices, num_replicas=num_replicas)


def test_one_device_is_one_replica():
    assert decide("one_device", Resources(TWO_GPUS), num_replicas=1).devices == ("GPU:0",)
    for arguments in ({"num_replicas": 2}, {"devices": ["GPU:0", "GPU:1"]}):
        with pytest.raises(StrategyError, match="'one_device' is one replica, not 2. Take 'mirrored'"):
            decide("one_device", Resources(TWO_GPUS), **arguments)


def test_replicas_take_the_first_gpus_or_else_cpu_devices_that_are_made():
    assert decide("mirrored", Resources((*TWO_GPUS, "GPU:2")), num_replicas=2).devices == ("GPU:0", "GPU:1")
    made = decide("auto", Resources(ONE_CPU), num_replicas=2)
    assert made == Decision("mirrored", "2 CPU devices for num_replicas=2, no TF_CONFIG", ("CPU:0", "CPU:1"), 2)
    assert decide("auto", Resources(("CPU:0", "CPU:1", "CPU:2")), num_replicas=2).num_cpus_to_make == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "TF_CONFIG is set but empty: ''. Unset it to train in one process"),
        ("{oops", r"TF_CONFIG is not JSON \(Expecting property name.*\): '{oops'"),
        ('{"cluster": ' + "9" * 5000 + "}", r"TF_CONFIG is not JSON \(Exceeds the limit"),
        ('["a:1"]', "TF_CONFIG is a JSON list, not an object"),
        ("{}", "TF_CONFIG lacks 'cluster': '{}'. Unset it to train in one process, or set it like {\"cluster\""),
        ('{"cluster": ["a:1"], "task": {}}', "has a JSON list, not an object, as its 'cluster'"),
        ('{"cluster": {}, "task": {}}', "has an empty 'cluster'"),
        ('{"cluster": {"worker": []}, "task": {}}', "has an empty 'cluster'"),
        ('{"cluster": {"worker": ["a:1"]}}', "lacks 'task'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": 0}', "has a JSON number, not an object, as its 'task'"),
        ('{"cluster": {"worker": "a:1"}, "task": {}}', "has a JSON string, not a list, as the addresses of 'worker'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', "lacks 'type' in its 'task'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', "lacks 'index' in its 'task'"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "x"}}',
            "task index 'x', which is not an integer",
        ),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": true}}', "task index True, which is no"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": null, "index": 0}}',
            "has a JSON null, not a string, as the type of its 'task'",
        ),
        *(
            (
                f'{{"rpc_layer": {layer}, "cluster": {{"worker": ["a:1"]}}, "task": {{"type": "worker", "index": 0}}}}',
                f"has the rpc_layer {layer.capitalize()}, which is not 'grpc'",
            )
            for layer in ("5", "true")
        ),
    ],
)
def test_a_tf_config_of_the_wrong_shape_is_refused_by_name(text, message):
    with pytest.raises(ClusterError, match=message):
        resources_of({"TF_CONFIG": text})


@pytest.mark.parametrize("address", ["a", "a:", ":1", "http://a:1", "a b:1", "a:1:2", "", None, 7, ["a:1"]])
def test_a_malformed_address_is_refused_with_the_task_that_has_it(address):
    with pytest.raises(ClusterError, match=r"TF_CONFIG gives worker 1 the address .*(write host:port|Correct it)"):
        resources_of(cluster_with(worker=["a:1", address]))


@pytest.mark.parametrize("port", ["http", "0", "65536", "-1", "1.5", "²"])
def test_a_port_that_is_no_port_number_is_refused(port):
    with pytest.raises(
        ClusterError, match=rf"worker 0 the address 'a:{port}', whose port is not a number from 1 to 65535"
    ):
        resources_of(cluster_with(worker=[f"a:{port}"]))


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64, "w\u00f6rker-" + "1" * 60])
def test_a_host_that_no_machine_is_called_is_refused(host):
    with pytest.raises(ClusterError, match=rf"worker 1 the address '{host}:1', whose host is not a valid host name \("):
        resources_of(cluster_with(worker=["a.b.c.:1", f"{host}:1"]))


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("::1:2222", "write an IPv6 address in brackets: '[::1]:2222'."),
        ("fe80::1:2222", "write an IPv6 address in brackets: '[fe80::1]:2222'."),
        ("2001:db8:0:0:0:0:0:1:2222", "write an IPv6 address in brackets: '[2001:db8:0:0:0:0:0:1]:2222'."),
        ("[::1]", "write the port too: '[::1]:2222'."),
        ("2001:db8::a", "write the port too: '[2001:db8::a]:2222'."),
        ("[fe80::1%eth0]:2222", "does not connect to an address with a zone (%), so that workers would wait"),
        ("fe80::1%eth0:2222", "does not connect to an address with a zone (%), so that workers would wait"),
        ("[1:2]:3", "which is not an IPv6 address (At least 3 parts expected in '1:2'). Correct it."),
        ("[::g]:3", "write host:port, such as '10.0.0.1:2222' or '[2001:db8::1]:2222'."),
        ("a", "write host:port, such as '10.0.0.1:2222' or '[2001:db8::1]:2222'."),
        (7, "write host:port, such as '10.0.0.1:2222' or '[2001:db8::1]:2222'."),
    ],
)
def test_an_address_that_is_none_is_told_how_to_write_it(address, advice):
    with pytest.raises(ClusterError, match=f"^TF_CONFIG gives worker 0 the address {re.escape(repr(address))}") as told:
        resources_of(cluster_with(worker=[address]))
    assert str(told.value).endswith(advice) or advice in str(told.value)


def test_an_ipv6_address_is_understood():
    assert resources_of(cluster_with(worker=["[::1]:1", "a-b.c:65535"])).cluster.worker == ("[::1]:1", "a-b.c:65535")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (cluster_with(worker=["a:1", "a:1"]), "gives a:1 to both worker 0 and worker 1. They would wait"),
        (cluster_with(chief=["a:1"], worker=["a:1"]), "gives a:1 to both chief 0 and worker 0"),
        (cluster_with(worker=["node:1", "Node:1"]), "gives Node:1 to both worker 0 and worker 1"),
        (cluster_with(worker=["node:1", "node:01"]), "gives node:01 to both worker 0 and worker 1"),
        (
            cluster_with({"type": "evaluator", "index": 1}, worker=["a:1"]),
            "calls this process evaluator 1, but lists 0 evaluators. Correct the index",
        ),
        (
            cluster_with({"type": "worker", "index": 2}, worker=["a:1", "b:1"]),
            "calls this process worker 2, but lists 2 workers, counted from 0: a:1, b:1. Correct the index",
        ),
        (
            cluster_with({"type": "worker", "index": -1}, worker=["a:1"]),
            "calls this process worker -1, but lists 1 worker",
        ),
        (
            cluster_with({"type": "wroker", "index": 0}, worker=["a:1"]),
            "a 'wroker'; did you mean 'worker'. There are chief",
        ),
        (cluster_with({"type": "chief", "index": 0}, worker=["a:1"]), "chief 0, but its cluster lists only worker"),
        (
            cluster_with(workers=["a:1"]),
            "TF_CONFIG lists a job 'workers'; did you mean 'worker'. There are chief, worker",
        ),
        (
            cluster_with(master=["a:1"]),
            "lists a job 'master', which is TensorFlow 1's name of the chief: write 'chief' in 'cluster' and in "
            "'task'. There are chief, worker, ps, evaluator",
        ),
        (
            cluster_with({"type": "master", "index": 0}, worker=["a:1"]),
            "calls this process a 'master', which is TensorFlow 1's name of the chief: write 'chief'",
        ),
        (cluster_with(chief=["a:1", "b:1"]), "lists 2 chiefs; there can be one"),
        (cluster_with({"type": "ps", "index": 0}, ps=["a:1"]), "TF_CONFIG lists no worker"),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "n[1"},
            r"SLURM_STEP_NODELIST is 'n\[1', which is not a node list of SLURM: a bracket is not closed",
        ),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS is 'two', which is not a number of tasks"),
        (
            {**SLURM, "SLURM_PROCID": "9"},
            "SLURM_PROCID calls this task 9, counted from 0, but SLURM_STEP_NUM_TASKS is 3",
        ),
        ({**SLURM, "SLURMD_NODENAME": "n2"}, "SLURM's variables put task 1 on n1, but it runs on n2: .*Set TF_CONFIG"),
        (
            {key: SLURM[key] for key in ["SLURM_STEP_NUM_TASKS"]},
            "SLURM started several tasks, but SLURM_STEP_NODELIST is not set",
        ),
    ],
)
def test_a_cluster_that_would_hang_or_confuse_is_refused(environ, message):
    with pytest.raises(ClusterError, match=message):
        resources_of(environ)


@pytest.mark.parametrize("name", ["mirrored", "one_device"])
def test_a_strategy_of_one_process_is_refused_while_tf_config_lists_several_workers(name):
    message = f"'{name}' trains in one process, but TF_CONFIG lists 2 workers, of which this is worker 1: each would"
    with pytest.raises(ClusterError, match=message):
        pick_strategy(name, environ=tf_config(TWO_WORKERS))


def test_a_strategy_of_one_process_under_srun_says_that_each_task_trains_alone():
    assert decide("mirrored", resources_of(SLURM)).reason == (
        "1 CPU device, asked for by name; each of SLURM's 3 tasks trains by itself"
    )


def test_auto_in_a_slurm_allocation_without_srun_is_refused():
    resources = resources_of({"SLURM_NTASKS": "4"})
    with pytest.raises(ClusterError, match="SLURM allocated 4 tasks, but srun did not start this process"):
        decide("auto", resources)
    assert decide("mirrored", resources).name == "mirrored"


@pytest.mark.parametrize("name", ["multi_worker", "parameter_server"])
def test_a_strategy_of_several_processes_needs_a_cluster(name):
    with pytest.raises(
        ClusterError, match=f"'{name}' needs a cluster, but TF_CONFIG is not set.*keras-dist-ext launch"
    ):
        pick_strategy(name, environ={})


@pytest.mark.parametrize(
    ("name", "environ", "message"),
    [
        (
            "multi_worker",
            cluster_with(worker=["a:1"], ps=["b:1"]),
            "1 worker and 1 ps, which 'multi_worker' does not use",
        ),
        (
            "multi_worker",
            cluster_with({"type": "evaluator", "index": 0}, worker=["a:1"]),
            "evaluator 0, which runs by itself; it cannot participate in 'multi_worker'",
        ),
        ("parameter_server", cluster_with(worker=["a:1"]), "'parameter_server' needs .* lists 1 worker and 0 ps"),
        (
            "auto",
            cluster_with({"type": "ps", "index": 0}, worker=["a:1"], ps=["b:1"]),
            r"ps 0, which serves; .*Server\(",
        ),
    ],
)
def test_a_cluster_that_does_not_suit_the_strategy_is_refused(name, environ, message):
    with pytest.raises(ClusterError, match=message):
        pick_strategy(name, environ=environ)


@pytest.mark.parametrize("arguments", [{"devices": ["CPU:0"]}, {"num_replicas": 2}])
def test_devices_and_replicas_are_refused_where_the_strategy_takes_what_it_finds(arguments):
    with pytest.raises(
        StrategyError, match=r"'multi_worker' \(TF_CONFIG lists 2 workers\) takes what each process finds"
    ):
        decide("auto", resources_of(tf_config(TWO_WORKERS)), **arguments)


def test_a_tpu_that_is_not_there_is_refused_with_what_is_there():
    with pytest.raises(StrategyError, match="There is no TPU: TensorFlow has CPU:0.* None of TPU_NAME, .* is set"):
        pick_strategy("tpu", environ={})


def test_a_tpu_that_does_not_answer_is_refused_at_once(free_port):
    address = f"grpc://127.0.0.1:{free_port}"
    with pytest.raises(StrategyError, match=f"The TPU '{address}' is not available: .*refused.*argument tpu"):
        pick_strategy("tpu", environ={"TPU_NAME": address})


def test_a_tpu_of_this_machine_has_no_address_to_try(monkeypatch):
    connected = []
    resolver_class = tf.distribute.cluster_resolver.TPUClusterResolver
    monkeypatch.setattr(resolver_class, "connect", staticmethod(lambda tpu: connected.append(tpu) or "resolver"))
    monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda resolver: ("TPUStrategy", resolver))
    monkeypatch.setattr(socket, "create_connection", None)
    assert builders._tpu.__wrapped__("local") == ("TPUStrategy", "resolver")
    assert connected == ["local"]


def test_a_cluster_of_parameter_servers_is_waited_for_once_and_has_one_strategy(monkeypatch):
    waited = []
    monkeypatch.setattr(builders, "_check_port_is_free", lambda cluster: None)
    monkeypatch.setattr(builders, "wait_for_ports", lambda cluster, tasks, seconds: waited.append(seconds))
    monkeypatch.setattr(builders, "_resolver_of", lambda cluster, num_gpus: None)
    monkeypatch.setattr(builders, "_LED", {})
    monkeypatch.setattr(tf.distribute, "ParameterServerStrategy", lambda resolver: object())
    lone, other = (
        Cluster("TF_CONFIG", worker=(f"{name}:1",), ps=("b:1",), chief=("d:1",), task_type="chief", task_index=0)
        for name in "ac"
    )
    first, again, another = (builders._parameter_server(cluster, 0, 5.0) for cluster in (lone, lone, other))
    assert first is again
    assert first is not another
    assert waited == [5.0, 5.0]


def test_a_tpu_that_answers_is_connected_and_used(monkeypatch, free_port):
    connected = []
    resolver_class = tf.distribute.cluster_resolver.TPUClusterResolver
    monkeypatch.setattr(resolver_class, "connect", staticmethod(lambda tpu: connected.append(tpu) or "resolver"))
    monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda resolver: ("TPUStrategy", resolver))
    with socket.create_server(("127.0.0.1", free_port)):
        choice = pick_strategy("auto", tpu=f"grpc://127.0.0.1:{free_port}", environ={})
    assert choice.strategy == ("TPUStrategy", "resolver")
    assert connected == [f"grpc://127.0.0.1:{free_port}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"implementation": "mpi"}, "implementation must be 'auto', 'ring' or 'nccl', got 'mpi'"),
        ({"bytes_per_pack": -1}, "bytes_per_pack must be an integer >= 0, got -1"),
        ({"bytes_per_pack": 1.5}, "bytes_per_pack must be an integer >= 0, got 1.5"),
        ({"timeout_seconds": 0}, "timeout_seconds must be a number of seconds > 0, or None, got 0"),
        ({"timeout_seconds": "5"}, "timeout_seconds must be a number of seconds > 0, or None, got '5'"),
        ({"devices": 2}, "devices is 2; give a list of names. TensorFlow has CPU:0"),
        ({"device_lister": list}, "There is nothing to train on: TensorFlow has no device"),
        (
            {"implementation": "ring"},
            r"'multi_worker', .* 'mirrored' \(.* CPU devices, .*\) takes none of them.",
        ),
        ({"bytes_per_pack": 9}, r"those of 'mirrored' on several GPUs; 'mirrored' \(.* CPU .*\) takes none of them."),
    ],
)
def test_arguments_that_cannot_be_had_are_refused(arguments, message):
    with pytest.raises(StrategyError, match=message):
        pick_strategy("mirrored", environ={}, **arguments)


@pytest.mark.parametrize("arguments", [{"name": "mirrored"}, {"devices": ["CPU:0", "CPU:1"]}])
def test_a_tpu_that_was_given_and_is_not_used_is_refused(arguments):
    with pytest.raises(
        StrategyError, match=r"tpu='here' was given, but 'mirrored' \(\d CPU devices, .*\) uses none. Leave it"
    ):
        pick_strategy(**arguments, tpu="here", environ={})


GPUS = {"device_lister": lambda: ["CPU:0", "GPU:0", "GPU:1", "GPU:2"], "environ": {}}


@pytest.fixture
def mirrored_made(monkeypatch):
    """Make strategies that stand for those on GPUs, which are not here; return the devices of each."""
    made = []

    class Mirrored:
        def __init__(self, devices):
            made.append(tuple(devices))

    monkeypatch.setattr(builders, "make_mirrored", Mirrored)
    monkeypatch.setattr(builders, "_MIRRORED", {})
    return made


def test_gpus_of_a_process_sum_a_pack_at_a_time_where_that_is_asked_for(mirrored_made):
    packed = pick_strategy("mirrored", bytes_per_pack=4096, **GPUS)
    plain = pick_strategy("mirrored", **GPUS)
    assert [bytes_per_pack_of(choice.strategy) for choice in (packed, plain)] == [4096, 0]
    assert pick_strategy(bytes_per_pack=4096, **GPUS).strategy is packed.strategy
    assert pick_strategy(num_replicas=3, **GPUS).strategy is plain.strategy
    assert mirrored_made == [("GPU:0", "GPU:1", "GPU:2")] * 2
    assert packed.reason == "3 GPUs, asked for by name"


@pytest.mark.parametrize("options", [{"implementation": "nccl"}, {"timeout_seconds": 5, "bytes_per_pack": 9}])
def test_gpus_of_a_process_take_no_other_communication_options(options, mirrored_made):
    with pytest.raises(StrategyError, match=r"'mirrored' \(3 GPUs, .*\) takes nothing but bytes_per_pack. Leave them"):
        pick_strategy("mirrored", **options, **GPUS)
    assert not mirrored_made
    choice = pick_strategy(**options, **GPUS)
    assert choice.reason == "3 GPUs, no TF_CONFIG; communication options unused"
    assert bytes_per_pack_of(choice.strategy) == options.get("bytes_per_pack", 0)


def test_a_gpu_alone_sums_nothing(mirrored_made):
    choice = pick_strategy("auto", devices=["GPU:1"], bytes_per_pack=9, environ={}, device_lister=GPUS["device_lister"])
    assert choice.reason.endswith("; communication options unused")
    with pytest.raises(StrategyError, match="takes none of them"):
        pick_strategy("mirrored", num_replicas=1, bytes_per_pack=9, **GPUS)


def test_nccl_without_gpus_is_refused():
    with pytest.raises(StrategyError, match="implementation='nccl' needs GPUs, and this worker has none"):
        pick_strategy("multi_worker", implementation="nccl", environ=tf_config(TWO_WORKERS))


def test_auto_says_when_communication_options_are_unused():
    choice = pick_strategy(devices=["CPU:0", "CPU:1"], implementation="ring", environ={})
    assert str(choice) == "mirrored: 2 CPU devices, no TF_CONFIG; communication options unused"


# The real strategies.


def test_listing_devices_finds_the_logical_ones():
    assert list_devices() == ("CPU:0", "CPU:1", "CPU:2", "CPU:3")


def test_a_choice_carries_a_strategy_and_prints_its_name_and_reason():
    choice = pick_strategy("one_device", devices=["CPU:1"], environ={})
    assert isinstance(choice.strategy, tf.distribute.OneDeviceStrategy)
    assert str(choice) == "one_device: 1 CPU device, asked for by name"
    assert repr(choice) == "StrategyChoice(name='one_device', reason='1 CPU device, asked for by name')"
    assert isinstance(choice, StrategyChoice)


def test_one_mirrored_strategy_is_made_for_a_set_of_devices(strategies):
    choice = pick_strategy("mirrored", num_replicas=2, environ={})
    assert isinstance(choice.strategy, tf.distribute.MirroredStrategy)
    assert choice.strategy.num_replicas_in_sync == 2
    assert choice.strategy is pick_strategy(devices=["cpu:0", "/CPU:1"], environ={}).strategy
    assert choice.strategy is pick_strategy("mirrored", devices=["CPU:1", "CPU:0"], environ={}).strategy
    assert choice.strategy is strategies.get("mirrored2")


def test_a_mirrored_strategy_reduces_over_its_replicas(mirrored):
    ids = mirrored.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group + 1)
    assert mirrored.reduce("SUM", ids, axis=None).numpy() == 3


def test_more_cpu_replicas_than_there_are_is_refused_once_tensorflow_runs():
    tf.constant(0)
    with pytest.raises(
        StrategyError, match=r"num_replicas=5 needs 5 .* initialised already and has CPU:0, .*at most 4"
    ):
        pick_strategy("mirrored", num_replicas=5, environ={})


# In processes of their own: TensorFlow not initialised yet, and real servers on the loopback interface.


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def kept_port():
    """A port as our launcher keeps it for its worker: bound, but nobody listens."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("", 0))
        yield keeper.getsockname()[1]


def run_python(code, **environ):
    """Run code in a process that has only pick_strategy imported; return what it prints."""
    ended = subprocess.run(
        [sys.executable, "-c", "from keras_dist_ext.strategy.pick import pick_strategy\n" + textwrap.dedent(code)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_num_replicas_makes_cpu_devices_before_tensorflow_starts():
    printed = run_python(
        """
        choice = pick_strategy(num_replicas=3, environ={})
        print(choice, choice.strategy.num_replicas_in_sync)
        """
    )
    assert printed == "mirrored: 3 CPU devices for num_replicas=3, no TF_CONFIG 3\n"


@pytest.mark.multiworker
@pytest.mark.slow
def test_a_real_worker_takes_its_options_and_reduces(kept_port):
    printed = run_python(
        """
        import tensorflow as tf
        options = dict(implementation="ring", bytes_per_pack=1000, timeout_seconds=60)
        choice = pick_strategy("multi_worker", **options)
        print(choice)
        communication = choice.strategy.extended._communication_options
        print(communication.implementation.name, communication.bytes_per_pack, communication.timeout_seconds)
        print(choice.strategy.reduce("SUM", choice.strategy.run(lambda: tf.constant(7)), axis=None).numpy())
        print(pick_strategy("multi_worker", **options, wait_seconds=30).strategy is choice.strategy)
        try:
            pick_strategy("multi_worker")
        except ValueError as error:
            print(error)
        """,
        **cluster_with(worker=[f"127.0.0.1:{kept_port}"]),
    )
    assert printed.splitlines()[:-1] == [
        "multi_worker: TF_CONFIG lists 1 worker, this is worker 0",
        "RING 1000 60",
        "7",
        "True",
    ]
    assert "joined a cluster already, with other addresses or communication options" in printed.splitlines()[-1]


@pytest.mark.multiworker
@pytest.mark.slow
def test_a_worker_is_refused_once_tensorflow_runs(free_port):
    printed = run_python(
        """
        import tensorflow as tf
        tf.constant(0)
        try:
            pick_strategy("multi_worker")
        except ValueError as error:
            print(error)
        """,
        **cluster_with(worker=[f"127.0.0.1:{free_port}"]),
    )
    assert re.search("initialised already, and a worker can join its cluster only before that. Call pick", printed)


def test_a_port_that_is_taken_is_named(free_port):
    with socket.create_server(("0.0.0.0", free_port)):  # as a server of TensorFlow's would
        message = f"TF_CONFIG gives worker 0 the address 127.0.0.1:{free_port}, but port {free_port} .*in use"
        with pytest.raises(ClusterError, match=message):
            pick_strategy("multi_worker", environ=cluster_with(worker=[f"127.0.0.1:{free_port}"]))


@pytest.mark.multiworker
@pytest.mark.slow
def test_a_real_coordinator_connects_to_its_parameter_server(free_port):
    printed = run_python(
        """
        import socket, tensorflow as tf
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        worker, ps = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
        for s in sockets:
            s.close()
        spec = tf.train.ClusterSpec({"worker": [worker], "ps": [ps]})
        servers = [tf.distribute.Server(spec, job_name=job, task_index=0, protocol="grpc") for job in ("worker", "ps")]
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
        choice = pick_strategy(cluster_resolver=resolver)
        print(choice)
        with choice.strategy.scope():
            print(tf.Variable(3.0).device)
        """
    )
    reason = "SimpleClusterResolver lists 1 worker and 1 ps, this is the coordinator"
    assert printed.splitlines()[0] == f"parameter_server: {reason}"
    assert "/job:ps/replica:0/task:0" in printed.splitlines()[1]
