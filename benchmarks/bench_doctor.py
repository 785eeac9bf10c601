"""Measure what the doctor's passive part costs: `fit` with ParallelismDoctor and without.

    python benchmarks/bench_doctor.py                       # about 8 minutes
    python benchmarks/bench_doctor.py --models cnn --replicas 2 --rounds 5

The contestants train the same model, with the same optimizer, on the same batch, again and again:

* ours: `kde.Model.fit` as it comes.
* doctor: the same with `ParallelismDoctor()`, which records steps, times callbacks and watches for tracing. Steps
  shorter than 3 ms it records for two seconds only, here for a tenth of one: what is timed comes after that.
* watching: the same with a doctor that never has enough, so that all steps are recorded whatever they cost.

Each row is a process of its own, in which the contestants run in turn. A sample is one call to `fit` with three
epochs, of which the last is timed; ratios are taken round by round. What the doctor does when
training ends, some 10 ms to judge and to print, is not in it; nor are experiments. Replicas are logical CPU devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench_fit import MODELS, Case, Classes, Job
from bench_monitor import _start
from harness import Goal, Timings, describe_machine, print_goals, print_table, run_apart, take_turns
from rich.console import Console

CONTESTANTS = ("ours", "doctor", "watching")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goals; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,mlp512,cnn,lstm")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.4, help="of timed training of one sample")
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
            limit = 240 + 20 * job.num_rounds * len(CONTESTANTS) * 3 * job.seconds
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
    from keras_dist_ext.diagnosis import step_blocks

    step_blocks._ENOUGH_SECONDS = 0.1

    class Watching(kde.ParallelismDoctor):  # type: ignore[misc]
        """A doctor that records every step."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._visit._blocks.__class__ = _Insatiable
            super().on_train_batch_end(batch, logs)

    class _Insatiable(step_blocks.StepBlocks):
        is_enough = False

    doctors: dict[str, Callable[[], list[Any]]] = {
        "ours": list,
        "doctor": lambda: [kde.ParallelismDoctor(show=False)],
        "watching": lambda: [Watching(show=False)],
    }
    trials: dict[str, Callable[[], float]] = {}
    for name, callbacks in doctors.items():
        keras.utils.set_random_seed(0)
        train = _fit(MODELS[job.model], strategy, callbacks())
        train(10)  # compiles
        num_steps = round(job.seconds / train(200))
        train(num_steps)  # compiles what records nothing
        trials[name] = lambda train=train, num_steps=num_steps: train(num_steps)  # type: ignore[misc]
    return take_turns(trials, job.num_rounds)


def _fit(case: Case, strategy: Any, callbacks: list[Any]) -> Callable[[int], float]:
    """Build a model, and return what trains it for three epochs of so many steps; it returns the last one's seconds."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_dist_ext as kde

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
        model = case.build(Classes(kde.Model, kde.Sequential))
        model.compile("adam", case.loss)
    times = EpochTimes()

    def train(num_steps: int) -> float:
        model.fit(dataset, epochs=3, steps_per_epoch=num_steps, verbose=0, callbacks=[*callbacks, times], shuffle=False)
        return (times.ends[-1] - times.ends[-2]) / num_steps

    return train


def _table(timings: dict[str, Timings]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, columns and rows of the table."""
    columns = ["model", *CONTESTANTS, "doctor / ours", "watching / ours", "others"]
    rows = [
        [
            row,
            *(timing.spread(name).show(0, 1e6) for name in CONTESTANTS),
            timing.ratio("doctor", "ours").show(3),
            timing.ratio("watching", "ours").show(3),
            f"{timing.others_cores:.1f}",
        ]
        for row, timing in timings.items()
    ]
    return "µs a step: median (quartiles); others: cores that other processes took meanwhile", columns, rows


def _goals(timings: dict[str, Timings]) -> list[Goal]:
    """Return what the doctor may cost, with the figures of this run."""
    costs = {row: 100 * (timing.ratio("doctor", "ours").median - 1) for row, timing in timings.items()}
    return [Goal("the doctor's passive part costs at most 1%", 1.0, costs)]


if __name__ == "__main__":
    sys.exit(main())
