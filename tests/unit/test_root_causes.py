"""From what experiments show to the cause that is named: each made up, on a model that is never trained."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist_ext.diagnosis.certificate.crashes import crash_finding
from keras_dist_ext.diagnosis.certificate.drawn_numbers import seeds_of_run
from keras_dist_ext.diagnosis.certificate.draws import Draws, _equal, _Watcher
from keras_dist_ext.diagnosis.certificate.lockstep import Comparison, _named_as_in
from keras_dist_ext.diagnosis.certificate.root_causes import explain, listed, of_draws
from keras_dist_ext.diagnosis.certificate.seeded_steps import of_seeded_steps
from keras_dist_ext.findings import Finding
from keras_dist_ext.training.callbacks import ReplicaSeeds
from keras_dist_ext.training.deviations import Deviation

X = np.arange(8.0).reshape(8, 1)
KERNEL = ("gradient", "dense/kernel")


def deviation(part: str = "gradient", excess: float = 0.0, *, name: str = "dense/kernel", **more: Any) -> Deviation:
    return Deviation(
        part,
        name,
        **{"absolute": 0.1, "relative": 0.25, "spread": 0.0, "is_apart": False, "step": 1} | more,
        excess=excess,
    )


def compared(
    *deviations: Deviation, rows: int = 8, sizes: tuple[int, ...] = (4, 4), one: Any = 1.0, many: Any = 1.0
) -> Comparison:
    expected, found = {KERNEL: (np.asarray(one),)}, {KERNEL: (np.asarray(many),)}
    return Comparison(1, sizes, tf.constant(X[:rows]), [], expected, found, deviations)


class Experiments:
    """Stands for both sides in lockstep: a step is off where `is_off` says so, of whether rows are alike, and parts.

    Args:
        is_off: given whether all replicas have the same rows, whether they have equally many, and what is left out.
        one: the gradient of one device.
        many: that of the replicas.
    """

    def __init__(
        self,
        is_off: Callable[[bool, bool, frozenset[str]], bool],
        *,
        model: keras.Model = None,
        one: Any = 1.0,
        many: Any = 1.0,
        itself: Deviation | None = None,
    ) -> None:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]) if model is None else model
        model.compile("sgd", "mse")
        self.many = SimpleNamespace(model=model, num_replicas=2, is_ours=False)
        self.draws = SimpleNamespace(unknown={"tf.random.uniform"})
        self._is_off, self._one, self._many, self._itself = is_off, one, many, itself

    def distance_to_itself(self, _: Comparison) -> Deviation | None:
        return self._itself

    def compare(
        self, batch: Any, step: int, *, before: Any, bounds: Sequence[int] | None, without: Sequence[str]
    ) -> Comparison:
        batch = np.asarray(batch)
        half = len(batch) // 2
        is_even = len(batch) % 2 == 0
        is_alike = is_even and bool((batch[:half] == batch[half:]).all())
        excess = 9.0 if self._is_off(is_alike, is_even, frozenset(without)) else 0.0
        sizes = (len(batch) - half, half)
        return compared(deviation(excess=excess), rows=len(batch), sizes=sizes, one=self._one, many=self._many)


def explained(experiments: Experiments, *comparisons: Comparison) -> list[Finding]:
    return explain(experiments, comparisons or [compared(deviation(excess=9.0))])  # type: ignore[arg-type]


def test_one_device_that_does_not_repeat_itself_is_the_finding_with_its_random_ops() -> None:
    (found,) = explained(Experiments(lambda *_: True, itself=deviation(excess=5.0)))
    assert found.code == "uncontrolled-draws"
    assert "Random ops that are not held still: tf.random.uniform." in found.what
    assert "gradient of dense/kernel is 0.25 (relative) from itself" in found.evidence


class Own(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("inner", "suspects"),
    [([], r"what computes across examples\."), ([Own], r"layers of your own: (\S+/)?own\S* \(Own\)\.")],
)
def test_a_difference_that_goes_only_where_all_replicas_have_the_same_rows_is_that_rows_interact(
    inner: list[type[Own]], suspects: str
) -> None:
    model = keras.Sequential([keras.Input((1,)), *(layer() for layer in inner), keras.layers.Dense(1)])
    (found,) = explained(Experiments(lambda is_alike, *_: not is_alike, model=model))
    assert found.code == "rows-interact"
    assert re.search(suspects, found.what)
    assert "step 1, 8 examples split into [4, 4]; the gradient of dense/kernel is 0.25 (relative) off" in found.evidence


def test_a_difference_that_goes_with_the_loss_is_the_loss() -> None:
    (found,) = explained(Experiments(lambda is_alike, _, without: not is_alike and "loss" not in without))
    assert found.code == "local-loss"
    assert "'mse'" in found.what


@pytest.mark.parametrize(("part", "code"), [("weights", "local-weight-count"), ("masks", "local-mask-count")])
def test_a_difference_that_goes_with_what_losses_count_is_their_count(part: str, code: str) -> None:
    (found,) = explained(Experiments(lambda is_alike, _, without: not is_alike and part not in without))
    assert found.code == code
    assert "the mask comes from" not in found.evidence  # no layer makes one


def test_uneven_parts_are_the_cause_where_even_ones_make_no_difference() -> None:
    uneven = compared(deviation(excess=9.0), rows=7, sizes=(4, 3))
    (found,) = explained(Experiments(lambda _, is_even, __: not is_even), uneven)
    assert found.code == "uneven-batch"
    assert "split into [4, 3]" in found.evidence


def test_what_no_experiment_shows_again_is_put_down_to_what_computes_across_rows() -> None:
    (found,) = explained(Experiments(lambda *_: False))
    assert found.code == "rows-interact"


@pytest.mark.parametrize(
    ("one", "many", "says"),
    [
        ([1.0, 2.0], [2.0, 4.0], "is 2 times that of one device: the replicas' means are added up"),
        ([1.0, 2.0], [3.0, 6.0], "is 3 times that of one device. Look at the loss 'mse'."),
        ([1.0, 2.0], [1.0, 3.0], "Replicas that all have the same examples still train differently from one device"),
        ([0.0, 0.0], [1.0, 3.0], "Replicas that all have the same examples still train differently from one device"),
    ],
)
def test_the_factor_of_a_gradient_is_told_where_there_is_one(one: Any, many: Any, says: str) -> None:
    (found,) = explained(Experiments(lambda *_: True, one=one, many=many))
    assert found.code == "scaled-gradient"
    assert says in found.what
    assert found.evidence == (
        "All 2 replicas were given the same 4 examples; the gradient of dense/kernel is 0.25 (relative) off."
    )


@pytest.mark.parametrize("is_by_norm", [True, False])
def test_a_replica_without_rows_is_blamed_on_batch_statistics_only_where_these_are_the_cause(is_by_norm: bool) -> None:
    norm = keras.layers.BatchNormalization(name="norm")
    model = keras.Sequential([keras.Input((1,)), norm, keras.layers.Dense(1)])
    starved = compared(
        deviation(excess=np.nan), deviation("weights", np.nan, absolute=np.nan), rows=1, sizes=(1, 0), many=np.nan
    )
    experiments = Experiments(lambda *_: False, model=model, many=1.0 if is_by_norm else np.nan)
    found = explained(experiments, starved)[0]
    assert found.code == "empty-replica"
    blamed = r"BatchNormalization \((\S+/)?norm\)" if is_by_norm else "Something"
    assert re.search(rf"{blamed} divides by no examples: dense/kernel\.", found.what)
    assert ("with moving statistics" in found.evidence) == is_by_norm


def test_equal_gradients_that_make_other_weights_are_the_update_unless_replicas_differ() -> None:
    experiments = Experiments(lambda *_: False)
    gradient = deviation("gradient", 0.5)
    (found,) = explained(experiments, compared(gradient, deviation("weights", 9.0)))
    assert found.code == "update-differs"
    assert "look at the optimizer (SGD)" in found.what
    assert not explained(experiments, compared(gradient, deviation("weights", 9.0, is_apart=True)))


def test_a_step_that_is_not_finite_but_within_rounding_has_no_worst_difference() -> None:
    (found,) = explained(Experiments(lambda *_: False), compared(deviation(excess=0.5), many=np.inf))
    assert found.evidence == "step 1, 8 examples split into [4, 4]; no difference beyond rounding."


def test_more_than_five_names_are_counted() -> None:
    assert listed(list("abcdefga")) == "a, b, c, d, e and 2 more"


# Random numbers


def drawn(**changed: Any) -> Draws:
    return Draws("drop", 1, 64, **{"equal": 0.0, "is_equal": False} | changed)


def test_equal_draws_and_a_wrong_share_are_named(mirrored: Any) -> None:
    given = [drawn(is_equal=True, equal=1.0), drawn(rate=0.5, kept=0.75, keeps_right=False), drawn(rate=0.5, kept=0.5)]
    same, share = of_draws(given, mirrored, is_ours=True)
    assert (same.code, share.code) == ("same-draws", "keep-rate")
    assert share.evidence == "0.7500 are kept, and 0.5000 should be"


def test_draws_without_numbers_are_not_equal() -> None:
    nothing = [np.zeros(0, np.float32)]
    assert _equal(nothing, nothing) == (0.0, False)
    assert _equal([np.zeros(3, np.float32)], [np.zeros(3, np.float32)]) == (1.0, True)
    assert _equal([np.zeros(3, np.int32)], [np.zeros(3, np.int32)]) == (1.0, False)  # may be by chance


def test_steps_that_are_off_with_what_they_draw_name_the_worst() -> None:
    steps = [compared(deviation(excess=2.0), deviation("metric", 3.0, name="loss", step=2)), compared(deviation())]
    (found,) = of_seeded_steps(steps)
    assert found.code == "draws-differ"
    assert "dense/kernel, loss" in found.what
    assert found.evidence.startswith("step 2; the metric of loss is 0.25")
    assert not list(of_seeded_steps(steps[1:]))


def test_what_is_drawn_outside_of_replicas_is_not_looked_at(mirrored: Any) -> None:
    watcher = _Watcher()
    with mirrored.scope():
        assert watcher.draw("uniform", lambda: 0.5) == 0.5
    assert not list(watcher.draws())


def test_seeds_of_a_model_that_is_exact_are_those_given_or_0() -> None:
    given = ReplicaSeeds(9)
    seeds = seeds_of_run(None, is_exact=True)
    assert seeds is not None
    assert seeds.seed == 0
    assert seeds_of_run(given, is_exact=True) is given


# Metrics that Keras numbers


@pytest.mark.parametrize(("others", "names"), [(["b_1"], ["b"]), (["b_1", "c_1"], ["b_1", "c_1"])])
def test_metrics_have_the_names_of_the_other_side_where_there_are_as_many(others: list[str], names: list[str]) -> None:
    one = np.zeros(1)
    found = _named_as_in({KERNEL: (one,), ("metric", "b"): (one,)}, {("metric", name): (one,) for name in others})
    assert list(found) == [("metric", name) for name in names]


# What does not run


def test_a_crash_of_stock_keras_is_known_and_the_same_of_ours_is_ours_to_mend(mirrored: Any) -> None:
    error = tf.errors.InvalidArgumentError(None, None, "You must feed a value for placeholder tensor")
    stock, ours = (crash_finding(error, mirrored, "A step", is_ours=is_ours) for is_ours in (False, True))
    assert stock.code == "steps-per-execution"
    assert ours.code == "does-not-run"
    assert ours.fix == "Please report this model: it should not be."
    unknown = crash_finding(ValueError(), mirrored, "A step", is_ours=False)
    assert (unknown.code, unknown.evidence) == ("does-not-run", "the error has no message")
