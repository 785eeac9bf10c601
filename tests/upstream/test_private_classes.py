"""What the classes of `_keras/` let ours override: Keras still calls the private methods behind them."""

import pickle
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist_ext._keras.adapters import CustomEpochIterator, use_epoch_iterator
from keras_dist_ext._keras.callbacks import LateCallbackList
from keras_dist_ext._keras.models import HookedModel, build_as_fit, build_from_batch
from keras_dist_ext._keras.saving import Saveable, unpickle_model

X = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
Y = X.sum(axis=1, keepdims=True)


@keras.saving.register_keras_serializable("test_private_classes")
class Net(HookedModel):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1)
        self.extra = Extra()
        object.__setattr__(self, "built_for", [])

    built_for: list[Any]

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def _build_for_run(self, iterator: Any, batch: Any) -> None:
        self.built_for.append((iterator, batch))
        build_from_batch(self, (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])))

    def _checkpoint_children(self) -> dict[str, Any]:
        return {"numbers": self.extra.numbers}

    @classmethod
    def _load_pickled(cls, file: Any, load: Any) -> Any:
        model = load(file)
        model.loaded_from = file
        return model


class Extra(Saveable):
    def __init__(self) -> None:
        self.numbers = tf.Variable([1.0, 2.0])

    def save_own_variables(self, store: Any) -> None:
        store["numbers"] = self.numbers.numpy()

    def load_own_variables(self, store: Any) -> None:
        self.numbers.assign(store["numbers"][()])


def compiled() -> Net:
    net = Net()
    net.compile("sgd", "mse")
    return net


def test_a_model_is_built_for_an_epoch_iterator_before_the_first_step_of_each_run() -> None:
    net = compiled()
    net.fit(X, Y, verbose=0)
    net.evaluate(X, Y, verbose=0)
    assert [(hasattr(iterator, "num_batches"), batch) for iterator, batch in net.built_for] == [(True, None)] * 2
    assert net.built
    assert net.optimizer.built


def test_a_model_is_built_for_a_batch_where_that_is_all_there_is() -> None:
    net = compiled()
    net.train_on_batch(X, Y)
    build_as_fit(net, (X, Y))
    assert [iterator for iterator, _ in net.built_for] == [None, None]
    assert all(np.array_equal(batch[0], X) for _, batch in net.built_for)


def test_stock_keras_builds_a_model_that_overrides_nothing() -> None:
    class Plain(HookedModel):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    net = Plain()
    net.compile("sgd", "mse")
    net.fit(X, Y, verbose=0)
    assert net.dense.built


def test_a_checkpoint_saves_what_a_model_adds(tmp_path: Any) -> None:
    net = compiled()
    net.fit(X, Y, verbose=0)
    path = tf.train.Checkpoint(model=net).save(tmp_path / "checkpoint")
    net.extra.numbers.assign([0.0, 0.0])
    tf.train.Checkpoint(model=net).restore(path)
    assert net.extra.numbers.numpy().tolist() == [1.0, 2.0]
    assert any("numbers" in name for name, _ in tf.train.list_variables(path))


def test_files_of_weights_hold_what_a_saveable_attribute_saves(tmp_path: Any) -> None:
    net = compiled()
    net.fit(X, Y, verbose=0)
    net.extra.numbers.assign([3.0, 4.0])
    net.save_weights(tmp_path / "net.weights.h5")
    net.extra.numbers.assign([0.0, 0.0])
    net.load_weights(tmp_path / "net.weights.h5")
    assert net.extra.numbers.numpy().tolist() == [3.0, 4.0]


def test_a_pickled_model_is_loaded_through_its_class() -> None:
    net = compiled()
    net.fit(X, Y, verbose=0)
    load, (file,) = net.__reduce__()[:2]
    for loaded in (pickle.loads(pickle.dumps(net)), load(file)):
        assert hasattr(loaded, "loaded_from")
        np.testing.assert_array_equal(loaded.get_weights()[0], net.get_weights()[0])
    file.seek(0)
    assert unpickle_model(Net, file).loaded_from is file


class Twice(CustomEpochIterator):
    """Two executions of all batches; reads the data twice in an epoch."""

    def executions(self) -> Any:
        for step in (0, 1):
            yield step, step, iter(self.data_adapter.get_tf_dataset())


def test_fit_makes_the_executions_that_an_epoch_iterator_gives() -> None:
    net, made = compiled(), []
    ended: list[int] = []

    def make(**arguments: Any) -> Any:
        del arguments["distribute_strategy"]
        made.append(Twice(**arguments))
        return made[-1]

    with use_epoch_iterator(make):
        net.fit(
            X,
            Y,
            batch_size=4,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ended.append(batch))],
        )
    assert ended == [0, 1]
    assert made[0].pass_length == 1
    with pytest.warns(UserWarning, match="ran out of data"):
        made[0].warn_of_interruption()


def test_a_list_of_callbacks_may_be_deleted_before_it_is_set_up() -> None:
    class Late(LateCallbackList):
        def __init__(self) -> None:
            pass

    unfinished = Late()
    getattr(unfinished, "__del__", lambda: None)()
    assert unfinished._executor is None
    keras.callbacks.CallbackList.__init__(unfinished, [keras.callbacks.History()], model=compiled())
    unfinished.on_train_begin()
    unfinished.on_train_end()


def test_keras_tuner_asks_a_hooked_tuner_for_its_space_its_models_and_how_to_compile_them(tmp_path: Any) -> None:
    keras_tuner = pytest.importorskip("keras_tuner")
    from keras_dist_ext._keras.keras_tuner import HookedTuner

    asked: list[str] = []

    class Own(HookedTuner, keras_tuner.RandomSearch):  # type: ignore[misc]
        def _discover_space(self) -> None:
            asked.append("space")
            super()._discover_space()

        def _build_for_trial(self, hp: Any) -> Any:
            asked.append("build")
            return super()._build_for_trial(hp)

        def _compile_for_trial(self, model: Any) -> None:
            asked.append("compile")
            super()._compile_for_trial(model)

    def build(hp: Any) -> Any:
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(hp.Int("units", 1, 3))])
        net.compile("sgd", "mse")
        return net

    tuner = Own(build, "loss", max_trials=1, directory=tmp_path, project_name="search", loss="mae")
    assert asked[0] == "space"
    model = tuner._try_build(tuner.oracle.get_space())  # what a trial does
    assert model.loss == "mae"
    assert asked == ["space", "build", "compile"]
    assert tuner._build_model(tuner.oracle.get_space()).loss == "mae"
