"""The versions of Keras and TensorFlow that this package was tested with, and what is said of others.

Much of what it does rests on what they do not document. A part that has been renamed is an error that names it, raised
where the first name that needs it is used; all other names go on working.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator

import lazy_loader
from packaging.version import Version

from keras_dist_ext.errors import BackendError

__all__ = ["TESTED", "TESTED_TUNER", "advice", "attach", "changed", "changed_tuner", "check", "naming", "tested"]

# The oldest, as setup.cfg asks for and `tox -e oldest` tests, and the newest release series. Nowhere else is a version
# of them compared.
TESTED = {"tensorflow": ("2.16.2", "2.21"), "keras": ("3.11", "3.15")}
TESTED_TUNER = "1.4"
"""The newest release series of keras-tuner that was tested."""
_SPELLED = {"tensorflow": "TensorFlow", "keras": "Keras"}


def tested() -> str:
    """Return the tested range of each, as text."""
    return " and ".join(f"{_SPELLED[name]} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items())


def check(installed: dict[str, str]) -> None:
    """Compare what is installed with what was tested; of a newer one a warning is given once.

    Args:
        installed: a version for each of ``TESTED``.

    Raises:
        BackendError: one is older than the oldest that was tested.
    """
    newer = []
    for name, (oldest, newest) in TESTED.items():
        version = Version(installed[name])
        if version.release < Version(oldest).release:
            raise BackendError(
                f"{_SPELLED[name]} {version} is older than {oldest}, the oldest that keras_dist_ext works with. "
                f"pip install '{name}>={oldest}'."
            )
        if version.release[:2] > Version(newest).release[:2]:
            newer.append(f"{_SPELLED[name]} {version}")
    if newer:
        warnings.warn(
            f"{' and '.join(newer)} {'is' if len(newer) == 1 else 'are'} newer than what this release of "
            f"keras_dist_ext was tested with ({tested()}). What it relies on is tried before the first step on several "
            "replicas, and an error says what has changed; `kde.certify` compares a model's numbers with one device's.",
            stacklevel=3,
        )


def attach(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that loads a name when it is first used.

    Args:
        package: its name.
        file: its ``__init__.py``, beside which ``__init__.pyi`` says where names are.
    """
    load, directory, names = lazy_loader.attach_stub(package, file)

    def get(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")
        with naming(f"{package}.{name}"):
            return load(name)

    return get, directory, names


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Have an import inside of a part of Keras or TensorFlow that is not there name what needs it; a decorator, too.

    Raises:
        BackendError: instead of Python's error.
    """
    try:
        yield
    except ImportError as error:
        if isinstance(error, BackendError) or not _is_moved(error):
            raise
        raise BackendError(_moved(what, error)) from error


def _is_moved(error: ImportError) -> bool:
    """Whether a part of Keras or TensorFlow is not where it was, rather than one of them not installed."""
    owner, _, part = (error.name or "").partition(".")
    return owner in TESTED and (bool(part) or not isinstance(error, ModuleNotFoundError))


def _moved(name: str, error: ImportError) -> str:
    owner = (error.name or "").partition(".")[0]
    return (
        f"{name} stands on a part of {_SPELLED[owner]} that version {_installed(owner)} does not have: "
        f"{error}. {advice()} Names that do not need that part still work."
    )


def changed(found: str) -> str:
    """Return an error's message: with what is installed something is not as it was, and what to do."""
    return f"With TensorFlow {_installed('tensorflow')} and Keras {_installed('keras')}: {found}. {advice()}"


def changed_tuner(found: str) -> str:
    """Return an error's message: with the keras-tuner that is installed something is not as it was, and what to do."""
    return (
        f"With keras-tuner {_installed('keras_tuner')}: {found}. This release of keras_dist_ext was tested with "
        f"keras-tuner {TESTED_TUNER}: pip install 'keras-tuner<{_next(TESTED_TUNER)}', or a newer keras_dist_ext."
    )


def _installed(name: str) -> str:
    """Return the version that is imported; nightly builds are installed under other names."""
    return str(importlib.import_module(name).__version__)


def advice() -> str:
    """Return what to do where Keras or TensorFlow has changed."""
    below = " ".join(f"'{each}<{_next(newest)}'" for each, (_, newest) in TESTED.items())
    return f"This release of keras_dist_ext was tested with {tested()}: pip install {below}, or a newer keras_dist_ext."


def _next(version: str) -> str:
    major, minor = Version(version).release[:2]
    return f"{major}.{minor + 1}"
