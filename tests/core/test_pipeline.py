"""A pipeline is looked into: what is slow or mixes badly is found, and nothing on a healthy one."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext.data import pipeline, stage_times
from keras_dist_ext.data.dataset_graph import read_graph
from keras_dist_ext.data.map_findings import calls_that_wait
from keras_dist_ext.errors import DataError

AUTO = tf.data.AUTOTUNE
BASE = tf.data.Dataset.range(1600)
measures_stages = pytest.mark.skipif(
    not hasattr(tf.data.experimental, "get_model_proto"), reason="TensorFlow tells what stages cost since 2.18"
)


def without_optimizations(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def without_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def slow(i: tf.Tensor) -> tf.Tensor:
    """Stands for half a millisecond of work in TensorFlow."""
    matrix = tf.random.stateless_uniform([2, 2], tf.stack([tf.cast(i, tf.int32), 1]))
    return tf.reduce_sum(matrix @ matrix)


def quick(i: tf.Tensor) -> tf.Tensor:
    return i + 1


def in_python(i: tf.Tensor) -> tf.Tensor:
    def sleep(value: Any) -> Any:
        time.sleep(0.001)
        return value

    return tf.ensure_shape(tf.numpy_function(sleep, [i], i.dtype), i.shape)


def augmented(i: tf.Tensor) -> tf.Tensor:
    return tf.cast(i, tf.float32) + tf.random.uniform([])


RECORD = tf.train.Example(
    features=tf.train.Features(feature={"x": tf.train.Feature(float_list=tf.train.FloatList(value=[1.0]))})
).SerializeToString()


def parse(record: tf.Tensor) -> Any:
    return tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature([], tf.float32)})


def fields(line: tf.Tensor) -> tf.Tensor:
    return tf.stack(tf.io.decode_csv(line, [0.0] * 3), axis=-1)


def numbers(pause: float) -> tf.data.Dataset:
    def generate() -> Any:
        for i in range(1600):
            time.sleep(pause)
            yield i

    return tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([], tf.int64))


def batches_of_python() -> tf.data.Dataset:
    def generate() -> Any:
        for _ in range(100):
            yield np.ones(8, "f")

    return tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([None], tf.float32))


class Batches(keras.utils.PyDataset):
    def __init__(self, pause: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.pause = pause

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self.pause)
        return np.ones((8, 2), "f"), np.ones(8, "f")


def record_files(folder: Path) -> list[str]:
    paths = [str(folder / f"{i}.tfrecord") for i in range(4)]
    for path in paths:
        with tf.io.TFRecordWriter(path) as writer:
            for i in range(400):
                writer.write(str(i).encode())
    return paths


def slow_records(path: tf.Tensor) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(path).map(in_python)


# What is found, in stages as tf.data runs them. What they cost is made up: a busy machine would be found fault with.


def planted(slow: str | None, cpu_share: float) -> Any:
    """What is measured, had nothing taken time but the stages whose kind has this in its name."""

    def measure(*arguments: Any) -> stage_times.Times | None:
        times = stage_times.measure(*arguments)
        return times and dataclasses.replace(
            times,
            batch_seconds=1e-6 if slow is None else 4e-3,
            cpu_share=cpu_share,
            stages=tuple(
                dataclasses.replace(stage, seconds=4e-3 if slow is not None and slow in stage.kind else 1e-6)
                for stage in times.stages
            ),
        )

    return mock.patch.object(pipeline, "measure", measure)


def codes(
    dataset: Any, strategy: Any = None, *, slow: str | None = None, cpu_share: float = 0.1, **arguments: Any
) -> list[str]:
    with planted(slow, cpu_share):
        return codes_as_measured(dataset, strategy, **{"num_batches": 4, **arguments})


def codes_as_measured(dataset: Any, strategy: Any = None, **arguments: Any) -> list[str]:
    found = kde.inspect(dataset, strategy, **{"seconds": 0.3, "num_batches": 20, **arguments})
    assert found.ok == (not found.findings)
    return sorted(finding.code for finding in found.findings)


SLOW = {
    "work in parallel": "Map",
    "cache, shuffle, augment": "Map",
    "a map that tf.data makes parallel": "Map",
    "sequential map": "Map",
    "a map with a limit of one": "Map",
    "a map that is fused with its batch": "Map",
    "Python in a map": "Map",
    "Python in a filter": "Filter",
    "a slow filter": "Filter",
    "a slow generator": "Generator",
    "a slow PyDataset": "Generator",
    "slow map after cache": "Map",
    "shard after map": "Map",
    "a map of single examples": "Map",
    "records that are parsed one by one": "Map",
    "lines that are taken apart one by one": "Map",
    "elements that are skipped after they were made": "Map",
    "elements that are skipped before they are made": "Map",
    "elements that a cache keeps, of which some are skipped": "Map",
    "a part of a cache": "Map",
    "the whole of a cache": "Map",
    "a part of a cache, kept again": "Map",
    "shard before map": "Map",
    "single examples that are augmented": "Map",
}
HEALTHY = {
    "numbers": lambda: BASE.shuffle(1000).map(quick, num_parallel_calls=AUTO).batch(8).prefetch(AUTO),
    "work in parallel": lambda: BASE.map(slow, num_parallel_calls=AUTO).batch(8).prefetch(AUTO),
    "cache, shuffle, augment": lambda: (
        BASE.map(slow, num_parallel_calls=AUTO).cache().shuffle(1600).map(augmented, num_parallel_calls=AUTO)
        .batch(8).prefetch(AUTO)
    ),
    "parallel batches": lambda: BASE.shuffle(1600, seed=1).batch(8, num_parallel_calls=AUTO).prefetch(2),
    "batches mapped": lambda: BASE.batch(8).map(quick, num_parallel_calls=AUTO).prefetch(AUTO),
    "repeated": lambda: BASE.shuffle(1000).repeat().batch(8, drop_remainder=True).prefetch(AUTO),
    "a prefetch that tf.data adds": lambda: BASE.shuffle(1000).batch(8),
    "a map that tf.data makes parallel": lambda: BASE.map(slow).batch(8).prefetch(AUTO),
    "a quick sequential map": lambda: without_optimizations(BASE.map(quick).batch(8).prefetch(AUTO)),
    "a quick generator": lambda: batches_of_python().prefetch(AUTO),
    "ragged": lambda: (
        tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]] * 20)).ragged_batch(4).prefetch(AUTO)
    ),
    "arrays": lambda: (np.ones((80, 3), "f"), np.ones(80, "f")),
    "batches in memory": lambda: tf.data.Dataset.from_tensor_slices(np.ones((10, 8, 3), "f")).prefetch(AUTO),
    "files in random order": lambda: (
        tf.data.Dataset.range(4).shuffle(4).interleave(lambda i: BASE.skip(400 * i).take(400), num_parallel_calls=AUTO)
        .shuffle(1000).batch(8).prefetch(AUTO)
    ),
    "samples of several": lambda: (
        tf.data.Dataset.sample_from_datasets([BASE, BASE.shuffle(1000)], [0.5, 0.5]).batch(8).prefetch(AUTO)
    ),
    "shard before map": lambda: BASE.shard(4, 0).map(slow).batch(8).prefetch(AUTO),
    "elements that are skipped before they are made": lambda: BASE.skip(400).map(slow).batch(8).prefetch(AUTO),
    "elements that a cache keeps, of which some are skipped": lambda: (
        BASE.map(slow).cache().skip(400).batch(8).prefetch(AUTO)
    ),
    "shard of batches that nothing has worked on": lambda: BASE.batch(8).shard(4, 0).prefetch(AUTO),
    "the whole of a cache": lambda: BASE.map(slow).cache().take(1600).batch(8).prefetch(AUTO),
    "a part of a cache, kept again": lambda: BASE.take(80).map(slow).cache().batch(8).take(10).prefetch(AUTO),
    "a cache that is repeated before a part is taken": lambda: BASE.cache().repeat().batch(8).take(30).prefetch(AUTO),
    "single examples that are augmented": lambda: (
        BASE.map(lambda i: tf.image.resize(tf.ones([4, 4, 1]), [2, 2]), num_parallel_calls=AUTO).batch(8).prefetch(AUTO)
    ),
    "shuffled passes": lambda: BASE.shuffle(1000).repeat(3).batch(8).prefetch(AUTO),
    "a quick filter": lambda: BASE.filter(lambda i: i % 2 == 0).batch(8).prefetch(AUTO),
    "distributed": lambda: kde.distribute(BASE.shuffle(1000), batch_size=8, seed=1),
    "distributed arrays": lambda: kde.distribute(np.ones((80, 3), "f"), batch_size=8),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_pipeline_has_no_findings(name: str, mirrored: Any) -> None:
    assert codes(HEALTHY[name](), mirrored, slow=SLOW.get(name), batch_size=8) == []


FAULTY: dict[str, tuple[Any, list[str]]] = {
    "no prefetch": (lambda: without_optimizations(BASE.shuffle(1000).batch(8)), ["no-prefetch"]),
    "no prefetch, no autotune": (lambda: without_autotune(BASE.shuffle(1000).batch(8)), ["no-prefetch"]),
    "sequential map": (
        lambda: without_optimizations(BASE.map(slow).batch(8).prefetch(AUTO)),
        ["sequential-map"],
    ),
    "a map with a limit of one": (
        lambda: BASE.map(in_python).shuffle(10).batch(8).prefetch(AUTO),
        ["python-map", "sequential-map"],
    ),
    "a map that is fused with its batch": (
        lambda: BASE.map(in_python).batch(8).prefetch(AUTO),
        ["python-map", "sequential-map"],
    ),
    "Python in a map": (
        lambda: BASE.map(in_python, num_parallel_calls=AUTO).batch(8).prefetch(AUTO),
        ["python-map"],
    ),
    "Python in a filter": (
        lambda: BASE.filter(lambda i: in_python(i) >= 0).batch(8).prefetch(AUTO),
        ["python-map"],
    ),
    "a slow filter": (lambda: BASE.filter(lambda i: slow(i) > 0).batch(8).prefetch(AUTO), ["sequential-filter"]),
    "a slow generator": (lambda: numbers(0.0005).batch(8).prefetch(AUTO), ["generator-bound"]),
    "a slow PyDataset": (lambda: Batches(0.003), ["generator-bound"]),
    "shuffle before cache": (
        lambda: BASE.shuffle(1000).cache().batch(8).prefetch(AUTO),
        ["shuffle-before-cache"],
    ),
    "augmentation before cache": (
        lambda: BASE.map(augmented, num_parallel_calls=AUTO).cache().batch(8).prefetch(AUTO),
        ["random-before-cache"],
    ),
    "repeat before cache": (lambda: BASE.repeat(2).cache().batch(8).prefetch(AUTO), ["repeat-before-cache"]),
    "slow map after cache": (
        lambda: BASE.cache().map(slow, num_parallel_calls=AUTO).batch(8).prefetch(AUTO),
        ["map-after-cache"],
    ),
    "shuffle after batch": (lambda: BASE.batch(8).shuffle(10).prefetch(AUTO), ["shuffle-after-batch"]),
    "a small buffer": (lambda: BASE.shuffle(4).batch(8).prefetch(AUTO), ["shuffle-buffer-small"]),
    "no batch": (lambda: BASE.prefetch(AUTO), ["not-batched"]),
    "two batches": (lambda: BASE.batch(8).batch(4).prefetch(AUTO), ["batched-twice"]),
    "batches that replicas share unevenly": (lambda: BASE.batch(5).prefetch(AUTO), ["uneven-batch"]),
    "batches that leave replicas idle": (lambda: BASE.batch(1).prefetch(AUTO), ["batch-smaller-than-replicas"]),
    "shard after map": (lambda: BASE.map(slow).shard(4, 0).batch(8).prefetch(AUTO), ["shard-after-map"]),
    "a map of single examples": (
        lambda: BASE.map(lambda i: tf.cast(i, tf.float32) / 255).batch(8).prefetch(AUTO),
        ["map-before-batch"],
    ),
    "records that are parsed one by one": (
        lambda: tf.data.Dataset.from_tensors(RECORD).repeat(80).map(parse).batch(8).prefetch(AUTO),
        ["map-before-batch"],
    ),
    "lines that are taken apart one by one": (
        lambda: tf.data.Dataset.from_tensors("1.0,2.0,3.0").repeat(80).map(fields).batch(8).prefetch(AUTO),
        ["map-before-batch"],
    ),
    "elements that are skipped after they were made": (
        lambda: BASE.map(slow).skip(400).batch(8).prefetch(AUTO),
        ["skip-after-map"],
    ),
    "a part of a cache": (
        lambda: BASE.map(slow).cache().take(80).batch(8).prefetch(AUTO),
        ["cache-never-fills"],
    ),
    "some batches of a cache": (lambda: BASE.cache().batch(8).take(10).prefetch(AUTO), ["cache-never-fills"]),
    "passes that run into each other": (
        lambda: BASE.repeat().shuffle(1000).batch(8).prefetch(AUTO),
        ["repeat-before-shuffle"],
    ),
    "a ragged last batch": (lambda: BASE.take(83).batch(8).prefetch(AUTO), ["partial-last-batch"]),
}


@measures_stages
@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_found_and_nothing_else(name: str, mirrored: Any) -> None:
    make, expected = FAULTY[name]
    assert codes(make(), mirrored, slow=SLOW.get(name)) == expected


@measures_stages
def test_python_that_computes_is_told_from_python_that_waits(mirrored: Any) -> None:
    data = BASE.map(in_python).batch(8).prefetch(AUTO)
    assert codes(data, mirrored, slow="Map", cpu_share=0.9) == ["python-map"]
    with planted("Map", 0.1):
        waits = kde.inspect(data, mirrored, num_batches=4).findings
    with planted("Map", 0.9):
        computes = kde.inspect(data, mirrored, num_batches=4).findings
    assert [(finding.code, finding.seconds is None) for finding in waits] == [
        ("sequential-map", False),
        ("python-map", True),  # the same seconds are lost once
    ]
    assert [(finding.code, finding.seconds is None) for finding in computes] == [("python-map", False)]
    assert f"private_threadpool_size = {calls_that_wait(data)[0]}" in waits[0].fix
    assert computes[0].fix.startswith("write the function with TensorFlow ops, of whole batches where they allow it: ")


@measures_stages
@pytest.mark.parametrize(("cores", "threads"), [(2, 16), (32, 128)])
def test_calls_that_wait_are_given_more_threads_than_there_are_cores_until_they_have_them(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keras_dist_ext.data.map_findings.num_cores", lambda: cores)
    data = BASE.map(in_python, num_parallel_calls=AUTO).batch(8).prefetch(AUTO)
    sequential = BASE.map(in_python).batch(8).prefetch(AUTO)
    with planted("Map", 0.1):
        (few,) = kde.inspect(data, num_batches=4).findings
        (still_few,) = kde.inspect(with_threads(data, 4), num_batches=4).findings
        assert kde.inspect(with_threads(data, threads), num_batches=4).findings == ()
        one_by_one = kde.inspect(with_threads(sequential, threads), num_batches=4).findings[0]
    assert one_by_one.fix == f"dataset.map(f, num_parallel_calls={threads})"
    assert "since this one has 4: options = " in still_few.fix
    assert "since tf.data has one a core: options = " in few.fix
    assert few.what.startswith("Calls of a map wait rather than compute, and only as many run at once as there are")
    assert few.fix.startswith(f"dataset.map(f, num_parallel_calls={threads}), and threads for them, ")
    assert few.fix.endswith(f"options.threading.private_threadpool_size = {threads}; dataset.with_options(options)")


def with_threads(data: tf.data.Dataset, number: int) -> tf.data.Dataset:
    options = tf.data.Options()
    options.threading.private_threadpool_size = number
    return data.with_options(options)


@measures_stages
def test_what_a_shard_throws_away_is_what_it_takes_to_make() -> None:
    data = BASE.map(in_python).shard(4, 0).batch(8)
    found = kde.inspect(without_optimizations(data.prefetch(1)), num_batches=5)
    cost = {stage.kind: stage.seconds for stage in found.times.stages}
    assert cost["Map"] > 32 * 0.001  # 8 of 32 elements are kept, each of which sleeps a millisecond
    shard, sequential, *others = found.findings
    lost = cost["Map"] * found.times.num_batches
    assert (shard.code, shard.fix) == (
        "shard-after-map",
        "dataset.shard(4, index) right after the source, before map",
    )
    assert sequential.code == "sequential-map"
    assert (shard.seconds, sequential.seconds) == (pytest.approx(0.75 * lost), pytest.approx(0.25 * lost))
    assert [finding.seconds for finding in others] == [None]


@measures_stages
def test_what_each_pass_skips_is_what_it_takes_to_make() -> None:
    data = without_optimizations(BASE.map(in_python).skip(1200).batch(8).prefetch(1))
    with planted("Map", 0.1):
        skip, sequential, *_ = kde.inspect(data, num_batches=4).findings
    assert (skip.code, skip.fix) == ("skip-after-map", "dataset.skip(1200) right after the source, before map")
    assert skip.seconds == pytest.approx(3 * sequential.seconds)  # of 1600 elements, 400 are left


@measures_stages
def test_files_that_take_long_to_open_are_opened_at_once_with_threads_for_them(tmp_path: Path) -> None:
    files = tf.data.Dataset.from_tensor_slices(record_files(tmp_path))
    for data in (files.interleave(slow_records, cycle_length=4), files.flat_map(slow_records)):
        for cpu_share, expected in (
            (0.1, f"cycle_length={calls_that_wait(data)[0]}, num_parallel_calls="),
            (0.9, "num_"),
        ):
            with planted("Map", cpu_share):
                found = kde.inspect(data.batch(8).prefetch(AUTO), num_batches=4).findings
            (finding,) = (finding for finding in found if finding.code == "sequential-interleave")
            assert finding.fix.startswith(f"files.interleave(tf.data.TFRecordDataset, {expected}")
            assert ("private_threadpool_size" in finding.fix) == (cpu_share < 0.5)


@measures_stages
def test_files_that_are_over_when_stages_are_looked_at_are_found_by_what_a_batch_takes(tmp_path: Path) -> None:
    data = tf.data.Dataset.from_tensor_slices(record_files(tmp_path)).flat_map(tf.data.TFRecordDataset).batch(8)
    with planted("nothing of it", 0.1):  # a batch takes 4 ms, and no stage that is left
        found = kde.inspect(data.prefetch(AUTO), num_batches=4)
    assert [finding.code for finding in found.findings] == ["sequential-interleave"]
    assert found.findings[0].seconds == pytest.approx(4e-3 * found.times.num_batches, rel=0.01)


@measures_stages
def test_files_that_are_read_one_after_the_other_are_found(tmp_path: Path) -> None:
    paths = record_files(tmp_path)
    files = tf.data.Dataset.from_tensor_slices(paths)
    sequential = files.interleave(slow_records, cycle_length=4).batch(8).prefetch(AUTO)
    parallel = files.interleave(slow_records, cycle_length=4, num_parallel_calls=AUTO).batch(8).prefetch(AUTO)
    assert "sequential-interleave" in codes_as_measured(sequential)
    assert "sequential-interleave" not in codes_as_measured(parallel)
    records = tf.data.TFRecordDataset(paths).shuffle(1000).batch(8).prefetch(AUTO)
    assert codes(records) == []  # it costs nothing here


@measures_stages
def test_costs_of_stages_are_those_that_were_planted() -> None:
    slept: list[float] = []

    def sleep(value: Any) -> Any:
        begin = time.perf_counter()
        time.sleep(0.001)
        slept.append(time.perf_counter() - begin)  # more where the machine is busy
        return value

    data = BASE.map(lambda i: tf.ensure_shape(tf.numpy_function(sleep, [i], i.dtype), []))
    found = kde.inspect(without_optimizations(data.batch(8).prefetch(1)), seconds=1.0)
    cost = {stage.name: stage.seconds for stage in found.times.stages}
    # A map takes what its function sleeps, at least, and a batch what its maps take; two are there before it is asked.
    assert 0.9 * 8 * np.mean(slept) < cost["Map"] < 1.2 * found.times.batch_seconds
    assert cost["Range"] + cost["BatchV2"] < cost["Map"]
    lost = next(finding.seconds for finding in found.findings if finding.code == "sequential-map")
    assert lost == pytest.approx(cost["Map"] * found.times.num_batches)
    lines = str(found).splitlines()
    assert lines[0] == "Range > Map > Batch > Prefetch"
    assert any(line.split()[0] == "Map" and line.endswith("ms a batch") for line in lines[1:])


@measures_stages
def test_costs_are_kept_when_the_data_ends_early() -> None:
    found = kde.inspect(without_optimizations(BASE.take(80).map(in_python).batch(8).prefetch(1)), seconds=1.0)
    assert found.times.num_batches == 9
    assert "Map" in {stage.name for stage in found.times.stages}


def test_filling_a_shuffle_buffer_is_told_apart() -> None:
    dataset = BASE.map(in_python, num_parallel_calls=1).shuffle(100).batch(8).prefetch(1)
    times = kde.inspect(dataset, seconds=0.3).times
    assert times.batch_seconds < 0.5 * times.first_seconds  # 8 elements, and 100


def test_sizes_are_told(mirrored: Any) -> None:
    found = kde.inspect(BASE.take(83).batch(8).prefetch(AUTO), mirrored)
    assert (found.batch_size, found.num_examples) == (8, 83)
    (finding,) = found.findings
    assert finding.evidence == "83 examples in batches of 8 leave 3 for 2 replicas"


def test_without_what_stages_cost_the_graph_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_times, "_model", lambda iterator: None)
    assert codes(BASE.map(slow).batch(8), slow="Map") == []  # tf.data makes it parallel, and adds a prefetch
    assert codes(without_optimizations(BASE.map(slow).batch(8)), slow="Map") == ["no-prefetch", "sequential-map"]
    assert codes(BASE.map(in_python).batch(8).prefetch(AUTO), slow="Map") == ["sequential-map"]


def test_batches_of_several_sources_are_told_from_what_chooses_among_them(mirrored: Any) -> None:
    of_both = tf.data.Dataset.sample_from_datasets([BASE.batch(8), BASE.take(83).batch(8)])
    found = kde.inspect(of_both, mirrored, seconds=0.1)
    assert found.stages == ("Range", "Take", "Batch", "Range", "Batch", "DirectedInterleave")
    assert (found.batch_size, found.num_examples) == (8, None)


def test_a_generator_of_one_batch_is_looked_into_though_it_is_used_up() -> None:
    found = kde.inspect(batch for batch in [(np.ones((4, 2), "f"), np.ones(4, "f"))])
    assert (found.times.num_batches, found.times.batch_seconds) == (0, None)


def test_data_without_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match="The dataset has no batch: there is nothing to look into."):
        kde.inspect(BASE.take(0).batch(8))
    with pytest.raises(DataError, match="The data is a NoneType, and holds nothing. Give a tf.data.Dataset"):
        kde.inspect(None)


# The graph


def test_a_graph_tells_its_stages_from_the_end_to_the_source() -> None:
    tf.random.set_seed(None)  # with a global seed, each shuffle has one
    graph = read_graph(BASE.shuffle(5).map(augmented, num_parallel_calls=2).batch(8, drop_remainder=True).prefetch(1))
    assert graph is not None
    assert [stage.kind for stage in graph] == ["Prefetch", "Batch", "Map", "Shuffle", "Range"]
    batch, mapped, shuffle = graph.of_kind("Batch", "Map", "Shuffle")
    assert (batch.batch_size, batch.drops_remainder) == (8, True)
    assert (mapped.is_parallel, mapped.is_random, mapped.calls_python) == (True, True, False)
    assert (shuffle.lacks_seed, shuffle.values[1]) == (True, 5)
    assert graph.num_elements(shuffle) == 1600
    assert graph.num_elements(batch) == 200


def test_both_arms_of_a_pipeline_are_in_its_graph() -> None:
    graph = read_graph(tf.data.Dataset.zip(BASE.map(in_python), BASE.shuffle(5, seed=1)).batch(8))
    assert graph is not None
    assert [stage.kind for stage in graph] == ["Batch", "Zip", "Map", "Range", "Shuffle", "Range"]
    assert graph.of_kind("Map")[0].calls_python
    assert not graph.of_kind("Shuffle")[0].lacks_seed


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (np.float32(3), "a float32, is a scalar"),
        (tf.constant(1.0), "a EagerTensor, is a scalar"),
        ((np.ones((4, 2)), np.array(1)), "a tuple, holds a scalar"),
    ],
)
def test_a_scalar_is_not_data(data: Any, named: str) -> None:
    with pytest.raises(DataError, match=f"The data, {named}, which has no examples"):
        kde.inspect(data)


def test_a_cache_of_endless_repetitions_never_fills_and_costs_all_that_is_below_it() -> None:
    with planted("Map", 1.0):
        inspection = kde.inspect(BASE.map(slow).repeat().cache().batch(8).prefetch(AUTO), seconds=0.5)
    (finding,) = [finding for finding in inspection.findings if finding.code == "repeat-before-cache"]
    assert finding.what == "The cache is never complete, grows without end, and spares nothing."
    assert finding.fix == "dataset.cache().repeat()"
    assert (finding.seconds or 0.0) > 0
    assert inspection.findings[0] == finding


class Endless(keras.utils.PyDataset):  # type: ignore[misc]
    """Waits for each batch, and has no end."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.003)
        return np.zeros((8, 2)), np.zeros((8, 1))


def test_a_py_dataset_that_does_not_say_how_long_it_is_is_refused_and_an_endless_one_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(DataError, match="Endless is a PyDataset without `__len__`, so nobody knows how many batches"):
        kde.inspect(Endless())
    monkeypatch.setattr(Endless, "num_batches", None)
    inspection = kde.inspect(Endless(), seconds=0.2)
    assert [finding.code for finding in inspection.findings] == ["generator-bound"]
    assert inspection.num_examples is None
