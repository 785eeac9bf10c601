"""Compare what `kde.plan` predicts from one replica with what several then take.

    python benchmarks/bench_plan.py                          # about 10 minutes
    python benchmarks/bench_plan.py --models tiny --replicas 2
    python benchmarks/bench_plan.py --shared                 # replicas of one process, which share its cores

Replicas are worker processes on 127.0.0.1, each pinned to as many cores of its own; numbers of replicas for which there
are not enough cores are left out. The workers of the first number plan, each for one replica, with what sums over them
add to a step (`network=strategy`); that plan is held against the steps of all numbers. Plans and timed steps take
turns, so that a slow moment of the machine hits both.

With `--shared`, replicas are logical CPU devices of one process, and one replica is measured on all cores.

A row is a model at a number of replicas, once with the batch of one replica divided and once with that for each; what
is shown is the median of the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from statistics import median
from typing import Any

from cases import MODELS, Case, Classes, Train, batches_of, epoch_times, start, steps_for
from harness import describe_machine, print_table, run_apart
from rich.console import Console

__all__ = ["main"]

GOAL = 0.15  # deviation of a predicted step
KINDS = ("fixed global batch", "fixed batch a replica")
MODELS_OF_ROWS = "tiny,mlp512,strided,cnn,lstm"
LIMIT_SECONDS = 300.0  # of a process


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process does; travels as JSON on its command line."""

    model: str
    num_replicas: int
    cores_each: int  # 0: all
    replicas: tuple[int, ...] = ()  # to predict for; none: nothing is predicted
    seconds: float = 1.0  # of timed training
    num_rounds: int = 3
    is_shared: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a process failed, else 0, whether or not predictions are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS_OF_ROWS, help=f"of {', '.join(MODELS)}, with commas between")
    parser.add_argument("--replicas", default="2,4", help="with commas between")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timed training of a row, in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", action="store_true", help="replicas of one process")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all figures")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        job = Job(**json.loads(options.job))
        value = run(job, is_worker=options.worker)
        if value is not None:
            options.result.write_text(json.dumps(value))
        os._exit(0)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine()), highlight=False)
    num_cores = len(os.sched_getaffinity(0))
    replicas = tuple(int(number) for number in options.replicas.split(","))
    if not options.shared:
        left_out = [number for number in replicas if number > num_cores]
        replicas = tuple(number for number in replicas if number <= num_cores)
        if left_out:
            console.print(f"left out: {left_out} replicas have no core each of {num_cores}", highlight=False)
    if not replicas:
        return 0
    cores_each = 0 if options.shared else num_cores // max(replicas)
    lines, figures, num_failed = [], {}, 0
    for model in options.models.split(","):
        job = Job(model, replicas[0], cores_each, replicas, options.seconds, options.rounds, options.shared)
        try:
            found = rows_of(job)
        except RuntimeError as error:
            num_failed += 1
            console.print(f"{model}: {error}", style="red", markup=False, highlight=False)
            continue
        figures[model] = found
        lines += [line_of(model, *row) for row in found]
        console.print(f"[dim]{model} done[/]")
    print_table(console, "", ["model", "replicas", "batch", "predicted ms", "measured ms", "ratio", "bound"], lines)
    ratios = [row[2]["value"] / row[3] for found in figures.values() for row in found]
    num_right = sum(abs(ratio - 1) <= GOAL for ratio in ratios)
    console.print(f"{num_right} of {len(ratios)} steps predicted within {GOAL:.0%}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps(figures))
    return int(num_failed > 0)


def line_of(
    model: str, num_replicas: int, kind: str, predicted: dict[str, float], measured: float, bound: str
) -> list[str]:
    """Return a row as text."""
    low, value, high = (1e3 * predicted[name] for name in ("low", "value", "high"))
    ratio = predicted["value"] / measured
    missed = "" if abs(ratio - 1) <= GOAL else ", missed"
    texts = [model, str(num_replicas), kind, f"{value:.2f} ({low:.2f}-{high:.2f})", f"{1e3 * measured:.2f}"]
    return [*texts, f"{ratio:.2f}{missed}", bound]


def rows_of(job: Job) -> list[tuple[int, str, dict[str, float], float, str]]:
    """Return, for numbers of replicas and kinds of batches, the predicted and the measured seconds of a step."""
    first = apart(job)
    taken = {job.num_replicas: first}
    for number in job.replicas[1:]:
        taken[number] = apart(dataclasses.replace(job, num_replicas=number, replicas=()))
    rows = []
    for number in job.replicas:
        for kind in KINDS:
            steps = [plan[kind][str(number)] for plan in first["plans"]]
            seconds = {name: median(step["seconds"][name] for step in steps) for name in ("low", "value", "high")}
            bounds = [step["bound"] for step in steps]
            measured = median(round_[kind] for round_ in taken[number]["steps"])
            rows.append((number, kind, seconds, measured, max(set(bounds), key=bounds.count)))
    return rows


def apart(job: Job) -> Any:
    """Do a job in processes of its own, and return its value."""
    command = [__file__, "--job", json.dumps(dataclasses.asdict(job))]
    if job.is_shared:
        return run_apart([sys.executable, *command], LIMIT_SECONDS)
    import keras_dist_ext as kde

    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "result.json")
        ended = kde.launch(
            job.num_replicas,
            [*command, "--worker", "--result", str(result)],
            time_limit=LIMIT_SECONDS,
            log_dir=folder,
            quiet=True,
        )
        if ended.exit_code or not result.exists():
            raise RuntimeError(f"{job.num_replicas} workers ended with code {ended.exit_code}")
        return json.loads(result.read_text())


