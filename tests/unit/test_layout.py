"""Packages import one way, from the ground up, and no modules import each other in a circle."""

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from syntax import syntax_tree

PACKAGE = Path(__file__).resolve().parents[2] / "keras_dist_ext"

# From the ground up: each imports only from those in lines above its own, and from itself.
LAYERS = (
    {"aliases", "errors", "messages", "findings", "whole_files"},
    {"arguments"},
    {"argument_types", "hashing", "versions"},
    {"_keras"},
    {"cluster"},
    {"strategy"},
    {"data"},
    {"step"},
    {"training"},
    {"monitoring"},
    {"diagnosis"},
    {"tuner"},
    {"examples"},
    {"cli"},
    {"__main__"},
)
FACE = "keras_dist_ext"  # loads names when they are used; others may import its version


def read_imports(package: Path) -> dict[str, set[str]]:
    """Read which modules of a package each of its modules imports: anywhere, also in functions and for types alone."""
    modules = {_name(package, path): path for path in sorted(package.rglob("*.py"))}
    return {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}


def _name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(syntax_tree(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                named = [name for name in (f"{node.module}.{alias.name}", node.module) if name in modules]
                yield from named[:1]


def room_of(module: str) -> str:
    """Return what holds a module at the top level of the package: another module, or a package."""
    _, _, rest = module.partition(".")
    return rest.partition(".")[0] or FACE


def arrows(imports: Mapping[str, set[str]]) -> dict[tuple[str, str], list[str]]:
    """Return what rooms import from one another, and by which imports of modules."""
    found = defaultdict(list)
    for module, others in imports.items():
        for other in sorted(others):
            if room_of(module) != room_of(other):
                found[room_of(module), room_of(other)].append(f"{module} imports {other}")
    return dict(found)


def upward(imports: Mapping[str, set[str]]) -> list[str]:
    """Return the imports by which a room has something from one that is not below it."""
    height = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    return [
        what
        for (room, other), whats in arrows(imports).items()
        for what in whats
        if FACE not in (room, other) and height[other] >= height[room]
    ]


def circle(imports: Mapping[str, set[str]]) -> str:
    """Return modules of which each imports the next and the last is the first; empty where there is no circle."""
    try:
        TopologicalSorter({module: others - {FACE} for module, others in imports.items() if module != FACE}).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def figures(package: Path) -> str:
    """Return how many rooms the top level of a package has beside its face, and how many arrows lie between them."""
    found = read_imports(package)
    between = [arrow for arrow in arrows(found) if FACE not in arrow]
    return f"{len({room_of(module) for module in found} - {FACE})} rooms, {len(between)} arrows"


@functools.cache
def own_imports() -> dict[str, set[str]]:
    return read_imports(PACKAGE)


def test_every_module_and_package_at_the_top_has_its_layer():
    assert {room_of(module) for module in own_imports()} == {FACE}.union(*LAYERS)


def test_packages_import_only_from_those_below_them():
    assert upward(own_imports()) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(own_imports()) == ""


def test_a_module_has_400_lines_at_most():
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {module: count for module, count in lines.items() if count > 400} == {}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_a_package_says_what_it_is_for_and_names_its_modules_and_packages(path):
    text = ast.get_docstring(syntax_tree(path.read_text())) or ""
    named = set(re.findall(r"\w+", text))
    modules = {module.stem for module in path.parent.glob("*.py")} - {"__init__", "__main__"}
    packages = {package.parent.name for package in path.parent.glob("*/__init__.py")}
    assert (modules | packages) - named == set()


@pytest.mark.parametrize(
    "code",
    [
        "from keras_dist_ext.tuner import search",
        "from keras_dist_ext.tuner.search import with_strategies",
        "import keras_dist_ext.tuner.search",
        "def late():\n    from keras_dist_ext.tuner.search import with_strategies",
        "if TYPE_CHECKING:\n    from keras_dist_ext.tuner.search import with_strategies",
    ],
)
def test_an_import_from_above_is_found_wherever_it_stands(code, tmp_path):
    package = tmp_path / "keras_dist_ext"
    for folder in ("data", "tuner"):
        (package / folder).mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "data" / "split.py").write_text(code)
    (package / "tuner" / "search.py").write_text("from keras_dist_ext.data.split import Shard\n")
    imports = read_imports(package)
    assert upward(imports) == ["keras_dist_ext.data.split imports keras_dist_ext.tuner.search"]
    assert circle(imports).count(" -> ") == 2


if __name__ == "__main__":  # python tests/unit/test_layout.py [.../keras_dist_ext]
    sys.stdout.write(f"{figures(Path(*sys.argv[1:]) if sys.argv[1:] else PACKAGE)}\n")
