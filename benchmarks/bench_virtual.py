"""Measure what virtual replicas cost: V of them on P replicas, against plain training on the same P.

    python benchmarks/bench_virtual.py                                 # about 5 minutes
    python benchmarks/bench_virtual.py --models mlp512 --runs 4x4,4x1  # V x P

Contestants train the same model on the same global batch: plain (no virtual replicas), fast, and ordered. XLA is off
for all, since virtual replicas run without it. Each row is a process of its own, in which the contestants run in turn;
ratios are taken round by round. At V = P, fast is the plain step. A replica is a logical CPU device, so replicas share
the cores. The time to trace is that of the first two steps.
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

from cases import MODELS, Classes, batches_of, epoch_times, start
from harness import Timings, describe_machine, print_table, run_apart, take_turns
from rich.console import Console

__all__ = ["main"]

CONTESTANTS = ("plain", "fast", "ordered")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a process failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--models", default="tiny,mlp512,cnn", help=f"of {', '.join(MODELS)}, with commas between")
    parser.add_argument("--runs", default="4x4,4x2,4x1,8x1", help="V x P, with commas between")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each contestant")
    parser.add_argument("--seconds", type=float, default=0.7, help="timed training of a sample")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)  # model, V, P: what one process measures
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row:
        model, num_virtual, num_replicas = options.row
        value = _measure(model, int(num_virtual), int(num_replicas), options.rounds, options.seconds)
        options.result.write_text(json.dumps(value))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine()), highlight=False)
    rows, failed = [], False
    for model in options.models.split(","):
        for run in options.runs.split(","):
            command = [sys.executable, __file__, "--rounds", str(options.rounds), "--seconds", str(options.seconds)]
            try:
                value = run_apart([*command, "--row", model, *run.split("x")], time_limit_seconds=600)
            except RuntimeError as error:
                failed = True
                console.print(f"{model} {run} failed: {error}", style="red", markup=False, highlight=False)
                continue
            timings = Timings(**value["timings"])
            rows.append([
                f"{model} {run}",
                timings.spread("plain").show(2, 1e3),
                *(timings.ratio(name, "plain").show() for name in ("fast", "ordered")),
                *(f"{value['trace_seconds'][name]:.1f}" for name in CONTESTANTS),
                "?" if timings.others_cores is None else f"{timings.others_cores:.1f}",
            ])  # fmt: skip
    columns = ["model VxP", "plain ms a step", "fast / plain", "ordered / plain"]
    columns += [f"trace {name} s" for name in CONTESTANTS] + ["cores of others"]
    print_table(console, "Cost of virtual replicas: median (quartiles)", columns, rows)
    return int(failed)


def _measure(model: str, num_virtual: int, num_replicas: int, num_rounds: int, seconds: float) -> dict[str, Any]:
    """Time the contestants in turn, in this process."""
    strategy = start(num_replicas)
    trials: dict[str, Callable[[], float]] = {}
    trace_seconds: dict[str, float] = {}
    for name in CONTESTANTS:
        train = _prepare(model, name, num_virtual, strategy)
        began = time.perf_counter()
        train(2)
        trace_seconds[name] = time.perf_counter() - began
        num_steps = max(4, round(seconds / train(16)))
        trials[name] = lambda train=train, num_steps=num_steps: train(num_steps)  # type: ignore[misc]
    return {"timings": dataclasses.asdict(take_turns(trials, num_rounds)), "trace_seconds": trace_seconds}


def _prepare(model: str, name: str, num_virtual: int, strategy: Any) -> Callable[[int], float]:
    """Build a contestant's model; return what trains it for some steps and gives the seconds a step."""
    import keras_dist_ext as kde
    from keras_dist_ext.strategy.virtual import VirtualReplicas

    case = MODELS[model]
    dataset = batches_of(case)
    virtual = None if name == "plain" else VirtualReplicas(num_virtual, reduction=name)  # type: ignore[arg-type]
    with strategy.scope():
        net = case.build(Classes(kde.Model, kde.Sequential))
        net.compile("adam", case.loss, jit_compile=False, virtual_replicas=virtual)
    times = epoch_times()

    def train(num_steps: int) -> float:
        steps = max(1, num_steps // 2)
        net.fit(dataset, epochs=3, steps_per_epoch=steps, verbose=0, callbacks=[times], shuffle=False)
        return (times.ends[-1] - times.ends[0]) / (2 * steps)

    return train


if __name__ == "__main__":
    sys.exit(main())
