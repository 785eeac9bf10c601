"""What starts processes on clusters tells each its place, in its own way; `pick_strategy` understands all of them.

The environments are those that Kubeflow's training operator (pkg/controller.v1/tensorflow/tensorflow.go), srun, Ray
Train (python/ray/train/tensorflow/config.py), Open MPI and Hydra (MPICH, Intel MPI) give to a process.
"""

import json
import os
import subprocess
import sys
import types

import pytest
from launching import ROOT

from keras_dist_ext.cluster.spec import Cluster, mpi_cluster
from keras_dist_ext.errors import ClusterError
from keras_dist_ext.strategy.decision import decide
from keras_dist_ext.strategy.resources import find_resources

TFJOB_HOSTS = [f"mnist-worker-{i}.train.svc:2222" for i in range(3)]
SLURM = {
    "SLURM_JOB_ID": "412",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "gpu08",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-412@1",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0", "PMI_FD": "9"}


def choice_in(environ):
    return decide("auto", find_resources(environ, device_lister=lambda: ("CPU:0",)))


def tfjob(kind, index, **jobs):
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}, "environment": "cloud"})}


def test_workers_of_a_tfjob_train_together():
    chosen = choice_in(tfjob("worker", 2, worker=TFJOB_HOSTS))
    assert (chosen.name, chosen.reason) == ("multi_worker", "TF_CONFIG lists 3 workers, this is worker 2")
    chief = choice_in(tfjob("chief", 0, chief=["mnist-chief-0.train.svc:2222"], worker=TFJOB_HOSTS))
    assert (chief.name, chief.reason) == ("multi_worker", "TF_CONFIG lists 4 workers, this is chief 0")


def test_a_tfjob_with_parameter_servers_is_led_by_its_chief():
    jobs = {"chief": ["a-chief-0.train.svc:2222"], "worker": TFJOB_HOSTS, "ps": ["a-ps-0.train.svc:2222"]}
    assert choice_in(tfjob("chief", 0, **jobs)).name == "parameter_server"
    assert choice_in(tfjob("evaluator", 0, **jobs)).name == "one_device"
    with pytest.raises(ClusterError, match="TF_CONFIG says ps 0, which serves"):
        choice_in(tfjob("ps", 0, **jobs))


def test_a_tfjob_whose_workers_know_only_themselves_is_refused():
    sparse = {"sparseCluster": {"worker": {"1": TFJOB_HOSTS[1]}, "ps": []}, "task": {"type": "worker", "index": 1}}
    with pytest.raises(ClusterError, match="TF_CONFIG lacks 'cluster'"):
        choice_in({"TF_CONFIG": json.dumps(sparse)})


def test_tasks_of_srun_train_together():
    resources = find_resources(SLURM, device_lister=lambda: ("CPU:0",))
    addresses = ("gpu07:8888", "gpu07:8889", "gpu08:8888", "gpu08:8889")
    assert resources.cluster == Cluster("SLURM", worker=addresses, task_type="worker", task_index=2, rpc_layer="grpc")
    assert decide("auto", resources).reason == "SLURM lists 4 workers, this is worker 2"


def test_workers_of_ray_train_train_together():
    """Ray sets nothing but TF_CONFIG, with addresses of its own choice."""
    config = {"cluster": {"worker": ["10.0.0.4:43211", "10.0.0.5:39201"]}, "task": {"type": "worker", "index": 1}}
    assert choice_in({"TF_CONFIG": json.dumps(config)}).reason == "TF_CONFIG lists 2 workers, this is worker 1"


@pytest.mark.parametrize(("environ", "rank"), [(OPEN_MPI, 1), (HYDRA, 0)])
def test_processes_of_mpirun_on_one_host_know_each_others_ports(environ, rank):
    chosen = choice_in(environ)
    assert (chosen.name, chosen.reason) == ("multi_worker", f"MPI lists 2 workers, this is worker {rank}")
    cluster = mpi_cluster(environ)
    ports = [int(address.removeprefix("127.0.0.1:")) for address in cluster.worker]
    assert ports == [ports[0], ports[0] + 1]
    assert 20000 <= ports[0] < 30000
    assert cluster.task_index == rank


