"""Measure what it costs stock models that the package has been loaded: calls of Keras and TensorFlow go through hooks.

    python benchmarks/bench_stock.py                     # about a minute

The contestants make steps of one stock `keras.Model` in eager mode, where each call is made anew in each step:

* plain: the functions of Keras and TensorFlow are put back.
* hooked: as it comes once the package has been loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from harness import describe_machine, print_table, take_turns
from rich.console import Console

STEPS = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    console = Console()
    console.print(str(describe_machine()), highlight=False)
    step = _stock_step()
    step()
    trials = {"plain": functools.partial(_plain, step), "hooked": functools.partial(_seconds, step)}
    timings = take_turns(trials, options.rounds)
    rows = [[name, timings.spread(name).show(1, 1e6)] for name in trials]
    rows.append(["hooked / plain", timings.ratio("hooked", "plain").show(3)])
    print_table(console, "a step of a stock model, µs", ["contestant", "time"], rows)
    return 0


def _stock_step() -> Any:
    import keras
    import numpy as np

    from keras_dist_ext._keras import hooks  # noqa: F401 - installs them

    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3), keras.layers.Flatten(), keras.layers.Dropout(0.2)]
    )
    model.add(keras.layers.Dense(10))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    x, y = np.zeros((4, 8, 8, 1), "float32"), np.zeros(4, "int32")
    return functools.partial(model.train_on_batch, x, y)


def _plain(step: Any) -> float:
    with _put_back():
        return _seconds(step)


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Give Keras and TensorFlow their own functions for a while."""
    from keras_dist_ext._keras.interception import HOOKS

    hooked = [(hook, getattr(hook.owner, hook.name)) for hook in HOOKS]
    for hook, function in hooked:
        setattr(hook.owner, hook.name, function.__wrapped__)
    try:
        yield
    finally:
        for hook, function in hooked:
            setattr(hook.owner, hook.name, function)


def _seconds(step: Any) -> float:
    """Return the seconds of a step, the mean of several."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begin) / STEPS


if __name__ == "__main__":
    raise SystemExit(main())
