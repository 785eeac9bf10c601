"""Show replicas in the terminal: a live table, or lines of text where the output is not a terminal."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keras_dist_ext import arguments
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.monitoring.stragglers import busy_seconds
from keras_dist_ext.monitoring.writers import Floats, Run, Writer
from keras_dist_ext.step.stats import ReplicaStats

__all__ = ["TerminalWriter", "replica_table"]

_PARTS = (("compute", "█", "green"), ("input", "▒", "yellow"), ("sync", "░", "blue"))
_BAR_WIDTH = 24
_NOTABLE = 1.05  # times as long as the fastest: from here on the slowest replica is highlighted


class TerminalWriter(Writer):
    """Shows a live table of the replicas, with the slowest one highlighted; of several workers, only on the chief.

    Other output appears above the table. Where the output is not a terminal, a line is printed now and then.

    Args:
        console: where to show it; by default stdout.
        seconds_between_lines: the least time between two lines.
        seconds_between_frames: the least time between two updates of the table.
        clock: monotonic, in seconds.

    Raises:
        MonitorError: an argument is invalid.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        seconds_between_lines: float = 10.0,
        seconds_between_frames: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(console, Console | None):
            arguments.refuse("console", console, "a Console of rich, or None", MonitorError)
        arguments.function("clock", clock, error=MonitorError)
        given = {"seconds_between_lines": seconds_between_lines, "seconds_between_frames": seconds_between_frames}
        for name, seconds in given.items():
            arguments.number(name, seconds, least=0.0, most=arguments.LONGEST_SECONDS, error=MonitorError)
        self._given_console = console
        self._console: Console | None = None
        self._seconds_between = {False: seconds_between_lines, True: seconds_between_frames}
        self._clock = clock
        self._is_shown = True
        self._live: Live | None = None
        self._last: dict[str, float] = {}  # when something was shown, by kind
        self._train: ReplicaStats | None = None
        self._is_news = False
        self._test: ReplicaStats | None = None
        self._findings: list[FindingRecord] = []

    def begin(self, run: Run) -> None:
        """See ``Writer.begin``."""
        self._is_shown = run.is_chief

    def write(self, stats: ReplicaStats, scores: Floats | None) -> None:
        """See ``Writer.write``."""
        now = self._clock()
        is_due = now - self._last.get(stats.kind, -math.inf) >= self._seconds_between[self._is_live]
        if is_due:
            self._last[stats.kind] = now
        if stats.kind == "train":
            self._train, self._is_news = stats, True
        else:
            self._test = stats
            if is_due and not self._is_live:
                self._print(_line(stats))
        if is_due:
            self._show()

    def write_findings(self, findings: Sequence[FindingRecord], *, step: int, wall_time: float) -> None:
        """See ``Writer.write_findings``."""
        known = {finding["code"] for finding in self._findings}
        self._findings = list(findings)
        if not self._is_live:
            for finding in findings:
                if finding["code"] not in known:
                    self._print(finding["what"])

    def close(self) -> None:
        """Show the last state, and keep it on the screen."""
        self._show()
        self._stop()
        self._last = {}

    @property
    def _is_live(self) -> bool:
        """Whether a live table can be shown."""
        if self._console is None:
            self._console = (
                self._given_console or Console()
            )  # not before: a console cannot be copied, but this writer can
        return self._console.is_terminal or self._console.is_jupyter

    def _print(self, text: str) -> None:
        if self._is_shown and self._console is not None:
            self._console.print(Text(text), soft_wrap=True)

    def _show(self) -> None:
        if not (self._is_shown and self._is_news) or self._train is None:
            return
        if not self._is_live:
            self._is_news = False
            self._print(_line(self._train))
            return
        assert self._console is not None
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            atexit.register(self._stop)  # else an exception would leave the cursor hidden
        below = [] if self._test is None else [Text(_line(self._test), style="dim")]
        below += [Text(finding["what"], style="red") for finding in self._findings]
        max_rows = max(1, self._console.height - 7 - len(below))
        self._live.update(Group(replica_table(self._train, max_rows), *below), refresh=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            atexit.unregister(self._stop)


def replica_table(stats: ReplicaStats, max_rows: int = 100) -> Table:
    """Return a table of an interval: a row per replica, or the slowest ones if there is no room for all."""
    busy = busy_seconds(stats)
    slowest, times = _slowest(busy)
    table = Table(title=_headline(stats), title_justify="left", caption=_legend(), caption_justify="left")
    for name in ("replica", "loss", "examples/s", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("time in a step", no_wrap=True)
    table.add_column("", no_wrap=True)
    shown = np.arange(stats.num_replicas)
    if len(shown) > max_rows:
        shown = np.sort(np.argsort(-np.nan_to_num(busy), kind="stable")[: max(1, max_rows - 1)])
    for i in shown.tolist():
        table.add_row(
            str(i),
            f"{stats.loss[i]:.4g}" if stats.examples[i] else "no examples",
            f"{stats.examples_per_second[i]:,.0f}",
            f"{1e3 * stats.step_seconds[i]:.3g} ms",
            _bar(stats, i),
            Text(f"slowest, {times:.2f} times the fastest", style="red") if i == slowest else "",
        )
    if len(shown) < stats.num_replicas:
        table.add_row("...", *[""] * 4, f"{stats.num_replicas - len(shown)} faster ones")
    return table


def _slowest(busy: Floats) -> tuple[int | None, float]:
    """Return the slowest replica, if the difference is notable, and its time as a multiple of the fastest's."""
    known = busy[~np.isnan(busy)]
    times = float(known.max() / known.min()) if len(known) > 1 else 1.0
    return (int(np.nanargmax(busy)) if times >= _NOTABLE else None), times


def _headline(stats: ReplicaStats) -> Text:
    return Text(f"step {stats.step:,}: {_summary(stats)}", style="bold")


def _summary(stats: ReplicaStats) -> str:
    parts = [] if math.isnan(stats.mean_loss) else [f"loss {stats.mean_loss:.4g}"]
    parts.append(f"{stats.examples_per_second.sum():,.0f} examples/s")
    parts.append(f"{stats.input_share:.0%} waiting for input")
    return ", ".join(parts)


def _line(stats: ReplicaStats) -> str:
    """Return an interval as one line of text."""
    if stats.kind == "test":
        return f"validation at step {stats.step:,}: {_summary(stats)}"
    slowest, times = _slowest(busy_seconds(stats))
    tail = "" if slowest is None else f", slowest replica {slowest} ({times:.2f} times the fastest)"
    return f"step {stats.step:,}: {_summary(stats)}{tail}"


def _bar(stats: ReplicaStats, replica: int) -> Text:
    """Return the parts of a step as a bar of fixed width."""
    seconds = [float(getattr(stats, f"{name}_seconds")[replica]) for name, _, _ in _PARTS]
    total = sum(seconds)
    ends = [round(_BAR_WIDTH * sum(seconds[: i + 1]) / total) if total > 0 else 0 for i in range(len(_PARTS))]
    bar = Text()
    for (_, glyph, style), begin, end in zip(_PARTS, [0, *ends], ends, strict=False):
        bar.append(glyph * (end - begin), style=style)
    return bar


def _legend() -> Text:
    legend = Text()
    for name, glyph, style in _PARTS:
        legend.append(f"{glyph} ", style=style)
        legend.append(f"{name}  ", style="dim")
    return legend