def test_every_process_of_a_job_finds_the_same_ports_and_other_jobs_others():
    first, second = (mpi_cluster({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": rank}) for rank in "01")
    other = mpi_cluster({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-host-413@1"})
    assert first.worker == second.worker
    assert not set(first.worker) & set(other.worker)


def test_processes_of_mpirun_on_several_hosts_tell_each_other_their_addresses():
    told = []

    def tell(address):
        told.append(address)
        return ["n1:5001", address, "n2:5001", "n2:5002"]

    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
    cluster = mpi_cluster(environ, tell)
    assert cluster.worker == ("n1:5001", *told, "n2:5001", "n2:5002")
    assert cluster.task == "worker 1"


def test_several_hosts_without_mpi4py_are_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ClusterError, match="on several hosts, and MPI does not tell them .* Install mpi4py"):
        choice_in({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"})


def test_several_hosts_tell_each_other_their_addresses_through_mpi4py(monkeypatch):
    world = types.SimpleNamespace(allgather=lambda address: ["n1:5001", address, "n2:5001", "n2:5002"])
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=types.SimpleNamespace(COMM_WORLD=world)))
    cluster = mpi_cluster({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"})
    assert (cluster.task, cluster.worker[0], cluster.worker[2:]) == ("worker 1", "n1:5001", ("n2:5001", "n2:5002"))


def test_workers_without_a_task_are_refused():
    with pytest.raises(ClusterError, match="^SLURM does not say which task this process is. Set its task type and"):
        Cluster("SLURM", worker=("n1:5001",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "2"}, "MPI calls this process 2 of 2, counted from 0"),
        ({"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK is 'one', which is not a number"),
    ],
)
def test_an_mpi_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ClusterError, match=message):
        choice_in({**OPEN_MPI, **changes})


def test_an_mpi_that_does_not_say_which_process_this_is_is_refused():
    environ = {key: value for key, value in OPEN_MPI.items() if key != "OMPI_COMM_WORLD_RANK"}
    with pytest.raises(ClusterError, match="but OMPI_COMM_WORLD_RANK, which says which one this is, is not set"):
        choice_in(environ)


def test_mpirun_comes_before_the_srun_that_has_started_its_daemons():
    """By srun it starts a daemon on each node, and its processes inherit what the daemons were told."""
    assert choice_in({**SLURM, **OPEN_MPI}).reason == "MPI lists 2 workers, this is worker 1"
    of_srun = {**SLURM, "PMI_SIZE": "4", "PMI_RANK": "2"}  # what srun --mpi=pmi2 sets
    assert choice_in(of_srun).reason == "SLURM lists 4 workers, this is worker 2"


def test_one_process_of_mpirun_works_alone_and_so_do_several_that_ask_for_it():
    alone = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    assert choice_in(alone).name == "one_device"
    resources = find_resources(OPEN_MPI, device_lister=lambda: ("CPU:0",))
    assert decide("one_device", resources).reason == (
        "1 CPU device, asked for by name; each of MPI's 2 tasks trains by itself"
    )


TRAIN = """
import keras
import numpy as np
import keras_dist_ext as kde

choice = kde.pick_strategy()
with choice.strategy.scope():
    model = kde.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.arange(8, dtype="float32")[:, None] / 8
model.fit(x, x, batch_size=4, epochs=1, shuffle=False, verbose=0)
print(choice.reason, model.get_weights()[0].tolist())
"""


@pytest.mark.slow
@pytest.mark.multiworker
@pytest.mark.timeout(200)
def test_two_processes_train_by_what_mpirun_gives_them_and_no_launcher():
    """As `mpirun -n 2 python train.py` starts them; the environment is all that matters here."""
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environ |= {**OPEN_MPI, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ["PMIX_NAMESPACE"] = f"test-{os.getpid()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN],
            env={**environ, "OMPI_COMM_WORLD_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (first, errors), (second, _) = (process.communicate(timeout=150) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert first.startswith("MPI lists 2 workers, this is worker 0 [["), errors
    assert second == first.replace("worker 0", "worker 1")
