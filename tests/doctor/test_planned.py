"""Plans from real runs: what was planted decides, the model stays as it was, and what cannot be planned is refused."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from doctor_runs import ROWS, WIDTH, L, X, Y, heavy, pipeline, sleeping, tiny

import keras_dist_ext as kde
from keras_dist_ext.cli import main
from keras_dist_ext.diagnosis.plan import sums_in_steps
from keras_dist_ext.diagnosis.plan.measure import _time_steps
from keras_dist_ext.diagnosis.plan.planned_script import plan_script
from keras_dist_ext.diagnosis.plan.sums import time_sums, time_sums_in_memory
from keras_dist_ext.step import reducers
from keras_dist_ext.step.reduce import sum_over_replicas

FAST, SLOW = "100GB/s, 1us", "1Mb/s, 10ms"
OF_ALL: Any = "fixed global batch"


def made(layers: list[Any], cls: Any = kde.Sequential) -> Any:
    model = cls(layers)
    model.compile("adam", "mse")
    return model


def slow_input() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(ROWS).map(sleeping(0.03), deterministic=True)


# Each is (layers, data, network), and what decides on two replicas.
PLANTED = {
    "input": (tiny, slow_input, FAST),
    "compute": (heavy, pipeline, FAST),
    "communication": (heavy, pipeline, SLOW),
}


@pytest.mark.parametrize("bound", rotating(PLANTED, []))
def test_what_was_planted_decides(bound: str) -> None:
    layers, data, network = PLANTED[bound]
    model = made(layers())
    before = model.get_weights()
    plan = kde.plan(model, data(), replicas=[2, 1], network=network)
    one, two = plan.curve(OF_ALL).points
    assert (one.num_replicas, two.num_replicas) == (1, 2)
    assert two.bound == bound, str(plan)
    assert one.seconds.low <= one.seconds.value <= one.seconds.high
    for was, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(was, now)
    assert model.optimizer.iterations.numpy() == 0
    assert json.loads(plan.to_json())["measured"]["batch_size"] == ROWS


@pytest.mark.rotating
def test_a_slow_map_is_what_to_change_first() -> None:
    plan = kde.plan(made(tiny()), slow_input(), replicas=[1, 2], network=FAST)
    first = plan.what_ifs[OF_ALL][0]
    assert first.code in ("sequential-map", "python-map", "input-bound", "input"), str(plan)
    assert first.factor > 1.5


@pytest.mark.rotating
def test_a_model_of_stock_keras_is_planned_by_a_copy() -> None:
    model = made(tiny(), keras.Sequential)
    plan = kde.plan(model, X, Y, batch_size=64, replicas=[1, 2, 4], network=FAST)
    assert [point.batch_per_replica for point in plan.curve(OF_ALL).points] == [64, 32, 16]
    assert sorted(plan.measured.steps) == [16, 32, 64]
    assert plan.measured.gradient_bytes == 4 * model.count_params()
    assert plan.measured.state_bytes > 3 * plan.measured.gradient_bytes  # Adam keeps two numbers a weight


@pytest.mark.rotating
def test_a_step_of_the_users_own_is_planned_and_what_python_draws_next_stays(mirrored: Any) -> None:
    class Own(kde.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    inputs = keras.Input((WIDTH,))
    model = Own(inputs, L.Dense(1)(inputs))
    model.compile("sgd")
    state = random.getstate()
    plan = kde.plan(model, pipeline(), replicas=[1, 2], network=mirrored)
    assert random.getstate() == state
    assert plan.measured.sums is not None


@pytest.mark.slow  # nothing else runs some lines
def test_replicas_that_share_memory_are_planned_with_sums_in_it(mirrored: Any) -> None:
    with mirrored.scope():
        model = made(heavy())
    plan = kde.plan(model, pipeline(), replicas=[1, 2], devices="shared", network=mirrored)
    assert plan.measured.sums is not None
    assert plan.measured.sums.in_memory
    assert plan.curve(OF_ALL).points[1].parts.communication > 0
    assert any("share the" in sentence for sentence in plan.assumptions)


def slow_sum(strategy: tf.distribute.Strategy, values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Add up as steps do, over a link that takes 20 ms."""

    def wait(value: Any) -> Any:
        time.sleep(0.02)
        return value

    first, *others = sum_over_replicas(strategy, values)
    (there,) = tf.numpy_function(wait, [first], [first.dtype])
    there.set_shape(first.shape)
    return [there, *others]


@pytest.mark.parametrize("where", rotating(["in memory", "in fit"], []))
def test_a_slow_link_is_the_bound_and_what_to_change_first(
    where: str, mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducers, "sum_over_replicas", slow_sum)
    if where == "in fit":  # as replicas are timed that do not share memory
        monkeypatch.setattr(sums_in_steps, "shares_memory", lambda strategy: False)
    model = made(tiny())
    model(X[:2])
    before = model.get_weights()
    plan = kde.plan(model, pipeline(), replicas=[1, 2], network=mirrored)
    assert plan.measured.sums is not None
    assert plan.measured.sums.in_steps
    one, two = plan.curve(OF_ALL).points
    assert one.parts.communication == 0
    assert two.parts.communication >= 0.01  # of 20 ms; a busy machine adds to it
    assert two.bound == "communication", str(plan)
    assert plan.what_ifs[OF_ALL][0].code == "communication"
    for was, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(was, now)


