"""Describe workers that make no progress: their last step, what they wait for, and their stacks."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_dist_ext.cluster.heartbeat import Activity, Heartbeat
from keras_dist_ext.cluster.process import Process, code_text

__all__ = ["describe", "progress"]

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
    before = [process.hosted.cpu_seconds() for process in processes]
    began = time.monotonic()
    asked = [process for process in processes if process.hosted.ask_for_stacks()]
    stacks_before: list[str] = []
    while True:
        time.sleep(0.05)
        seconds = time.monotonic() - began
        stacks_now = [process.hosted.stacks() for process in asked]
        is_there = all(stacks_now) and stacks_now == stacks_before  # they are written thread by thread
        stacks_before = stacks_now
        if seconds >= _MOST_SECONDS or (seconds >= _LOOK_SECONDS and is_there):
            break
    heartbeats = [process.heartbeat for process in processes]
    used = [process.hosted.cpu_seconds() - seconds for process, seconds in zip(processes, before, strict=True)]
    activities = [
        f"{process.name} {_activity(process, heartbeats, is_idle=cpu_seconds < _IDLE_SHARE * seconds)}"
        for process, cpu_seconds in zip(processes, used, strict=True)
    ]
    stacks = "".join(f"\n  {process.name}:{_shown(process.hosted.stacks())}" for process in processes)
    return ", ".join(activities), stacks


def _activity(process: Process, heartbeats: Sequence[Heartbeat], *, is_idle: bool) -> str:
    last = process.heartbeat
    if process.exit_code is not None:
        return f"ended with {code_text(process.exit_code)}{progress(last)}"
    if process.is_stopped:
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
    return [frame for frame in frames if frame[0] != "<string>" and not frame[0].endswith(_BOOT)]


_BOOT = os.path.join("keras_dist_ext", "cluster", "worker.py")  # wherever a worker has it
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
