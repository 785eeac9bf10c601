"""Give every test four logical CPU devices, one strategy object per kind, and the same seeds."""

import gc
import itertools
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import pytest
import tensorflow as tf

from keras_dist_ext.strategy.pick import pick_strategy

KERAS_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])
NUM_DEVICES = 4
SEED = 1337

# Before anything initialises TensorFlow: afterwards the number of devices cannot change.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_DEVICES)]
)


def mostly_slow(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Make parameters of a test, of which the default run has those in ``quick``, and `-m slow` the others.

    Raises:
        ValueError: one of the quick ones is none of the cases: the default run would go without it.
    """
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    if unknown:
        raise ValueError(f"no such cases: {unknown}; there are {cases}")
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for case in cases
    ]


class Strategies:
    """Hand out one strategy object per kind, the same for the whole process (tensorflow#62790)."""

    KINDS = ("one_device", "default", "mirrored2", "mirrored3", "mirrored4")

    def get(self, kind: str) -> tf.distribute.Strategy:
        """Return the strategy of a kind: one of `KINDS`."""
        if kind == "default":
            return tf.distribute.get_strategy()
        if kind == "one_device":
            return pick_strategy("one_device", devices=["CPU:0"], environ={}).strategy
        if kind in self.KINDS:
            devices = [f"CPU:{i}" for i in range(int(kind.removeprefix("mirrored")))]
            return pick_strategy("mirrored", devices=devices, environ={}).strategy
        raise ValueError(f"no strategy {kind!r}; there are {', '.join(self.KINDS)}")


strategies = Strategies()


@pytest.fixture(name="strategies", scope="session")
def _strategies() -> Strategies:
    """Look strategies up by kind: `strategies.get("mirrored3")`."""
    return strategies


@pytest.fixture(params=Strategies.KINDS)
def strategy(request: pytest.FixtureRequest) -> tf.distribute.Strategy:
    """Run the test under each kind of strategy."""
    return strategies.get(request.param)


@pytest.fixture
def mirrored() -> tf.distribute.Strategy:
    """Two replicas in this process."""
    return strategies.get("mirrored2")


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
    keras.utils.set_random_seed(SEED)
