"""Describe workers that make no progress: their last step, what they wait for, and their stacks."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from keras_dist_ext.cluster import worker
from keras_dist_ext.cluster.heartbeat import STACKS_SIGNAL, Activity, Heartbeat, stacks_path
from keras_dist_ext.cluster.process import Process, code_text

__all__ = ["describe", "is_stopped", "progress"]

_LOOK_SECONDS = 0.5  # in which a process that computes uses its CPU, and one that is asked writes its stacks
_MOST_SECONDS = 6.0  # until stacks are there that a busy machine holds up
_IDLE_SHARE = 0.2  # of a CPU: a process that waits for others uses less
_MOST_FRAMES = 15  # of a stack, the innermost ones


def progress(heartbeat: Heartbeat) -> str:
    """Return "after step 412", or nothing where no step was finished."""
    return f" after step {heartbeat.finished}" if heartbeat.finished else ""


def describe(processes: Sequence[Process]) -> tuple[str, str]:
    """Return a sentence on what each process does, and the stacks of those that could be asked for them.

    It takes about half a second, to see which compute and which wait, and more where a busy machine delays the
    stacks.
    """
    before = {process.pid: _cpu_seconds(process.pid) for process in processes}
    began = time.monotonic()
    asked = [process for process in processes if _ask_for_stacks(process)]
    stacks_before: list[str] = []
    while True:
        time.sleep(0.05)
        seconds = time.monotonic() - began
        stacks_now = [_stacks_of(process) for process in asked]
        is_there = all(stacks_now) and stacks_now == stacks_before  # they are written thread by thread
        stacks_before = stacks_now
        if seconds >= _MOST_SECONDS or (seconds >= _LOOK_SECONDS and is_there):
            break
    heartbeats = [process.heartbeat for process in processes]
    used = {process.pid: _cpu_seconds(process.pid) - before[process.pid] for process in processes}
    activities = [
        f"{process.name} {_activity(process, heartbeats, is_idle=used[process.pid] < _IDLE_SHARE * seconds)}"
        for process in processes
    ]
    stacks = "".join(f"\n  {process.name}:{_shown(_stacks_of(process))}" for process in processes)
    return ", ".join(activities), stacks


def _activity(process: Process, heartbeats: Sequence[Heartbeat], *, is_idle: bool) -> str:
    last = process.heartbeat
    if process.exit_code is not None:
        return f"ended with {code_text(process.exit_code)}{progress(last)}"
    if is_stopped(process):
        return f"is stopped, as by SIGSTOP,{progress(last) or ' before its first step'}"
    if last.waits:
        return f"waits in an all-reduce at step {last.finished + 1}"
    if last.activity == Activity.STEPS and last.trains:
        steps = f"step {last.first}" if last.first == last.last else f"steps {last.first} to {last.last}"
        if not is_idle:
            return f"computes in {steps}"
        others_are_elsewhere = any(other.activity != Activity.STEPS or other.last < last.first for other in heartbeats)
        return (
            f"waits in an all-reduce at {steps}"
            if others_are_elsewhere
            else f"waits in {steps}, for others or for data"
        )
    if last.activity == Activity.STEPS:
        return f"{'waits' if is_idle else 'computes'} in an evaluation or a prediction{progress(last)}"
    return {
        Activity.BETWEEN: f"has finished step {last.finished} and begun no other",
        Activity.NO_MORE_DATA: f"finished its data at step {last.finished}",
        Activity.LEFT: f"has left fit{progress(last)}",
    }.get(Activity(last.activity), "has not made a step yet")


def _cpu_seconds(pid: int) -> float:
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0


def is_stopped(process: Process) -> bool:
    """Whether a process is held by a signal such as SIGSTOP: the others see no more of it than that it is silent."""
    import psutil

    try:
        return process.exit_code is None and bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


# Stacks


def _ask_for_stacks(process: Process) -> bool:
    """Have a worker write its stacks, if it can; whoever else has its process number by now is left alone."""
    heartbeat = process.heartbeat
    if not heartbeat.has_stacks or process.exit_code is not None or is_stopped(process):
        return False
    with suppress(OSError):
        if os.getsid(heartbeat.pid) == process.pid:
            os.kill(heartbeat.pid, STACKS_SIGNAL)
            return True
    return False


def _stacks_of(process: Process) -> str:
    if process.heartbeat_file is None:
        return ""
    try:
        return stacks_path(process.heartbeat_file).read_text(errors="replace")
    except OSError:
        return ""


def _shown(dump: str) -> str:
    """Return what faulthandler has written as Python shows it: the main thread, and others that do something."""
    threads = [_frames(part) for part in dump.strip().split("\n\n")]
    if not any(threads):
        return " no stack; it is stopped, or runs no code of this package"
    *others, main = threads
    parts = [("", main), *(("another thread, ", frames) for frames in others if frames and not _is_waiting(frames))]
    return "".join("\n    " + "\n    ".join(_lines(name, frames)) for name, frames in parts)


def _frames(thread: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of a thread's calls, the innermost first, but for those that launch has added."""
    frames: list[tuple[str, str, str]] = _FRAME.findall(thread)
    return [frame for frame in frames if frame[0] not in ("<string>", worker.__file__)]


_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)


def _is_waiting(frames: Sequence[tuple[str, str, str]]) -> bool:
    """Whether a thread does nothing but wait for work, as those of pools do."""
    return Path(frames[0][0]).name in ("threading.py", "thread.py", "queue.py", "selectors.py", "connection.py")


def _lines(name: str, frames: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    yield f"{name}most recent call last:"
    if len(frames) > _MOST_FRAMES:
        yield f"  ... {len(frames) - _MOST_FRAMES} outer calls"
    for file, line, function in reversed(frames[:_MOST_FRAMES]):
        yield f'  File "{file}", line {line}, in {function}'
