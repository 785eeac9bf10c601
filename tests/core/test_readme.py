"""What the README shows runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(
    r"^    (\S.*)$", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
)


def run(command, folder):
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def test_the_first_command_does_the_main_job_and_the_second_tests_it():
    set_up = "python3 -m venv .venv && . .venv/bin/activate && "
    assert COMMANDS[0] == set_up + "pip install . && keras-dist-ext demo"
    assert COMMANDS[1] == set_up + "pip install '.[test]' && python -m pytest"


def test_the_number_of_cases_is_that_of_the_table():
    assert f"A table of {len(ROWS)} cases" in README


def test_the_blocks_run_one_after_the_other(tmp_path):
    assert len(BLOCKS) == README.count("```python")
    output = run([sys.executable, "-c", "\n".join(BLOCKS)], tmp_path)
    assert output.startswith("one_device: 1 CPU device, no TF_CONFIG\n")  # as the comment in the quick start says
    assert (tmp_path / "model.keras").is_file()


@pytest.mark.multiworker
@pytest.mark.slow
def test_the_quick_start_runs_on_two_workers_as_it_is(tmp_path):
    (tmp_path / "train.py").write_text(BLOCKS[0])
    name, *arguments = next(line for line in COMMANDS if " launch " in line).split()
    assert name == "keras-dist-ext"
    output = run([sys.executable, "-m", "keras_dist_ext", *arguments], tmp_path)
    assert "[worker 1] multi_worker: TF_CONFIG lists 2 workers, this is worker 1" in output


def test_links_lead_to_files_and_headings():
    headings = {
        re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", README, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target[1:] in headings if target.startswith("#") else (ROOT / target).is_file(), target
