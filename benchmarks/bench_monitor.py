"""Measure what it costs to see every replica: `fit` with ReplicaMonitor and ReplicaSeeds, without, and stock Keras.

    python benchmarks/bench_monitor.py                       # about 8 minutes
    python benchmarks/bench_monitor.py --models tiny --replicas 1,2 --rounds 5

The contestants train the same model, with the same optimizer, on the same batch, again and again:

* stock: `keras.Model.fit` as it comes.
* stock+tb: the same with `keras.callbacks.TensorBoard(update_freq=1)`: the loss of all replicas together, each step.
* ours: `kde.Model.fit` as it comes.
* watched: the same with `ReplicaMonitor(folder)` and `ReplicaSeeds(1)`: loss, examples and times of each replica.

Each row is a process of its own, in which the contestants run in turn. A sample is one call to `fit` with three epochs,
of which the last two are timed; differences are taken round by round. Replicas are logical CPU devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench_fit import MODELS, Case, Classes, Job
from harness import Goal, Spread, Timings, describe_machine, print_goals, print_table, run_apart, take_turns
from rich.console import Console

CONTESTANTS = ("stock", "stock+tb", "ours", "watched")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goals; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,cnn,lstm")
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.5, help="of timed training of one sample")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        options.result.write_text(json.dumps(dataclasses.asdict(measure(Job(**json.loads(options.job))))))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine()), highlight=False)
    timings: dict[str, Timings] = {}
    for model in options.models.split(","):
        for num_replicas in map(int, options.replicas.split(",")):
            job = Job(model, num_replicas, CONTESTANTS, num_rounds=options.rounds, seconds=options.seconds)
            console.print(f"[dim]{job.row}[/]")
            command = [sys.executable, __file__, "--job", json.dumps(dataclasses.asdict(job))]
            limit = 240 + 20 * job.num_rounds * len(CONTESTANTS) * job.seconds
            timings[job.row] = Timings(**run_apart(command, limit))
    print_table(console, *_table(timings))
    goals = _goals(timings)
    print_goals(console, goals)
    return int(any(goal.misses for goal in goals))


def measure(job: Job) -> Timings:
    """Time the contestants in turn, in this process.

    Raises:
        RuntimeError: TensorFlow or a contestant could not train.
    """
    strategy = _start(job.num_replicas)
    import keras

    import keras_dist_ext as kde

    stock, ours = Classes(keras.Model, keras.Sequential), Classes(kde.Model, kde.Sequential)
    with tempfile.TemporaryDirectory() as folder:
        contestants: dict[str, tuple[Classes, list[Any]]] = {
            "stock": (stock, []),
            "stock+tb": (stock, [keras.callbacks.TensorBoard(f"{folder}/stock", update_freq=1)]),
            "ours": (ours, []),
            "watched": (ours, [kde.ReplicaMonitor(f"{folder}/ours"), kde.ReplicaSeeds(1)]),
        }
        trials: dict[str, Callable[[], float]] = {}
        for name, (classes, callbacks) in contestants.items():
            keras.utils.set_random_seed(0)
            train = _fit(classes, MODELS[job.model], strategy, callbacks)
            train(10)  # compiles
            num_steps = round(job.seconds / train(200))
            trials[name] = lambda train=train, num_steps=num_steps: train(num_steps)  # type: ignore[misc]
        return take_turns(trials, job.num_rounds)


def _start(num_replicas: int) -> Any:
    """Start TensorFlow with so many devices and return the strategy over them."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_replicas)
    if num_replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(num_replicas)])


def _fit(classes: Classes, case: Case, strategy: Any, callbacks: list[Any]) -> Callable[[int], float]:
    """Build a model, and return what trains it for so many timed steps and returns its seconds a step."""
    import keras
    import numpy as np
    import tensorflow as tf

    class EpochTimes(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        """Note when epochs end; it has no batch hooks, which would keep "auto" at one step an execution."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    random = np.random.default_rng(0)
    x = random.normal(size=(case.batch_size, *case.input_shape)).astype("float32")
    y = random.integers(max(1, case.num_classes), size=(case.batch_size, 1)).astype("float32")
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat()
    with strategy.scope():
        model = case.build(classes)
        model.compile("adam", case.loss)
    times = EpochTimes()

    def train(num_steps: int) -> float:
        half = max(1, num_steps // 2)
        model.fit(dataset, epochs=3, steps_per_epoch=half, verbose=0, callbacks=[*callbacks, times], shuffle=False)
        return (times.ends[-1] - times.ends[0]) / (2 * half)

    return train


def _added(timing: Timings, name: str, base: str) -> Spread:
    """Return the seconds a step that one takes longer than another, round by round."""
    return Spread.of([own - other for own, other in zip(timing.samples[name], timing.samples[base], strict=True)])


def _table(timings: dict[str, Timings]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, columns and rows of the table."""
    columns = ["model", *CONTESTANTS, "watching adds", "tb adds", "watched / stock", "others"]
    rows = [
        [
            row,
            *(timing.spread(name).show(0, 1e6) for name in CONTESTANTS),
            _added(timing, "watched", "ours").show(1, 1e6),
            _added(timing, "stock+tb", "stock").show(0, 1e6),
            timing.ratio("watched", "stock").show(),
            f"{timing.others_cores:.1f}",
        ]
        for row, timing in timings.items()
    ]
    return "µs a step: median (quartiles); others: cores that other processes took meanwhile", columns, rows


def _goals(timings: dict[str, Timings]) -> list[Goal]:
    """Return what watching may cost, with the figures of this run."""
    added = {row: _added(timing, "watched", "ours").median for row, timing in timings.items()}
    long = {row for row, timing in timings.items() if timing.spread("ours").median > 5e-3}
    shares = {row: 100 * added[row] / timings[row].spread("ours").median for row in long}
    micros = {row: 1e6 * seconds for row, seconds in added.items() if row not in long}
    ratios = {row: timing.ratio("watched", "stock").median for row, timing in timings.items()}
    return [
        Goal("watching adds at most 1% to steps over 5 ms", 1.0, shares),
        Goal("watching adds at most 30 µs to shorter steps", 30.0, micros),
        Goal("watched takes at most as long as stock fit, unwatched", 1.0, ratios),
    ]


if __name__ == "__main__":
    sys.exit(main())
