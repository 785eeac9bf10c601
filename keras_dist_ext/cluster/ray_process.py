"""One process of a launch on a node of Ray, seen from the launcher."""

import signal

from keras_dist_ext.aliases import Picklable, RayHandle
from keras_dist_ext.cluster.host import State, ValueLost
from keras_dist_ext.cluster.ray_agent import Report
from keras_dist_ext.errors import LaunchError

__all__ = ["RayProcess"]


class RayProcess:
    """One process, on a node of Ray; see `HostedProcess`.

    Args:
        agent: runs it.
        node: its address.
        starting: the agent's answer when it has started it.
    """

    REPORT_SECONDS = 0.25  # that the agent waits for something to report
    ANSWER_SECONDS = 5.0  # for other calls
    VALUE_SECONDS = 600.0  # for what a function returned, which may be large
    NOTED_SECONDS = 3.0  # of silence of the agent, which other processes may fail of before it is lost
    LOST_SECONDS = 20.0  # of its silence

    def __init__(self, agent: RayHandle, node: str, starting: RayHandle):
        self.agent, self._node = agent, node
        self.is_lost = False
        self._is_starting, self._is_at_end = True, False
        self._awaited: RayHandle = starting  # afterwards a report
        self._silence = 0.0  # seconds since the report was asked for
        self._state, self._is_stopped = State(), False

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to report."""
        return self._is_at_end and self._state.exit_code is not None

    def awaited(self) -> RayHandle:
        """Ask for the next report, unless an answer is due."""
        if self._awaited is None:
            self._awaited, self._silence = self.agent.report.remote(self.REPORT_SECONDS), 0.0
        return self._awaited

    def take(self) -> list[bytes]:
        """Take the answer that has come, and return what is printed in it; nothing at the end of the output.

        Raises:
            LaunchError: it cannot be started.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        ref, self._awaited = self._awaited, None
        was_starting, self._is_starting = self._is_starting, False
        try:
            report: Report = ray.get(ref)
        except RayTaskError as error:
            if was_starting:
                raise LaunchError(str(error.cause)) from error
            return self._lose(f"or Ray's process there, has failed ({_text(error)})")
        except RayError as error:
            return self._lose(f"or Ray's process there, has died ({_text(error)})")
        if was_starting:
            return []
        self._state, self._is_stopped = report.state, report.is_stopped
        return [report.data] * bool(report.data) + self._end(report.is_at_end)

    def _end(self, is_at_end: bool) -> list[bytes]:
        was_at_end, self._is_at_end = self._is_at_end, is_at_end
        return [b""] * (is_at_end and not was_at_end)

    def note_silence(self, seconds: float) -> list[bytes]:
        """Note that there was no report for some more seconds; after too many, take it for dead."""
        if self._is_starting:
            return []  # which may take long, as where the call is large
        self._silence += seconds
        if self._silence > self.LOST_SECONDS:
            return self._lose(f"or Ray's process there, has not answered for {self._silence:.0f} s")
        if self._silence > self.NOTED_SECONDS:
            self._state = self._state._replace(silent_seconds=self._silence)
        return []

    def _lose(self, why: str) -> list[bytes]:
        self.is_lost = True
        if self._state.exit_code is None:
            code = -signal.SIGKILL
            self._state = State(code, code, self._state.heartbeat, f"its node {self._node}, {why}")
        return self._end(True)

    def poll(self) -> State:
        """Return its state, of the last report."""
        return self._state

    def _call(self, method: str, *args: Picklable, otherwise: Picklable = None) -> Picklable:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        if self.is_lost or self._is_starting or self._state.silent_seconds:
            return otherwise  # at once: those that answer need us
        try:
            return ray.get(self.agent.call.remote(method, *args), timeout=self.ANSWER_SECONDS)
        except GetTimeoutError:
            self._state = self._state._replace(silent_seconds=self.ANSWER_SECONDS)  # until the next report
            return otherwise
        except RayError:
            return otherwise

    @property
    def is_stopped(self) -> bool:
        """Whether it was held by a signal, at the last report."""
        return self._is_stopped

    def cpu_seconds(self) -> float:
        """Return how much of the CPU it has used."""
        return float(self._call("cpu_seconds", otherwise=0.0))

    def ask(self, signum: int) -> None:
        """Ask it to end."""
        self.send(signum, "ask")

    def send(self, signum: int, how: str = "send") -> None:
        """Send a signal to all of its session."""
        if self._is_starting and self._state.exit_code is None:  # its agent ends it, if it ever starts
            self._state, self._is_at_end = State(-signum, -signum), True
        self._call(how, signum)

    def ask_to_leave(self) -> bool:
        """Have it save and end at its next checkpoint."""
        return bool(self._call("ask_to_leave", otherwise=False))

    def ask_for_stacks(self) -> bool:
        """Have it write its stacks."""
        return bool(self._call("ask_for_stacks", otherwise=False))

    def stacks(self) -> str:
        """Return those that it has written so far."""
        return str(self._call("stacks", otherwise=""))

    def value(self) -> bytes:
        """Return what its function returned, pickled."""
        import ray
        from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

        if self.is_lost:
            raise ValueLost(f"node {self._node}, or Ray's process there, was lost after the function had returned")
        try:
            return bytes(ray.get(self.agent.call.remote("value"), timeout=self.VALUE_SECONDS))
        except RayTaskError as error:
            raise error.cause from error
        except GetTimeoutError as error:
            raise ValueLost(f"node {self._node} has not sent it within {self.VALUE_SECONDS:g} s") from error
        except (ObjectLostError, RayActorError) as error:
            raise ValueLost(f"node {self._node}, or Ray's process there, has died ({_text(error)})") from error


def _text(error: Exception) -> str:
    """Name an error of Ray's, and what it was caused by in our own code."""
    cause = getattr(error, "cause", None)
    return f"{type(error).__name__}: {cause}" if cause else type(error).__name__
