"""Ask a tf.distribute strategy what it does not tell: its kind, its replicas, and whose it is."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from keras_dist_ext import versions
from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import SpecNest, TensorNest

__all__ = [
    "make_mirrored",
    "seen_as_one_replica",
    "note_creations",
    "sum_over_replicas",
    "regroup",
    "replica_id",
    "local_replica_id",
    "first_replica",
    "is_default_strategy",
    "has_several_workers",
    "spec_of_replica",
    "uses_collectives",
    "num_tasks",
    "strategy_of_variable",
    "strategy_of_model",
    "strategy_of_optimizer",
    "num_local_replicas",
]


def make_mirrored(devices: Sequence[str]) -> tf.distribute.MirroredStrategy:
    """Make a MirroredStrategy whose collectives have keys that no other strategy of ours has.

    Each MirroredStrategy numbers its groups of devices from 1 (distribute/mirrored_strategy.py, of TensorFlow 2.16 to
    2.21), so those of two and of four GPUs in one process meet in one group, and fail: "is joining a group with size 4,
    but that group has size 2" (tensorflow#62790). TensorFlow's own tests set where the numbers begin, as is done here.
    """
    mirrored = tf.distribute.MirroredStrategy
    with _MAKING:
        before = mirrored._collective_key_base
        mirrored._collective_key_base = _KEYS_A_STRATEGY * next(_COUNT)
        try:
            return mirrored(list(devices))
        finally:
            mirrored._collective_key_base = before


_MAKING = threading.Lock()
_COUNT = itertools.count(1)
_KEYS_A_STRATEGY = 1000


@contextlib.contextmanager
def seen_as_one_replica() -> Iterator[None]:
    """Have strategies tell this thread that they have one replica (distribute/distribute_lib.py, `StrategyBase`)."""
    if "num_replicas_in_sync" not in vars(tf.distribute.Strategy):
        of_base = tf.distribute.Strategy.num_replicas_in_sync.fget
        tf.distribute.Strategy.num_replicas_in_sync = property(
            lambda strategy: 1 if getattr(_thread, "sees_one", False) else of_base(strategy), doc=of_base.__doc__
        )
    _thread.sees_one = True
    try:
        yield
    finally:
        _thread.sees_one = False


_thread = threading.local()


def note_creations(
    strategy: tf.distribute.MultiWorkerMirroredStrategy, waiting: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    """Enter a context wherever a variable of several workers is given its first value, which the chief broadcasts.

    distribute/collective_all_reduce_strategy.py, `_get_variable_creator_initial_value`, does so for the first replica
    of each worker, by a collective in which a worker waits that makes a variable alone.
    """
    original = strategy.extended._get_variable_creator_initial_value

    def creator(replica_id: int, device: str, primary_var: tf.Variable, **given: object) -> TensorNest:
        value_of = original(replica_id=replica_id, device=device, primary_var=primary_var, **given)
        if replica_id:
            return value_of

        def initial_value() -> tf.Tensor:
            with waiting():
                return value_of()

        return initial_value

    strategy.extended._get_variable_creator_initial_value = creator


def sum_over_replicas(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sum each value over all replicas, from within the current one."""
    context = tf.distribute.get_replica_context()
    return list(context.all_reduce(tf.distribute.ReduceOp.SUM, values))


@versions.naming("A value for each replica")
def regroup(values: Sequence[tf.Tensor]) -> tf.distribute.DistributedValues:
    """One value a local replica, as what ``strategy.run`` and ``merge_call`` take (distribute_utils.py)."""
    from tensorflow.python.distribute import distribute_utils

    return distribute_utils.regroup(tuple(values), always_wrap=True)


def replica_id() -> int | tf.Tensor:
    """The current replica's number over all workers: an int but on TPUs (distribute_lib.py hides it in a constant)."""
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    static = tf.get_static_value(number) if tf.is_tensor(number) else number
    return number if static is None else int(static)


def local_replica_id() -> int:
    """The current replica's number in this process; outside of replicas that of the first, 0."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(replica_id()) - first_replica(context.strategy)


def first_replica(strategy: tf.distribute.Strategy) -> int:
    """The number of this worker's first replica (distribute/collective_all_reduce_strategy.py)."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 0
    return int(strategy.extended._id_in_cluster) * len(strategy.extended.worker_devices)


def is_default_strategy(strategy: tf.distribute.Strategy) -> bool:
    """Whether it is what `tf.distribute.get_strategy()` gives outside of all scopes (distribute/distribute_lib.py)."""
    return type(strategy) is _type_of_none()


@functools.cache
def _type_of_none() -> type:
    with tf.Graph().as_default():  # which is in no scope
        return type(tf.distribute.get_strategy())


def has_several_workers(strategy: tf.distribute.Strategy) -> bool:
    """Whether workers of a cluster take steps together (tensorflow/python/distribute/distribute_lib.py)."""
    return bool(strategy.extended._in_multi_worker_mode())


def spec_of_replica(spec: SpecNest) -> SpecNest:
    """The spec of the first replica's value where TensorFlow has distributed it (distribute/values.py), or the spec."""
    return spec._value_specs[0] if hasattr(spec, "_value_specs") else spec


def uses_collectives(strategy: tf.distribute.Strategy) -> bool:
    """Whether a MirroredStrategy reduces by collectives, as it does by default (distribute/mirrored_strategy.py)."""
    return type(strategy.extended._cross_device_ops).__name__ == "CollectiveAllReduce"


def num_tasks(strategy: tf.distribute.Strategy) -> dict[str, int]:
    """How many tasks of each job the strategy's cluster has.

    `cluster_resolver` is public, and None under parameter servers (distribute/parameter_server_strategy_v2.py).
    """
    cluster = (strategy.cluster_resolver or strategy._cluster_resolver).cluster_spec()
    return {job: cluster.num_tasks(job) for job in cluster.jobs}


def strategy_of_variable(variable: keras.Variable) -> tf.distribute.Strategy | None:
    """The strategy in whose scope a variable of Keras, a `tf.Variable` or a `ShardedVariable` was made.

    Every kind of variable keeps it (tensorflow/python/ops/resource_variable_ops.py, distribute/values.py,
    sharded_variable.py, ps_values.py).
    """
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return getattr(value, "_distribute_strategy", None)


def strategy_of_model(model: keras.Model) -> tf.distribute.Strategy | None:
    """The strategy in whose scope a model was made (keras/src/backend/tensorflow/trainer.py, `__init__`)."""
    return getattr(model, "_distribute_strategy", None)


def strategy_of_optimizer(optimizer: keras.optimizers.Optimizer) -> tf.distribute.Strategy | None:
    """The strategy in whose scope an optimizer was made (keras/src/backend/tensorflow/optimizer.py, `__init__`)."""
    return getattr(optimizer, "_distribution_strategy", None)


def num_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """How many replicas this worker has; the default strategy does not tell (distribute/distribute_lib.py)."""
    return 1 if is_default_strategy(strategy) else len(strategy.extended.worker_devices)
