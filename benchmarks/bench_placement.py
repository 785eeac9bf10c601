"""Measure whether the parts of a placed model work at the same time, and what placing them costs or gains.

    python benchmarks/bench_placement.py                                # about 1 minute
    python benchmarks/bench_placement.py --micro-batches 1,4 --rounds 9

One model of two parts, of 3 and 4 Dense layers of 1024, trains on one batch of 256 rows. Contestants: unplaced, on one
device; placed on two, with a number of micro-batches; and the same micro-batches on one device, to tell the gain of
overlap from the cost of cutting. Devices are logical CPUs, each op runs on one thread and two ops may run at once, so
that two devices can be busy with the machine's two cores; but the unplaced step may use both cores as well. XLA is off.
"Busy" is the number of devices that work at once, by TensorFlow's profiler (`Placement.measure`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from harness import describe_machine, print_table, take_turns
from rich.console import Console

__all__ = ["main"]

NUM_ROWS, WIDTH = 256, 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--micro-batches", default="1,2,4,8", help="with commas between")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each contestant")
    parser.add_argument("--steps", type=int, default=8, help="of a sample")
    options = parser.parse_args(arguments)
    numbers = [int(number) for number in options.micro_batches.split(",")]

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine()), highlight=False)
    _start()
    x = np.random.default_rng(0).normal(size=(NUM_ROWS, 512)).astype("float32")
    y = x[:, :1]
    models = {"unplaced": _make(None, 1)}
    for number in numbers:
        models[f"two devices, {number}"] = _make("CPU:1", number)
        models[f"one device, {number}"] = _make("CPU:0", number)
    trials = {name: _trial(model, x, y, options.steps) for name, model in models.items()}
    for trial in trials.values():
        trial()
    timings = take_turns(trials, options.rounds)
    rows = []
    for name, model in models.items():
        is_split = name.startswith("two")
        busy = f"{model.placement.measure(x, y, num_steps=options.steps).num_busy:.2f}" if is_split else ""
        rows.append([name, timings.spread(name).show(1, 1e3), timings.ratio(name, "unplaced").show(), busy])
    title = (
        f"Parts on two logical CPUs, by micro-batches: median (quartiles); others took {timings.others_cores:.1f} cores"
    )
    print_table(console, title, ["contestant", "ms a step", "/ unplaced", "busy"], rows)
    return 0


def _start() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the profiler says each time that it begins and ends

    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    (physical,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration() for _ in range(2)])


def _make(device: str | None, micro_batches: int) -> Any:
    """Make the model, its second part on a device."""
    import keras
    from keras import layers

    import keras_dist_ext as kde

    first = keras.Sequential([layers.Dense(WIDTH, "relu") for _ in range(3)], name="first")
    second = keras.Sequential([*(layers.Dense(WIDTH, "relu") for _ in range(3)), layers.Dense(1)], name="second")
    model = kde.Sequential([keras.Input((512,)), first, second])
    model.compile("sgd", "mse", jit_compile=False)
    if device is not None:
        with warnings.catch_warnings():  # it says that logical devices share a processor, which is known here
            warnings.simplefilter("ignore")
            kde.place(model, {"second": device}, micro_batches=micro_batches)
    return model


def _trial(model: Any, x: Any, y: Any, num_steps: int) -> Callable[[], float]:
    def train() -> float:
        began = time.perf_counter()
        for _ in range(num_steps):
            model.train_on_batch(x, y)
        return (time.perf_counter() - began) / num_steps

    return train


if __name__ == "__main__":
    sys.exit(main())
