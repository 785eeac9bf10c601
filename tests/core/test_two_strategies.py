"""Several strategies over other devices live in one process, as in a search that compares them."""

import subprocess
import sys

import pytest
import tensorflow as tf
from strategies import strategies

SUMS = """
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
for num_replicas in (2, 3):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
    step = lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant([1.0, 2.0]))
    tf.function(lambda: strategy.run(step))()
"""


def summed_by_collectives(strategy: tf.distribute.Strategy) -> list[float]:
    @tf.function
    def total() -> tf.Tensor:
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant([1.0, 2.0])))

    return list(strategy.experimental_local_results(total())[0].numpy())


@pytest.mark.parametrize("order", [(2, 4, 3), (4, 2, 3)])
def test_collectives_of_strategies_over_other_devices_do_not_meet(order: tuple[int, ...]) -> None:
    for num_replicas in order:
        assert summed_by_collectives(strategies.get(f"mirrored{num_replicas}")) == [num_replicas, 2 * num_replicas]


@pytest.mark.slow
def test_stock_strategies_over_other_devices_meet_in_one_group() -> None:
    """Which is why ours set where keys begin: when this no longer fails, `make_mirrored` can go."""
    ended = subprocess.run([sys.executable, "-c", SUMS], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "is joining a group with size3, but that group has size 2" in ended.stderr
