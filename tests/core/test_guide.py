"""The guide's pages are alike, and the messages that they quote are those of the package."""

import ast
import functools
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "keras_dist_ext"
GUIDE = PACKAGE / "docs" / "guide"
PAGE = (GUIDE / "troubleshooting.md").read_text(encoding="utf-8")
SUBJECTS = sorted({path.stem for path in GUIDE.glob("*.md")} - {"index", "examples"})


@functools.cache
def messages():
    """Return all texts in the sources, with a line break for each value that is put in."""
    texts = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def quoted():
    """Return the messages in the first column of the tables, but for those of TensorFlow and Keras."""
    own = PAGE.partition("\n## Starting\n")[2].partition("\n## Without a message\n")[0]
    return re.findall(r"^\| `(.+?)` \| ", own, re.MULTILINE)


def test_the_page_quotes_messages():
    assert len(quoted()) > 60


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_of_the_package(message):
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
    assert any(pattern.search(text) for text in messages())


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_page_begins_with_an_example_and_ends_with_limits(subject):
    text = (GUIDE / f"{subject}.md").read_text(encoding="utf-8")
    before_example, _, rest = text.partition("```py")
    assert rest, f"{subject}.md has no example"
    assert "\n## " not in before_example, f"the first example of {subject}.md comes after a heading"
    assert "\n## Limits\n" in rest
    assert f"]({subject}.md)" in (GUIDE / "index.md").read_text(encoding="utf-8")
