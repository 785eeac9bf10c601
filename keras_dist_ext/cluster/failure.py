"""Say why a launch failed, for the user who started it."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from keras_dist_ext.cluster.hang_report import describe, progress
from keras_dist_ext.cluster.process import Process, code_text

__all__ = ["Failure", "NotPlaced"]


@dataclass(frozen=True)
class Failure:
    """Why a launch failed."""

    exit_code: int  # of the launch: positive, 128 + n for signal n
    reason: str
    process: Process | None = None  # the one that failed first
    is_final: bool = False  # starting again would not be what was asked for

    @classmethod
    def by_signal(cls, signum: int, *, ended_well: bool = False) -> "Failure":
        """A signal came to the launcher; did all that worked end by themselves, with exit code 0?"""
        name = signal.Signals(signum).name
        if ended_well:
            return cls(0, f"{name} ended the launch; all workers have ended well, with exit code 0.", is_final=True)
        return cls(128 + signum, f"{name} ended the launch.", is_final=True)

    @classmethod
    def by_time(cls, running: Sequence[Process]) -> "Failure":
        """The time limit passed while these worked."""
        doing = "".join(f"\n  {process.doing}" for process in running)
        return cls(
            124,  # as timeout(1) has it
            f"The time limit passed, and the launch ended what still ran:{doing}\n"
            "Give more time if they were busy. If all were silent, they wait for one another.",
            is_final=True,
        )

    @classmethod
    def by_time_without_places(cls, waits_for: str) -> "Failure":
        """The time limit passed while nothing had a place yet."""
        return cls(124, f"The time limit passed before anything could start. {waits_for}.", is_final=True)

    @classmethod
    def by_hang(cls, working: Sequence[Process], seconds: float) -> "Failure":
        """No step was finished for too long, though work was left; it takes a second to say where each is."""
        activities, stacks = describe(working)
        printed = "".join(f"\n  {process.doing}" for process in working if process.exit_code is None)
        return cls(
            124,
            f"No step was finished for {seconds:g} s, and the launch ended what still ran: {activities}.{printed}\n"
            f"Where they were:{stacks}\n"
            "Give a longer timeout if they were busy: loading data and compiling count, too.",
        )

    @classmethod
    def by_sigstop(cls, process: Process, seconds: float) -> "Failure":
        """A process was held by a signal for too long, while others worked."""
        return cls(
            124,
            f"{process.name} was stopped, as by SIGSTOP{progress(process.heartbeat)}, for {seconds:g} s, so that the "
            "others could not continue, and the launch ended all.",
        )

    @classmethod
    def of_process(cls, process: Process, others: Sequence[Process]) -> "Failure":
        """A process failed, or a server ended before the work did."""
        code = process.failure_code or 0
        reason = f"{process.name} failed with {code_text(code)}{progress(process.heartbeat)}"
        if process.lost:
            reason = f"{process.name} was lost{progress(process.heartbeat)}: {process.lost}"
        elif code == -signal.SIGKILL:
            reason += ", which the launch did not send; often it means that memory ran out (see dmesg)"
        elif process.exit_code == 0:
            reason = f"{process.name} ended before {'its function returned' if process.calls else 'the chief did'}"
        stopped = "".join(
            f" {other.name} was stopped, as by SIGSTOP{progress(other.heartbeat)}."
            for other in others
            if other.is_stopped
        )
        stopped += "".join(
            f" The node of {other.name} has not answered for {other.silent_seconds:.0f} s."
            for other in others
            if other.silent_seconds
        )
        ended = {0: "", 1: " The launch ended the other process."}
        return cls(
            max(code, 1) if code >= 0 else 128 - code,
            f"{reason}.{stopped}" + ended.get(len(others), f" The launch ended the other {len(others)} processes."),
            process,
        )

    @property
    def message(self) -> str:
        """The reason and the last lines of the process; complete once it has ended."""
        if self.process is None:
            return self.reason
        if not self.process.last_lines:
            return f"{self.reason} It printed nothing."
        log = f" (all of them are in {self.process.log})" if self.process.log else ""
        lines = "".join(f"\n  [{self.process.name}] {line}" for line in self.process.last_lines)
        return f"{self.reason} Its last lines{log}:{lines}"


class NotPlaced(Exception):
    """There is no place for the processes of a launch, and nobody waits for one any longer."""

    def __init__(self, failure: Failure):
        super().__init__(failure.reason)
        self.failure = failure
