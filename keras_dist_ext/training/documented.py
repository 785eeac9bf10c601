"""Show Keras' docstrings and signatures at methods that do what Keras' do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar, cast

__all__ = ["documented_as"]

_Method = TypeVar("_Method", bound=Callable[..., object])


def documented_as(method: Callable[..., object]) -> Callable[[_Method], _Method]:
    """Show Keras' docstring and signature; to type checkers what `functools.wraps` returns would be no method."""

    def wrap(ours: _Method) -> _Method:
        documented = functools.wraps(method)(ours)
        documented.__doc__ = inspect.getdoc(method)  # Keras' trainer inherits it
        return cast("_Method", documented)

    return wrap
