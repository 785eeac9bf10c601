"""What workers do on Ray: of Ray Train, as the README shows it, with what they learn in files; and of our launches."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

MARKS = [
    pytest.mark.ray,
    pytest.mark.multiworker,
    pytest.mark.timeout(280),
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore"),  # what Ray deprecates of its own
]
NUM_AT_LENGTH = 32  # turns: of these tests, a commit has one at most


def at_length(number: int) -> pytest.MarkDecorator:
    """Mark a test on Ray that takes a minute or so, by a number below `NUM_AT_LENGTH` of its own."""
    return pytest.mark.rotating("at length on Ray", number, NUM_AT_LENGTH)


RUNTIME_ENV = {"env_vars": {"PYTHONPATH": str(pathlib.Path(__file__).parent)}}  # workers import this file by its name
NUM_EXAMPLES = 29


def train_on_two_workers(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Start a cluster of Ray's on this machine, train there, and return what each worker has found."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env=RUNTIME_ENV)
    try:
        trainer = TensorflowTrainer(
            train,
            train_loop_config={"folder": str(folder)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(folder / "ray")),
        )
        trainer.fit()
    finally:
        ray.shutdown()
    return [json.loads((folder / f"worker-{worker}.json").read_text()) for worker in range(2)]


def train(config: dict[str, Any]) -> None:
    """Train on one worker of Ray's."""
    import os

    os.environ.pop("TF_USE_LEGACY_KERAS", None)  # Ray asks for Keras 2, because stock Keras 3 cannot `fit` there
    import keras

    import keras_dist_ext as kde

    choice = kde.pick_strategy()
    values = fit(choice.strategy)
    worker = choice.strategy.cluster_resolver.task_id
    values |= {"reason": choice.reason, "keras": keras.__version__}
    (pathlib.Path(config["folder"]) / f"worker-{worker}.json").write_text(json.dumps(values))


def train_as_worker() -> dict[str, Any]:
    """Train on one worker of `launch`."""
    import keras_dist_ext as kde

    return fit(kde.pick_strategy().strategy)


def fit(strategy: Any) -> dict[str, Any]:
    """Train a small model under a strategy; return its weights, and how often each example was used in each epoch."""
    import numpy as np
    from worker_runs import counting_model, ids

    model = counting_model(strategy)
    history = model.fit(ids(), ids(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    return {"weights": weights.tolist(), "seen": [np.asarray(seen).tolist() for seen in history.history["seen"]]}


def weights_of_one_device() -> list[float]:
    """Return the weights of the same run on one device."""
    import tensorflow as tf

    weights: list[float] = fit(tf.distribute.get_strategy())["weights"]
    return weights
