"""Run what several tests want to know of two workers in one launch of them.

A test brings a function that runs in each worker, and looks at what it has returned:

    def sum_over_workers(strategy, folder):
        return float(strategy.reduce("sum", 1.0, axis=None))

    @on_two_workers(sum_over_workers)
    def test_each_worker_knows_the_sum(values):
        assert values == (2.0, 2.0)

The functions of all selected tests run one after the other, in the order of the tests, in the same two processes. One
that raises fails its own tests alone, as long as it raises on both workers, or before either waits for the other.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["TwoWorkers", "Work", "on_two_workers"]

Work = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that other processes can import, and what it is called with behind strategy and folder."""

_SECONDS_TO_START, _SECONDS_EACH = 90, 30


def on_two_workers(work: Callable[..., Any], *args: Any) -> pytest.MarkDecorator:
    """Have a test find in the fixture `values` what ``work(strategy, folder, *args)`` returned on each of two workers.

    It fits a case of a parametrised test too: ``pytest.param(name, marks=on_two_workers(run, name))``. Several tests
    with the same function and arguments look at one run of it.

    Args:
        work: a function that other processes can import: defined at the top level of a module that does not import
            `strategies`. `strategy` is the one MultiWorkerMirroredStrategy of the launch, `folder` an empty folder of
            this work, the same on both workers. What it returns is pickled.
        args: for it; plain values.
    """
    return pytest.mark.on_two_workers.with_args(work, *args)


class TwoWorkers:
    """The one launch, and what came out of it."""

    def __init__(self, works: Sequence[Work], folder: Path) -> None:
        self._works = list(dict.fromkeys(works))
        self._folder = folder
        self._end: str | None = None

    def values(self, work: Work) -> tuple[Any, Any]:
        """Return what a function returned on each worker; the first call launches them."""
        if self._end is None:
            self._end = self._launch()
        found = []
        for worker in (0, 1):
            path = _path(self._folder, self._works.index(work), worker)
            if not path.exists():
                pytest.fail(f"The workers did not get to {_name(work)}:\n{self._end}", pytrace=False)
            returned, value = pickle.loads(path.read_bytes())
            if not returned:
                pytest.fail(f"{_name(work)} failed on worker {worker}:\n{value}", pytrace=False)
            found.append(value)
        return found[0], found[1]

    def _launch(self) -> str:
        """Launch the workers, and say how that ended."""
        from keras_dist_ext.cluster.launch import launch
        from keras_dist_ext.errors import LaunchError

        limit = _SECONDS_TO_START + _SECONDS_EACH * len(self._works)
        try:
            launch(2, _run, args=(self._works, str(self._folder)), time_limit=limit, threads_per_worker=1, quiet=True)
        except LaunchError as error:
            return str(error)
        return "they ended well"


def _run(works: Sequence[Work], folder: str) -> None:
    """Run all in this worker; leave what each returned, or its traceback, in a file."""
    import keras
    import tensorflow as tf

    from keras_dist_ext.strategy.pick import pick_strategy

    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * 2  # the first is the replica's
    tf.config.set_logical_device_configuration(cpu, devices)
    strategy = pick_strategy("multi_worker").strategy
    worker = strategy.cluster_resolver.task_id
    for index, (function, args) in enumerate(works):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1337)
        own = Path(folder, str(index))
        own.mkdir(exist_ok=True)
        try:
            found = pickle.dumps((True, function(strategy, own, *args)))
        except Exception:
            found = pickle.dumps((False, traceback.format_exc()))
        path = _path(Path(folder), index, worker)
        path.with_suffix(".part").write_bytes(found)
        os.replace(path.with_suffix(".part"), path)


def _path(folder: Path, index: int, worker: int) -> Path:
    return folder / f"{index}-worker{worker}.pkl"


def _name(work: Work) -> str:
    return f"{work[0].__module__}.{work[0].__qualname__}{work[1] or ''}"
