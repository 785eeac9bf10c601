"""What the shapes of batches cost: padding that is computed, and compiling anew for each new shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from test_diagnose import HEALTHY, times

from keras_dist_ext.data.padding import read_sequences, shapes_of
from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.diagnosis.doctor.shape_trials import read_padding
from keras_dist_ext.diagnosis.doctor.shapes import Padding, Recompilation
from keras_dist_ext.diagnosis.doctor.trials import Trials

# Judged


def padded(by_length: float = 0.008, **facts: Any) -> Padding:
    trials = Trials({"as they come": (0.018,) * 3, "by length": (by_length,) * 3})
    given: dict[str, Any] = {"stage": "padded_batch(64)", "boundaries": (16, 64), "trials": trials, **facts}
    return Padding(0.8, 0.1, 640, 64, 400, 80.0, **given)


def test_padding_says_its_share_and_stage_and_what_a_step_takes_without_it() -> None:
    (finding,) = judge(Examination(HEALTHY, times(), padding=padded())).findings
    assert (finding.code, finding.seconds) == ("mostly-padding", pytest.approx(80 * 0.010))
    assert finding.what.startswith("80% of what batches hold is padding")
    assert finding.evidence == (
        "padded_batch(64): in 640 examples the longest has 400 places, the mean 80; in batches of these examples by "
        "their length, 10% was padding, and a step took 10 ms (10 to 10) less: 8 ms instead of 18 ms"
    )
    assert finding.fix == (
        "`dataset.bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], bucket_boundaries=[17, 65], "
        "bucket_batch_sizes=[64] * 3)` instead of `dataset.padded_batch(64)`, which batches examples of similar length "
        "together; or `kde.bucket_by_length(dataset, batch_size=64, strategy=strategy)`, which takes some 0.2 s to "
        "begin a pass, and fills all batches."
    )
    (longer,) = judge(Examination(HEALTHY, times(num_blocks=16), padding=padded())).findings
    assert longer.fix.startswith("`kde.bucket_by_length(dataset, batch_size=64, strategy=strategy)` instead of `datas")
    (groups,) = judge(Examination(HEALTHY, times(), padding=padded(boundaries=()))).findings
    assert groups.fix.startswith("`kde.bucket_by_length(dataset, batch_size=64, strategy=strategy)` instead of")
    assert groups.fix.endswith(" similar length together.")


def test_rows_that_are_padded_before_they_are_batched_are_to_be_given_as_they_were() -> None:
    (finding,) = judge(Examination(HEALTHY, times(), padding=padded(stage=""))).findings
    assert "`kde.bucket_by_length((sequences, y), batch_size=64, strategy=strategy)`" in finding.fix
    assert finding.evidence.startswith("in 640 examples")


@pytest.mark.parametrize(("by_length", "is_found"), [(0.0139, True), (0.0141, False), (0.019, False)])
def test_padding_that_costs_less_than_a_fifth_of_the_time_is_no_finding(by_length: float, is_found: bool) -> None:
    assert bool(judge(Examination(HEALTHY, times(), padding=padded(by_length))).findings) == is_found


def test_padding_of_a_stock_script_is_a_finding_without_seconds() -> None:
    stock = dataclasses.replace(HEALTHY, is_ours=False)
    untimed = padded(trials=Trials())
    (finding,) = judge(Examination(stock, stock_steps=(80, 1.6), padding=untimed)).findings
    assert (finding.code, finding.seconds) == ("mostly-padding", None)
    assert finding.evidence.endswith("10% was padding; `kde.diagnose(model, data)` times what that saves")
    assert judge(Examination(HEALTHY, times(), padding=untimed)).findings == ()


def test_padding_is_read_where_lengths_are_open_and_most_of_it_could_be_spared() -> None:
    def read(lengths: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices(lengths).map(lambda n: (tf.fill([n], 5), n)).padded_batch(2)
        return read_padding(data)

    assert read([1, 20] * 4) is None  # 48%
    wide = tf.data.Dataset.from_tensor_slices(np.where(np.arange(16) % 4 == 3, 20, 1))
    padding = read_padding(wide.map(lambda n: (tf.fill([n], 5), n)).padded_batch(4))
    assert padding is not None
    assert (padding.num_examples, padding.stage) == (16, "padded_batch(4)")
    assert padding.share == pytest.approx(1 - 92 / 320)
    fixed = tf.data.Dataset.from_tensor_slices((sequences([1, 20] * 4), np.zeros((8, 1)))).batch(4)
    assert read_padding(fixed) is None


SHAPES = Recompilation(
    num_shapes=30,
    num_batches=32,
    examples=("(64, 7) and (64, 1)", "(64, 9) and (64, 1)"),
    only_rows=False,
    longest=400,
    boundaries=(16, 64),
    batch_size=64,
    stage="padded_batch(64)",
    step_seconds=(*[0.1] * 10, *[0.004] * 70),
    compiled_seconds=0.003,
    plain_seconds=0.004,
)


def recompiled(**changes: Any) -> Any:
    return judge(Examination(HEALTHY, times(), recompilation=dataclasses.replace(SHAPES, **changes))).findings


def test_compiling_anew_says_how_often_for_how_long_and_the_change_that_suits_the_shapes() -> None:
    (finding,) = recompiled()
    assert (finding.code, finding.seconds) == ("recompiling", pytest.approx(10 * 0.097))
    assert finding.what.endswith("(jit_compile=True): 10 times.")
    assert finding.evidence == (
        "10 of 80 steps took 100 ms, and one of a shape that has been compiled takes 3 ms, and 4 ms without XLA; 32 "
        "batches, read once more, have 30 shapes: (64, 7) and (64, 1); (64, 9) and (64, 1), ..."
    )
    assert finding.fix.startswith("`compile(jit_compile=False)`: steps are about as fast without; or keep XLA, and")
    (faster,) = recompiled(plain_seconds=0.005)
    assert faster.fix == (
        "Give XLA few lengths, `dataset.bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], "
        "bucket_boundaries=[17, 65, longest + 1], bucket_batch_sizes=[64] * 4, pad_to_bucket_boundary=True, "
        "drop_remainder=True)` instead of `padded_batch(64)`, where `longest` is that of all data, 400 or more; or do "
        "without, `compile(jit_compile=False)`, which compiles nothing and takes longer a step."
    )
    (tiny,) = recompiled(compiled_seconds=1e-5, plain_seconds=4e-5)  # 80 steps of 30 µs, against 3 times 0.1 s
    assert tiny.fix.startswith("`compile(jit_compile=False)`")
    (rows,) = recompiled(plain_seconds=0.0, only_rows=True)
    assert rows.fix.startswith("Give XLA batches of one size, `dataset.rebatch(64, drop_remainder=True)`; or")
    (other,) = recompiled(plain_seconds=0.0, stage="")
    assert "such as the next power of 2" in other.fix


@pytest.mark.parametrize(
    "steps",
    [
        (*[0.1] * 4, *[0.004] * 76),  # few
        (*[0.02] * 5, *[0.004] * 75),  # short
        (*[0.014] * 80,),  # hardly longer
    ],
)
def test_steps_that_are_compiled_seldom_or_fast_are_no_finding(steps: tuple[float, ...]) -> None:
    assert recompiled(step_seconds=steps) == ()


# Read


def sequences(lengths: Any, *, before: bool = False, value: int = 0) -> Any:
    """Rows of ones, padded to the longest."""
    rows = np.full([len(lengths), max(lengths)], value)
    for row, length in zip(rows, lengths, strict=True):
        row[len(row) - length if before else 0 : None if before else length] = 5
    return rows


def of_padded_batch(value: int = 0) -> tf.data.Dataset:
    lengths = tf.constant([2, 8, 1, 4, 3, 6])
    data = tf.data.Dataset.from_tensor_slices(lengths).map(lambda n: (tf.fill([n], 5), tf.cast(n, tf.float32)))
    return data.padded_batch(2, padding_values=(value, 0.0))


@pytest.mark.parametrize("value", [0, 7])
def test_batches_are_read_as_they_come_and_by_the_length_of_their_rows(value: int) -> None:
    found = read_sequences(of_padded_batch(value), most_batches=9, seconds=9.0)
    assert found is not None
    assert (found.is_padded_by, found.batch_size, found.is_padded_before) == ("padded_batch(2)", 2, False)
    assert (found.longest, found.mean) == (8, 4)
    assert found.padding == (pytest.approx(1 - 24 / 36), pytest.approx(1 - 24 / 28))
    assert [batch[0].shape for batch in found.as_they_come] == [(2, 8), (2, 4), (2, 6)]
    assert [batch[0].shape for batch in found.by_length] == [(2, 2), (2, 4), (2, 8)]
    assert [batch[1].tolist() for batch in found.by_length] == [[1, 2], [3, 4], [6, 8]]
    as_they_come, by_length = found.dataset(found.as_they_come), found.dataset(found.by_length)
    assert as_they_come.element_spec == by_length.element_spec
    assert [tuple(x.shape) for x, _ in by_length] == [(2, 2), (2, 4), (2, 8)]


def test_padding_may_come_first_and_rows_may_be_padded_before_they_are_batched() -> None:
    lengths = [2, 16, 3, 4]
    for before in (False, True):
        data = tf.data.Dataset.from_tensor_slices((sequences(lengths, before=before), np.zeros((4, 1)))).batch(2)
        found = read_sequences(data, most_batches=9, seconds=9.0)
        assert found is not None
        assert (found.is_padded_by, found.is_padded_before) == ("", before)
        assert found.padding == (pytest.approx(1 - 25 / 64), pytest.approx(1 - 25 / 38))
        assert [batch[0].shape for batch in found.by_length] == [(2, 3), (2, 16)]
        assert found.by_length[0][0].tolist() == ([[0, 5, 5], [5, 5, 5]] if before else [[5, 5, 0], [5, 5, 5]])


def test_inputs_of_lengths_of_their_own_are_cut_each_to_its_longest() -> None:
    def example(n: Any) -> Any:
        return (tf.fill([n], 5), tf.fill([2 * n], 6)), tf.fill([2 * n], 1)

    data = tf.data.Dataset.from_tensor_slices([3, 1, 2, 5]).map(example).padded_batch(2)
    found = read_sequences(data, most_batches=9, seconds=9.0)
    assert found is not None
    shapes = [[leaf.shape for leaf in tf.nest.flatten(batch)] for batch in found.by_length]
    assert shapes == [[(2, 2), (2, 4), (2, 4)], [(2, 5), (2, 10), (2, 10)]]
    assert found.boundaries == ()


def test_a_map_that_pads_ragged_batches_is_named() -> None:
    rows = tf.ragged.constant([[5] * 2, [5] * 8, [5], [5] * 4])
    data = tf.data.Dataset.from_tensor_slices((rows, np.zeros((4, 1)))).batch(2).map(lambda x, y: (x.to_tensor(), y))
    found = read_sequences(data, most_batches=9, seconds=9.0)
    assert found is not None
    assert (found.is_padded_by, found.boundaries) == ("map(... to_tensor())", ())
    assert [batch[0].shape for batch in found.by_length] == [(2, 2), (2, 8)]


def test_what_holds_no_sequences_is_not_read() -> None:
    def read(*arrays: Any) -> Any:
        return read_sequences(tf.data.Dataset.from_tensor_slices(arrays).batch(2), most_batches=4, seconds=9.0)

    assert read(np.zeros((4, 20), "float32"), np.zeros((4, 1))) is None  # features, not places
    assert read(np.zeros((4, 15), "int64"), np.zeros((4, 1))) is None  # too short to be told from features
    assert read(np.zeros((4, 1), "float32"), np.zeros((4, 20), "int64")) is None  # targets
    assert read(tf.ragged.constant([[1], [2, 3], [], [4]]), np.zeros((4, 1))) is None


def test_shapes_are_read_where_they_are_open() -> None:
    assert shapes_of(of_padded_batch(), most_batches=2, seconds=9.0) == [((2, 8), (2,)), ((2, 4), (2,))]
    assert len(shapes_of(of_padded_batch(), most_batches=9, seconds=0.0)) == 1
    fixed = tf.data.Dataset.from_tensor_slices(np.zeros((5, 3))).batch(2, drop_remainder=True)
    assert shapes_of(fixed, most_batches=9, seconds=9.0) == []
