"""See how rows of the table fail: by ours with a cause put back, and by stock Keras; what was seen is in seen.txt."""

import faulthandler
import os
import re
from collections.abc import Sequence
from pathlib import Path

import keras
from strategies import make_devices, strategies

import keras_dist_ext as kde
from conformance.causes import cause_of
from conformance.rows import ROWS
from conformance.run import Row, differences, run, run_on_one_device

__all__ = ["PASSES", "RECORD", "SECONDS", "look", "seen"]

RECORD = Path(__file__).with_name("seen.txt")
"""A line a row: its name, its cause, a digest of both, what was seen of ours with the cause put back, and of stock."""
PASSES = "passes"
SECONDS = 120
"""How long a row may take before it is said to hang."""


def seen(row: Row, library: str) -> str:
    """Say how a row fails by stock Keras under two replicas ("stock"), or by "ours" under three with its cause back."""
    expected = run_on_one_device(row)
    try:
        if library == "stock":
            found = run(row, keras, strategies.get("mirrored2"))
        else:
            with cause_of(row)():
                found = run(row, kde, strategies.get("mirrored3"))
    except Exception as error:
        if library == "ours" and isinstance(error, (AttributeError, NameError, TypeError)):
            raise  # the patch itself is wrong, and shows nothing
        text = re.sub(r"\x1b\[\d+m|\{\{.*?\}\} ?|Exception encountered when calling .*\n+", "", str(error))
        return f"dies: {type(error).__name__}: {' '.join(text.split())[:90]}"
    apart = [key for key in found if key.startswith("copies of ")]
    lines = differences(expected, found, row.tolerance)
    return (apart or [line.split(": is")[0][:90] for line in lines] or [PASSES])[0]


def look(library: str, names: Sequence[str], path: str) -> None:
    """Write what is seen of rows, a line each, and end the process; after an error, or when a row hangs, early."""
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    make_devices()
    with open(path, "w", buffering=1) as file:
        for row in sorted((row for row in ROWS if row.name in names), key=lambda row: names.index(row.name)):
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            found = seen(row, library)
            file.write(found + "\n")
            if found.startswith("dies"):
                break
    os._exit(0)  # threads of a step that has failed may never end
