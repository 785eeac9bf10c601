"""Time what happens on the host between executions: other callbacks' hooks for batches, and tracing.

Callbacks are timed by wrapping their methods while a run is under way; nothing is left of it afterwards.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.tracing import observe_traces
from keras_dist_ext.aliases import UserFunction
from keras_dist_ext.diagnosis.doctor.examination import Calls, Traces
from keras_dist_ext.training.worker_sync import own_callback

__all__ = ["CallbackClock", "TraceWatch"]

_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end")
_KEPT = 10_000  # calls, one by one
_LOOKED_INTO = 4  # the call that is looked into: the first ones may set things up


class CallbackClock:
    """Times hooks of some callbacks.

    Args:
        callbacks: those of the run.
        but: the one that asks.
        hooks: those for batches by default.
        looks_into_calls: whether to note by what one call of each fetches values.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        but: keras.callbacks.Callback,
        hooks: Sequence[str] = _BATCH_HOOKS,
        *,
        looks_into_calls: bool = True,
    ) -> None:
        self._timed: list[_Timed] = []
        for callback in callbacks:
            for hook in hooks:
                if callback is not but and _is_own(callback, hook):
                    self._timed.append(_Timed(callback, hook, looked_into=_LOOKED_INTO if looks_into_calls else None))

    def reset(self) -> None:
        """Forget what was timed so far."""
        for timed in self._timed:
            timed.seconds, timed.num_calls = 0.0, 0
            timed.last.clear()

    def stop(self) -> None:
        """Leave the callbacks as they were."""
        for timed in self._timed:
            timed.unwrap()

    def calls(self) -> tuple[Calls, ...]:
        """Return what each callback did; at once for both of its hooks."""
        of_callback: dict[int, list[_Timed]] = {}
        for timed in self._timed:
            of_callback.setdefault(id(timed.callback), []).append(timed)
        found = []
        for parts in of_callback.values():
            longest = max(parts, key=lambda timed: timed.seconds)
            if longest.num_calls:
                own = own_callback(longest.callback)
                cls = type(own)
                every, num_slow = period(longest.last, longest.num_calls)
                argument, better = _how_often(own, longest.hook)
                found.append(
                    Calls(
                        name=cls.__name__,
                        hook=longest.hook,
                        seconds=sum(timed.seconds for timed in parts),
                        num_calls=longest.num_calls,
                        fetched=tuple(dict.fromkeys(name for timed in parts for name in timed.fetched)),
                        is_keras_own=cls in (keras.callbacks.ProgbarLogger, keras.callbacks.History),
                        every=every,
                        num_slow=num_slow,
                        argument=argument,
                        better=better,
                    )
                )
        return tuple(found)


