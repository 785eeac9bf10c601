"""What `.ci/run` does with its stages: these are made up, and take the place of its own in a copy."""

import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / ".ci" / "run"
ENDS = "[ $# -gt 0 ] || set"  # the functions end, and stages are gone through


def ran(folder: Path, quick: str, ends_at: int) -> subprocess.CompletedProcess[str]:
    """Run two stages, of which the first is given, with an end after so many seconds, and at least one for each."""
    functions, ends, rest = RUN.read_text().partition(ENDS)
    assert ends
    made_up = f"""
        install_debian_packages() {{ :; }}
        install_package() {{ :; }}
        install_tools() {{ :; }}
        quick() {{ {quick}; }}
        matrix() {{ in_time echo "the next began"; }}
        ENDS_AT={ends_at} LEAST_SECONDS=1
    """
    copy = folder / ".ci" / "run"
    copy.parent.mkdir()
    copy.write_text(functions + made_up + ends + rest)
    return subprocess.run(["bash", copy, "quick", "matrix"], capture_output=True, text=True, timeout=60)


@pytest.mark.usefixtures("signals_as_in_a_terminal")
def test_a_stage_without_time_left_fails_the_run_and_says_so_and_no_other_begins(tmp_path):
    ended = ran(tmp_path, "in_time sleep 50; echo 'it went on'", ends_at=0)
    assert ended.returncode == 124, ended.stderr
    assert "NOT ALL RUN: no time was left for the rest of: sleep 50" in ended.stdout
    assert not {"it went on", "the next began"} & set(ended.stdout.splitlines())


@pytest.mark.parametrize(
    ("quick", "status"), [("in_time false", 1), ("in_time bash -c 'exit 3'; true", 3), ("false; in_time true", 1)]
)
def test_a_stage_that_fails_ends_the_run_with_its_status_and_nothing_about_time(tmp_path, quick, status):
    ended = ran(tmp_path, quick, ends_at=50)
    assert ended.returncode == status, ended.stderr
    assert "NOT ALL RUN" not in ended.stdout
    assert "the next began" not in ended.stdout


@pytest.mark.parametrize("installs", ["true", "sleep 50", "false"])
def test_what_installs_beside_a_stage_fails_no_run_and_does_not_outlive_it(tmp_path, installs):
    ended = ran(tmp_path, f"{installs} & ahead_installs=$!; sleep 0.2; echo installed by $ahead_installs", ends_at=50)
    assert ended.returncode == 0, ended.stderr
    (said,) = [line for line in ended.stdout.splitlines() if line.startswith("installed by ")]
    assert not Path("/proc", said.rpartition(" ")[2]).exists()


def test_a_stage_that_ends_in_time_is_followed_by_the_next(tmp_path):
    ended = ran(tmp_path, "in_time env KEPT=here bash -c 'echo $KEPT'", ends_at=50)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert said.index("here") < said.index("the next began")
    assert said[-1].startswith("=== done (")
