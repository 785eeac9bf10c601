"""A run on two workers that is killed again and again, for tests/workers/test_chaos.py and test_ray_chaos.py.

An accident says who dies, and when: after a batch, somewhere in a step, or in the middle of a save. Attempt k meets the
k-th; the run then goes on from its last save.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

NUM_EXAMPLES, BATCH, EPOCHS = 70, 8, 5  # 9 batches an epoch, the last of 6 rows
SAVE_EVERY = 2  # batches
KINDS = ("after a batch", "in a step", "in a save")
CALLS = {"open": 2, "write": 20, "fsync": 2, "replace": 1}  # of `os`, and about how many a save makes


class Accident(NamedTuple):
    """Who dies when, in one attempt."""

    kind: str  # of KINDS
    victims: tuple[int, ...]  # workers
    number: int  # of the batch, or of the save, in this attempt, from 1
    seconds: float = 0.0  # into the step
    call: str = ""  # in the save, of CALLS
    count: int = 1  # the how many-th such call in it
    dies: str = "worker"  # on Ray also "node": that of the victim; or "driver"


def accidents(seed: int, count: int) -> list[Accident]:
    """Draw accidents: the kinds in turn, all else at random."""
    draw = random.Random(seed)
    drawn = []
    for number in range(count):
        kind = KINDS[(number + seed) % len(KINDS)]
        victims = draw.choice([(0,), (1,), (0, 1)])
        if kind == "in a save":
            call = draw.choice(list(CALLS))
            drawn.append(Accident(kind, victims, draw.randint(1, 2), call=call, count=draw.randint(1, CALLS[call])))
        else:
            drawn.append(Accident(kind, victims, draw.randint(1, 8), seconds=draw.uniform(0.0, 0.01)))
    return drawn


def accidents_on_ray(seed: int) -> list[Accident]:
    """Draw an accident of a worker, of a node and of the driver, in an order and at points that are drawn, too."""
    draw = random.Random(seed)
    plan = []
    for dies in draw.sample(["worker", "node", "driver"], 3):
        kind, victims = draw.choice(["after a batch", "in a save"]), (draw.randrange(2),)
        call = draw.choice(list(CALLS)) if kind == "in a save" else ""
        number = draw.randint(1, 2 if call else 8)
        plan.append(Accident(kind, victims, number, call=call, count=draw.randint(1, CALLS.get(call, 1)), dies=dies))
    return plan


def train(folder: str, plan: Sequence[Accident]) -> dict[str, Any]:
    """What each worker does: train to the end, or to the accident of this attempt; return what the run ended with."""
    import keras

    import keras_dist_ext as kde

    strategy = kde.pick_strategy("multi_worker").strategy
    worker = strategy.cluster_resolver.task_id
    here = pathlib.Path(folder)
    attempt = len(list(here.glob("accident-*.json")))  # no restarts of a launch: a driver is resubmitted
    _own_note(here, attempt, worker).write_text(str(os.getpid()))
    is_saved = any((here / "saves").glob("ckpt-*.kde"))  # else all accidents came before the first save
    callbacks: list[Any] = [kde.Resume(here / "saves", SAVE_EVERY)]
    if attempt < len(plan):
        callbacks.append(_callback(plan[attempt], worker, _Death(here, attempt, worker, plan[attempt].dies)))
    model = _model(strategy)
    random_rows = np.random.default_rng(0)
    x = random_rows.normal(size=(NUM_EXAMPLES, 4)).astype("float32")
    y = np.stack([x.sum(axis=1), np.arange(NUM_EXAMPLES)], axis=1).astype("float32")
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    resumed = callbacks[0].resumed_from
    return {
        "weights": [*model.get_weights(), *(keras.ops.convert_to_numpy(v) for v in model.optimizer.variables)],
        "seen": [np.asarray(counts).tolist() for counts in history.history["seen"]],
        "loss": history.history["loss"],
        "resumed": None if resumed is None else (resumed.epoch, resumed.step),
        "is_saved": is_saved,
    }


def _model(strategy: Any) -> Any:
    import keras

    import keras_dist_ext as kde

    class Seen(keras.metrics.Metric):
        """How often each example was used, in an epoch."""

        def __init__(self) -> None:
            super().__init__(name="seen")
            self.counts = self.add_weight(shape=(NUM_EXAMPLES,), initializer="zeros", name="counts")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            one_hot = keras.ops.one_hot(keras.ops.cast(y_true[:, 1], "int32"), NUM_EXAMPLES)
            self.counts.assign_add(keras.ops.sum(one_hot, axis=0))

        def result(self) -> Any:
            return keras.ops.convert_to_tensor(self.counts)

    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = kde.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        )
        model.compile(
            keras.optimizers.Adam(0.01), lambda y_true, y_pred: (y_true[:, :1] - y_pred) ** 2, metrics=[Seen()]
        )
    return model


# Accidents


class _Death:
    """Kills workers, and leaves a note of it first.

    Args:
        folder: of the run.
        attempt: that is under way.
        worker: this one.
        dies: see `Accident`.
    """

    def __init__(self, folder: pathlib.Path, attempt: int, worker: int, dies: str) -> None:
        self._folder, self._attempt, self._worker, self._dies = folder, attempt, worker, dies

    def come_to(self, victims: Sequence[int]) -> None:
        """Kill the victims, this worker last."""
        left = sorted(path.suffix for path in (self._folder / "saves").glob("ckpt-*"))
        self._folder.joinpath(f"accident-{self._attempt}.json").write_text(json.dumps(left))
        for victim in sorted(victims, key=lambda victim: victim == self._worker):
            os.kill(self._process(victim), signal.SIGKILL)

    def _process(self, victim: int) -> int:
        if self._dies == "driver":
            return int((self._folder / "driver").read_text())
        process = psutil.Process(int(_own_note(self._folder, self._attempt, victim).read_text()))
        if self._dies == "node":
            process = process.parents()[1]  # the agent's: Ray's process on the node
        return int(process.pid)


def _own_note(folder: pathlib.Path, attempt: int, worker: int) -> pathlib.Path:
    return folder / f"process-{attempt}-{worker}"


def _callback(accident: Accident, worker: int, death: _Death) -> Any:
    """Return a callback that brings the accident about, from one worker."""
    import keras

    begun, made = itertools.count(1), itertools.count(1)  # what a callback counts, a resumed run takes over

    class Bring(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if next(begun) == accident.number and accident.kind == "in a step":
                threading.Thread(
                    target=_later, args=(accident.seconds, lambda: death.come_to(accident.victims))
                ).start()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if next(made) == accident.number and accident.kind == "after a batch":
                death.come_to(accident.victims)
                time.sleep(100)  # if the other one is the victim: no further step

    bringer = 0 if accident.kind == "in a save" else accident.victims[0]
    if worker != bringer:
        return keras.callbacks.Callback()
    if accident.kind == "in a save":
        _bring_about_in_save(accident, lambda: death.come_to(accident.victims))
    return Bring()


def _later(seconds: float, action: Callable[[], None]) -> None:
    time.sleep(seconds)
    action()


def _bring_about_in_save(accident: Accident, action: Callable[[], None]) -> None:
    """Have it happen at a call that a save makes, in the thread that writes it; half of a write is made before."""
    from keras_dist_ext import whole_files
    from keras_dist_ext.training.resume import checkpoints

    original = checkpoints.CheckpointStore.write
    number = 0

    def write(self: Any, *arguments: Any) -> Any:
        nonlocal number
        number += 1
        if number >= accident.number:
            dying = _DyingOs(accident.call, accident.count, action)
            for module in (checkpoints, whole_files):
                module.os = dying  # type: ignore[attr-defined]
        return original(self, *arguments)

    checkpoints.CheckpointStore.write = write  # type: ignore[method-assign]


class _DyingOs:
    """The module `os` as the module of checkpoints sees it, one of whose functions is the last."""

    def __init__(self, call: str, count: int, action: Callable[[], None]) -> None:
        self._call, self._left, self._action = call, count, action

    def __getattr__(self, name: str) -> Any:
        original = getattr(os, name)
        if name != self._call:
            return original

        def dying(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                if name == "write":
                    original(arguments[0], arguments[1][: len(arguments[1]) // 2])
                self._action()
                time.sleep(100)  # if another worker was the victim, this save hangs, too
            return original(*arguments)

        return dying


# On Ray


def launch_on_ray(address: str, folder: str, seed: int, token: str) -> None:
    """Be the driver: launch on Ray, and leave what each worker has ended with."""
    import ray_runs

    import keras_dist_ext as kde

    here = pathlib.Path(folder)
    (here / "driver").write_text(str(os.getpid()))
    result = kde.launch(
        2,
        train,
        args=(folder, accidents_on_ray(seed)),
        on=kde.RayCluster(address, runtime_env=ray_runs.RUNTIME_ENV),
        environ={"TF_CPP_MIN_LOG_LEVEL": "3", "TEST_TOKEN": token},
        max_restarts=9,
        timeout=120,
        time_limit=240,
        pause_seconds=0.05,
        grace_seconds=0.5,
        threads_per_worker=1,
    )
    (here / "values.tmp").write_bytes(pickle.dumps((result.values, result.num_restarts)))
    (here / "values.tmp").replace(here / "values")
