"""Measure how far replicas that are compiled with `exact=True` are from stock Keras on one device after 50 steps.

    python benchmarks/bench_exact.py                     # about 10 minutes

Four networks with dropout and BatchNormalization (`tests/support/exact_runs.py`) train by SGD with momentum, on batches
that split evenly over 2, 3 and 4 replicas and on batches that do not. The first column is stock Keras on one device
against itself, from initial weights that are moved by half a unit in their last place: what rounding alone may do.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from cases import start
from harness import Goal, describe_machine, print_goals, print_table
from rich.console import Console

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

from exact_runs import EXAMPLES, NETWORKS, farthest, train_network

REPLICAS = (1, 2, 3, 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goal; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="which ones")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd", help="that trains them")
    options = parser.parse_args(arguments)
    console = Console()
    console.print(str(describe_machine()), highlight=False)
    start(max(REPLICAS))
    import keras_dist_ext as kde

    rows, figures = [], {}
    for name in options.networks:
        for examples in EXAMPLES:
            expected = train_network(name, examples, optimizer=options.optimizer)
            moved = farthest(train_network(name, examples, optimizer=options.optimizer, moved=True), expected)
            found = [
                farthest(
                    train_network(
                        name, examples, kde.pick_strategy(num_replicas=num).strategy, optimizer=options.optimizer
                    ),
                    expected,
                )
                for num in REPLICAS
            ]
            figures[f"{name}, {examples}"] = max(found) / 1e-5
            rows.append([f"{name}, {examples}", *(f"{one:.1e}" for one in (moved, *found))])
    columns = ["network, batches", "moved", *(f"x{num}" for num in REPLICAS)]
    print_table(
        console, "The largest difference after 50 steps, as a share of a tensor's largest number", columns, rows
    )
    goal = Goal("at most 1e-5 (shown as shares of it)", 1.0, figures)
    print_goals(console, [goal])
    return int(bool(goal.misses))


if __name__ == "__main__":
    raise SystemExit(main())
