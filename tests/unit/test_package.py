"""The package imports nothing heavy, shows its names, and raises errors of one tree."""

import ast
import configparser
import io
import os
import pickle
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from syntax import syntax_tree

import keras_dist_ext as kde
from keras_dist_ext import cli, errors

PACKAGE = Path(kde.__file__).parent


def run_python(code):
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


MODULES = [
    "errors",
    "messages",
    "findings",
    "cli",
    *(f"cluster.{path.stem}" for path in PACKAGE.glob("cluster/[a-z]*.py")),
]


@pytest.mark.parametrize("module", ["keras_dist_ext", *(f"keras_dist_ext.{name}" for name in MODULES)])
def test_importing_loads_neither_tensorflow_nor_keras(module):
    heavy = "{'tensorflow', 'keras', 'numpy', 'sklearn'}"
    assert run_python(f"import sys, {module}; print({heavy} & set(sys.modules))") == "set()"


def test_names_that_need_no_tensorflow_load_none():
    assert (
        run_python("import sys; from keras_dist_ext import ScopeError; print('tensorflow' in sys.modules)") == "False"
    )


@pytest.mark.parametrize("name", sorted({*kde.__all__} - {"tuner"}))
def test_every_public_name_loads_and_is_in_the_docstring(name):
    assert getattr(kde, name).__name__ == name
    assert name in dir(kde)
    assert re.search(rf"\b{name}\b", kde.__doc__)


def test_output_that_cannot_be_written_any_more_is_dropped(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError("No space left on device")

        def fileno(self):
            return file.fileno()

    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", Full())
        cli._flush()
        assert os.fstat(file.fileno()).st_rdev == os.stat(os.devnull).st_rdev  # so that exiting does not fail, too
        monkeypatch.setattr(sys, "stdout", None)  # as under pythonw
        cli._flush()


def test_the_tuner_is_a_package():
    assert kde.tuner.__name__ == "keras_dist_ext.tuner"
    assert "tuner" in dir(kde)


@pytest.mark.parametrize("package", [kde, kde.tuner], ids=["kde", "kde.tuner"])
def test_type_checkers_see_the_names_that_load(package):
    stub = syntax_tree(resources.files(package).joinpath("__init__.pyi").read_text())
    imported = [name for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert {name.asname for name in imported} == set(package.__all__)  # `import x` alone would be private to the stub
    assert all(name.name == name.asname for name in imported)


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(AttributeError, match=r"module 'keras_dist_ext' has no attribute 'modle'; it has .*, Model, "):
        _ = kde.modle


@pytest.mark.parametrize(
    "imports",
    [
        "import keras_dist_ext as kde",
        "import keras_dist_ext.cluster.launch; import keras_dist_ext as kde",
        "from keras_dist_ext.cluster.launch import launch; import keras_dist_ext as kde",
        "import keras_dist_ext as kde; kde.launch; import keras_dist_ext.cluster.launch",
    ],
)
def test_launch_is_the_function_whatever_was_imported_before(imports):
    assert run_python(f"{imports}; print(type(kde.launch).__name__, kde.launch.__module__)") == (
        "function keras_dist_ext.cluster.launch"
    )


def test_the_package_says_that_it_is_typed():
    assert resources.files(kde).joinpath("py.typed").is_file()


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_of_the_tree_is_drawn_in_it_and_crosses_processes(name):
    error_class = getattr(errors, name)
    assert issubclass(error_class, errors.KerasDistError)
    assert name in errors.__doc__
    copy = pickle.loads(pickle.dumps(error_class("what was found")))
    assert type(copy) is error_class
    assert str(copy) == "what was found"


@pytest.mark.parametrize(
    ("error_class", "builtin"),
    [
        (errors.ClusterError, errors.StrategyError),
        (errors.StrategyError, ValueError),
        (errors.ScopeError, ValueError),
        (errors.DataError, ValueError),
        (errors.LaunchError, RuntimeError),
        (errors.BackendError, ImportError),
    ],
)
def test_errors_are_also_what_python_code_expects(error_class, builtin):
    assert issubclass(error_class, builtin)


def test_the_lower_bounds_are_the_versions_that_tox_installs():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    extras = setup["options.extras_require"]
    needed = [setup["options"]["install_requires"], extras["tuner"], extras["test"]]
    bounds = [
        line.split(",")[0]
        for text in needed
        for line in text.split("\n")
        if line and not line.startswith("keras_dist_ext[")
    ]
    tried = setup["testenv:oldest"]["deps"].strip().split("\n")
    assert sorted(line.replace("==", ">=") for line in tried) == sorted(bounds)
