"""Measure what it costs to have the strategy in a search: trials a minute, against keras-tuner as it comes.

    python benchmarks/bench_tuner.py                       # about 6 minutes
    python benchmarks/bench_tuner.py --strategies mirrored(2) --rounds 3

The contestants make the same trials, in the same order, on the same data, under one strategy:

* stock: `keras_tuner.RandomSearch(build, distribution_strategy=...)`, whose models are stock Keras models.
* adopted: `kde.tuner.RandomSearch(build, strategies=[...])` of the same `build`: each model is rebuilt as one of ours.
* ours: the same with a `build` that makes models of ours.
* logged: the same, with what every replica does, hyperparameters and results written for TensorBoard.

Each row is a process of its own, in which the contestants run in turn. A sample is one search, from the constructor to
the end of its last trial. Under one device keras-tuner gets no strategy: OneDeviceStrategy has crashed TensorFlow.
Replicas are logical CPU devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import Goal, Timings, describe_machine, print_goals, print_table, run_apart, take_turns
from rich.console import Console

CONTESTANTS = ("stock", "adopted", "ours", "logged")


@dataclasses.dataclass(frozen=True)
class Job:
    """One row."""

    strategy: str
    num_trials: int
    epochs: int
    num_rounds: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goals; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="one_device,mirrored(2)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=4, help="of a sample")
    parser.add_argument("--epochs", type=int, default=5, help="of a trial")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        options.result.write_text(json.dumps(dataclasses.asdict(measure(Job(**json.loads(options.job))))))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine(("tensorflow", "keras", "keras-tuner"))), highlight=False)
    timings: dict[str, Timings] = {}
    for strategy in options.strategies.split(","):
        job = Job(strategy, options.trials, options.epochs, options.rounds)
        console.print(f"[dim]{strategy}[/]")
        command = [sys.executable, __file__, "--job", json.dumps(dataclasses.asdict(job))]
        limit = 120 + 10 * job.num_rounds * job.num_trials * len(CONTESTANTS)
        timings[strategy] = Timings(**run_apart(command, limit))
    rows = [
        [
            strategy,
            *(f"{60 / timing.spread(name).median:.1f}" for name in CONTESTANTS),
            *(timing.ratio(name, "stock").show() for name in CONTESTANTS[1:]),
            f"{timing.others_cores:.1f}",
        ]
        for strategy, timing in timings.items()
    ]
    columns = ["strategy", *CONTESTANTS, *(f"{name} / stock" for name in CONTESTANTS[1:]), "others"]
    title = "trials a minute; seconds a trial against stock (quartiles); others: cores that other processes took"
    print_table(console, title, columns, rows)
    goals = [
        Goal(
            f"{name}: a trial takes at most 1.05 times as long as keras-tuner's",
            1.05,
            {strategy: timing.ratio(name, "stock").median for strategy, timing in timings.items()},
        )
        for name in CONTESTANTS[1:]
    ]
    print_goals(console, goals)
    return int(any(goal.misses for goal in goals))


def measure(job: Job) -> Timings:
    """Time the contestants in turn, in this process.

    Raises:
        RuntimeError: TensorFlow or a contestant could not train.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    import keras
    import keras_tuner
    from sklearn.datasets import load_digits

    import keras_dist_ext as kde
    from keras_dist_ext.tuner.strategies import Strategies

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    train, held_out = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])

    def builder(sequential: Any) -> Callable[[Any], Any]:
        def build(hp: Any) -> Any:
            model = sequential(
                [
                    keras.Input((64,)),
                    keras.layers.Dense(hp.Int("units", 16, 256), "relu"),
                    keras.layers.Dropout(hp.Float("dropout", 0.0, 0.5)),
                    keras.layers.Dense(10, "softmax"),
                ]
            )
            rate = hp.Float("learning_rate", 1e-4, 1e-2, sampling="log")
            model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
            return model

        return build

    strategy = None if job.strategy == "one_device" else Strategies.of([job.strategy])
    fixed = None if strategy is None else strategy.get(job.strategy).strategy
    numbers = itertools.count()

    def search(cls: Any, sequential: Any, folder: str, **given: Any) -> float:
        number = next(numbers)
        if "log_dir" in given:
            given["log_dir"] = f"{folder}/logs{number}"
        began = time.perf_counter()
        tuner = cls(
            builder(sequential),
            "val_accuracy",
            max_trials=job.num_trials,
            seed=1 + number // len(CONTESTANTS),  # the same trials in a round
            directory=folder,
            project_name=str(number),
            **given,
        )
        tuner.search(*train, validation_data=held_out, batch_size=32, epochs=job.epochs, verbose=0)
        assert len(tuner.oracle.trials) == job.num_trials
        return (time.perf_counter() - began) / job.num_trials

    names = [job.strategy]
    with tempfile.TemporaryDirectory() as folder:
        trials = {
            "stock": lambda: search(keras_tuner.RandomSearch, keras.Sequential, folder, distribution_strategy=fixed),
            "adopted": lambda: search(kde.tuner.RandomSearch, keras.Sequential, folder, strategies=names),
            "ours": lambda: search(kde.tuner.RandomSearch, kde.Sequential, folder, strategies=names),
            "logged": lambda: search(kde.tuner.RandomSearch, kde.Sequential, folder, strategies=names, log_dir=""),
        }
        for trial in trials.values():
            trial()  # what is loaded and made once
        return take_turns(trials, job.num_rounds)


if __name__ == "__main__":
    sys.exit(main())
