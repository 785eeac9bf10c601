"""Time contestants in turn on a machine that others use too, and say how far the figures can be trusted.

A bench gives one callable a contestant; each trains for a while and returns its seconds a step:

    timings = take_turns(several_copies({"floor": build_floor, "stock": build_stock}, num_copies=4), num_rounds=12)
    timings.spread("stock").median                  # seconds a step
    timings.ratio("stock", "floor").median          # paired: a slow moment of the machine hits both sides
    timings.others_cores                            # what other processes took meanwhile
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

__all__ = [
    "Estimate",
    "Goal",
    "Machine",
    "Spread",
    "Timings",
    "describe_machine",
    "print_goals",
    "print_table",
    "run_apart",
    "several_copies",
    "take_slices",
    "take_turns",
]


@dataclasses.dataclass(frozen=True)
class Spread:
    """The middle half of some samples."""

    low: float  # first quartile
    median: float
    high: float  # third quartile

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        """Return the quartiles of at least one sample.

        Raises:
            ValueError: There is no sample.
        """
        if not samples:
            raise ValueError("There are no samples, so they have no median. Measure at least one round.")
        if len(samples) == 1:
            return Spread(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(low, median, high)

    def show(self, digits: int = 2, scale: float = 1.0) -> str:
        """Return `median (low-high)`, each multiplied by `scale`."""
        low, median, high = (f"{value * scale:.{digits}f}" for value in (self.low, self.median, self.high))
        return f"{median} ({low}-{high})"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The middle of samples that do not depend on each other, a few of which may be far off.

    It is the median of the means of all pairs, with the interval of Wilcoxon's signed-rank test (Hodges and Lehmann,
    Estimates of location based on rank tests, Annals of Mathematical Statistics 34, 1963).
    """

    middle: float
    error: float  # standard error of the middle: half of the interval that holds the true one with 68%

    @staticmethod
    def of(samples: Sequence[float]) -> Estimate:
        """Return the estimate from at least one sample; one alone says nothing of its error, which is infinite then.

        Raises:
            ValueError: There is no sample.
        """
        if not samples:
            raise ValueError("There are no samples, so they have no middle. Measure at least one round.")
        count = len(samples)
        means = sorted((one + other) / 2 for one, other in itertools.combinations_with_replacement(samples, 2))
        outside = round(count * (count + 1) / 4 - math.sqrt(count * (count + 1) * (2 * count + 1) / 24))
        error = (means[-1 - outside] - means[outside]) / 2 if count > 1 else math.inf
        return Estimate(statistics.median(means), error)

    def show(self, digits: int = 2, scale: float = 1.0) -> str:
        """Return `middle ± error`, each multiplied by `scale`."""
        return f"{self.middle * scale:.{digits}f} ± {self.error * scale:.{digits}f}"


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds a step of every contestant, one sample a round; of those that leave early, of the first rounds."""

    samples: dict[str, list[float]]  # contestant -> [rounds that it was in]
    others_cores: float | None  # mean number of cores that others, or the hypervisor, took meanwhile; None = unknown

    def spread(self, name: str) -> Spread:
        """Return the spread of a contestant's seconds a step.

        Raises:
            KeyError: The contestant did not run.
        """
        return Spread.of(self.samples[name])

    def ratio(self, name: str, base: str) -> Spread:
        """Return the spread of `name / base`, taken round by round where both ran.

        Raises:
            KeyError: One of the two did not run.
        """
        return Spread.of([ours / other for ours, other in zip(self.samples[name], self.samples[base], strict=False)])

    def added(self, name: str, base: str) -> Estimate:
        """Return the seconds a step that one takes longer than another, taken round by round where both ran.

        Raises:
            KeyError: One of the two did not run.
        """
        return Estimate.of([ours - other for ours, other in zip(self.samples[name], self.samples[base], strict=False)])


def take_turns(
    trials: Mapping[str, Callable[[], float]], num_rounds: int, *, goes_on: Callable[[Timings], bool] = lambda _: True
) -> Timings:
    """Run every trial once a round, and let another one begin each round.

    Args:
        trials: Contestant -> callable that trains for a while and returns its seconds a step.
        num_rounds: Number of samples of each contestant.
        goes_on: Asked after each round, with what there is so far, whether to make another.

    Raises:
        ValueError: `num_rounds` is below 1.
    """
    return _rounds(list(trials), {}, num_rounds, lambda ring: {name: trials[name]() for name in ring}, goes_on)


def _rounds(
    names: list[str],
    leave_after: Mapping[str, int],
    num_rounds: int,
    play: Callable[[list[str]], Mapping[str, float]],
    goes_on: Callable[[Timings], bool] = lambda _: True,
) -> Timings:
    """Play so many rounds; `play` is given the names in turn, another one first each round, and returns samples."""
    if num_rounds < 1:
        raise ValueError(f"num_rounds is {num_rounds}, so nothing would be measured. Ask for at least 1.")
    samples: dict[str, list[float]] = {name: [] for name in names}
    began, busy = time.perf_counter(), _others_seconds()
    for round_index in range(num_rounds):
        present = [name for name in names if round_index < leave_after.get(name, num_rounds)]
        first = round_index % len(present)
        for name, seconds in play(present[first:] + present[:first]).items():
            samples[name].append(seconds)
        cores = (_others_seconds() - busy) / (time.perf_counter() - began)
        timings = Timings(samples, max(0.0, cores))
        if not goes_on(timings):
            break
    return timings


class _Baton:
    """Lets one of several threads run at a time, in a ring."""

    def __init__(self, names: Sequence[str]) -> None:
        self._ring = list(names)
        self._changed = threading.Condition()

    def wait(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ring[0] == name)

    def pass_on(self, name: str) -> None:
        with self._changed:
            self._ring.append(self._ring.pop(0))
            self._changed.notify_all()
        self.wait(name)

    def leave(self) -> None:
        with self._changed:
            self._ring.pop(0)
            self._changed.notify_all()


def take_slices(
    prepare: Mapping[str, Callable[[], Callable[[Callable[[], None]], float]]],
    num_rounds: int,
    leave_after: Mapping[str, int] = MappingProxyType({}),
) -> Timings:
    """Prepare and run every contestant once a round, all in turn slice by slice.

    What slows the machine for a second slows them all. Rounds do not depend on each other, as each has copies of its
    own: two copies of one program may differ by more than what is measured. Nothing of earlier rounds is given back
    before the process ends: to delete what stock has used up took 14 s once.

    Args:
        prepare: Contestant -> callable that builds and compiles it and returns its trial: a callable that trains for a
            while and returns its seconds a step. What the trial is given it has to call every tenth of a second or so;
            that returns when it is its turn again. All should call it equally often, so that what they do by
            themselves, after others are over, is not counted.
        num_rounds: Number of samples of each contestant.
        leave_after: Contestant -> how many rounds it is in, if not in all: what differs much is soon known.

    Raises:
        ValueError: `num_rounds` is below 1.
    """

    def play(ring: list[str]) -> dict[str, float]:
        gc.disable()
        trials = {name: prepare[name]() for name in ring}
        gc.freeze()  # Python's collector would go through all copies now and then, in the time of one of them
        gc.enable()
        baton = _Baton(ring)
        with ThreadPoolExecutor(len(ring)) as pool:
            futures = {name: pool.submit(_in_slices, trials[name], name, baton) for name in ring}
        return {name: future.result() for name, future in futures.items()}

    return _rounds(list(prepare), leave_after, num_rounds, play)


def _in_slices(trial: Callable[[Callable[[], None]], float], name: str, baton: _Baton) -> float:
    baton.wait(name)
    try:
        return trial(lambda: baton.pass_on(name))
    finally:
        baton.leave()


def several_copies(
    prepare: Mapping[str, Callable[[], Callable[..., float]]], num_copies: int
) -> dict[str, Callable[..., float]]:
    """Prepare `num_copies` of every contestant; return trials that take a contestant's copies in turn.

    Two copies of one program may differ by more than what is measured, and so may what is compiled first and last:
    copies are prepared in changing order.

    Args:
        prepare: Contestant -> callable that builds and compiles it and returns its trial.
        num_copies: At least 1; `take_turns` should have a multiple of it as rounds.
    """
    copies: dict[str, list[Callable[..., float]]] = {name: [] for name in prepare}
    for index in range(num_copies):
        for name in [*prepare][:: -1 if index % 2 else 1]:
            copies[name].append(prepare[name]())
    gc.collect()
    gc.freeze()  # Python's collector would go through all copies now and then, in the time of one of them
    turns = {name: itertools.cycle(trials) for name, trials in copies.items()}
    return {name: lambda *given, turn=turn: next(turn)(*given) for name, turn in turns.items()}  # type: ignore[misc]


def _others_seconds() -> float:
    """Return the core-seconds since boot that went to anyone but this process."""
    everyone, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = everyone.idle + getattr(everyone, "iowait", 0.0)
    guests = getattr(everyone, "guest", 0.0) + getattr(everyone, "guest_nice", 0.0)  # counted in user and nice too
    return float(sum(everyone) - guests - idle - own.user - own.system)


def run_apart(command: Sequence[str], time_limit_seconds: float) -> Any:
    """Run `command --result FILE` in a process of its own and return the JSON value that it wrote to FILE.

    What it has written counts, also if it was ended at its time limit.

    Raises:
        RuntimeError: The process failed, took too long or wrote nothing; the message ends with its last lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, output = pathlib.Path(folder, "result.json"), pathlib.Path(folder, "output.txt")
        with output.open("w") as lines:  # a file, because a pipe stays open for as long as any grandchild lives
            process = subprocess.Popen(
                [*command, "--result", str(result)], stdout=lines, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            code = process.wait(time_limit_seconds)
        except subprocess.TimeoutExpired as error:
            if not result.exists():
                raise RuntimeError(f"no result within {time_limit_seconds:.0f} s; the process was ended") from error
            code = 0
        finally:
            _end(process)
        if code or not result.exists():
            tail = "\n".join(output.read_text(errors="replace").strip().splitlines()[-15:])
            raise RuntimeError(f"the process ended with code {code}:\n{tail}")
        return json.loads(result.read_text())


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its session, and what it started: at a time limit, and at Ctrl-C."""
    if process.poll() is not None:
        return
    for number, grace_seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
            return


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a figure has to be read with."""

    date: str  # UTC, to the minute
    processor: str
    num_cores: int
    memory_gib: float
    system: str
    load: float  # load average of the minute before the first measurement
    versions: dict[str, str]  # Python and the packages that matter

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.date}, {self.processor}, {self.num_cores} cores, {self.memory_gib:.0f} GiB, {self.system}, "
            f"load {self.load:.1f} at the start; {versions}"
        )


