"""The terminal shows the replicas: a table where it is one, lines where it is not, nothing on other workers."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import pty
import select
import subprocess
import sys
import time
from typing import Any

from intervals_made_up import interval, run
from rich.console import Console

import keras_dist_ext as kde
from keras_dist_ext.monitoring.terminal import replica_table

FINDINGS: Any = [{"step": 20, "kind": "straggler", "code": "slow-replica", "what": "Replica [1] is slow."}]


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def writer_to(output: io.StringIO, clock: Clock, **given: Any) -> kde.TerminalWriter:
    console = Console(file=output, width=110, force_terminal=False, color_system=None)
    writer = kde.TerminalWriter(console, clock=clock, **given)
    writer.begin(run())
    return writer


def shown(table: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_row_shows_loss_speed_and_where_the_time_went() -> None:
    stats = interval([0.010, 0.020], step=1200, waiting=0.005)
    lines = shown(replica_table(stats))
    assert lines[0].startswith("step 1,200: loss 0.625, 1,164 examples/s, 18% waiting for input")
    (first,) = (line for line in lines if "0.5 " in line)
    (second,) = (line for line in lines if "0.75" in line)
    assert "582" in first
    assert "27 ms" in first
    assert (first.count("█"), first.count("▒"), first.count("░")) == (9, 4, 11)  # 10, 5 and 12 of 27 ms
    assert (second.count("█"), second.count("▒"), second.count("░")) == (18, 4, 2)
    assert "slowest, 1.67 times the fastest" in second
    assert "slowest" not in first
    assert lines[-1].split() == ["█", "compute", "▒", "input", "░", "sync"]


def test_replicas_that_are_about_equal_have_no_slowest() -> None:
    assert not any("slowest" in line for line in shown(replica_table(interval([0.0100, 0.0102]))))


def test_a_replica_without_examples_is_labeled() -> None:
    lines = shown(replica_table(interval(examples=[160, 0])))
    assert sum("no examples" in line for line in lines) == 1


def test_where_there_is_no_room_for_all_the_slowest_are_shown() -> None:
    lines = shown(replica_table(interval([0.01 + 0.001 * i for i in range(64)]), max_rows=4))
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == ["61", "62", "63", "..."]
    assert any("61 faster ones" in line for line in lines)


def test_without_a_terminal_there_is_a_line_now_and_then_and_the_last_at_the_end() -> None:
    output, clock = io.StringIO(), Clock()
    writer = writer_to(output, clock)
    for second in range(25):
        clock.now = float(second)
        writer.write(interval([0.010, 0.020], step=second), None)
    writer.close()
    lines = output.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 10", "step 20", "step 24"]
    assert lines[0] == (
        "step 0: loss 0.625, 1,362 examples/s, 4% waiting for input, slowest replica 1 (1.91 times the fastest)"
    )


def test_findings_are_no_lines_where_there_is_a_table() -> None:
    output = io.StringIO()
    console = Console(file=output, width=110, force_terminal=True, color_system=None)
    writer = kde.TerminalWriter(console, clock=Clock())
    writer.begin(run())
    before = len(output.getvalue())
    writer.write_findings(FINDINGS, step=20, wall_time=0.0)
    assert FINDINGS[0]["what"] not in output.getvalue()[before:]
    writer.close()


def test_evaluations_and_findings_are_lines_too_and_printed_once() -> None:
    output, clock = io.StringIO(), Clock()
    writer = writer_to(output, clock)
    writer.write(interval(kind="test", step=7), None)
    for _ in range(2):
        writer.write_findings(FINDINGS, step=20, wall_time=0.0)
    writer.close()
    lines = output.getvalue().splitlines()
    assert lines[0].startswith("validation at step 7: loss 0.625")
    assert lines[1:] == ["Replica [1] is slow."]


def test_other_workers_than_the_chief_show_nothing() -> None:
    output = io.StringIO()
    writer = writer_to(output, Clock())
    writer.begin(run(is_chief=False))
    writer.write(interval(), None)
    writer.write(interval(kind="test"), None)
    writer.write_findings(FINDINGS, step=20, wall_time=0.0)
    writer.close()
    assert output.getvalue() == ""


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from intervals_made_up import interval, run
from keras_dist_ext.monitoring.terminal import TerminalWriter
writer = TerminalWriter(seconds_between_frames=0.0)
writer.begin(run())
for step in (1, 2, 3):
    writer.write(interval([0.010, 0.020], step=step), None)
    print("epoch", step)
{end}
"""


def in_a_terminal(end: str) -> str:
    """Run a script in a pseudo-terminal and return what it showed, control codes and all."""
    master, slave = pty.openpty()
    script = SCRIPT.format(tests=str(pathlib.Path(__file__).parents[1] / "support"), end=end)
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "40"}
    process = subprocess.Popen([sys.executable, "-c", script], stdin=slave, stdout=slave, stderr=slave, env=environ)
    os.close(slave)
    output, deadline = b"", time.monotonic() + 120
    with contextlib.suppress(OSError):  # how a pseudo-terminal says that the other side has closed
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.2)[0]:
                output += os.read(master, 65536)
    os.close(master)
    process.wait(60)
    return output.decode()


def test_a_terminal_shows_a_live_table_below_other_output() -> None:
    output = in_a_terminal("writer.close()")
    assert output.count("step 3: loss") >= 1
    assert "\x1b[1A\x1b[2K" in output  # up a line, and clear it
    assert output.index("epoch 1") < output.rindex("step 3: loss")
    assert "slowest, 1.91 times the fastest" in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor, hidden and shown again


def test_an_exception_leaves_the_terminal_as_it_was() -> None:
    output = in_a_terminal("raise RuntimeError('out of memory')")
    assert "out of memory" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_tables_are_drawn_a_few_times_a_second_at_most() -> None:
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, width=110, force_terminal=True, height=30)
    writer = kde.TerminalWriter(console, clock=clock, seconds_between_frames=0.25)
    writer.begin(run())
    for millisecond in range(0, 1000, 50):
        clock.now = millisecond / 1000
        writer.write(interval(step=millisecond), None)
    writer.close()
    drawn = [step for step in range(0, 1000, 50) if f"step {step}: loss" in output.getvalue()]
    assert drawn == [0, 250, 500, 750, 950]
