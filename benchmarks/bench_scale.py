"""Measure whether a step, and what is recorded of it, cost the same at any number of replicas and after any of steps.

    python benchmarks/bench_scale.py                    # about 15 minutes, otherwise on an idle machine
    python benchmarks/bench_scale.py --parts replicas --rounds 2

* replicas: `fit` of the tiny model with 32 examples a replica on 1, 2, 4, 8 and 16 logical CPU devices, bare and with
  `ReplicaMonitor`, in turn: microseconds a step divided by the replicas, which share the cores.
  A sample is a whole call of `fit`, of one and the same model; `bench_monitor.py` measures what recording adds to steps
  in the middle of a long one, in new copies of the model.
* steps: one `fit` with `ReplicaMonitor` on two replicas, of one epoch of 10^3 to 10^6 steps, each in a process of its
  own: microseconds a step, and the memory that it added.
* workers: seconds from `kde.launch` of 1, 2, 4 and 8 workers until all of them have made a first step, and, divided by
  the workers for each core, those of a worker: they load TensorFlow all at once.
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

import psutil
from cases import MODELS, Classes, batches_of, start
from harness import Goal, Spread, Timings, describe_machine, print_goals, print_table, run_apart, take_turns
from rich.console import Console

__all__ = ["first_step", "main", "measure"]

PARTS = ("replicas", "steps", "workers")
ROWS_OF_REPLICA = 32
WARM_UP_STEPS = 500
SAMPLE_STEPS = 3000  # of a sample at one replica; fewer at more


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, whether or not the goals are met.

    Raises:
        RuntimeError: A process failed or took too long.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    parser.add_argument("--replicas", default="1,2,4,8,16")
    parser.add_argument("--steps", default="1000,10000,100000,1000000")
    parser.add_argument("--workers", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each row, but of steps")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        part, number, num_rounds = json.loads(options.job)
        options.result.write_text(json.dumps(measure(part, number, num_rounds)))
        os._exit(0)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine()), highlight=False)
    goals: list[Goal] = []
    for part in options.parts.split(","):
        numbers = [int(number) for number in getattr(options, part).split(",")]
        goals += REPORTS[part](console, {number: _apart(part, number, options.rounds) for number in numbers})
    print_goals(console, goals)
    return 0


def _apart(part: str, number: int, num_rounds: int) -> Any:
    if part == "workers":
        return measure(part, number, num_rounds)
    command = [sys.executable, __file__, "--job", json.dumps([part, number, num_rounds])]
    return run_apart(command, 900)


def measure(part: str, number: int, num_rounds: int) -> Any:
    """Measure a row of a part in this process; return what its report takes.

    Raises:
        RuntimeError: TensorFlow could not train, or workers did not end.
    """
    return {"replicas": _measure_replicas, "steps": _measure_steps, "workers": _measure_workers}[part](
        number, num_rounds
    )


def _prepare(num_replicas: int) -> tuple[Any, Any]:
    """Return a model of so many replicas, and its data."""
    strategy = start(num_replicas)
    import keras_dist_ext as kde

    case = dataclasses.replace(MODELS["tiny"], batch_size=ROWS_OF_REPLICA * num_replicas)
    with strategy.scope():
        model = case.build(Classes(kde.Model, kde.Sequential))
        model.compile("adam", case.loss)
    return model, batches_of(case)


def _measure_replicas(num_replicas: int, num_rounds: int) -> dict[str, Any]:
    """Return `Timings` of the bare and the watched `fit`."""
    model, dataset = _prepare(num_replicas)
    import keras_dist_ext as kde

    num_steps = SAMPLE_STEPS // num_replicas

    def trial(callbacks: list[Any]) -> Callable[[], float]:
        def fit(steps: int) -> float:
            began = time.perf_counter()
            model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=callbacks, shuffle=False)
            return (time.perf_counter() - began) / steps

        fit(WARM_UP_STEPS)
        return lambda: fit(num_steps)

    with tempfile.TemporaryDirectory() as folder:
        trials = {"bare": trial([]), "watched": trial([kde.ReplicaMonitor(folder)])}
        return dataclasses.asdict(take_turns(trials, num_rounds))


def _report_replicas(console: Console, measured: dict[int, Any]) -> list[Goal]:
    timings = {number: Timings(**value) for number, value in measured.items()}
    rows = [
        [
            str(number),
            timing.spread("bare").show(1, 1e6),
            timing.spread("bare").show(1, 1e6 / number),
            timing.ratio("watched", "bare").show(3),
            timing.added("watched", "bare").show(2, 1e6 / number),
        ]
        for number, timing in timings.items()
    ]
    columns = ["replicas", "step (µs)", "a replica", "watched / bare", "recording, a replica (µs)"]
    print_table(console, "32 examples a replica: median (quartiles); ± a standard error", columns, rows)
    fewest, most = min(timings), max(timings)
    a_replica = {number: timings[number].spread("bare").median / number for number in timings}
    return [
        Goal(
            "a replica's step at most replicas takes at most 1.25 of that at fewest",
            1.25,
            {f"{most} against {fewest}": a_replica[most] / a_replica[fewest]},
        )
    ]


def _measure_steps(num_steps: int, num_rounds: int) -> dict[str, float]:
    """Return microseconds a step, and the MiB that the epoch added; of one round."""
    model, dataset = _prepare(2)
    import keras_dist_ext as kde

    with tempfile.TemporaryDirectory() as folder:
        monitor = kde.ReplicaMonitor(folder)
        model.fit(dataset, steps_per_epoch=1000, verbose=0, callbacks=[monitor], shuffle=False)
        before, began = psutil.Process().memory_info().rss, time.perf_counter()
        model.fit(dataset, steps_per_epoch=num_steps, verbose=0, callbacks=[monitor], shuffle=False)
        seconds = time.perf_counter() - began
        return {"us": seconds / num_steps * 1e6, "mib": (psutil.Process().memory_info().rss - before) / 2**20}


def _report_steps(console: Console, measured: dict[int, Any]) -> list[Goal]:
    rows = [[f"{number:,}", f"{value['us']:.1f}", f"{value['mib']:.1f}"] for number, value in measured.items()]
    print_table(console, "an epoch of so many steps, watched, on 2 replicas", ["steps", "µs a step", "MiB added"], rows)
    fewest, most = min(measured), max(measured)
    return [
        Goal(
            "a step of the longest epoch takes at most 1.05 of one of the shortest",
            1.05,
            {f"{most:,} against {fewest:,}": measured[most]["us"] / measured[fewest]["us"]},
        )
    ]


def first_step() -> float:
    """Train one step in a worker; return when it was over, in seconds since 1970."""
    import keras_dist_ext as kde

    case = MODELS["tiny"]
    strategy = kde.pick_strategy().strategy
    with strategy.scope():
        model = case.build(Classes(kde.Model, kde.Sequential))
        model.compile("adam", case.loss)
    model.fit(batches_of(case), steps_per_epoch=1, verbose=0, shuffle=False)
    return time.time()


def _measure_workers(num_workers: int, num_rounds: int) -> list[float]:
    """Return the seconds until all workers have made a step, one sample a round, two rounds at most."""
    import keras_dist_ext as kde

    samples = []
    for _ in range(min(num_rounds, 2)):
        began = time.time()
        result = kde.launch(num_workers, first_step, timeout=300, quiet=True)
        samples.append(max(result.values) - began)
    return samples


def _report_workers(console: Console, measured: dict[int, Any]) -> list[Goal]:
    cores = os.cpu_count() or 1
    rows = [
        [str(number), Spread.of(samples).show(1), Spread.of(samples).show(1, 1 / max(1.0, number / cores))]
        for number, samples in measured.items()
    ]
    columns = ["workers", "until all have made a step (s)", "a worker, with a core of its own"]
    print_table(console, f"from `launch` to the first step, on {cores} cores: median (quartiles)", columns, rows)
    return []


REPORTS = {"replicas": _report_replicas, "steps": _report_steps, "workers": _report_workers}

if __name__ == "__main__":
    sys.exit(main())
