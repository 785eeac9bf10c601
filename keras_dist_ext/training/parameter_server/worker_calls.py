"""Send calls to the workers of a ParameterServerStrategy, and take what they return, first come, first served."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import tensorflow as tf

from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.errors import ClusterError

__all__ = ["WorkerCalls", "lost_servers_named"]


class WorkerCalls:
    """Calls that workers have not finished yet, and what finished ones returned, first come, first served.

    TensorFlow's RemoteValue can only be waited for one at a time, so daemon threads do. They report values alone: a
    failed copy may mean that the worker died and TensorFlow is about to repeat the call; what really failed is raised
    by the coordinator's own `schedule` and `done`.

    Args:
        strategy: whose workers are called.
        timeout_seconds: how long `take_next` waits while no worker finishes anything.
        on_failure: called when a call has failed and all others were cancelled, before the error is raised.

    Attributes:
        num_out: calls whose results were not taken yet.
    """

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        timeout_seconds: float,
        on_failure: Callable[[], None],
    ) -> None:
        self.num_out = 0
        self._on_failure = on_failure
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._timeout_seconds = timeout_seconds
        self._generation = 0
        self._waited_for: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[_Call, TensorNest]] = queue.SimpleQueue()
        self._num_threads = 0

    @property
    def has_result(self) -> bool:
        """Whether `take_next` would not wait."""
        return bool(self._finished.qsize() > 0)

    def schedule(
        self, on_result: Callable[..., None], function: Callable[..., TensorNest], args: Sequence[object]
    ) -> None:
        """Let the next free worker run `function(*args)`, and `take_next` call `on_result` with what it returns.

        Raises:
            ClusterError: the parameter server is lost.
            tf.errors.OpError: an earlier call failed; those that were under way are cancelled.
        """
        try:
            remote = self._coordinator.schedule(function, args=args)
        except Exception as error:
            self._fail(error)
        self.num_out += 1
        if self._num_threads < self.num_out:
            self._num_threads += 1
            threading.Thread(target=self._wait_for_calls, daemon=True, name="kde-ps-results").start()
        self._waited_for.put(_Call(on_result, remote, self._generation))

    def take_next(self) -> None:
        """Wait for the next call that finishes, and take its result; return at once for a cancelled one.

        Raises:
            ClusterError: the parameter server is lost, or no call has finished for `timeout_seconds`.
            tf.errors.OpError: a call failed; those that were under way are cancelled.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            try:
                call, value = self._finished.get(timeout=0.2)
            except queue.Empty:
                try:
                    self._coordinator.done()
                except Exception as error:
                    self._fail(error)
                if time.monotonic() > deadline:
                    self._fail(
                        ClusterError(
                            f"No worker has finished a step for {self._timeout_seconds:g} s; {self.num_out} calls wait "
                            "for one. See whether the processes of the cluster still run, and start the whole job "
                            "again from its last checkpoint; or give Coordinator a longer timeout_seconds."
                        )
                    )
                continue
            if call.generation == self._generation:
                self.num_out -= 1
                call.on_result(value)
            return

    def close(self) -> None:
        """End the threads."""
        self._generation += 1
        for _ in range(self._num_threads):
            self._waited_for.put(None)
        self._num_threads = 0

    def _wait_for_calls(self) -> None:
        while (call := self._waited_for.get()) is not None:
            while call.generation == self._generation:
                try:
                    self._finished.put((call, call.remote.get()))
                    break
                except Exception:
                    time.sleep(0.1)
            del call

    def _fail(self, error: Exception) -> NoReturn:
        """Forget all calls (TensorFlow has cancelled them), and raise what went wrong."""
        self._generation += 1
        self.num_out = 0
        self._on_failure()
        with lost_servers_named():
            raise error


@dataclass(frozen=True)
class _Call:
    on_result: Callable[..., None]
    remote: tf.distribute.coordinator.RemoteValue
    generation: int  # calls of an older one were cancelled


@contextlib.contextmanager
def lost_servers_named() -> Iterator[None]:
    """Say what it means that a parameter server does not answer.

    Raises:
        ClusterError: in place of TensorFlow's error, where that names a parameter server.
    """
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        if "/job:ps" not in str(error):
            raise
        raise ClusterError(
            "A parameter server is lost, and with it the variables that it held. Start the whole job again from its "
            f"last checkpoint. TensorFlow says: {error}"
        ) from error