@pytest.mark.parametrize("kind", rotating(["mirrored2", "memory"], [], slow=["memory"]))
def test_sums_of_more_bytes_take_longer(kind: str, strategies: Any) -> None:
    num_bytes = 16 << 20
    times = time_sums_in_memory(2, num_bytes) if kind == "memory" else time_sums(strategies.get(kind), num_bytes, 6)
    least, *_, most = (np.median(times.seconds[size]) for size in sorted(times.seconds))
    assert most > least
    assert times.num_replicas == 2


SCRIPT = f"""
import keras
import numpy as np

import keras_dist_ext as kde

x = np.ones((64, {WIDTH}), "float32")
model = kde.Sequential([keras.Input(({WIDTH},)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=16, epochs=50, validation_split=0.5, callbacks=[keras.callbacks.TerminateOnNaN()])
raise SystemExit("this is never reached")
"""


@pytest.mark.slow  # nothing else runs some lines
def test_a_script_is_planned_up_to_its_first_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, report = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT)
    command = ["plan", "--replicas", "1,2", "--network", FAST, "--json", str(report), str(script)]
    assert main(command) == 0
    assert "fixed global batch" in capsys.readouterr().out
    written = json.loads(report.read_text())
    assert written["measured"]["batch_size"] == 16
    assert [point["replicas"] for point in written["curves"][OF_ALL]["points"]] == [1, 2]
    assert any("TerminateOnNaN" in sentence for sentence in written["assumptions"])


# Refusals, before anything is trained


def generator() -> Any:
    yield X[:ROWS], Y[:ROWS]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": []}, "^replicas must be a list of 1 to 64 numbers of replicas"),
        ({"replicas": [2, 0]}, "^replicas must be an integer >= 1, got 0"),
        ({"devices": "gpu"}, "^devices must be 'own' or 'shared', got 'gpu'"),
        ({"network": "10Gb"}, "^network must be a bandwidth and a latency"),
        ({"network": 10}, "^network must be a string such as"),
        ({"data": None}, "^data must be what `fit` takes"),
        ({"epochs": 3}, "^epochs has no place in a plan"),
        ({"y": Y}, "^y was given beside data that is no array"),
        ({"data": X, "sample_weight": Y[:, 0]}, "^sample_weight was given without y. Give y, too."),
    ],
)
def test_a_bad_argument_is_an_error_that_names_it(given: dict[str, Any], message: str) -> None:
    model = made(tiny())
    with pytest.raises(kde.MonitorError, match=message):
        kde.plan(model, **{"data": pipeline(), **given})
    assert not model.optimizer.built


def test_data_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(kde.MonitorError, match="^data is a generator, which can be read only once"):
        kde.plan(made(tiny()), generator())


def test_a_model_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(kde.MonitorError, match="is not compiled"):
        kde.plan(kde.Sequential([keras.Input((WIDTH,)), L.Dense(1)]), pipeline())


def test_a_strategy_of_one_replica_sums_nothing(strategies: Any) -> None:
    with pytest.raises(kde.MonitorError, match="^network is OneDeviceStrategy .*sums nothing over replicas"):
        kde.plan(made(tiny()), pipeline(), network=strategies.get("one_device"))


def test_what_pick_strategy_returns_is_refused_with_what_to_give() -> None:
    choice = kde.pick_strategy("one_device")
    with pytest.raises(kde.StrategyError, match=r"^network must be .*it has one: `StrategyChoice.strategy`"):
        kde.plan(made(tiny()), pipeline(), network=choice)


def test_a_model_under_another_strategy_is_refused_with_what_to_give() -> None:
    with tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]).scope():
        model = made(tiny(), keras.Sequential)
    with pytest.raises(kde.MonitorError, match=r"lives under CentralStorage.*by network=strategy\."):
        kde.plan(model, pipeline())


class Fails(kde.Model):
    fails = False

    def train_step(self, data: Any) -> Any:
        if self.fails:
            raise ValueError("no luck here")
        return super().train_step(data)


@pytest.mark.slow
def test_steps_that_cannot_be_timed_are_an_error_that_says_why(mirrored: Any) -> None:
    with mirrored.scope():
        inputs = keras.Input((2,))
        model = Fails(inputs, keras.layers.Dense(1)(inputs), name="net")
        model.compile("sgd", "mse")
    batch = tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1])))
    model.fit(batch, verbose=0)
    model.fails = True
    words = "^Steps of 'net' could not be timed: ValueError: .*no luck here"
    with pytest.raises(kde.MonitorError, match=words):
        sums_in_steps._added_in_memory(model, batch)
    with pytest.raises(kde.MonitorError, match=words):
        _time_steps(model, batch, [2, 4])


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = True


@pytest.mark.slow
def test_a_callback_that_ends_the_run_leaves_too_few_steps_to_measure() -> None:
    with pytest.raises(kde.MonitorError, match="made too few steps to measure them. Give num_steps, or more data."):
        kde.plan(made(tiny()), pipeline(), callbacks=[Stops()])


def test_a_plan_inside_of_a_scope_is_refused(mirrored: Any) -> None:
    model = made(tiny())
    with mirrored.scope(), pytest.raises(kde.MonitorError, match="Leave the scope"):
        kde.plan(model, pipeline())


def test_a_script_that_is_not_there_or_a_bad_network_is_refused_before_it_runs(tmp_path: Path) -> None:
    with pytest.raises(kde.MonitorError, match="There is no script"):
        plan_script(str(tmp_path / "none.py"))
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    with pytest.raises(kde.MonitorError, match="^network must"):
        plan_script(str(script), network="10")
    with pytest.raises(kde.MonitorError, match="exit code 3 before it called `fit`"):
        plan_script(str(script))
    script.write_text("pass")
    with pytest.raises(kde.MonitorError, match="there is nothing to plan for"):
        plan_script(str(script))
