"""What README and the documents show runs as it stands there, and what they refer to exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "keras_dist_ext"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "tests/*.md", "benchmarks/**/*.md", "keras_dist_ext/**/*.md")
    for path in ROOT.glob(pattern)
)
# Others take 4 to 10 s each, and have their turn.
MARKS = {"README.md": (), "keras_dist_ext/docs/guide/several_processes.md": pytest.mark.slow}
TEXT_OF = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
README = TEXT_OF["README.md"]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^    (\S.*)$", CODE.sub("", README), re.MULTILINE)
# The words of our sources, among which every name in backticks must be.
WORDS = {word for path in PACKAGE.rglob("*.py") for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


def python_of(page):
    """Return a page's blocks of Python as one program, whose line numbers are those of the page."""
    lines, inside = [], False
    for line in TEXT_OF[page].splitlines():
        begins = line == "```python"
        inside = (inside or begins) and line != "```"
        lines.append(line if inside and not begins else "")
    return "\n".join(lines) + "\n"


def headings_of(path):
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    anchors = []
    for heading in headings:
        anchor = re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "", heading)).lower().replace(" ", "-")
        repeats = sum(re.sub(r"-\d+$", "", other) == anchor for other in anchors)
        anchors.append(f"{anchor}-{repeats}" if repeats else anchor)
    return anchors


def names_in_backticks(page):
    return re.findall(r"`([^`\n]+)`", CODE.sub("", TEXT_OF[page]))


def run(command, folder):
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def test_the_first_command_does_the_main_job_and_the_second_tests_it():
    set_up = "python3 -m venv .venv && . .venv/bin/activate && "
    assert COMMANDS[0] == set_up + "pip install . && keras-dist-ext demo"
    assert COMMANDS[1] == set_up + "pip install '.[test]' && python -m pytest"


def test_readme_is_read_in_five_minutes():
    assert len(README.splitlines()) <= 180


def test_the_number_of_cases_is_that_of_the_table():
    assert f"A table of {len(ROWS)} cases" in README


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=MARKS.get(page, pytest.mark.rotating(turns=2)))
        for page in PAGES
        if "```python" in TEXT_OF[page]
    ],
)
def test_the_python_of_a_page_runs_from_its_top_to_its_end(page, tmp_path):
    program = tmp_path / "page.py"
    program.write_text(python_of(page), encoding="utf-8")
    assert program.read_text(encoding="utf-8").strip()
    output = run([sys.executable, str(program)], tmp_path)
    for line in re.findall(r"^print\(.*\)  # prints: (.*)$", python_of(page), re.MULTILINE):
        assert line in output.splitlines()


@pytest.mark.parametrize("page", PAGES)
def test_no_python_of_a_page_is_left_out(page):
    assert TEXT_OF[page].count("```python") == len(re.findall(r"^```python$", TEXT_OF[page], re.MULTILINE))
    assert len(re.findall(r"^```", TEXT_OF[page], re.MULTILINE)) % 2 == 0


@pytest.mark.multiworker
@pytest.mark.slow
def test_the_quick_start_runs_on_two_workers_as_it_is(tmp_path):
    quick_start = README.partition("```python\n")[2].partition("```\n")[0]
    (tmp_path / "train.py").write_text(quick_start)
    name, *arguments = next(line for line in COMMANDS if " launch " in line).split()
    assert name == "keras-dist-ext"
    output = run([sys.executable, "-m", "keras_dist_ext", *arguments], tmp_path)
    assert "[worker 1] multi_worker: TF_CONFIG lists 2 workers, this is worker 1" in output


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"`[^`\n]*`", "", CODE.sub("", TEXT_OF[page]))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = ROOT / page if not name else (ROOT / page).parent / name
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in headings_of(path), f"{page} links to {target}; there are {headings_of(path)}"


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_found_from_readme(page):
    reached, new = set(), {"README.md"}
    while new:
        reached |= new
        targets = {
            os.path.relpath((ROOT / one).parent / target.partition("#")[0], ROOT)
            for one in new
            for target in re.findall(r"\]\(([^)\s#]+\.md[^)\s]*)\)", TEXT_OF[one])
            if not target.startswith("https://")
        }
        new = (targets & set(PAGES)) - reached
    assert page in reached


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    for name in names_in_backticks(page):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", name) and (name.endswith("/") or re.search(r"/.*\.\w+$", name)):
            folders = (ROOT, PACKAGE, (ROOT / page).parent)
            assert any((folder / name).exists() for folder in folders), f"{page} names {name}, which does not exist"


def test_names_in_the_description_of_the_architecture_are_those_of_the_code():
    page = "keras_dist_ext/docs/ARCHITECTURE.md"
    for path in re.findall(r"[\w/]+/\w+\.py\b", TEXT_OF[page]):  # in its picture, too
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path
    for name in names_in_backticks(page):
        if re.fullmatch(r"[A-Za-z_][\w.]*", name) and not name.endswith((".py", ".md", ".cfg", ".toml")):
            assert set(name.split(".")) <= WORDS | {"kde"}, name
