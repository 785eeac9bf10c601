"""Whatever is private in Keras and TensorFlow, or differs between their versions, goes through `_keras/`."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from syntax import syntax_tree

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "keras_dist_ext"
OUTSIDE = sorted(path for path in PACKAGE.rglob("*.py") if "_keras" not in path.parts)
UPSTREAM = ("keras", "keras_tuner", "tensorflow")

# Private attributes of ours that modules reach into each other for. They may only become fewer.
OWN = set(
    re.findall(r'"(_\w+)"', (ROOT / ".ruff.toml").read_text().partition("extend-ignore-names = [")[2].partition("]")[0])
)


def imports_past_the_door(code: str) -> list[str]:
    """Return imports of Keras, keras-tuner, and of parts of TensorFlow."""
    found = []
    for node in ast.walk(syntax_tree(code)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        found += [name for name in names if name.partition(".")[0] in UPSTREAM and name != "tensorflow"]
        if isinstance(node, ast.ImportFrom) and node.module == "tensorflow":
            found += [f"tensorflow.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Attribute) and node.attr in ("__internal__", "python") and _is_tensorflow(node.value):
            found.append(f"tensorflow.{node.attr}")
        if isinstance(node, ast.Attribute) and node.attr == "keras" and _is_tensorflow(node.value):
            found.append("tensorflow.keras")
    return found


def _is_tensorflow(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("tf", "tensorflow")


def private_names(code: str) -> set[str]:
    """Return private names that are asked of anything but `self` and the like, also by `getattr`.

    A class may ask them of objects that it makes of itself.
    """
    return set(_private_names(syntax_tree(code), frozenset()))


def _private_names(tree: ast.AST, makes: frozenset[str]) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value, makes):
            yield node.attr
        elif isinstance(node, ast.Call) and _called(node.func) in ACCESSORS:
            named = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (name for given in named for name in given.split(".") if _is_private(name))
        yield from _private_names(node, makes | _made(node) if isinstance(node, ast.ClassDef) else makes)


def _made(tree: ast.ClassDef) -> set[str]:
    """Return the variables to which methods of a class assign a new object of that class."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    made = [node for node in assigned if isinstance(node.value, ast.Call) and _called(node.value.func) == tree.name]
    return {target.id for node in made for target in node.targets if isinstance(target, ast.Name)}


ACCESSORS = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")


def _is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_[a-zA-Z]\w*", name)) and name not in NOT_PRIVATE


NOT_PRIVATE = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples: documented
OF_PYTHON = {"_getframe", "_current_frames", "_exit"}  # of `sys` and `os`: documented


def _is_own(node: ast.expr, makes: Collection[str] = ()) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and (node.id in ("self", "cls") or node.id in makes)


def _called(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_keras_is_imported_through_the_door(path: Path) -> None:
    assert imports_past_the_door(path.read_text()) == []


def test_private_names_of_others_are_those_of_the_list_which_may_only_shrink() -> None:
    found = {name: path.name for path in OUTSIDE for name in private_names(path.read_text())}
    new = {name: file for name, file in found.items() if name not in OWN | OF_PYTHON}
    assert new == {}, "Give what it is for to _keras/ if it is Keras' or TensorFlow's, or else a public name."
    unused = (OWN | OF_PYTHON) - set(found)
    assert unused == set(), "Take out of extend-ignore-names in .ruff.toml what no module reaches into any more."


def classes_on_upstream() -> list[type]:
    """Return the classes outside of the door that derive from one of Keras, TensorFlow or keras-tuner."""
    found = []
    for module in pkgutil.walk_packages([str(PACKAGE)], "keras_dist_ext."):
        if "._keras" not in module.name and not module.name.endswith("__main__"):
            for value in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(value) and value.__module__ == module.name and _upstream_bases(value):
                    found.append(value)
    return found


def _upstream_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] in UPSTREAM]


def private_names_of_bases(cls: type) -> set[str]:
    """Return the private names of its upstream bases that a class uses or defines itself."""
    used: set[str] = set()
    for node in ast.walk(syntax_tree(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.Attribute) and _is_own(node.value):
            used.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            used.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            used |= {target.id for target in targets if isinstance(target, ast.Name)}
    return used & set().union(*map(private_names_of, _upstream_bases(cls)))


def private_names_of(cls: type) -> set[str]:
    """Return the private names of methods and attributes that the source of a class has."""
    try:
        source = inspect.getsource(cls)
    except OSError:  # Keras 3.16 gives some classes the module that exports them
        source = "".join(inspect.getsource(member) for member in vars(cls).values() if inspect.isfunction(member))
    return set(re.findall(r"\b(?:self|cls)\.(_[a-z]\w*)", source)) | set(re.findall(r"\bdef (_[a-z]\w*)", source))


def test_classes_leave_private_names_of_their_upstream_bases_to_the_door() -> None:
    classes = classes_on_upstream()
    assert len(classes) > 20
    assert {cls.__qualname__: names for cls in classes if (names := private_names_of_bases(cls))} == {}


def test_no_text_is_the_name_of_a_private_attribute_of_keras() -> None:
    keras: Any = importlib.import_module("keras")
    central = (keras.Model, keras.Sequential, keras.optimizers.Optimizer, keras.Metric, keras.Variable)
    known = set().union(*(private_names_of(base) for cls in central for base in _upstream_bases(cls)))
    for path in OUTSIDE:
        texts = {node.value for node in ast.walk(syntax_tree(path.read_text())) if isinstance(node, ast.Constant)}
        assert texts & known == set(), path


# What finds them


@pytest.mark.parametrize(
    "code",
    [
        "import keras",
        "from keras import layers",
        "from keras.src.losses import loss",
        "def late():\n    import keras_tuner",
        "from tensorflow import keras",
        "import tensorflow.keras as keras",
        "import tensorflow as tf\ntf.keras.Model",
        "from tensorflow.python.eager import context",
        "import tensorflow as tf\ntf.__internal__.FuncGraph",
    ],
)
def test_an_import_past_the_door_is_found(code: str) -> None:
    assert imports_past_the_door(code)


@pytest.mark.parametrize(
    "code", ["import tensorflow as tf", "from keras_dist_ext._keras import keras\nkeras.Model", "import numpy"]
)
def test_other_imports_are_let_through(code: str) -> None:
    assert imports_past_the_door(code) == []


@pytest.mark.parametrize(
    "code",
    [
        "model._losses",
        "model._losses = []",
        "self.model._losses",
        "getattr(model, '_losses', None)",
        "hasattr(model, '_losses')",
        "setattr(model, '_losses', [])",
        "operator.attrgetter('layer._losses')",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert private_names(code) == {"_losses"}


@pytest.mark.parametrize(
    "code", ["self._losses", "super()._losses", "row._replace(a=1)", "model.losses", "model.__dict__"]
)
def test_own_and_public_names_are_let_through(code: str) -> None:
    assert private_names(code) == set()


def test_an_override_of_a_private_method_and_a_private_attribute_are_found() -> None:
    keras: Any = importlib.import_module("keras")

    class Override(keras.Model):  # type: ignore[misc, name-defined]
        def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
            return self._loss_tracker  # type: ignore[no-any-return]

    assert private_names_of_bases(Override) == {"_symbolic_build", "_loss_tracker"}
