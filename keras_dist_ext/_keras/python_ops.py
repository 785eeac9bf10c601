"""Time the functions of Python that graphs call, by `tf.numpy_function` and `tf.py_function`."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_dist_ext import versions
from keras_dist_ext.aliases import TensorNest, UserFunction

__all__ = ["observe_python_ops", "python_ops_of"]

Note = Callable[[str, float, float], None]
_observers: list[Note] = []
_PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


@versions.naming("The time of functions of Python")
def observe_python_ops(note: Note) -> Callable[[], None]:
    """Have each call of such a function noted: its token, and when it began and ended, by `time.perf_counter`.

    TensorFlow calls them all through `_py_funcs`, by a token that is an attribute of the op
    (tensorflow/python/ops/script_ops.py, `FuncRegistry.__call__`). Calls come from TensorFlow's own threads.

    Returns:
        A function that ends it.
    """
    from tensorflow.python.ops import script_ops

    registry = script_ops.FuncRegistry
    if not _observers:
        original = registry.__call__

        @functools.wraps(original)
        def timed(self: object, token: bytes | str, device: str, args: TensorNest) -> TensorNest:
            begin = time.perf_counter()
            try:
                return original(self, token, device, args)
            finally:
                for each in tuple(_observers):
                    each(_text(token), begin, time.perf_counter())

        registry.__call__ = timed
    _observers.append(note)

    def stop() -> None:
        if note in _observers:
            _observers.remove(note)
            if not _observers:
                registry.__call__ = registry.__call__.__wrapped__

    return stop


@versions.naming("The time of functions of Python")
def python_ops_of(graphs: Iterable[tf.Graph]) -> dict[str, str]:
    """Return the functions of Python that graphs call, also in functions and loops: by token, a name with its line.

    Whose function is not there any more is called by its token; those of this package are left out.
    """
    from tensorflow.python.ops import script_ops

    tokens: dict[str, None] = {}
    for graph in graphs:
        definition = graph.as_graph_def()
        for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
            tokens.update((_text(node.attr["token"].s), None) for node in nodes if node.op in _PYTHON_OPS)
    functions = {token: _function(script_ops._py_funcs.get(token)) for token in tokens}
    return {token: _described(function, token) for token, function in functions.items() if not _is_own(function)}


def _text(token: bytes | str) -> str:
    return token.decode() if isinstance(token, bytes) else str(token)


def _function(registered: UserFunction | None) -> Any:
    function: Any = getattr(registered, "_func", registered)  # of py_function, its EagerFunc
    while True:
        inner = _inside(function)
        if inner is None:
            return function
        function = inner


def _inside(function: Any) -> Any:
    """Return what a function only passes calls on to; None where it is one itself."""
    if isinstance(function, functools.partial):
        return function.func
    if inspect.isfunction(function) and function.__module__ == "tensorflow.python.autograph.impl.api":
        return inspect.getclosurevars(function).nonlocals.get("func")  # `do_not_convert`, of an object that is called
    return getattr(function, "__wrapped__", None)


def _is_own(function: object) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _described(function: object, token: str) -> str:
    if function is None:
        return token
    name: str = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)  # which objects and functions of C do not have
    return name if code is None else f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
