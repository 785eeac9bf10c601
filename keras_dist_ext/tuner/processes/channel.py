"""Carry calls between the processes of a search: JSON over gRPC, from workers and supervisor to the chief.

Nothing is unpickled, and only the chief listens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict

import grpc

from keras_dist_ext.aliases import JsonObject, JsonValue
from keras_dist_ext.errors import LaunchError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Channel", "ScreeningReply", "SearchStatus", "Unreachable", "WorkerState", "handlers"]

_SERVICE = "keras_dist_ext.Search"
_UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class SearchStatus(TypedDict):
    """The reply to "status": numbers of trials."""

    trials: int
    ended: int


class WorkerState(TypedDict):
    """The reply to "worker_state": what a worker, or a group of workers, is doing."""

    trial_id: str | None  # None: it has no trial
    trial_seconds: float  # since it has this trial
    screening_seconds: float  # since it screens strategies
    num_ended: int  # trials that it has ended
    message: str | None  # of a failure on one worker of the group
    is_finished: bool  # whether the search is


class ScreeningReply(TypedDict, total=False):
    """The reply to "request_screening": one of the two."""

    result: JsonObject  # of a `ScreeningResult`
    may_measure: bool


class Unreachable(LaunchError):
    """The chief of a search does not answer.

    Attributes:
        is_busy: something listens there, and may answer later.
    """

    def __init__(self, message: str, *, is_busy: bool):
        super().__init__(message)
        self.is_busy = is_busy


class Channel:
    """A connection to a chief.

    Args:
        address: host:port.
        retry_seconds: how long a call is retried while the chief does not answer; 0: it is tried once.
    """

    CALL_SECONDS = 30.0  # time limit of one attempt: a Bayesian proposal takes seconds
    RETRY_PAUSE_SECONDS = 0.2

    def __init__(self, address: str, retry_seconds: float = 0.0):
        self.address, self._retry_seconds = address, retry_seconds
        # Finds a restarted chief at once; gRPC would wait for up to two minutes.
        options = [(f"grpc.{name}_reconnect_backoff_ms", 200) for name in ("initial", "min", "max")]
        self._channel = grpc.insecure_channel(address, [*options, ("grpc.enable_http_proxy", 0)])

    def call(self, method: str, **request: JsonValue) -> JsonValue:
        """Call a method of the chief, and return its reply.

        Raises:
            Unreachable: it did not answer in time.
            RuntimeError: the method failed, with its message.
            NotImplementedError: keras-tuner's own chief answers there.
        """
        send, data = (
            self._channel.unary_unary(f"/{_SERVICE}/{method}"),
            json.dumps(request, default=_to_python).encode(),
        )
        begin = time.monotonic()
        while True:
            left = self._retry_seconds - (time.monotonic() - begin)
            seconds = self.CALL_SECONDS if self._retry_seconds == 0 else min(self.CALL_SECONDS, max(left, 1.0))
            try:
                reply = json.loads(send(data, timeout=seconds, wait_for_ready=self._retry_seconds > 0))
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise NotImplementedError(method) from error
                waited = time.monotonic() - begin
                if error.code() not in _UNAVAILABLE or waited >= self._retry_seconds:
                    raise Unreachable(
                        f"The chief of the search at {self.address} has not answered for {waited:.0f} s "
                        f"({error.code().name}): it has ended or was killed, so this process gets no more trials. "
                        "Restart the search: it continues from the saved project.",
                        is_busy=error.code() == grpc.StatusCode.DEADLINE_EXCEEDED,
                    ) from error
                time.sleep(self.RETRY_PAUSE_SECONDS)
            else:
                if "error" in reply:
                    raise RuntimeError(reply["error"])
                return reply["value"]

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def handlers(methods: Mapping[str, Callable[..., JsonValue]], after_each: Callable[[], None]) -> grpc.GenericRpcHandler:
    """Return a gRPC handler for methods by name: requests are keyword arguments, replies a value or an error."""

    def served(method: Callable[..., JsonValue]) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: object) -> bytes:
            del context
            try:
                reply = {"value": method(**json.loads(request))}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            after_each()
            return json.dumps(reply, default=_to_python).encode()

        return grpc.unary_unary_rpc_method_handler(answer)

    return grpc.method_handlers_generic_handler(_SERVICE, {name: served(method) for name, method in methods.items()})


def _to_python(value: np.generic) -> JsonValue:
    """Return a NumPy number as a Python number."""
    return value.item()
