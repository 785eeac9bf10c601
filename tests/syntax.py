"""Syntax trees of Python code, for tests that read it."""

import ast
import functools
import gc

__all__ = ["syntax_tree"]


@functools.cache
def syntax_tree(code: str) -> ast.Module:
    """The tree of `code`, not to be changed; made without garbage collection.

    What a collection runs while CPython 3.11 makes a tree may make another, and the first then ends in a SystemError
    (https://github.com/python/cpython/issues/106905).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(code)
    finally:
        if collects:
            gc.enable()
