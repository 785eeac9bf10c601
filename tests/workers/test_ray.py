"""Ray Train's TensorflowTrainer runs a training function on two workers, with Keras 3, for real.

pip install '.[test,ray]' && python -m pytest -m ray tests/workers/test_ray.py
"""

import pytest
import ray_runs

pytestmark = ray_runs.MARKS


@pytest.mark.usefixtures("ray_token")
def test_two_workers_of_ray_train_a_keras_3_model_together(tmp_path):
    values = ray_runs.train_on_two_workers(tmp_path)
    assert [value["reason"] for value in values] == [f"TF_CONFIG lists 2 workers, this is worker {i}" for i in (0, 1)]
    assert all(value["keras"].startswith("3.") for value in values)
    assert values[0]["weights"] == values[1]["weights"] == pytest.approx(ray_runs.weights_of_one_device(), rel=1e-5)
    assert all(value["seen"] == [[1.0] * ray_runs.NUM_EXAMPLES] * 2 for value in values)
