"""Check what a complete checkpoint says, before anything acts on it.

Its checksum shows that nobody has changed it since it was written, not that this package wrote it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from types import UnionType

import numpy as np

from keras_dist_ext.aliases import Array, JsonObject, JsonValue
from keras_dist_ext.errors import ResumeError
from keras_dist_ext.training.resume.position import Position

__all__ = ["check_contents", "iterator_array", "iterator_parts", "numpy_state", "python_state"]

_LARGEST = 2**53  # of what counts something
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def check_contents(
    metadata: JsonObject,
    arrays: Mapping[str, Array],
    check_callbacks: Callable[[JsonObject, Mapping[str, Array]], None],
    directory: str,
) -> None:
    """Check types, names, shapes and ranges of a checkpoint of this version.

    Args:
        metadata: of the checkpoint.
        arrays: likewise.
        check_callbacks: raises ValueError where the states of callbacks are malformed.
        directory: for the message.

    Raises:
        ResumeError: something is not what this package writes.
    """
    try:
        for name, kind in _KINDS.items():
            _require(isinstance(metadata[name], kind), f"{name} is {_short(metadata[name])}")
        _check_position(metadata["position"], metadata["data"])
        _require(0 <= metadata["order_root"] < _LARGEST, f"order_root is {metadata['order_root']}")
        _check_seeds(metadata["seeds"])
        _check_variables(metadata["variables"], metadata["per_replica"], arrays)
        _check_optimizers(metadata["optimizers"])
        _check_host(arrays["host/python"], arrays["host/numpy"])
        iterator_parts(arrays.get("iterator"))
        check_callbacks(metadata["callbacks"], arrays)
    except _MALFORMED as error:
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ResumeError(
            f"The newest checkpoint in {directory} is not torn, but it is malformed, as this package writes none "
            f"({what[:300]}). Remove it to resume from the one before, or give Resume another directory."
        ) from error


_KINDS: Mapping[str, type | UnionType] = {
    "position": dict,
    "stopped": bool,
    "random_seed": int | None,
    "order_root": int | float,
    "data": dict,
    "callbacks": dict,
    "fingerprint": dict,
    "optimizers": dict,
    "variables": list,
    "per_replica": list,
    "accumulators_are_split": bool,
    "seeds": dict,
}


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."


def _is_count(value: object, most: int = _LARGEST) -> bool:
    return type(value) is int and 0 <= value <= most


def _check_position(values: JsonObject, data: JsonObject) -> None:
    names = {field.name for field in dataclasses.fields(Position)}
    _require(set(values) == names, f"position has {', '.join(sorted(map(str, set(values) ^ names)))}, or lacks it")
    for name, value in values.items():
        _require(_is_count(value), f"{name} of the position is {_short(value)}")
    position = Position(**values)
    # What is read or made again without training must be bounded by what this run is to do.
    most = {
        "num_epochs": position.epoch,
        "num_passes": position.num_epochs + 1,
        "num_tests": position.num_epochs + 1,
        "num_tests_before": position.num_tests,
        "num_pass_batches": position.num_run_batches,
        "step": position.num_run_batches,
    }
    of_pass, of_epoch = data.get("batches of a pass"), data.get("steps_per_epoch")
    for given in (of_pass, of_epoch):
        _require(given is None or type(given) is int, f"the length of the data is {_short(given)}")
    lengths = [n for n in (of_pass, of_epoch) if n is not None and n > 0]
    if lengths:
        longest = of_epoch if of_epoch is not None and of_epoch > 0 else lengths[0]
        most["num_run_batches"] = (position.num_epochs + 1) * longest
        most["step"] = min(most["step"], longest)
    if of_pass is not None and of_pass > 0:
        most["num_pass_batches"] = min(most["num_pass_batches"], of_pass)
    for name, largest in most.items():
        _require(values[name] <= largest, f"{name} of the position is {values[name]}, of at most {largest}")


def _check_seeds(seeds: JsonObject) -> None:
    for name, numbers in seeds.items():
        is_list = isinstance(numbers, list) and all(type(n) is int and -(2**63) <= n < 2**63 for n in numbers)
        _require(is_list, f"the state of the generator {name} is {_short(numbers)}")
    if "run" in seeds:
        root, num_passes, uses_global, *is_global = seeds["run"]
        is_valid = -1 <= root < 2**31 and _is_count(num_passes) and {uses_global, *is_global} <= {0, 1}
        _require(is_valid, f"the state of the seeds is {seeds['run']}")


def _check_variables(listed: list[JsonValue], per_replica: list[JsonValue], arrays: Mapping[str, Array]) -> None:
    _require(all(isinstance(name, str) for name in per_replica), f"per_replica is {_short(per_replica)}")
    seen: set[str] = set()
    for name, path, dtype, shape in listed:
        _require(isinstance(name, str) and isinstance(path, str), f"a variable is called {_short((name, path))}")
        array = arrays[name]
        found = array.shape[1:] if name in per_replica else array.shape
        _require(
            array.dtype.name == dtype and found == tuple(shape) and not (name in per_replica and not array.ndim),
            f"{name} is {array.dtype.name} {array.shape}, and said to be {dtype} {_short(shape)}",
        )
        seen.add(name)
    _require(len(seen) == len(listed) and seen.issuperset(per_replica), "variables have no names of their own")


def _check_optimizers(optimizers: JsonObject) -> None:
    for name, value in optimizers.items():
        is_valid = isinstance(value["class"], str) and all(type(number) is int for number in value["of"])
        _require(is_valid, f"{name} is {_short(value)}")


def _check_host(python: Array, numpy: Array) -> None:
    """Try the states of the host's generators, one of each for a worker, on generators of their own."""
    _require(python.ndim == numpy.ndim == 2 and len(python) == len(numpy), "the states of generators have other shapes")
    for row in python.tolist():
        random.Random(0).setstate(python_state(row))
    for row in numpy.tolist():
        state = numpy_state(row)
        if state is not None:
            np.random.RandomState(0).set_state(state)


