"""Time an optimizer's update of all variables: as Keras wrote it, by fused ops, and compiled by XLA.

    python benchmarks/bench_update.py               # all rows
    python benchmarks/bench_update.py Adam Lion     # these
    python benchmarks/bench_update.py --device GPU  # wall time there, instead of the processor's

An MLP of 1M weights in six variables, and 160 small variables. `fused` is what steps of several replicas run
(`step/fused_updates.py`); "-" where they leave it to Keras. `xla` compiles the update alone, which no step does: the
first one would take 0.5 to 3 s longer. Processor time on one core, the least of many rounds, in turn; ratios to Keras.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from harness import describe_machine, print_table
from keras import optimizers
from rich.console import Console

from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext.step.fused_updates import fused_updates, update_for
from keras_dist_ext.step.pass_through import LocalUpdate

SHAPES = {
    "MLP of 1M": [(784, 800), (800,), (800, 400), (400,), (400, 10), (10,)],
    "160 small": [(32, 32), (32,)] * 80,
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optimizers.SGD(0.01),
    "momentum": lambda: optimizers.SGD(0.01, momentum=0.9),
    "Nesterov": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "RMSprop": optimizers.RMSprop,
    "RMSprop with momentum": lambda: optimizers.RMSprop(momentum=0.9),
    "centered RMSprop": lambda: optimizers.RMSprop(momentum=0.9, centered=True),
    "Adagrad": optimizers.Adagrad,
    "Adam": optimizers.Adam,
    "AdamW": optimizers.AdamW,
    "Lion": optimizers.Lion,
}
NUM_ROUNDS, NUM_UPDATES = 25, 10


def update_of(
    make: Callable[[], Any], shapes: list[tuple[int, ...]], *, is_fused: bool = False, xla: bool = False
) -> Callable[[], None]:
    """Return what makes one update, traced already."""
    random = np.random.default_rng(0)
    variables = [keras.Variable(random.normal(0, 0.05, size=shape).astype("float32")) for shape in shapes]
    gradients = [tf.Variable(random.normal(0, 0.01, size=shape).astype("float32")) for shape in shapes]
    optimizer = make()
    optimizer.build(variables)

    @tf.function(autograph=False, jit_compile=xla)
    def step() -> None:
        values = [gradient.read_value() for gradient in gradients]
        if is_fused:
            with intercept(LocalUpdate()), fused_updates(optimizer):
                optimizer.apply(values, variables)
        else:
            optimizer.apply(values, variables)

    run = step.get_concrete_function()
    run()
    return run


def measured(contestants: dict[str, Callable[[], None]], device: str) -> dict[str, float]:
    """Return the least milliseconds that an update took of each: of the processor, or of the clock on a GPU."""
    clock = time.process_time if device == "CPU" else time.perf_counter
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(NUM_ROUNDS):
        for name, run in contestants.items():
            begin = clock()
            for _ in range(NUM_UPDATES):
                run()
            tf.test.experimental.sync_devices()
            best[name] = min(best[name], (clock() - begin) / NUM_UPDATES * 1e3)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("optimizers", nargs="*", metavar="OPTIMIZER", help=", ".join(OPTIMIZERS))
    parser.add_argument("--device", default="CPU", choices=["CPU", "GPU"])
    options = parser.parse_args()
    if options.device == "CPU":
        tf.config.set_visible_devices([], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    console = Console()
    console.print(str(describe_machine()), highlight=False)
    rows = []
    for size, shapes in SHAPES.items():
        for name in options.optimizers or OPTIMIZERS:
            make = OPTIMIZERS[name]
            with tf.device(f"{options.device}:0"):
                contestants = {"keras": update_of(make, shapes), "xla": update_of(make, shapes, xla=True)}
                if update_for(make()) is not None:
                    contestants["fused"] = update_of(make, shapes, is_fused=True)
                took = measured(contestants, options.device)
            ratios = [f"{took[kind] / took['keras']:.2f}" if kind in took else "-" for kind in ("fused", "xla")]
            rows.append([size, name, f"{took['keras']:.2f}", *ratios])
    print_table(console, "Updates", ["variables", "optimizer", "Keras, ms", "fused", "XLA"], rows)


if __name__ == "__main__":
    main()
