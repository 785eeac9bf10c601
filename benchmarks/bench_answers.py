"""Measure whether the doctor's first finding is the answer: what its fix brings, beside the best change known.

    python benchmarks/bench_answers.py --json answers.json                  # about 30 minutes
    python benchmarks/bench_answers.py --only hdf5_rows,large_table
    python benchmarks/bench_answers.py --healthy                            # 41 programs that need no change

Each situation (`situations.py`, `further_situations.py`, `step_situations.py`) trains a program that is slower than it
need be, has the doctor judge it, and then times that program, the same with the fix as the finding words it, and the
same with the best change known, in turn. Figures are examples a second against those of the sick program: the median
of the rounds. Where the data is passed over several times in an epoch, the faster programs make three times as many
passes, so that there is enough to time: what is done once an epoch weighs a third there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from cases import epoch_times, start

MORE_PASSES = 3  # of what is faster, in an epoch
MOST_OF_BEST = 0.5  # that the fix must bring of what the best change does
LEAST_TIMES = 1.2  # as fast with the fix, where no other change is known


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a first finding is not the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of situations, with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--healthy", action="store_true", help="look at programs that need no change instead")
    parser.add_argument("--json", type=pathlib.Path, help="add the results there")
    given = parser.parse_args(arguments)
    strategy = start(2)
    if given.healthy:
        return _healthy(strategy)
    import further_situations  # noqa: F401  # adds its own to them
    import step_situations  # noqa: F401  # likewise
    from situations import SITUATIONS, names

    results = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    try:
        asked = names([name for name in given.only.split(",") if name])
    except ValueError as error:
        parser.error(str(error))
    for name in asked:
        results[name] = measure(SITUATIONS[name], strategy, given.rounds)
        print(row(results[name]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1))
    return int(any(not result["is_right"] for result in results.values()))


def measure(situation: Any, strategy: Any, num_rounds: int) -> dict[str, Any]:
    """Return what the doctor says of a situation, and how many times as fast the changes make it."""
    report = _examined(situation, strategy)
    first = report.findings[0] if report.findings else None
    kinds = ["sick", "fix", *(["best"] if situation.best else [])]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        for kind in kinds:
            rates[kind].append(_rate(situation.make(kind), strategy, 1 if kind == "sick" else MORE_PASSES))
    times = {k: statistics.median(r / s for r, s in zip(rates[k], rates["sick"], strict=True)) for k in kinds[1:]}
    best = max(times.values())
    least = MOST_OF_BEST * best if situation.best else LEAST_TIMES
    code = None if first is None else first.code
    return {
        "title": situation.title,
        "expected": situation.code,
        "found": list(report.codes),
        "fix": "" if first is None else first.fix,
        "evidence": "" if first is None else first.evidence,
        "headline": report.headline,
        "change": situation.change,
        "best": situation.best,
        "fix_times": times["fix"],
        "best_times": best,
        "rates": rates,
        "is_right": code in situation.code.split("|") and times["fix"] >= least,
    }


def row(result: dict[str, Any]) -> str:
    """Return a row of the guide's table."""
    best = "" if not result["best"] else f"{result['best']}: {result['best_times']:.3g}"
    first = f"`{result['found'][0]}`" if result["found"] else "none"
    wrong = "" if result["is_right"] else f" (expected {result['expected']}; found {result['found']})"
    return f"| {result['title']} | {first}{wrong} | {result['change']} | {result['fix_times']:.3g} | {best} |"


def _examined(situation: Any, strategy: Any) -> Any:
    import keras_dist_ext as kde

    program = situation.make("sick")
    doctor = kde.ParallelismDoctor(show=False, interventions=situation.interventions)
    if program.is_stock:
        doctor.stock_data = program.data
    train(program, strategy, [doctor])
    return doctor.report


def _rate(program: Any, strategy: Any, more_passes: int) -> float:
    """Train, and return the examples a second after the first epoch."""
    times = epoch_times()
    if program.passes > 1:
        program.passes *= more_passes
    train(program, strategy, [times])
    return float(program.passes * program.examples) * (len(times.ends) - 1) / (times.ends[-1] - times.ends[0])


def train(program: Any, strategy: Any, callbacks: list[Any]) -> None:
    """Make a program's model and train it."""
    import keras

    import keras_dist_ext as kde

    keras.utils.set_random_seed(0)
    make = program.model or (keras.Sequential if program.is_stock else kde.Sequential)
    with strategy.scope() if program.num_replicas > 1 else contextlib.nullcontext():
        model = make(program.layers())
        model.compile(**{"optimizer": "adam", "loss": "mse", **program.compiled})
    x, y = program.data if isinstance(program.data, tuple) else (program.data, None)
    x = x.repeat(program.passes) if program.passes > 1 else x
    fitted = {"epochs": 2, "verbose": 0, **program.fitted}
    model.fit(x, y, callbacks=[*program.callbacks(), *callbacks], **fitted)


def _healthy(strategy: Any) -> int:
    """Print what the doctor says of programs that need no change; return 1 if it is anything."""
    from further_healthy import FURTHER_HEALTHY
    from healthy_programs import HEALTHY
    from step_healthy import STEP_HEALTHY

    import keras_dist_ext as kde

    programs, alarms = {**HEALTHY, **FURTHER_HEALTHY, **STEP_HEALTHY}, 0
    for name, make in programs.items():
        doctor, begin = kde.ParallelismDoctor(show=False), time.perf_counter()
        train(make(), strategy, [doctor])
        assert doctor.report is not None
        alarms += bool(doctor.report.findings)
        print(
            f"{name}: {doctor.report.codes} {doctor.report.headline} [{time.perf_counter() - begin:.1f} s]", flush=True
        )
    print(f"{alarms} of {len(programs)} with findings")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
