"""A program of several workers, of which the last comes to harm at a place; what the others say, and when.

As a script: prints a table of what became of the workers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from keras_dist_ext.cluster import tasks

PLACES = ("batch end", "epoch end", "validation", "save", "evaluate alone", "load_model", "program's end")
ACCIDENTS = ("SIGKILL", "SIGSTOP", "exit 0", "exception")
SECONDS = 60.0  # after which a worker counts as hanging


class Case(NamedTuple):
    """An accident of one of some workers."""

    num_workers: int
    place: str
    accident: str
    harmed: int


class Outcome(NamedTuple):
    """What became of the workers that nothing has happened to."""

    told: float  # seconds from the accident until the last of them had its WorkersError; 0 where none had
    ended: float  # until the last of them had ended; infinite where one did not
    errors: tuple[str, ...]  # the last of each, a line; empty where the program came to its end


def harm(accident: str, folder: pathlib.Path) -> None:
    """Have an accident, at a time that is noted."""
    if not (folder / "harmed").exists():
        (folder / "harmed").write_text(str(time.time()))
    if accident == "exception":
        raise ArithmeticError("the accident")
    if accident == "exit 0":
        sys.exit(0)
    os.kill(os.getpid(), getattr(signal, accident))


def program(place: str, accident: str, harmed: str, folder: str) -> None:
    """Train, save, load and evaluate on all workers, of which one has an accident; note when others are told."""
    import keras_dist_ext as kde

    strategy = kde.pick_strategy(wait_seconds=60).strategy
    try:
        _program(strategy, Case(strategy.num_replicas_in_sync, place, accident, int(harmed)), pathlib.Path(folder))
    except kde.WorkersError:
        pathlib.Path(folder, f"told{strategy.cluster_resolver.task_id}").write_text(str(time.time()))
        raise


def _program(strategy: Any, case: Case, where: pathlib.Path) -> None:
    import keras
    import numpy as np

    import keras_dist_ext as kde

    is_harmed = strategy.cluster_resolver.task_id == case.harmed

    def at(here: str) -> None:
        if here == case.place and is_harmed:
            harm(case.accident, where)

    class Harmed(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            at("batch end" if batch == 2 else "")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            at("epoch end")

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            at("validation" if batch == 1 else "")

    class Alone(keras.callbacks.Callback):  # type: ignore[misc]
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            at("evaluate alone")

    @keras.saving.register_keras_serializable()
    class Scale(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, inputs: Any) -> Any:
            return inputs * self.scale

        def save_own_variables(self, store: Any) -> None:
            at("save")
            super().save_own_variables(store)

        def load_own_variables(self, store: Any) -> None:
            at("load_model")
            super().load_own_variables(store)

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).random((24, 4), dtype="float32")
    y = x[:, :1]
    with strategy.scope():
        model = kde.Sequential([keras.Input((4,)), Scale(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = {"batch_size": 6, "verbose": 0}
    model.fit(x, y, epochs=2, validation_data=(x, y), callbacks=[Harmed()], **data)
    model.save(where / "model.keras")
    if is_harmed and case.place == "evaluate alone":
        kde.local_copy(model).evaluate(x, y, callbacks=[Alone()], **data)
    again = kde.load_model(where / "model.keras", strategy=strategy)
    again.evaluate(x, y, **data)
    at("program's end")


def _run_by_launch(cases: Sequence[Case], folder: pathlib.Path) -> Iterator[tuple[Case, Outcome]]:
    """Run cases, of which `launch` starts the workers. What it shows is the error."""
    from keras_dist_ext import launch

    for number, case in enumerate(cases):
        where = folder / str(number)
        where.mkdir()
        shown = io.StringIO()
        command = [sys.executable, __file__, "--program", *map(str, case[1:]), str(where)]
        launch(case.num_workers, command, stream=shown, time_limit=2 * SECONDS)
        yield case, _outcome(where, time.time(), (shown.getvalue(),))


def _run_all(cases: Sequence[Case], folder: pathlib.Path, at_once: int) -> Iterator[tuple[Case, Outcome]]:
    """Run cases without a launcher, some at the same time, in processes that are forked from this one.

    TensorFlow is loaded once. A process that is a worker leaves this function by `_IsWorker`.
    """
    import keras
    import tensorflow as tf

    import keras_dist_ext as kde

    assert [keras.Model, tf.Module, kde.pick_strategy, kde.Sequential, kde.load_model, kde.local_copy]  # loaded
    left, running, own = list(cases), list[_Running](), os.getpid()
    try:
        while left or running:
            while left and len(running) < at_once:
                running.append(_Running(left.pop(0), folder))
            for each in list(running):
                if each.is_over():
                    running.remove(each)
                    yield each.case, each.outcome()
            time.sleep(0.02)
    finally:
        for each in running if os.getpid() == own else ():
            each.kill()


class _Running:
    """The workers of a case, while they run."""

    def __init__(self, case: Case, folder: pathlib.Path) -> None:
        self.case = case
        self.folder = folder / "-".join(map(str, case)).replace(" ", "_")
        self.folder.mkdir()
        self._deadline = time.monotonic() + 3 * SECONDS
        self._ended = 0.0
        self._held = contextlib.ExitStack()  # the ports of the cluster, until its processes have ended
        cluster = self._held.enter_context(tasks.cluster(case.num_workers, 0))
        self._processes = {task.index: self._start(task, cluster) for task in cluster}

    def _start(self, task: tasks.Task, cluster: list[tasks.Task]) -> int:
        sys.stdout.flush()
        process = os.fork()
        if process:
            return process
        os.environ["TF_CONFIG"] = tasks.tf_config(task, cluster)
        log = os.open(self.folder / f"{task.index}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        raise _IsWorker(lambda: program(*map(str, self.case[1:]), str(self.folder)))

    def is_over(self) -> bool:
        """Whether all have ended that nothing has happened to, or none will any more."""
        harmed = self.folder / "harmed"
        for index, process in list(self._processes.items()):
            if os.waitpid(process, os.WNOHANG)[0]:
                del self._processes[index]
        is_late = time.monotonic() > self._deadline or (
            harmed.exists() and time.time() > float(harmed.read_text() or "inf") + SECONDS
        )
        left = set(self._processes) - {self.case.harmed}
        if not left or is_late:
            self._ended = float("inf") if left else time.time()
            self.kill()
            return True
        return False

    def kill(self) -> None:
        """End and reap all that are left."""
        for process in self._processes.values():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        self._processes = {}
        self._held.close()

    def outcome(self) -> Outcome:
        """Say what became of them."""
        others = [index for index in range(self.case.num_workers) if index != self.case.harmed]
        logs = [(self.folder / f"{index}.log").read_text() for index in others]
        return _outcome(self.folder, self._ended, tuple(map(_error, logs)))


class _IsWorker(BaseException):
    """This process is a worker that was forked, and has something to do."""


def _outcome(folder: pathlib.Path, ended: float, errors: tuple[str, ...]) -> Outcome:
    harmed = float((folder / "harmed").read_text()) if (folder / "harmed").exists() else float("nan")
    told = max((float(path.read_text()) for path in folder.glob("told*")), default=harmed)
    return Outcome(round(told - harmed, 1), round(ended - harmed, 1), errors)


def _error(log: str) -> str:
    found = re.findall(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*$", log, re.MULTILINE)
    return str(found[-1]) if found else ""


def main() -> None:
    """Print a table, or be a worker of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", nargs=4, metavar=("PLACE", "ACCIDENT", "WORKER", "FOLDER"))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--places", nargs="+", default=PLACES)
    parser.add_argument("--accidents", nargs="+", default=ACCIDENTS)
    parser.add_argument("--first", action="store_true", help="the first worker has the accident, by default the last")
    parser.add_argument("--launch", action="store_true", help="under `launch`")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="seconds until all others were told, and had ended")
    given = parser.parse_args()
    if given.program:
        program(*given.program)
        return
    work = None
    cases = [
        Case(num_workers, place, accident, 0 if given.first else num_workers - 1)
        for num_workers, place, accident in itertools.product(given.workers, given.places, given.accidents)
    ]
    folder = pathlib.Path(tempfile.mkdtemp())
    found: dict[Case, Outcome] = {}
    try:
        for case, outcome in _run_by_launch(cases, folder) if given.launch else _run_all(cases, folder, given.at_once):
            found[case] = outcome
            _say(json.dumps([case, outcome]))
        if given.table:
            _say(*_table(found))
        return
    except _IsWorker as worker:
        work = worker.args[0]
    finally:
        if work is None:
            shutil.rmtree(folder, ignore_errors=True)
    work()


def _table(found: dict[Case, Outcome]) -> Iterator[str]:
    places = list(dict.fromkeys(case.place for case in found))
    yield f"| workers | accident | {' | '.join(places)} |"
    yield f"|{' --- |' * (2 + len(places))}"
    for num_workers, accident, harmed in dict.fromkeys((case.num_workers, *case[2:]) for case in found):
        outcomes = [found[Case(num_workers, place, accident, harmed)] for place in places]
        cells = [f"{each.told}, {each.ended}" if each.told else f"-, {each.ended}" for each in outcomes]
        yield f"| {num_workers} | {accident} | {' | '.join(cells)} |"


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
