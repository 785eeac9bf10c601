"""The demo trains, says what each replica did, and leaves what TensorBoard can show."""

import io
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import keras_dist_ext as kde
from keras_dist_ext.examples import digits

NUM_TRAIN, NUM_HELD_OUT = 1437, 360


def run_demo(folder, *arguments):
    """Run the command in a process of its own, as a user does; return what it printed to stdout."""
    command = [sys.executable, "-m", "keras_dist_ext", "demo", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def table(output):
    """Return the lines of the table of replicas, each as [replica, device ..., examples, examples/s, loss, loss]."""
    lines = [line.removeprefix("[worker 0] ").split() for line in output.splitlines()]
    first = next(i for i, words in enumerate(lines) if words[:2] == ["replica", "device"])
    return [words for words in lines[first + 2 :] if words and words[0].isdecimal()]


def accuracy(output):
    return float(re.search(r"held-out digits +accuracy (0\.\d+|1\.0+), loss \d+\.\d+, 360 examples", output)[1])


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Two epochs in this process; return what was printed and where the logs are."""
    log_dir = tmp_path_factory.mktemp("demo") / "logs"
    console = Console(file=io.StringIO(), width=100, highlight=False)
    assert digits.main(num_replicas=2, epochs=2, log_dir=log_dir, console=console) == 0
    return console.file.getvalue(), log_dir


def test_the_strategy_and_why_it_was_picked_come_first(short):
    assert short[0].splitlines()[0] == "strategy  mirrored: 2 CPU devices, no TF_CONFIG"


def test_each_replica_has_its_examples_throughput_and_losses(short):
    rows = table(short[0])
    assert [row[:2] for row in rows] == [["0", "CPU:0"], ["1", "CPU:1"]]
    assert [int(row[2]) for row in rows] == [718, 719]  # of 1437: in the last batch, 14 and 15
    for _, _, _, throughput, first_loss, last_loss in rows:
        assert int(throughput) > 0
        assert float(first_loss) > float(last_loss) > 0


def test_every_epoch_has_a_plain_line_where_there_is_no_terminal(short):
    output, _ = short
    epochs = re.findall(r"epoch +(\d)/2  loss [\d.]+  accuracy [\d.]+  held out [\d.]+  [\d.]+ s\n", output)
    assert epochs == ["1", "2"]
    assert "\x1b" not in output
    assert accuracy(output) > 0.8


@pytest.mark.rotating
def test_the_command_that_opens_tensorboard_finds_the_curves_of_each_replica(short):
    output, log_dir = short
    command = shlex.split(output.splitlines()[-1])
    assert command[0] == "TensorBoard"
    assert command[-2:] == ["--logdir", str(log_dir)]
    seen = subprocess.run([*command[1:], "--inspect"], capture_output=True, text=True, timeout=60)
    assert f"Event statistics for {log_dir / 'validation'}" in seen.stdout, seen.stderr
    for run, examples in (("", NUM_TRAIN), ("validation", NUM_HELD_OUT)):
        total = 0.0
        for replica in (0, 1):
            events = EventAccumulator(str(log_dir / run / f"replica_{replica}"), size_guidance={"scalars": 0})
            events.Reload()
            assert {"replica/loss", "replica/step_seconds"} <= set(events.Tags()["scalars"])
            counts = [event.value for event in events.Scalars("replica/examples")]
            assert sum(counts) > 0
            total += sum(counts)
        assert total == 2 * examples  # of two epochs


@pytest.mark.slow
def test_a_terminal_shows_a_table_of_replicas_while_training_goes_on(tmp_path):
    terminal = Console(file=io.StringIO(), width=100, force_terminal=True, highlight=False)
    digits.main(num_replicas=2, epochs=1, log_dir=tmp_path, console=terminal)
    output = terminal.file.getvalue()
    assert not re.search(r"epoch +1/1", output)
    hidden, shown = output.index("\x1b[?25l"), output.index("\x1b[?25h")  # the cursor, while the table is live
    assert "examples/s" in output[hidden:shown]
    assert shown < output.index("held-out digits")


def test_replicas_of_workers_cannot_be_chosen():
    with pytest.raises(kde.StrategyError, match="--replicas 2 and --workers 3 were given.*Leave out --replicas."):
        digits.main(num_replicas=2, num_workers=3)


def test_a_log_directory_that_cannot_be_made_is_refused_before_training(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(digits, "digits", lambda: pytest.fail("it has begun"))
    with pytest.raises(kde.KerasDistError, match=rf"{file}/logs cannot be made \(Not a directory\).*--log-dir DIR"):
        digits.main(num_replicas=2, log_dir=file / "logs")


@pytest.mark.slow
def test_with_the_defaults_two_replicas_of_a_bare_cpu_read_digits(tmp_path):
    output = run_demo(tmp_path)
    assert output.startswith("strategy  mirrored: 2 CPU devices for num_replicas=2, no TF_CONFIG\n")
    assert accuracy(output) >= 0.95
    log_dir = Path(tmp_path, output.split()[-1])
    assert log_dir.parent.name == "logs"
    assert {path.name for path in log_dir.iterdir()} == {"train", "validation", "all", "replica_0", "replica_1"}


@pytest.mark.multiworker
@pytest.mark.slow
def test_of_two_workers_the_chief_alone_reports_for_both(tmp_path):
    output = run_demo(tmp_path, "--workers", "2", "--epochs", "2", "--log-dir", "two")
    assert "[worker 0] strategy  multi_worker: TF_CONFIG lists 2 workers, this is worker 0\n" in output
    rows = table(output)
    assert [row[:4] for row in rows] == [["0", "worker", "0", "CPU:0"], ["1", "worker", "1", "CPU:0"]]
    assert [int(row[4]) for row in rows] == [718, 719]
    assert re.search(r"\[worker 0\] TensorBoard .*tensorboard.* --logdir two\n", output)
    assert not re.search(r"\[worker 1\].*(strategy|epoch|accuracy|TensorBoard)", output)
    for run in ("train", "all", "replica_0", "replica_1", "validation/replica_1"):
        assert len(list(Path(tmp_path, "two", run).iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "falls"), [("linear_no_keras", "val_loss"), ("sequences", "loss"), ("gan", "generator_loss")]
)
def test_an_example_that_is_run_prints_what_it_has_learnt(
    example: str, falls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    choice = kde.pick_strategy("one_device")
    monkeypatch.setattr(kde, "pick_strategy", lambda: choice)
    monkeypatch.delitem(sys.modules, f"keras_dist_ext.examples.{example}", raising=False)  # another test may have it
    runpy.run_module(f"keras_dist_ext.examples.{example}", run_name="__main__")
    printed = {name: list(map(float, values)) for name, *values in map(str.split, capsys.readouterr().out.splitlines())}
    assert np.isfinite(printed[falls]).all()
    assert falls == "generator_loss" or printed[falls][-1] < printed[falls][0]
    assert (tmp_path / "logs" / "all").is_dir()


def test_an_error_of_the_demo_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(**_: Any) -> int:
        raise kde.StrategyError("no devices here")

    monkeypatch.setattr(digits, "main", fails)
    monkeypatch.setattr(sys, "argv", ["digits"])
    assert digits.command_line() == 1
    assert capsys.readouterr().err == "digits: no devices here\n"
