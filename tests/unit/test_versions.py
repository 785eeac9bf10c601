"""Versions of Keras and TensorFlow: too old is refused, newer is told, and a part that has moved is named."""

import ast
import configparser
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keras_dist_ext as kde
from keras_dist_ext import versions

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "keras_dist_ext"
NEWEST = {name: newest for name, (_, newest) in versions.TESTED.items()}


def run_python(code, **options):
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_the_oldest_that_is_tested_is_what_setup_asks_for_and_tox_installs():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for name, (oldest, _) in versions.TESTED.items():
        assert f"{name} >= {oldest}" in setup["options"]["install_requires"].split("\n")
        assert f"{name} == {oldest}" in setup["testenv:oldest"]["deps"].split("\n")


@pytest.mark.parametrize(
    "installed",
    [
        {name: oldest for name, (oldest, _) in versions.TESTED.items()},
        NEWEST,
        {name: f"{newest}.9" for name, newest in NEWEST.items()},
        {"tensorflow": "2.18.0", "keras": "3.12.0.dev2025"},
        {"tensorflow": "2.21.0+nv25.1", "keras": "3.11.0"},
    ],
)
def test_what_was_tested_is_taken_without_a_word(installed):
    versions.check(installed)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({**NEWEST, "tensorflow": "2.15.1"}, r"TensorFlow 2\.15\.1 is older than 2\.16\.2, .* 'tensorflow>=2\.16\.2'"),
        ({**NEWEST, "keras": "3.9.2"}, r"Keras 3\.9\.2 is older than 3\.11, the oldest .* pip install 'keras>=3\.11'"),
    ],
)
def test_what_is_older_is_refused(installed, message):
    with pytest.raises(kde.BackendError, match=message):
        versions.check(installed)


def test_all_that_is_newer_is_told_in_one_warning():
    with pytest.warns(UserWarning, match="are newer") as told:
        versions.check({"tensorflow": "2.22.0rc0", "keras": "4.0.0"})
    (warning,) = told
    assert re.search(
        r"TensorFlow 2\.22\.0rc0 and Keras 4\.0\.0 are newer than what .* was tested with \(.*TensorFlow 2\.16\.2 to "
        r"2\.21 and Keras 3\.11 to 3\.15\)\. What it relies on is tried before the first step",
        str(warning.message),
    )


# Where a part is gone

HIDING = """
import builtins
imported = builtins.__import__

def hiding(name, globals=None, locals=None, fromlist=(), level=0):
    asks = (globals or {{}}).get("__name__", "")
    asked = [name, *(f"{{name}}.{{part}}" for part in fromlist or ())]
    if asks.startswith("keras_dist_ext") and any(each.startswith({gone!r}) for each in asked):
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return imported(name, globals, locals, fromlist, level)

builtins.__import__ = hiding
import keras_dist_ext as kde
"""

STAND_ALONE = (  # each with what else is asked of it
    "kde.pick_strategy('mirrored', num_replicas=2).strategy",
    "kde.inspect(tf.data.Dataset.range(8).map(lambda x: x + 1).batch(2))",
    "kde.launch",
    "kde.EventWriter",
    "kde.heartbeat",
    "import_module('keras_dist_ext.monitoring.dashboard.loader').ReplicasLoader",
    "import_module('keras_dist_ext.cli').main(['devices'])",
    "import_module('keras_dist_ext.cluster.spec').tf_config_cluster",
    "import_module('keras_dist_ext.monitoring.dashboard.plugin').ReplicasPlugin",
)


@pytest.mark.slow
def test_what_needs_no_private_part_works_without_any():
    program = HIDING.format(gone=("keras.src", "tensorflow.python")) + (
        "import tensorflow as tf\nfrom importlib import import_module\n"
        "tf.config.set_logical_device_configuration(\n"
        "    tf.config.list_physical_devices('CPU')[0], [tf.config.LogicalDeviceConfiguration()] * 2)\n"
        f"print(all(bool(eval(asked)) or True for asked in {STAND_ALONE!r}))\n"
    )
    assert run_python(program).endswith("True")