def pin(index: int, cores_each: int) -> None:
    """Give this process cores of its own, before TensorFlow counts them."""
    if cores_each:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, set(cores[index * cores_each : (index + 1) * cores_each]))
        os.environ["TF_NUM_INTRAOP_THREADS"] = str(cores_each)


def built(case: Case, strategy: Any) -> Any:
    """Return a compiled model of ours under a strategy."""
    import keras

    import keras_dist_ext as kde

    with strategy.scope():
        model = case.build(Classes(kde.Model, kde.Sequential))
        model.compile(keras.optimizers.Adam(), case.loss, **case.compile_options)
    return model


def run(job: Job, *, is_worker: bool) -> dict[str, Any] | None:
    """Plan and train in turn; return the plans and the measured seconds of steps, None but on worker 0."""
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if is_worker else 0
    pin(index, job.cores_each)
    case = MODELS[job.model]
    import tensorflow as tf

    import keras_dist_ext as kde

    strategy = kde.pick_strategy("multi_worker").strategy if is_worker else start(job.num_replicas)
    one = built(case, tf.distribute.get_strategy()) if job.replicas else None
    fits = {}
    for kind in KINDS:
        size = case.batch_size * (job.num_replicas if kind == KINDS[1] else 1)
        train = timed_fit(built(case, strategy), batches_of(dataclasses.replace(case, batch_size=size)))
        fits[kind] = train, steps_for(train, job.seconds, strategy)
    devices: Any = "shared" if job.is_shared else "own"
    plans: list[Any] = []
    steps: list[dict[str, float]] = []
    for _ in range(job.num_rounds):
        if one is not None:
            plan = kde.plan(one, batches_of(case), replicas=job.replicas, devices=devices, network=strategy)
            plans.append(plan.to_dict())
        steps.append({kind: train(num_steps) for kind, (train, num_steps) in fits.items()})
    return {"plans": [by_number(plan) for plan in plans], "steps": steps} if index == 0 else None


def by_number(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a plan says of a step, by kind and number of replicas."""
    return {
        kind: {
            str(point["replicas"]): {"seconds": point["step_seconds"], "bound": point["bound"], "parts": point["parts"]}
            for point in curve["points"]
        }
        for kind, curve in plan["curves"].items()
    }


def timed_fit(model: Any, data: Any) -> Train:
    """Return what trains so many steps, and says how long one took in the second epoch."""
    times = epoch_times()

    def train(num_steps: int) -> float:
        model.fit(data, epochs=2, steps_per_epoch=num_steps, verbose=0, callbacks=[times])
        return float(times.ends[-1] - times.begins[-1]) / num_steps

    return train


if __name__ == "__main__":
    sys.exit(main())
