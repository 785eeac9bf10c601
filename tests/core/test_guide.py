"""The messages that the guide quotes are those of the package."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "keras_dist_ext"
PAGE = (PACKAGE / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")


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


TEXTS = messages()


def test_the_page_quotes_messages():
    assert len(quoted()) > 60


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_of_the_package(message):
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
    assert any(pattern.search(text) for text in TEXTS)