@pytest.mark.rotating
@pytest.mark.parametrize("gone", ["tensorflow.python.eager", "keras.src"])
def test_a_cluster_that_needs_a_part_that_has_moved_names_it_and_waits_for_nobody(gone):
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    program = HIDING.format(gone=gone) + (
        f"import os\nos.environ['TF_CONFIG'] = {config!r}\n"
        "try: kde.pick_strategy()\nexcept kde.BackendError as e: print(e)\n"
    )
    assert re.search(
        rf"(multi_worker|Several workers) stands on a part of (Keras|TensorFlow) that version \d\S+ does not have: No "
        rf"module named '{gone}.*'\. This release of",
        run_python(program),
    )


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("gone", "name"),
    [
        ("keras.src.trainers.compile_utils", "Model"),
        pytest.param("tensorflow.python.ops.handle_data_util", "TrainLoop", marks=pytest.mark.slow),
        pytest.param("keras.src.saving", "tuner.RandomSearch", marks=pytest.mark.slow),
    ],
)
def test_a_part_that_has_moved_is_named_by_what_needs_it(gone, name):
    program = HIDING.format(gone=gone.rpartition(".")[0]) + f"try: kde.{name}\nexcept kde.BackendError as e: print(e)\n"
    owner = {"keras": "Keras", "tensorflow": "TensorFlow"}[gone.partition(".")[0]]
    assert re.search(
        rf"keras_dist_ext\.{name} stands on a part of {owner} that version \d\S+ does not have: No module named "
        rf"'{gone.rpartition('.')[0]}.*'\. .* was tested with TensorFlow 2\.16\.2 to 2\.21 and Keras 3\.11 to 3\.15: "
        r"pip install 'tensorflow<2\.22' 'keras<3\.16', or a newer keras_dist_ext",
        run_python(program),
    )


@pytest.mark.rotating
def test_models_train_where_parts_are_gone_that_only_the_doctor_or_a_placement_needs(tmp_path):
    gone = ("tensorflow.tsl", "tensorflow.python.eager.polymorphic_function.tracing_compilation")
    program = HIDING.format(gone=gone) + (
        "import numpy, pathlib\nfrom keras_dist_ext._keras import keras, profiles, tracing\n"
        "model = kde.Sequential([keras.layers.Dense(1)])\nmodel.compile('sgd', 'mse')\n"
        "model.fit(numpy.ones((4, 2)), numpy.ones((4, 1)), verbose=0)\n"
        "pathlib.Path('host.xplane.pb').touch()\n"
        "for needs in (lambda: tracing.observe_traces(print), lambda: list(profiles.op_spans('.'))):\n"
        "    try: needs()\n    except kde.BackendError as e: print(str(e).partition(' stands')[0])\n"
    )
    assert run_python(program, cwd=tmp_path).split() == ["ParallelismDoctor", "Placement.measure"]


@pytest.mark.slow
def test_a_function_that_is_not_there_to_be_replaced_is_named():
    program = (
        "import keras, keras_dist_ext as kde\nfrom keras.src.losses import loss\n"
        "del loss.scale_loss_for_distribution\n"
        "try: kde.Model\nexcept kde.BackendError as e: print(e)\n"
    )
    assert re.search(
        r"keras_dist_ext\.Model stands on a part of Keras .*: cannot import name 'scale_loss_for_distribution' from "
        r"<module 'keras\.src\.losses\.loss'",
        run_python(program),
    )


def test_what_is_not_installed_is_told_as_python_tells_it():
    program = HIDING.format(gone="tensorflow") + (
        "try: kde.Model\nexcept ModuleNotFoundError as e: print(type(e).__name__, e)\n"
    )
    assert run_python(program) == "ModuleNotFoundError No module named 'tensorflow'"


def test_no_module_but_one_compares_versions():
    compares = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and "__version__" in ast.unparse(node)
    }
    assert compares == set()
