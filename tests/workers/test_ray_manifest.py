"""The manifest for KubeRay in the guide has what its custom resource definitions ask for. It has not run there.

Required fields are those of ray-operator/apis/ray/v1 (rayjob_types.go, raycluster_types.go) in ray-project/kuberay.
"""

import re
import shlex
from pathlib import Path

import pytest
import ray_runs

import keras_dist_ext
from keras_dist_ext.cli import _parser

pytestmark = ray_runs.MARKS

GUIDE = Path(keras_dist_ext.__file__).parent / "docs" / "guide" / "several_processes.md"


@pytest.fixture(scope="module")
def manifest():
    import yaml

    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)]
    (found,) = (block for block in blocks if block["apiVersion"] == "ray.io/v1")
    return found


def test_it_is_a_ray_job_with_all_required_fields_and_no_others(manifest):
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert (manifest["kind"], manifest["metadata"].keys()) == ("RayJob", {"name"})
    spec = manifest["spec"]
    assert spec.keys() == {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
    cluster = spec["rayClusterSpec"]
    assert cluster.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers.keys() == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


def test_parameters_of_ray_start_are_strings_and_options_of_it(manifest):
    import ray.scripts.scripts

    options = {name for option in ray.scripts.scripts.start.params for name in option.opts}
    cluster = manifest["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for name, value in group["rayStartParams"].items():
            assert f"--{name}" in options
            assert isinstance(value, str), "of a map[string]string"


def test_all_pods_have_one_image_and_the_shared_folder(manifest):
    cluster = manifest["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    containers = [container for pod in pods for container in pod["containers"]]
    assert len({container["image"] for container in containers}) == 1
    assert len({container["name"] for container in containers}) == len(containers) == 2
    for pod, container in zip(pods, containers, strict=True):
        (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
        assert mount == {"name": volume["name"], "mountPath": "/shared"}
        assert volume["persistentVolumeClaim"].keys() == {"claimName"}
        assert set(container["resources"]["limits"]) == {"cpu", "memory"}


def test_its_command_is_one_of_the_launcher_for_as_many_workers_as_there_can_be_pods(manifest):
    shell, option, script = shlex.split(manifest["spec"]["entrypoint"])
    assert (shell, option) == ("sh", "-c")
    folder, command = script.split(" && ")
    assert folder == "cd /app"
    program, *words = command.split()
    assert program == "keras-dist-ext"
    arguments = _parser().parse_args(words)
    (workers,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert arguments.on == "ray"
    assert arguments.workers == (workers["minReplicas"], workers["maxReplicas"])