def describe_machine(packages: Sequence[str] = ("tensorflow", "keras")) -> Machine:
    """Describe this machine and the installed `packages`, without importing them."""
    versions = {"Python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "(not installed)"
    affinity = getattr(os, "sched_getaffinity", None)  # Linux; what a container may use, not what the host has
    return Machine(
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        processor=_processor(),
        num_cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        memory_gib=psutil.virtual_memory().total / 2**30,
        system=f"{platform.system()} {platform.release()}",
        load=os.getloadavg()[0],
        versions=versions,
    )


def _processor() -> str:
    """Return the processor's name; `platform.processor()` is empty or only "x86_64" on Linux."""
    if sys.platform == "linux":
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text; the first column is left-aligned, figures are right-aligned."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound that a figure must keep in every row that it speaks of."""

    text: str
    bound: float
    figures: dict[str, float]  # row -> figure; empty = not measured in this run
    errors: dict[str, float] = dataclasses.field(default_factory=dict)  # row -> standard error, where it is known

    @property
    def misses(self) -> dict[str, float]:
        """The rows whose figure is above the bound, by more than its error."""
        return {row: figure for row, figure in self.figures.items() if figure - self._error(row) > self.bound}

    @property
    def unclear(self) -> dict[str, float]:
        """The rows whose figure is no further from the bound than its error."""
        return {row: figure for row, figure in self.figures.items() if abs(figure - self.bound) <= self._error(row) > 0}

    def _error(self, row: str) -> float:
        return self.errors.get(row, 0.0)

    def show(self, row: str) -> str:
        """Return a row's name with its figure, and its error if that is known."""
        error = f" ± {self.errors[row]:.2f}" if row in self.errors else ""
        return f"{row} {self.figures[row]:.2f}{error}"


def print_goals(console: Console, goals: Sequence[Goal]) -> None:
    """Print met, not met, cannot tell or not measured for each goal, with the rows that are not clearly within it."""
    for goal in goals:
        if not goal.figures:
            console.print(f"not measured  {goal.text}", highlight=False)
        elif goal.misses or goal.unclear:
            verdict = "[red]not met[/]     " if goal.misses else "[yellow]cannot tell[/] "
            parts = [
                f"{word} in {len(rows)} of {len(goal.figures)} rows: {', '.join(map(goal.show, rows))}"
                for word, rows in (("missed", goal.misses), ("cannot tell", goal.unclear))
                if rows
            ]
            console.print(f"{verdict}  {goal.text} ({'; '.join(parts)})", highlight=False)
        else:
            worst = max(goal.figures, key=goal.figures.__getitem__)
            console.print(f"[green]met[/]           {goal.text} (worst: {goal.show(worst)})", highlight=False)
