"""How much of Keras, TensorFlow and keras-tuner that is private the package stands on: it may only become less."""

import ast
from collections.abc import Iterator
from pathlib import Path

from syntax import syntax_tree
from test_one_door import OF_PYTHON, PACKAGE, private_names
from test_one_door import _is_private as is_private

from keras_dist_ext._keras import hooks  # noqa: F401 - installs all
from keras_dist_ext._keras.interception import HOOKS

TABLE = Path(__file__).with_name("private_touches.txt")
MOST_TOUCHES = 157
"""Modules that are imported, and private attributes, also as text; each once a file of `_keras/`."""
MOST_HOOKS = 42
"""Functions of theirs that are replaced for steps."""
PARTS = {"_v2"}  # of names of ops, which have others before them
PRIVATE_MODULES = ("keras.src.", "keras_tuner.src.", "tensorflow.python.", "tensorflow.core.", "tensorflow.tsl.")


def private_imports(code: str) -> set[str]:
    """Return what is imported of modules that are not documented, as `module.name`."""
    return set(_private_imports(syntax_tree(code)))


def _private_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr == "__internal__":
            yield "tf.__internal__"
        yield from (name for name in names if name.startswith(PRIVATE_MODULES))


def touches() -> list[str]:
    found = []
    for path in sorted((PACKAGE / "_keras").glob("*.py")):
        code = path.read_text()
        texts = {node.value for node in ast.walk(syntax_tree(code)) if isinstance(node, ast.Constant)} - PARTS
        names = private_names(code) | {text for text in texts if isinstance(text, str) and is_private(text)}
        found += sorted(private_imports(code)) + sorted(names - OF_PYTHON)
    return found


def table() -> dict[str, str]:
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split(" | ", 1) for line in lines]
    assert len(pairs) == len(dict(pairs)), "a name is there twice"
    return dict(pairs)


def test_each_private_touch_has_its_reason_in_the_table() -> None:
    found, reasons = set(touches()), table()
    assert found - set(reasons) == set(), f"Use public API, or say in {TABLE.name} why there is none."
    assert set(reasons) - found == set(), f"Take out of {TABLE.name} what is not touched any more."
    assert all(reason.strip() for reason in reasons.values())


def test_there_are_never_more_private_touches_and_hooks_than_there_were() -> None:
    counts = len(touches()), len(HOOKS)
    assert counts == (MOST_TOUCHES, MOST_HOOKS), "More: drop another for it. Fewer: lower the number here."


def test_a_private_import_is_found() -> None:
    code = (
        "import keras\nfrom keras.src.losses import loss\nfrom tensorflow.python.ops import cond as c\n"
        "import tensorflow as tf\ntf.__internal__.FuncGraph\nfrom keras import layers\n"
    )
    assert private_imports(code) == {"keras.src.losses.loss", "tensorflow.python.ops.cond", "tf.__internal__"}
