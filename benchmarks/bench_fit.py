"""Compare `fit` of keras_dist_ext with stock Keras and with a hand-written loop, at 1, 2 and 4 replicas.

    python benchmarks/bench_fit.py                       # about 10 minutes
    python benchmarks/bench_fit.py --quick --models tiny
    python benchmarks/bench_fit.py --workers 2           # processes instead of replicas; stock fit dies there

The contestants train the same Keras model, with the same optimizer, on the same batch, again and again:

* floor: a `tf.function` that loops over `strategy.run(step)` with `tf.range`; no metrics, no callbacks, no logs.
* stock: `keras.Model.fit` as it comes.
* ours: `kde.Model.fit` as it comes, so with `steps_per_execution="auto"`.

Each row (a model at a number of replicas) is a process of its own, in which the contestants run in turn. A sample of
`fit` is one call with three epochs, of which the last two are timed: compiling, starting the input pipeline and tuning
are over by then. Ratios are taken round by round. A replica is a logical CPU device, so replicas share the cores: the
figures say what distribution costs, not what it gains. Memory is measured in one more process for each contestant,
because the memory of a process hardly ever shrinks.

At several replicas the floor is no lower bound, and ours can be below it, for two reasons that are not the same work
done faster. The floor reads a `DistributedDataset` while ours cuts rows out of the plain dataset; and where all
replicas are CPUs of one process ours adds gradients in memory (`step.shares_memory`) instead of reducing them through
the strategy, which GPUs and several workers must do. So these rows do not foretell the ratio on GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from cases import MODELS, Case, Classes, Job, Train, batches_of, epoch_times, prepare_floor, start, steps_for
from harness import (
    Goal,
    Timings,
    describe_machine,
    print_goals,
    print_table,
    run_apart,
    take_turns,
)
from rich.console import Console

__all__ = ["main", "measure_memory", "measure_speed"]

CONTESTANTS = ("floor", "stock", "ours")
CAVEAT = (
    "At several replicas in one process ours is below the floor partly because it reads the plain dataset, and adds\n"
    "gradients in memory, which only logical CPUs allow: these rows do not foretell the ratio on GPUs."
)
NUM_EPOCHS = 3  # of a call to fit; the first one is not timed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a process failed, else 0, whether or not the goals are met."""
    options = _parse(arguments)
    if options.job:
        job = Job(**json.loads(options.job))
        value = measure_memory(job) if job.memory else measure_speed(job)
        if value is not None:
            options.result.write_text(json.dumps(value))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine = describe_machine()
    console.print(str(machine), highlight=False)
    timings: dict[str, Timings] = {}
    memory: dict[str, dict[str, Memory]] = {}
    failures: dict[str, str] = {}
    for job in _jobs(options):
        console.print(f"[dim]{job.row}: {'memory of ' if job.memory else ''}{', '.join(job.contestants)}[/]")
        try:
            value = _run(job)
        except RuntimeError as error:
            failures[f"{job.row} {' '.join(job.contestants)}"] = str(error)
            console.print(f"{job.row} failed: {error}", style="red", markup=False, highlight=False)
            continue
        if job.memory:
            memory.setdefault(job.row, {})[job.contestants[0]] = Memory(**value)
        else:
            timings[job.row] = Timings(**value)
    print_table(console, *_speed_table(timings))
    if "ours" in options.contestants and "floor" in options.contestants and max(options.replicas) > 1:
        console.print(CAVEAT, highlight=False)
    if memory:
        print_table(console, *_memory_table(memory))
    print_goals(console, _goals(timings, memory))
    if options.json:
        report = {
            "machine": dataclasses.asdict(machine),
            "seconds_per_step": {row: dataclasses.asdict(value) for row, value in timings.items()},
            "memory": {
                row: {name: dataclasses.asdict(value) for name, value in values.items()}
                for row, values in memory.items()
            },
            "failures": failures,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names, counts = _list_of(str, tuple(MODELS)), _list_of(int)
    parser.add_argument(
        "--models", type=names, default="tiny,mlp512,cnn,lstm", help="which models, with commas between"
    )
    parser.add_argument("--replicas", type=counts, default=None, help="replicas a worker (1,2,4; with --workers: 1)")
    parser.add_argument("--contestants", type=_list_of(str, CONTESTANTS), default=",".join(CONTESTANTS))
    parser.add_argument("--workers", type=int, default=1, help="worker processes; more than 1 leaves stock out")
    parser.add_argument("--rounds", type=int, default=None, help="samples of each contestant (7; --quick: 3)")
    parser.add_argument("--json", type=pathlib.Path, help="write all samples to this file")
    parser.add_argument("--quick", action="store_true", help="few and short samples, no memory; figures are rough")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave memory out")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.replicas = options.replicas or ((1, 2, 4) if options.workers == 1 else (1,))
    options.rounds = options.rounds or (3 if options.quick else 7)
    if options.workers > 1:
        options.contestants = tuple(name for name in options.contestants if name != "stock")
    return options


def _list_of(kind: type, known: Sequence[str] | None = None) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of comma-separated values that refuses what is not `known`."""

    def values(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",")]
        if known is not None and (strange := [part for part in parts if part not in known]):
            raise argparse.ArgumentTypeError(f"{', '.join(strange)}: not among {', '.join(known)}")
        try:
            return tuple(kind(part) for part in parts)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return values


def _jobs(options: argparse.Namespace) -> list[Job]:
    """Return the processes to run, in table order."""
    jobs = []
    for model in options.models:
        for num_replicas in options.replicas:
            job = Job(
                model=model,
                num_replicas=num_replicas,
                contestants=options.contestants,
                num_workers=options.workers,
                num_rounds=options.rounds,
                seconds=0.2 if options.quick else 0.7,
            )
            jobs.append(job)
            if options.memory and not options.quick and options.workers == 1:
                jobs += [
                    dataclasses.replace(job, contestants=(name,), memory=True)
                    for name in options.contestants
                    if name != "floor"
                ]
    return jobs


def _run(job: Job) -> Any:
    """Run the job in processes of its own and return what `measure_speed` or `measure_memory` returned there."""
    command = [sys.executable, __file__, "--job", json.dumps(dataclasses.asdict(job))]
    limit = 120 + 10 * job.num_rounds * len(job.contestants) * job.seconds
    if job.num_workers > 1:
        command = [sys.executable, "-m", "keras_dist_ext", "launch", "--workers", str(job.num_workers), *command[1:]]
    return run_apart(command, limit)


def measure_speed(job: Job) -> dict[str, Any] | None:
    """Time the job's contestants in turn, in this process.

    Returns:
        The fields of `Timings`; None on all workers but the chief.

    Raises:
        RuntimeError: TensorFlow or a contestant could not train.
    """
    strategy = start(job.num_replicas, job.num_workers)
    trains = {name: _prepare(name, MODELS[job.model], strategy) for name in job.contestants}
    trials: dict[str, Callable[[], float]] = {}
    for name, train in trains.items():
        num_steps = steps_for(train, job.seconds, strategy)
        trials[name] = lambda train=train, num_steps=num_steps: train(num_steps)  # type: ignore[misc]
    timings = take_turns(trials, job.num_rounds)
    if job.num_workers > 1:
        if strategy.cluster_resolver.task_id:
            return None
        timings = dataclasses.replace(timings, others_cores=None)  # the other workers would count
    return dataclasses.asdict(timings)


def _prepare(name: str, case: Case, strategy: Any) -> Train:
    """Build a contestant's model and return what trains it."""
    import keras

    dataset = batches_of(case)
    keras.utils.set_random_seed(0)
    if name == "ours":
        import keras_dist_ext as kde

        return _prepare_fit(Classes(kde.Model, kde.Sequential), case, strategy, dataset)
    stock = Classes(keras.Model, keras.Sequential)
    return (prepare_floor if name == "floor" else _prepare_fit)(stock, case, strategy, dataset)


def _prepare_fit(classes: Classes, case: Case, strategy: Any, dataset: Any) -> Train:
    """Return `fit` of a compiled model, stock or ours."""
    with strategy.scope():
        model = case.build(classes)
        model.compile("adam", case.loss)
    times = epoch_times()

    def train(num_steps: int) -> float:
        steps_per_epoch = max(1, round(num_steps / (NUM_EPOCHS - 1)))
        model.fit(
            dataset,
            epochs=NUM_EPOCHS,
            steps_per_epoch=steps_per_epoch,
            verbose=0,
            callbacks=[times],
            shuffle=False,  # a dataset is never shuffled by fit; True warns
        )
        return (times.ends[-1] - times.ends[0]) / (steps_per_epoch * (NUM_EPOCHS - 1))

    return train


@dataclasses.dataclass(frozen=True)
class Memory:
    """Resident memory of a process that trained one contestant, in MiB."""

    before: float  # TensorFlow and Keras imported, devices and strategy made
    peak: float

    @property
    def growth(self) -> float:
        """What building and training added."""
        return self.peak - self.before


def measure_memory(job: Job) -> dict[str, Any]:
    """Train the job's only contestant for a while, in this process, and return the fields of `Memory`.

    Raises:
        RuntimeError: TensorFlow or the contestant could not train.
    """
    (name,) = job.contestants
    strategy = start(job.num_replicas, job.num_workers)
    import keras  # noqa: F401  # before `before`: its memory is the same for all

    case = MODELS[job.model]
    before = psutil.Process().memory_info().rss / 2**20
    _prepare(name, case, strategy)(case.memory_steps * (NUM_EPOCHS - 1))
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return dataclasses.asdict(Memory(before, peak))


def _speed_table(timings: dict[str, Timings]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, columns and rows of the speed table."""
    ratios = [("stock", "floor"), ("ours", "stock"), ("ours", "floor")]
    columns = ["model", *CONTESTANTS, *(f"{name} / {base}" for name, base in ratios), "others"]
    rows = []
    for row, timing in timings.items():
        cells = [row]
        cells += [timing.spread(name).show(0, 1e6) if name in timing.samples else "" for name in CONTESTANTS]
        for name, base in ratios:
            both = name in timing.samples and base in timing.samples
            cells.append(timing.ratio(name, base).show() if both else "")
        rows.append([*cells, "" if timing.others_cores is None else f"{timing.others_cores:.1f}"])
    return "µs a step: median (quartiles); others: cores that other processes took meanwhile", columns, rows


def _memory_table(memory: dict[str, dict[str, Memory]]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, columns and rows of the memory table."""
    names = [name for name in CONTESTANTS if name != "floor"]
    columns = ["model", *(f"{name} {what}" for name in names for what in ("peak", "growth"))]
    columns += ["ours / stock peak", "ours / stock growth"]
    rows = []
    for row, values in memory.items():
        cells = [row]
        for name in names:
            value = values.get(name)
            cells += [f"{value.peak:.0f}", f"{value.growth:.0f}"] if value else ["", ""]
        stock, ours = values.get("stock"), values.get("ours")
        if stock and ours:
            cells += [f"{ours.peak / stock.peak:.3f}", f"{ours.growth / stock.growth:.3f}"]
        rows.append(cells)
    return "Resident memory in MiB; growth is over the imported TensorFlow and Keras", columns, rows


def _goals(timings: dict[str, Timings], memory: dict[str, dict[str, Memory]]) -> list[Goal]:
    """Return the goals with the figures of this run."""

    def medians(name: str, base: str, model: str = "") -> dict[str, float]:
        return {
            row: timing.ratio(name, base).median
            for row, timing in timings.items()
            if row.startswith(model) and name in timing.samples and base in timing.samples
        }

    both = {
        row: (values["ours"], values["stock"])
        for row, values in memory.items()
        if "ours" in values and "stock" in values
    }
    peaks = {row: ours.peak / stock.peak for row, (ours, stock) in both.items()}
    growths = {row: ours.growth / stock.growth for row, (ours, stock) in both.items()}
    return [
        Goal("ours <= 0.5 of stock for the tiny MLP", 0.5, medians("ours", "stock", "tiny ")),
        Goal("ours <= 1.0 of stock in every row", 1.0, medians("ours", "stock")),
        Goal("ours <= 1.25 of the floor", 1.25, medians("ours", "floor")),
        Goal("peak memory of ours <= 1.05 of stock", 1.05, peaks),
        Goal("memory that training adds, ours <= 1.05 of stock", 1.05, growths),
    ]


if __name__ == "__main__":
    sys.exit(main())
