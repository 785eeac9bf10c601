"""See each row of the table fail: `cd tests && python -m conformance [--rows PATTERN] [--write]`.

Each row is run by ours under three replicas with its cause put back (see `causes`), and by stock Keras under two. What
stock Keras does may end a process or hang it, so rows run in other processes, some in each.
"""

import argparse
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from conformance.causes import cause_of
from conformance.definition import digest
from conformance.rows import ROWS
from conformance.run import Row
from conformance.seen import PASSES, RECORD, SECONDS, look

ROWS_A_PROCESS = 20


def main(arguments: Sequence[str]) -> int:
    """Print for each row how it fails; return 1 if one passes with its cause put back."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--rows", default=".*", metavar="PATTERN", help="a regular expression for the names of rows")
    parser.add_argument("--ours", action="store_true", help="leave stock Keras out")
    parser.add_argument("--write", action="store_true", help=f"write them into {RECORD.name}")
    given = parser.parse_args(arguments)
    rows = [row for row in ROWS if re.fullmatch(given.rows, row.name)]
    ours, lines = [], []
    for row, seen in see("ours", rows):
        ours.append(seen)
        print(f"{row.name} | {cause_of(row).__name__} | {seen}", flush=True)
    for (row, seen), on_ours in zip(see("stock", [] if given.ours else rows), ours, strict=not given.ours):
        lines.append(f"{row.name} | {cause_of(row).__name__} | {digest(row)} | {on_ours} | {seen}")
        print(f"{row.name} | stock Keras | {seen}", flush=True)
    if given.write:
        kept = RECORD.read_text().splitlines() if RECORD.exists() else []
        by_name = {line.split(" | ")[0]: line for line in [*kept, *lines]}
        RECORD.write_text("".join(f"{by_name[row.name]}\n" for row in ROWS if row.name in by_name))
    print(f"{len(ours) - ours.count(PASSES)} of {len(ours)} rows fail with their causes put back")
    return int(PASSES in ours)


def see(library: str, rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Run rows in processes of their own, and say what was seen of each."""
    context = multiprocessing.get_context("spawn")
    left = list(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "seen")
        while left:
            path.write_text("")
            names = [row.name for row in left[:ROWS_A_PROCESS]]
            process = context.Process(target=look, args=(library, names, str(path)))
            process.start()
            process.join()
            found = path.read_text().splitlines()
            hangs = time.time() - path.stat().st_mtime > SECONDS - 5
            yield from zip(left, found, strict=False)
            left = left[len(found) :]
            if process.exitcode == 1 and not hangs:
                raise RuntimeError(f"'{left[0].name}' cannot be looked at: run conformance.seen.seen(row, {library!r})")
            if process.exitcode:
                yield left.pop(0), "hangs" if hangs else f"ends the process with exit code {process.exitcode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
