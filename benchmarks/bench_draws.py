"""Measure what it costs a step that all replicas draw what one device draws.

    python benchmarks/bench_draws.py                     # about 2 minutes

Two programs train the same network with dropout by `kde.Model.fit`, in turn: with `ReplicaSeeds(1)`, and with
`ReplicaSeeds(1, draws="global")`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from cases import start
from harness import Goal, describe_machine, print_goals, print_table, take_turns
from rich.console import Console

STEPS = 200
BATCH = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goal; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="samples of each program")
    options = parser.parse_args(arguments)
    console = Console()
    console.print(str(describe_machine()), highlight=False)
    start(4)
    rows, figures = [], {}
    for num_replicas, width in ((2, 32), (2, 256), (4, 256)):
        timings = take_turns(
            {draws: _trial(draws, num_replicas, width) for draws in ("replica", "global")}, options.rounds
        )
        name = f"x{num_replicas}, {width} units"
        ratio = timings.ratio("global", "replica")
        figures[name] = ratio.median
        rows.append([name, timings.spread("replica").show(0, 1e6), timings.spread("global").show(0, 1e6), ratio.show()])
    columns = ["replicas, layers", 'draws="replica"', 'draws="global"', "ratio"]
    print_table(console, "Microseconds a step with four dropout layers: median (quartiles)", columns, rows)
    goal = Goal('draws="global" costs at most 1.05 of the default', 1.05, figures)
    print_goals(console, [goal])
    return int(bool(goal.misses))


def _trial(draws: str, num_replicas: int, width: int) -> Callable[[], float]:
    import keras
    import numpy as np

    import keras_dist_ext as kde

    keras.utils.set_random_seed(1)
    with kde.pick_strategy(num_replicas=num_replicas).strategy.scope():
        model = kde.Sequential([keras.Input((width,))])
        for _ in range(4):
            model.add(keras.layers.Dense(width, activation="relu"))
            model.add(keras.layers.Dropout(0.3))
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).random((BATCH * STEPS, width), dtype="float32")
    callbacks: list[Any] = [kde.ReplicaSeeds(1, draws=draws)]

    def fit() -> float:
        begin = time.perf_counter()
        model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, shuffle=False, callbacks=callbacks)
        return (time.perf_counter() - begin) / STEPS

    fit()
    return fit


if __name__ == "__main__":
    raise SystemExit(main())
