"""What all tests need: strategies and equal seeds; which tests run, and which of them in one process."""

import gc
import itertools
import re
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import xdist
from cases import head, is_its_turn
from strategies import Strategies, make_devices, selects_gpus, strategies
from two_workers import TwoWorkers

SEED = 1337


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("which cases run (tests/README.md)")
    group.addoption("--every-case", action="store_true", help='all that rotate, not this commit\'s share; with -m ""')
    group.addoption("--commit", metavar="HASH", help="of those that rotate, the share of this commit instead of HEAD")
    group.addoption("--row", metavar="PATTERN", help="of the conformance table, each row whose whole name matches")
    group.addoption(
        "--share", metavar="N", type=int, help="of the conformance table, one row in N, those of this commit"
    )
    group.addoption(
        "--handful", metavar="N", type=int, help="of tests/gpu, a case each of N tests, or of fewer that take long"
    )
    group.addoption("--strategy", metavar="KIND", help="of the conformance table, what runs under this strategy")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.row or config.option.strategy:  # asked for by name, whatever else would leave it out
        config.option.every_case = True
        config.option.markexpr = ""


def pytest_report_header(config: pytest.Config) -> str:
    if config.option.every_case:
        return "cases that rotate: all"
    return f"cases that rotate: those of commit {_commit(config)} (--commit, --every-case)"


def _commit(config: pytest.Config) -> str:
    return config.option.commit or head(config.rootpath)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Load TensorFlow and make devices in the processes that run tests, not in the one that hands them out."""
    if not xdist.is_xdist_controller(session):
        make_devices(hide_gpus=not selects_gpus(session.config.option.markexpr))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases whose turn it is not; keep in one process what shares a fixture; begin with launches."""
    chosen = [item for item in items if _is_asked_for(item) and _is_its_turn(item)]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=sorted(set(items) - set(chosen), key=items.index))
        items[:] = chosen
    for item in items:
        if item.get_closest_marker("checks_fit") is None:  # that a step could not be checked is no matter of the test
            item.add_marker(pytest.mark.filterwarnings("ignore:Whether .* was not checked, because of its step"))
        if item.get_closest_marker("on_two_workers"):
            item.add_marker(pytest.mark.multiworker)
            item.add_marker(pytest.mark.timeout(3600))  # the first waits for the work of all; the launch has a limit
            item.add_marker(pytest.mark.xdist_group("two_workers"))
        elif item.get_closest_marker("xdist_group") is None and _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("multiworker") is None)


def _is_its_turn(item: pytest.Item) -> bool:
    """Say whether a case that rotates runs at this commit."""
    marker = item.get_closest_marker("rotating")
    if marker is None or item.config.option.every_case:
        return True
    return is_its_turn(*(marker.args or [item.nodeid]), **marker.kwargs, commit=_commit(item.config))


def _is_asked_for(item: pytest.Item) -> bool:
    """Say whether a test is one of the rows and strategies that were asked for; without a wish all are."""
    row, kind, share = item.config.option.row, item.config.option.strategy, item.config.option.share
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    is_row = {"row", "kind"} <= given.keys()
    if is_row and share and not is_its_turn(f"share: {given['row'].name}", turns=share, commit=_commit(item.config)):
        return False
    if row is None and kind is None:
        return True
    if not is_row or kind not in (None, given["kind"]):
        return False
    return row is None or re.fullmatch(row, given["row"].name) is not None


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Say whether a test uses a fixture that is made once a module."""
    definitions: dict[str, Sequence[Any]] = item._fixtureinfo.name2fixturedefs
    return any(definition.scope == "module" for found in definitions.values() for definition in found)


@pytest.fixture(scope="session")
def _two_workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TwoWorkers:
    works = [_work_of(item) for item in request.session.items if item.get_closest_marker("on_two_workers")]
    return TwoWorkers(works, tmp_path_factory.mktemp("two_workers"))


@pytest.fixture
def values(request: pytest.FixtureRequest, _two_workers: TwoWorkers) -> tuple[Any, Any]:
    """What the function that `on_two_workers` names returned on worker 0, and on worker 1."""
    return _two_workers.values(_work_of(request.node))


def _work_of(item: pytest.Item) -> tuple[Any, tuple[Any, ...]]:
    marker = item.get_closest_marker("on_two_workers")
    if marker is None:
        raise ValueError(f"{item.nodeid} asks for `values`, and has no @on_two_workers(work) that says of what")
    work, *args = marker.args
    return work, tuple(args)


@pytest.fixture(name="strategies", scope="session")
def _strategies() -> Strategies:
    """Look strategies up by kind: `strategies.get("mirrored3")`."""
    return strategies


@pytest.fixture(params=Strategies.KINDS)
def strategy(request: pytest.FixtureRequest) -> Any:
    """Run the test under each kind of strategy."""
    return strategies.get(request.param)


@pytest.fixture
def mirrored() -> Any:
    """Two replicas in this process."""
    return strategies.get("mirrored2")


@pytest.fixture(autouse=True)
def _checks_of_fit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `fit` check steps with code of the user's in a share of the tests: it traces each step once more."""
    node, runners = request.node, sys.modules.get("keras_dist_ext.training.runners")
    checks = request.config.option.every_case or node.get_closest_marker("checks_fit") is not None
    checks = checks or is_its_turn(f"checks of fit in {node.nodeid}", commit=_commit(request.config))
    if runners is not None and not checks:
        monkeypatch.setattr(runners, "check_step", lambda *_: None)


@pytest.fixture(scope="session")
def ray_token() -> Iterator[None]:
    """Give all clusters of Ray in this process one token, which it reads once, instead of one in the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture
def signals_as_in_a_terminal() -> Iterator[None]:
    """Mind what starts in the background, or by nohup: it ignores some signals, and so do its children."""
    before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in (signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that must be empty in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture(autouse=True)
def _quick_collections() -> None:
    """Spare the collections of garbage, of which Keras makes one a model, from all that is imported, or was kept."""
    if next(_NUM_TESTS) % 100 == 0:
        gc.collect()
        gc.freeze()


_NUM_TESTS = itertools.count()


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    import keras

    keras.utils.set_random_seed(SEED)
