"""Every public name says what it takes, what it raises, and what it is."""

import ast
import dataclasses
import inspect
import re
import textwrap

import pytest
from syntax import syntax_tree

import keras_dist_ext as kde
from keras_dist_ext import errors

PUBLIC = {name: getattr(module, name) for module in (kde, kde.tuner) for name in module.__all__ if name != "tuner"}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
ERRORS = {"ValueError", "TypeError", "KeyError", *errors.__all__}


def is_ours(cls):
    return cls.__module__.startswith("keras_dist_ext.")


def functions():
    """Yield public functions, and public methods of public classes, with the docstrings that speak of them."""
    for name, value in PUBLIC.items():
        if name not in CLASSES:
            yield name, value, value.__doc__ or ""
            continue
        for attribute in {attribute for cls in value.__mro__ if is_ours(cls) for attribute in vars(cls)}:
            found = [vars(cls)[attribute] for cls in value.__mro__ if attribute in vars(cls)]
            made = [getattr(method, "__func__", method) for method in found]
            is_kerass = not all(is_ours(cls) for cls in value.__mro__ if attribute in vars(cls))
            if inspect.isfunction(made[0]) and not attribute.startswith("_") and not is_kerass:
                yield f"{name}.{attribute}", made[0], "\n".join(inspect.cleandoc(m.__doc__ or "") + "\n" for m in made)


def arguments_of(function):
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "args", "kwargs") and not name.startswith("_")]


def undescribed(text, names):
    """Return the names that neither ``Args`` nor ``Attributes`` lists, and that the text does not have in backticks."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:[ ]+.*\n|\n)+)", inspect.cleandoc(text) + "\n", re.MULTILINE)
    listed = set(re.findall(r"^ +\**(\w+(?:, \w+)*)\b[^:\n]*:", "".join(sections), re.MULTILINE))
    listed = {name for names_of_line in listed for name in names_of_line.split(", ")}
    return [name for name in names if name not in listed and not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)]


def class_text(name):
    """Return the docstring of a method's class, which may say when the errors of all its methods are raised."""
    return PUBLIC[name.partition(".")[0]].__doc__


def raised_by(function):
    """Return the names of the errors that a function itself raises and that callers may want to know of."""
    raised = [
        node.exc for node in ast.walk(syntax_tree(textwrap.dedent(inspect.getsource(function)))) if is_raise(node)
    ]
    names = {getattr(getattr(error, "func", error), "id", "") for error in raised}
    return names & ERRORS


def is_raise(node):
    return isinstance(node, ast.Raise) and node.exc is not None


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring_of_its_own(name):
    value = PUBLIC[name]
    assert value.__doc__
    assert value.__doc__ not in [base.__doc__ for base in getattr(value, "__mro__", [None])[1:]]
    if dataclasses.is_dataclass(value):
        assert not value.__doc__.startswith(f"{name}("), "dataclasses makes one of the fields where there is none"


def test_functions_and_methods_describe_their_arguments_and_errors():
    missing = {
        name: lacks
        for name, function, text in functions()
        if (
            lacks := [
                *(["a docstring"] if not text.strip() else []),
                *undescribed(text, arguments_of(function)),
                *sorted(error for error in raised_by(function) if error not in text + class_text(name)),
            ]
        )
    }
    assert missing == {}


def test_classes_describe_what_they_are_made_of():
    missing = {}
    for name, cls in CLASSES.items():
        text = cls.__doc__
        if dataclasses.is_dataclass(cls):  # a comment beside a field will do
            source = inspect.getsource(cls)
            fields = [field.name for field in dataclasses.fields(cls)]
            names = [field for field in fields if not re.search(rf"^    {field}: .*  # ", source, re.MULTILINE)]
        else:
            names = arguments_of(cls.__init__) if "__init__" in vars(cls) else []
        if lacks := undescribed(text, names):
            missing[name] = lacks
    assert missing == {}
