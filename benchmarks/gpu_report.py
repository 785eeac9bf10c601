"""Run the suite of tests and the benchmarks for GPUs one after the other, and write one report file.

    python benchmarks/gpu_report.py benchmarks/results/2026-12-01-h200.md       # at most 12 minutes, on 16 cores
    python benchmarks/gpu_report.py report.md --parts suite,fit                 # at most 10 of them
    KERAS_DIST_EXT_GPU_SUITE=cpu python benchmarks/gpu_report.py report.md --device CPU --quick    # to try the script

What the suite leaves is a table of results, with versions and cards; behind it stands what `bench_gpu.py` and
`bench_update.py` print. A part that does not end in its time is ended, what it has left by then is kept, and the report
says so. Of a file that is there already, parts that run are added at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["main"]

HERE = pathlib.Path(__file__).parent


class Part(NamedTuple):
    """One part of the report: its title, what runs, and how many seconds it has."""

    title: str
    command: Sequence[str]
    seconds: float


def parts_of(device: str, num_processes: int, *, is_quick: bool) -> dict[str, Part]:
    """Return all parts; the quick ones are a handful of tests and one row a benchmark."""
    suite = [sys.executable, "-m", "pytest", "-m", "gpu", str(HERE.parent / "tests" / "gpu")]
    suite += ["-n", "0", "--handful", "3"] if is_quick else ["-n", str(num_processes)]
    fit = [sys.executable, str(HERE / "bench_gpu.py"), "--device", device]
    fit += ["--rows", "tiny x1", "--rounds", "1", "--seconds", "0.1"] if is_quick else []
    update = [sys.executable, str(HERE / "bench_update.py"), "--device", device, *(["SGD"] if is_quick else [])]
    return {
        "suite": Part("The suite for GPUs", suite, 360),
        "fit": Part("`fit`", fit, 240),
        "update": Part("Updates", update, 90),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one failed or was ended, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("--parts", default="suite,fit,update", help="of suite, fit, update, with commas between")
    parser.add_argument("--device", default="GPU", choices=["GPU", "CPU"])
    parser.add_argument("-n", type=int, default=14, help="processes of the suite")
    parser.add_argument("--quick", action="store_true", help="a handful of tests, a row a benchmark")
    options = parser.parse_args(arguments)
    parts = parts_of(options.device, options.n, is_quick=options.quick)
    names = options.parts.split(",")
    if unknown := set(names) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    options.report.parent.mkdir(parents=True, exist_ok=True)
    ended_well = [run(parts[name], options.report, is_suite=name == "suite") for name in names]
    return int(not all(ended_well))


def run(part: Part, report: pathlib.Path, *, is_suite: bool) -> bool:
    """Run a part, and add to the report what it prints, or how the suite ended; return whether it ended well."""
    environ = {**os.environ, "COLUMNS": "160"}
    before = report.read_text() if report.exists() else ""
    if is_suite:
        environ["KERAS_DIST_EXT_GPU_REPORT"] = str(report.absolute())
    began = time.monotonic()
    process = subprocess.Popen(
        part.command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=HERE.parent,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=part.seconds)
        how = f"ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        how = "was ended before it had done all"
        printed, errors = end(process)
    how += f" after {time.monotonic() - began:.0f} s"
    if process.returncode:
        printed += "\n" + "\n".join(errors.splitlines()[-30:])
    own = report.read_text() if is_suite and report.exists() else ""
    if is_suite and own != before:  # the suite has written its table in place of the file
        text, section = before, own
    else:
        text, section = before, f"## {part.title}\n\n```text\n{printed.strip()}\n```\n"
    said = f"{part.title}: `{' '.join(map(relative, part.command))}` {how}."
    report.write_text("\n".join(filter(None, [text, section, said + "\n"])))
    print(said, flush=True)
    return process.returncode == 0


def relative(word: str) -> str:
    """Write a word of a command as somebody in the project's root would."""
    return "python" if word == sys.executable else word.removeprefix(f"{HERE.parent}{os.sep}")


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a part and all that it has started; return what it had printed, and what of it to the standard error."""
    for sent in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=20)
    return "", ""


if __name__ == "__main__":
    sys.exit(main())
