"""Tell whether a row, or the cause that it was seen to fail with, has changed since: a digest of their source text."""

import ast
import functools
import hashlib
from pathlib import Path

from conformance.causes import cause_of
from conformance.run import Row

__all__ = ["digest"]

_FOLDER = Path(__file__).parent
_HELPERS = ("models", "feeds", "causes", "rows")


def digest(row: Row) -> str:
    """Return 12 hexadecimal digits of what defines a row: its own text, and the models, data and cause that it names.

    Spaces do not matter, nor whether the row is one of the quick ones.
    """
    text = _text_of(row.name)
    names = {node.id for node in ast.walk(text) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(text) if isinstance(node, ast.Attribute)}
    parts = [_source("rows", text).replace("Quick(", "Row(")]
    for module in _HELPERS:
        found = _definitions(module)
        parts += [_source(module, found[name]) for name in sorted({*names, cause_of(row).__name__} & found.keys())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _text_of(name: str) -> ast.AST:
    """Find the smallest call that is given the name; else what makes rows in a loop, which is all of its statement."""
    statements = _tree("rows").body
    calls = [
        node
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value == name
    ]
    if calls:
        return calls[0]
    loops = [statement for statement in statements if _makes(statement, name)]
    return loops[0] if loops else _tree("rows")


def _makes(statement: ast.stmt, name: str) -> bool:
    """Say whether a statement makes rows from a comprehension, and holds the words of a name."""
    loops = [node for node in ast.walk(statement) if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp))]
    words = [node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)]
    text = [str(word).strip() for word in words if isinstance(word, str)]
    return bool(loops) and (name in text or any(len(word) > 3 and word in name for word in text))


@functools.cache
def _definitions(module: str) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for statement in _tree(module).body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found[statement.name] = statement
    return found


def _source(module: str, node: ast.AST) -> str:
    """Cut a node out of its module, without spaces: `ast.get_source_segment`, which splits the whole text each time."""
    if not isinstance(node, (ast.stmt, ast.expr)) or node.end_lineno is None:
        return ""
    lines = _lines(module)[node.lineno - 1 : node.end_lineno]
    lines[-1] = lines[-1][: node.end_col_offset]  # first: a node of one line ends there
    lines[0] = lines[0][node.col_offset :]
    return "".join(b"".join(lines).decode().split())


@functools.cache
def _lines(module: str) -> list[bytes]:
    return _text(module).encode().splitlines(keepends=True)  # offsets of ast are in bytes


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_text(module))


@functools.cache
def _text(module: str) -> str:
    return (_FOLDER / f"{module}.py").read_text(encoding="utf-8")
