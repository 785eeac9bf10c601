"""Measure what it costs a step that every replica draws numbers of its own.

    python benchmarks/bench_seeds.py                     # about 4 minutes

The contestants train the same network, of four dropout layers, by `kde.Model.fit`:

* alike: every replica draws the same numbers, as in stock Keras (the replica's offset is left out).
* apart: as it comes.
* seeded: with the callback `ReplicaSeeds`, which also has epochs begin with a data order of the seed.

A sample is the last of three epochs; differences are taken round by round, in microseconds a step.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from harness import Goal, Spread, describe_machine, print_goals, print_table, take_turns
from rich.console import Console

STEPS = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goal; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
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
        timings = take_turns({name: _trial(name, strategy) for name in ("alike", "apart", "seeded")}, options.rounds)
        samples = timings.samples
        cost = {
            name: Spread.of([1e6 * (own - base) for own, base in zip(samples[name], samples["alike"], strict=True)])
            for name in ("apart", "seeded")
        }
        figures[f"x{num_replicas}"] = cost["seeded"].median
        step = timings.spread("alike").show(0, 1e6)
        rows.append([f"x{num_replicas}", step, cost["apart"].show(1), cost["seeded"].show(1)])
    print_table(console, "Microseconds a step: median (quartiles)", ["replicas", "alike", "apart +", "seeded +"], rows)
    goal = Goal("seeds cost at most 5 µs a step", 5.0, figures)
    print_goals(console, [goal])
    return int(bool(goal.misses))


def _trial(name: str, strategy: Any) -> Callable[[], float]:
    import keras
    import numpy as np

    import keras_dist_ext as kde
    from keras_dist_ext.step import ReplicaStep

    with strategy.scope():
        hidden = [layer for _ in range(4) for layer in (keras.layers.Dense(16), keras.layers.Dropout(0.5))]
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
