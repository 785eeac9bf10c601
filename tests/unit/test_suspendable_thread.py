"""A virtual replica waits in a thread of its own, which ends with the step."""

from typing import Any

import pytest

from keras_dist_ext.step.suspendable_thread import SuspendableThread, SyncPoint


def test_it_stops_where_it_asks_and_goes_on_with_the_answer() -> None:
    def run() -> SyncPoint:
        return SyncPoint("end", [], thread.suspend(SyncPoint("sum", [1])) + 1)

    thread = SuspendableThread(run)
    assert thread.resume(None).values == [1]
    assert thread.resume(41).subject == 42
    thread.end()


def test_code_that_catches_everything_is_abandoned_at_the_next_point_nevertheless() -> None:
    reached: list[Any] = []

    def run() -> SyncPoint:
        for place in range(3):
            try:
                thread.suspend(SyncPoint("sum", []))
            except BaseException as error:  # as a `finally` of the user's that returns
                reached.append((place, type(error).__name__))
        return SyncPoint("end", [])

    thread = SuspendableThread(run)
    thread.resume(None)
    thread.end()
    assert reached == [(place, "_Abandoned") for place in range(3)]


def test_an_error_is_that_of_who_resumes() -> None:
    def fail() -> SyncPoint:
        raise ZeroDivisionError("here")

    thread = SuspendableThread(fail)
    with pytest.raises(ZeroDivisionError, match="here"):
        thread.resume(None)
    thread.end()
