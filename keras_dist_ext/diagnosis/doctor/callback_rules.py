"""Judge the callbacks that work in the middle of an epoch, while all replicas wait."""

from __future__ import annotations

from keras_dist_ext.diagnosis.doctor.examination import Calls, Examination, Times
from keras_dist_ext.diagnosis.doctor.units import ms
from keras_dist_ext.findings import Finding

__all__ = ["slow_callbacks"]

_SHARE = 0.15
_SHARE_OF_KERAS_OWN = 0.4  # the progress bar of a run of short steps takes a third of it
_SECONDS = 3e-4  # a call
_NUM_CALLS = 5  # at least: what comes now and then may be slow
_NUM_SLOW_CALLS = 3  # at least, of one that works now and then


def slow_callbacks(examination: Examination) -> list[Finding]:
    """Callbacks that are slow at each batch, or again and again."""
    times = examination.times
    assert times is not None
    return [_callback(calls, times) for calls in times.calls if _is_slow(calls, times)]


def _is_slow(calls: Calls, times: Times) -> bool:
    if calls.is_keras_own:
        return calls.name == "ProgbarLogger" and calls.seconds >= _SHARE_OF_KERAS_OWN * times.seconds
    comes_again = calls.num_slow >= _NUM_SLOW_CALLS if calls.every != 1 else calls.num_calls >= _NUM_CALLS
    is_long = calls.seconds >= _SECONDS * max(1, calls.num_calls)
    return comes_again and is_long and calls.seconds >= _SHARE * times.seconds


def _callback(calls: Calls, times: Times) -> Finding:
    often = _often(calls)
    num_slow = calls.num_calls if calls.every == 1 else calls.num_slow
    evidence = (
        f"{calls.name}.{calls.hook} took {ms(calls.seconds / max(1, num_slow))} a call, {num_slow} times"
        + ("" if calls.every == 1 else f" in {calls.num_calls} batches")
        + f": {calls.seconds / times.seconds:.0%} of the time"
    )
    if calls.is_keras_own:
        return Finding(
            "slow-callback",
            f"Keras draws its progress bar anew {often}; all replicas wait meanwhile.",
            evidence,
            "`fit(..., verbose=2)`, which prints one line an epoch.",
            calls.seconds,
        )
    if calls.argument:
        return Finding(
            "slow-callback",
            f"The callback {calls.name}({calls.argument}) writes {often}; all replicas wait meanwhile.",
            evidence,
            f"`{calls.name}(..., {calls.better})`, which writes once an epoch.",
            calls.seconds,
        )
    least = max(100, 10 * calls.every)
    if not calls.every:
        less = "let it work less often"
    elif calls.every > 1:
        less = f"let it work at every {least}th batch instead of every {_ordinal(calls.every)}"
    else:
        less = f"begin `{calls.hook}` with `if batch % {least}: return`"
    if calls.fetched:
        return Finding(
            "fetching-callback",
            f"The callback {calls.name} fetches values from the devices {often}; all replicas wait meanwhile.",
            f"{evidence}; one call of it fetched by {', '.join(calls.fetched)}",
            f"Fetch less often: move it to `on_epoch_end`, or {less}; "
            "numbers of each replica are recorded by `kde.ReplicaMonitor`.",
            calls.seconds,
        )
    return Finding(
        "slow-callback",
        f"The callback {calls.name} is slow {often}; all replicas wait meanwhile.",
        evidence,
        f"Move the work to `on_epoch_end`, {less}, or hand it to a thread.",
        calls.seconds,
    )


def _often(calls: Calls) -> str:
    if not calls.every:
        return f"at {calls.num_slow} of {calls.num_calls} batches"
    return "at every batch" if calls.every == 1 else f"at every {_ordinal(calls.every)} batch"


def _ordinal(number: int) -> str:
    """Write a number as the one in a row.

    >>> [_ordinal(number) for number in (2, 3, 10, 11, 21)]
    ['2nd', '3rd', '10th', '11th', '21st']
    """
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"
