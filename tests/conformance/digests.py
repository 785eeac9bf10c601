"""Print a digest of what each row of the table, and each example, gives: `cd tests && python -m conformance.digests`.

A change that should alter no number shows equal digests before and after, on one machine. Rows run under one device,
and two and three replicas; all threads but one are left out, since sums in another order are other bits.
"""

import argparse
import hashlib
import importlib
import itertools
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from strategies import make_devices, strategies

import keras_dist_ext as kde
from conformance.rows import ROWS
from conformance.run import run

KINDS = ("default", "mirrored2", "mirrored3")
EXAMPLES = ("gan", "linear_no_keras", "sequences")


def main(arguments: Sequence[str]) -> int:
    """Print a line a row and strategy, and one for all of them."""
    parser = argparse.ArgumentParser(prog="python -m conformance.digests", description=__doc__)
    parser.add_argument("--rows", default=".*", metavar="PATTERN", help="a regular expression for the names of rows")
    given = parser.parse_args(arguments)
    make_devices()
    tf.config.experimental.enable_op_determinism()
    warnings.simplefilter("ignore")
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    everything = hashlib.sha256()
    for name, outcome in itertools.chain(examples(given.rows), rows(given.rows)):
        found = digest(outcome)
        everything.update(f"{name} {found}\n".encode())
        print(f"{found} {name}", flush=True)
    print(f"{everything.hexdigest()[:16]} all of them")
    return 0


def rows(pattern: str) -> Iterator[tuple[str, Any]]:
    """Train rows of the conformance table."""
    for row in ROWS:
        for kind in KINDS:
            if re.fullmatch(pattern, row.name) and kind in row.under:
                try:
                    outcome: Any = run(row, kde, None if kind == "default" else strategies.get(kind))
                except Exception as error:
                    outcome = type(error).__name__
                yield f"{row.name} | {kind}", outcome


def examples(pattern: str) -> Iterator[tuple[str, Any]]:
    """Train the examples on two replicas."""
    for name in EXAMPLES:
        if re.fullmatch(pattern, name):
            train = importlib.import_module(f"keras_dist_ext.examples.{name}").train
            _, history = train(strategies.get("mirrored2"), epochs=2)
            yield f"example {name} | mirrored2", history.history


def digest(outcome: Any) -> str:
    """Return 16 hexadecimal digits that change with any bit of an outcome."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                found.update(str(key).encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            found.update(f"{len(value)} values".encode())
            for item in value:
                add(item)
        else:
            array = np.asarray(value)
            found.update(f"{array.dtype}{array.shape}".encode())
            found.update(repr(array.tolist()).encode() if array.dtype.kind in "OUS" else array.tobytes())

    add(outcome)
    return found.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
