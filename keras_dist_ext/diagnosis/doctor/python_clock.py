"""Time the functions of Python that the ops of a step call, while a run is under way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

import tensorflow as tf

from keras_dist_ext._keras.python_ops import observe_python_ops, python_ops_of
from keras_dist_ext.diagnosis.doctor.examination import PythonCalls

__all__ = ["PythonClock"]

_EVEN = 3.0  # times as long on one replica as on another


class PythonClock:
    """Times them; those that tf.data calls are told apart when the graphs of the steps are known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._intervals: dict[str, list[tuple[float, float]]] = {}
        self._stop = observe_python_ops(self._note)

    def reset(self) -> None:
        """Forget what was timed so far."""
        with self._lock:
            self._intervals = {}

    def stop(self) -> None:
        """Time no longer."""
        self._stop()

    def calls(self, graphs: Iterable[tf.Graph]) -> tuple[PythonCalls, ...]:
        """Return what the functions took that these graphs call; what replicas call at once counts once."""
        of_function: dict[str, list[list[tuple[float, float]]]] = {}
        for token, name in (python_ops_of(graphs) if self._intervals else {}).items():  # a token for each replica
            if token in self._intervals:
                of_function.setdefault(name, []).append(self._intervals[token])
        return tuple(_summary(name, of_replicas) for name, of_replicas in of_function.items())

    def _note(self, token: str, begin: float, end: float) -> None:
        with self._lock:
            self._intervals.setdefault(token, []).append((begin, end))


def _summary(function: str, of_replicas: Sequence[Sequence[tuple[float, float]]]) -> PythonCalls:
    calls = list(itertools.chain.from_iterable(of_replicas))
    own = [_seconds(intervals) for intervals in of_replicas]
    return PythonCalls(function, len(calls), _seconds(calls), is_even=max(own) <= _EVEN * min(own))


def _seconds(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one interval."""
    total, until = 0.0, 0.0
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
