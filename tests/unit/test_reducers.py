"""How replicas add up, where a whole run is no easier to look at."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext._keras.hooks import current_step
from keras_dist_ext.step.compression import checked_compression
from keras_dist_ext.step.draw_refusals import refuse_model
from keras_dist_ext.step.lone_replica import LoneReplica
from keras_dist_ext.step.pass_through import PassThrough
from keras_dist_ext.step.reduce import optimization_barrier
from keras_dist_ext.step.reducers import MirroredReducer, OneReplica, RowRange, TpuReducer, reducer_of
from keras_dist_ext.step.xla import can_compile


def on_replicas(strategy: Any, run: Any) -> list[Any]:
    """What a function of a replica's number returns on each."""

    @tf.function(autograph=False)
    def call() -> Any:
        return strategy.run(lambda: run(tf.distribute.get_replica_context().replica_id_in_sync_group))

    return [
        tf.nest.map_structure(np.asarray, one)
        for one in zip(*map(strategy.experimental_local_results, tf.nest.flatten(call())), strict=True)
    ]


def number(replica: Any) -> Any:
    return tf.cast(replica, tf.float32) + 1.0


def test_replicas_of_a_tpu_add_up_by_tensorflow_also_where_they_do_so_at_times(mirrored: Any) -> None:
    reducer = TpuReducer(2)

    def run(replica: Any) -> Any:
        value = number(replica)
        (total,) = reducer.sum([value])
        (now,), (later,) = (reducer.sum_if(tf.constant(is_time), [value]) for is_time in (True, False))
        return total, now, later

    assert on_replicas(mirrored, run) == [(3, 3, 1), (3, 3, 2)]
    with reducer.updating():
        assert isinstance(current_step(), PassThrough)
    assert (reducer.sums_in_layers, reducer.traces_each_replica) == (False, False)


def test_a_replica_of_a_tpu_is_known_by_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    tpu = mock.Mock(spec=tf.distribute.TPUStrategy, num_replicas_in_sync=8)
    context = SimpleNamespace(num_replicas_in_sync=8, strategy=tpu)
    monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: context)
    found = reducer_of(kde.Sequential([]))
    assert (type(found), found.num_replicas) == (TpuReducer, 8)
    assert not can_compile(tpu)  # it is compiled already


@pytest.mark.parametrize("op", [tf.distribute.ReduceOp.MEAN, "MEAN"])
def test_a_mean_over_replicas_in_a_layer_is_one(op: Any, mirrored: Any) -> None:
    with mirrored.scope():
        reducer = MirroredReducer(kde.Sequential([]), mirrored, loops=False)
    found = on_replicas(mirrored, lambda replica: reducer.all_reduce(op, [number(replica)], lambda *_: None))
    assert found == [(1.5,), (1.5,)]


def test_a_replica_by_itself_has_the_sums_and_rows_of_all() -> None:
    values, rows = [tf.constant([1.0, 2.0])], RowRange(0, 2, 2)
    one = OneReplica()
    for found in (one.sum(values), one.sum_if(tf.constant(True), values), one.gather(values, rows)):
        assert found[0] is values[0]
    stands_for_three = LoneReplica(tf.distribute.get_strategy(), 3)
    assert stands_for_three.sum(values)[0].numpy().tolist() == [3, 6]
    assert stands_for_three.sum_if(tf.constant(False), values)[0].numpy().tolist() == [1, 2]
    assert stands_for_three.sum_if(tf.constant(True), values)[0].numpy().tolist() == [3, 6]
    assert stands_for_three.gather(values, rows)[0].numpy().tolist() == [1, 2] * 3


def test_parameter_servers_are_refused_by_what_they_cannot_do() -> None:
    servers = mock.Mock(spec=tf.distribute.ParameterServerStrategy, num_replicas_in_sync=1)
    with pytest.raises(kde.StrategyError, match="'bfloat16' under a ParameterServerStrategy, whose workers send"):
        checked_compression("bfloat16", servers, None, exact=False)
    with pytest.raises(kde.SeedError, match="under a ParameterServerStrategy, whose workers make steps of their own"):
        refuse_model(SimpleNamespace(distribute_strategy=servers), [])


@pytest.mark.parametrize(
    "value",
    [tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense([[0.0, 1.0]])],
    ids=["ragged", "sparse"],
)
def test_rows_that_are_no_tensor_pass_a_barrier_as_they_are(value: Any) -> None:
    found = optimization_barrier(value)
    assert type(found) is type(value)
    np.testing.assert_array_equal(*(tf.nest.flatten(one, expand_composites=True)[0] for one in (found, value)))