def python_state(row: list[float]) -> tuple[object, ...]:
    """Return a state of Python's generator, as `random.setstate` takes it, from an array's row."""
    version, has_gauss, gauss, *words = row
    return int(version), tuple(int(word) for word in words), gauss if has_gauss else None


def numpy_state(row: list[float]) -> tuple[str, Array, int, int, float] | None:
    """Return a state of NumPy's generator, as `numpy.random.set_state` takes it; None for one of an unknown kind."""
    is_known, place, has_gauss, cached, *keys = row
    if not is_known:
        return None
    return "MT19937", np.array(keys, np.uint32), int(place), int(has_gauss), cached


def iterator_array(parts: list[bytes]) -> Array:
    """Return the state of an iterator as an array."""
    sizes = np.array([len(parts), *map(len, parts)], np.int64).tobytes()
    return np.frombuffer(sizes + b"".join(parts), np.uint8)


def iterator_parts(array: Array | None) -> list[bytes] | None:
    """Return what the iterator over the data held, if it was saved.

    Raises:
        ValueError: the array does not hold it.
    """
    if array is None:
        return None
    _require(array.ndim == 1 and array.dtype == np.uint8 and array.size >= 8, "the iterator's state has another shape")
    return list(_parts(array.tobytes()))


def _parts(data: bytes) -> Iterator[bytes]:
    num_parts = int.from_bytes(data[:8], "little")
    begin = 8 * (1 + num_parts)
    _require(begin <= len(data), f"the iterator's state has {num_parts} parts")
    for size in np.frombuffer(data, np.int64, num_parts, 8).tolist():
        _require(0 <= size <= len(data) - begin, f"a part of the iterator's state has {size} bytes")
        yield data[begin : begin + size]
        begin += size
