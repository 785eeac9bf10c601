"""Measure what it costs a step that every replica draws numbers of its own.

    python benchmarks/bench_seeds.py                     # about 6 minutes

The contestants train the same network, of 32 dropout layers, by `kde.Model.fit`:

* alike: every replica draws the same numbers, as in stock Keras (the replica's offset is left out).
* apart: as it comes.
* seeded: with the callback `ReplicaSeeds`, which also has epochs begin with a data order of the seed.

Each has several copies. A sample is the last of three epochs of one copy; the cost is the difference of the copies'
means, with its standard error: copies of one program differ by 20 µs and more. Each layer costs the same, so the cost
is given for four of them: in a network of four it could not be told from that noise.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from harness import Goal, Timings, describe_machine, print_goals, print_table, several_copies, take_turns
from rich.console import Console

STEPS = 300
NUM_LAYERS = 32  # that draw numbers
REPORTED_LAYERS = 4  # for which the cost is given
CONTESTANTS = ("alike", "apart", "seeded")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goal; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each copy")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    console = Console()
    console.print(str(describe_machine()), highlight=False)

    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    rows, figures = [], {}
    for num_replicas in (1, 2, 4):
        devices = [f"CPU:{i}" for i in range(num_replicas)]
        strategy = tf.distribute.MirroredStrategy(devices) if num_replicas > 1 else tf.distribute.get_strategy()
        prepare = {name: functools.partial(_trial, name, strategy) for name in CONTESTANTS}
        timings = take_turns(several_copies(prepare, options.copies), options.copies * options.rounds)
        costs = [_cost(timings, name, options.copies) for name in ("apart", "seeded")]
        figures[f"x{num_replicas}"] = costs[1][0]
        added = [f"{mean:.1f} ± {error:.1f}" for mean, error in costs]
        rows.append([f"x{num_replicas}", timings.spread("alike").show(0, 1e6), *added])
    columns = ["replicas", "alike: median (quartiles)", "apart +", "seeded +"]
    title = f"Microseconds a step; + for {REPORTED_LAYERS} of {NUM_LAYERS} layers, ±: standard error"
    print_table(console, title, columns, rows)
    goal = Goal(f"the seeds of {REPORTED_LAYERS} layers cost at most 5 µs a step", 5.0, figures)
    print_goals(console, [goal])
    return int(bool(goal.misses))


def _cost(timings: Timings, name: str, num_copies: int) -> tuple[float, float]:
    """Return what a contestant takes longer than `alike`, and its standard error, in microseconds a step: see above."""
    means, variance = [], 0.0
    for contestant in (name, "alike"):
        samples = timings.samples[contestant]
        copies = [1e6 * statistics.median(samples[copy::num_copies]) for copy in range(num_copies)]
        means.append(statistics.mean(copies))
        variance += statistics.variance(copies) / num_copies
    share = REPORTED_LAYERS / NUM_LAYERS
    return share * (means[0] - means[1]), share * math.sqrt(variance)


def _trial(name: str, strategy: Any) -> Callable[[], float]:
    import keras
    import numpy as np

    import keras_dist_ext as kde
    from keras_dist_ext.step.replica_step import ReplicaStep

    with strategy.scope():
        hidden = [keras.layers.Dense(16), *(keras.layers.Dropout(0.05) for _ in range(NUM_LAYERS))]
        model = kde.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((STEPS * 16, 8), "float32"), np.ones((STEPS * 16, 1), "float32")

    class Last(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begin = time.perf_counter()

    def fit() -> float:
        last = Last()
        callbacks = [last, kde.ReplicaSeeds(1)] if name == "seeded" else [last]
        model.fit(x, y, batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
        return (time.perf_counter() - last.begin) / STEPS

    def alike(self: Any, generator: Any, ordered: bool, original: Any) -> Any:
        return original(ordered)

    if name == "alike":
        with mock.patch.object(ReplicaStep, "next_seed", alike):
            fit()
    else:
        fit()
    return fit


if __name__ == "__main__":
    raise SystemExit(main())
