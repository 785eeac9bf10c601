"""Calls to the workers of parameter servers end with a result or an error that says what to do, whatever is lost."""

from __future__ import annotations

import queue
import types
from typing import Any

import pytest
import tensorflow as tf

from keras_dist_ext.errors import ClusterError
from keras_dist_ext.training.parameter_server import worker_steps
from keras_dist_ext.training.parameter_server.coordinator import Coordinator
from keras_dist_ext.training.parameter_server.worker_calls import WorkerCalls, lost_servers_named


class Workers:
    """Stands for TensorFlow's coordinator, whose workers finish a call when they are told to."""

    def __init__(self, strategy: Any) -> None:
        self.values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.error: Exception | None = None

    def schedule(self, function: Any, args: Any) -> Any:
        return types.SimpleNamespace(get=self.values.get)

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return False


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls, whose failures are counted, to workers that answer within a third of a second or never."""
    monkeypatch.setattr(tf.distribute.coordinator, "ClusterCoordinator", Workers)
    failures: list[int] = []
    made = WorkerCalls(None, 0.3, lambda: failures.append(1))  # type: ignore[arg-type]
    yield types.SimpleNamespace(made=made, workers=made._coordinator, failures=failures)
    for _ in range(2):
        made._coordinator.values.put("late")
    made.close()


def test_workers_that_finish_nothing_are_an_error_that_says_for_how_long(calls: Any) -> None:
    calls.made.schedule(print, print, ())
    with pytest.raises(
        ClusterError, match=r"No worker has finished a step for 0\.3 s; 1 calls wait for one\. See whet"
    ):
        calls.made.take_next()
    assert calls.failures == [1]
    assert calls.made.num_out == 0


def test_what_a_call_from_before_an_error_returns_later_is_not_taken(calls: Any) -> None:
    taken: list[Any] = []
    calls.made.schedule(taken.append, print, ())
    calls.workers.error = tf.errors.InvalidArgumentError(None, None, "wrong")
    with pytest.raises(tf.errors.InvalidArgumentError, match="wrong"):
        calls.made.take_next()
    calls.workers.error = None
    calls.workers.values.put("of before")
    calls.made.take_next()  # of the first call, which was forgotten
    calls.made.schedule(taken.append, print, ())
    calls.workers.values.put("of now")
    calls.made.take_next()
    assert taken == ["of now"]
    assert calls.made.num_out == 0


def test_only_what_names_a_parameter_server_means_that_one_is_lost() -> None:
    is_lost = "A parameter server is lost, and with it the variables that it held"
    with pytest.raises(ClusterError, match=is_lost), lost_servers_named():
        raise tf.errors.UnavailableError(None, None, "GRPC error from remote task /job:ps/replica:0/task:0")
    of_worker = tf.errors.UnavailableError(None, None, "GRPC error from remote task /job:worker/replica:0/task:1")
    with pytest.raises(tf.errors.UnavailableError) as raised, lost_servers_named():
        raise of_worker
    assert raised.value is of_worker


def test_before_the_first_step_there_are_no_logs() -> None:
    coordinator = object.__new__(Coordinator)
    coordinator._pool = None
    assert coordinator.logs() == {}


def test_batches_of_one_form_travel_together_and_ragged_ones_each_by_itself() -> None:
    def dense(rows: int) -> Any:
        return tf.zeros([rows, 2]), None

    ragged = tf.ragged.constant([[1], []]), None
    batches = [dense(2), dense(2), dense(2), dense(1), ragged, ragged]
    assert [len(bundle) for bundle in worker_steps._bundles(batches, 2)] == [2, 1, 1, 1, 1]