def _is_own(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Whether a callback has such a hook of its own, or the one that it calls by default."""
    for name in (hook, hook.replace("train_", "")):
        method = getattr(callback, name, None)
        if getattr(method, "__func__", method) is not getattr(keras.callbacks.Callback, name):
            return True
    return False


_LONG = 5.0  # times as long as three of four calls at least take
_SHORT = 0.2  # of the mean: calls that are shorter can make no more than this share of the time
_FEW = 0.8  # of the seconds: then it is the long calls that count


def period(seconds: Sequence[float], num_calls: int) -> tuple[int, int]:
    """Return at which call in a row something takes long, and how many of all calls do.

    Args:
        seconds: of the last calls, one by one.
        num_calls: of which these are the last.

    Returns:
        1 where it is at each, or 0 where it is at some, at no period; and the number of those calls.

    >>> period([1e-5, 1e-5, 0.2, 1e-5, 1e-5, 0.2, 1e-5, 1e-5, 0.2], 90)
    (3, 30)
    >>> period([0.1, 0.2, 0.1], 3)
    (1, 3)
    >>> period([1e-5, 1e-5, 1.0, 1e-5, 1e-5], 5)
    (0, 1)
    """
    if not seconds:
        return 1, num_calls
    limit = max(_LONG * sorted(seconds)[len(seconds) // 4], _SHORT * statistics.fmean(seconds))
    slow = [place for place, value in enumerate(seconds) if value >= limit]
    if sum(seconds[place] for place in slow) < _FEW * sum(seconds) or len(slow) == len(seconds):
        return 1, num_calls
    gaps = [after - before for before, after in itertools.pairwise(slow)]
    every = round(statistics.median(gaps)) if gaps else 0
    if every < 2 or sum(abs(gap - every) <= 0.1 * every for gap in gaps) < 0.7 * len(gaps):
        return 0, round(len(slow) * num_calls / len(seconds))
    return every, max(len(slow), num_calls // every)


def _how_often(callback: keras.callbacks.Callback, hook: str) -> tuple[str, str]:
    """Return the argument of a class of Keras that has it write in the middle of an epoch, and what to give instead.

    At the end of an epoch it is that of how many epochs it writes after.
    """
    if not type(callback).__module__.startswith("keras."):
        return "", ""
    if "epoch" in hook:
        every = getattr(callback, "histogram_freq", 0)
        return (f"histogram_freq={every}", "") if every else ("", "")
    for name in ("save_freq", "update_freq"):
        value = getattr(callback, name, None)
        if isinstance(value, int):
            return f"{name}={value}", f'{name}="epoch"'
    return "", ""


class _Timed:
    """A method of an object that is timed until it is unwrapped."""

    def __init__(self, callback: keras.callbacks.Callback, hook: str, *, looked_into: int | None) -> None:
        self.callback = callback
        self.hook = hook
        self._looked_into = looked_into  # which of its calls
        self.seconds = 0.0
        self.num_calls = 0
        self.last: collections.deque[float] = collections.deque(maxlen=_KEPT)  # seconds of the last calls
        self.fetched: tuple[str, ...] = ()
        self._num_ever = 0
        self._before = vars(callback).get(hook)
        self._method: UserFunction = getattr(callback, hook)
        setattr(callback, hook, self._call)

    def unwrap(self) -> None:
        """Give the object its method back, unless somebody has given it another one meanwhile."""
        if vars(self.callback).get(self.hook) == self._call:
            if self._before is None:
                delattr(self.callback, self.hook)
            else:
                setattr(self.callback, self.hook, self._before)

    def _call(self, *args: object, **kwargs: object) -> object:
        self._num_ever += 1
        if self._num_ever == self._looked_into:
            value, self.fetched = _looked_into(lambda: self._method(*args, **kwargs))
            return value
        begin = time.perf_counter()
        try:
            return self._method(*args, **kwargs)
        finally:
            self.last.append(time.perf_counter() - begin)
            self.seconds += self.last[-1]
            self.num_calls += 1


_FETCHES = ("numpy", "__array__", "__float__", "__int__", "__bool__", "convert_to_numpy", "get_weights", "item")


def _looked_into(call: Callable[[], object]) -> tuple[object, tuple[str, ...]]:
    """Make a call; return its value, and the functions of TensorFlow and Keras by which it fetched values."""
    if sys.getprofile() is not None:
        return call(), ()  # somebody else looks
    fetched: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name in _FETCHES and _is_upstream(code.co_filename):
            fetched.append(code.co_name)

    sys.setprofile(look)
    try:
        value = call()
    finally:
        sys.setprofile(None)
    counts = collections.Counter(fetched)
    return value, tuple(f"{name} ({count} times)" if count > 1 else name for name, count in counts.most_common(3))


def _is_upstream(path: str) -> bool:
    return any(f"/{name}/" in path.replace("\\", "/") for name in ("tensorflow", "keras", "keras_dist_ext"))


@dataclasses.dataclass
class _Trace:
    execution: int
    seconds: float
    arguments: dict[str, str]


class TraceWatch:
    """Notes each tf.function that is traced while it watches, and when.

    Attributes:
        execution: the number of the execution that is under way.
    """

    def __init__(self) -> None:
        self.execution = 0
        self._begin = 0
        self._found: dict[str, list[_Trace]] = {}
        self._stop = observe_traces(self._note)

    def stop(self) -> None:
        """Watch no longer."""
        self._stop()

    def reset(self) -> None:
        """Forget what was traced so far: the first executions trace what they need."""
        self._found = {}
        self._begin = self.execution

    def forget_execution(self) -> None:
        """Forget what was traced in the execution that is under way: it has not begun yet."""
        for function, traces in list(self._found.items()):
            self._found[function] = [trace for trace in traces if trace.execution != self.execution]
        self._found = {function: traces for function, traces in self._found.items() if traces}

    @property
    def seconds(self) -> float:
        """Seconds of tracing."""
        return sum(trace.seconds for traces in self._found.values() for trace in traces)

    def traces(self) -> tuple[Traces, ...]:
        """Return what was traced, function by function."""
        return tuple(_summary(function, traces) for function, traces in self._found.items())

    def _note(self, function: str, arguments: dict[str, str], seconds: float) -> None:
        self._found.setdefault(function, []).append(_Trace(self.execution, seconds, arguments))


def _summary(function: str, traces: Sequence[_Trace]) -> Traces:
    changes = collections.Counter(
        name
        for one, other in itertools.pairwise(traces)
        for name in other.arguments
        if one.arguments.get(name) != other.arguments[name]
    )
    argument = changes.most_common(1)[0][0] if changes else ""
    values = dict.fromkeys(_shown(trace.arguments[argument]) for trace in traces if argument in trace.arguments)
    return Traces(
        function=function,
        num_traces=len(traces),
        num_executions=len({trace.execution for trace in traces}),
        seconds=sum(trace.seconds for trace in traces),
        argument=argument,
        values=tuple(values)[:8],
    )


def _shown(value: str) -> str:
    """Write an argument without addresses.

    >>> _shown("Weakref[<weakref at 0x7f099473e7f0; to 'Batch' at 0x7f09968e0190>])")
    'Weakref[Batch]'
    """
    return re.sub(r"Weakref\[<weakref at 0x\w+; to '([^']*)' at 0x\w+>\]\)?", r"Weakref[\1]", value)
