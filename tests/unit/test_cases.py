"""Cases that rotate come up in turn, and every one of them over time."""

import subprocess

import pytest
import xdist
from cases import TURNS, handful, head, is_its_turn, rotating

COMMITS = [f"{number:040x}" for number in range(200)]


def test_exactly_one_of_those_that_take_turns_runs_at_a_commit():
    for commit in COMMITS:
        assert sum(is_its_turn("sample weights", turn, 5, commit=commit) for turn in range(5)) == 1


def test_over_time_each_has_its_turn():
    assert {
        turn for commit in COMMITS for turn in range(5) if is_its_turn("sample weights", turn, 5, commit=commit)
    } == {0, 1, 2, 3, 4}


def test_a_commit_runs_its_share_of_many_cases():
    names = [f"test_something[{number}]" for number in range(4000)]
    shares = [sum(is_its_turn(name, commit=commit) for name in names) * TURNS / len(names) for commit in COMMITS[:50]]
    assert min(shares) > 0.75
    assert max(shares) < 1.25


def test_quick_cases_do_not_rotate_and_the_others_do():
    one, two, three = rotating(["a", ("b", 1), "c"], ["c"])
    assert (one.values, two.values, three) == (("a",), ("b", 1), "c")
    assert [mark.name for case in (one, two) for mark in case.marks] == ["rotating", "rotating"]


def test_slow_cases_do_not_rotate():
    one, two, three = rotating(["a", "b", "c"], ["a"], slow=["b"])
    assert one == "a"
    assert [[mark.name for mark in case.marks] for case in (two, three)] == [["slow"], ["rotating"]]


def test_a_quick_case_that_is_none_of_the_cases_is_an_error():
    with pytest.raises(ValueError, match=r"no such cases: \['d'\]; there are \['a', 'b'\]"):
        rotating(["a", "b"], ["a", "d"])
    with pytest.raises(ValueError, match=r"no such cases: \['d'\]"):
        rotating(["a", "b"], ["a"], slow=["d"])


def test_a_handful_is_a_case_each_of_as_many_tests_as_fit_and_over_time_all_come():
    tests = {f"test {n}": (3 if n < 4 else 1, [f"test {n}[{case}]" for case in range(3)]) for n in range(20)}
    seen = set()
    for commit in COMMITS:
        cases = handful(tests, 4, commit=commit)
        names = [case.partition("[")[0] for case in cases]
        assert len(set(names)) == len(names)
        assert sum(tests[name][0] for name in names) == 4
        assert handful(tests, 4, commit=commit) == cases
        seen |= set(cases)
    assert seen == {case for _, cases in tests.values() for case in cases}


def test_the_commit_is_the_one_that_is_checked_out(tmp_path):
    assert head(tmp_path) == "no commit"
    author = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    repository = tmp_path / "repository"
    repository.mkdir()
    for command in (("init", "-q"), (*author, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *command], cwd=repository, check=True)
    assert len(head(repository)) == 40


@pytest.mark.xdist_group("one group")
def test_pytest_xdist_sees_which_tests_belong_together(request):
    """As version 3.8 does not under pytest 9.2: then each process would launch workers of its own."""
    assert not xdist.is_xdist_worker(request) or request.node.nodeid.endswith("@one group")
