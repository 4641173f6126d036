"""The voice of docstrings, error texts and pages: openings and words that CONTRIBUTING.md forbids grow no more.

``python -m tests.test_voice`` prints the counts of today; lower the bounds after an edit.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

import pytest

from tests.structure import product, raised_by_the_product
from tests.test_documents import PAGES, by_hand

OPENINGS = ("Of", "What", "Whether", "Which", "How", "Where")
"""First words that no docstring has."""
STOP_WORDS = ("what", "whose", "those", "beside", "lies", "behind", "alike", "told", "held", "kept")
IDIOMS = (
    "says so", "say so", "says why", "stands still", "stand still", "stood still", "behind its back", "is told",
    "are told", "lies in", "lie in", "out of step", "stands there", "goes its way", "at its place", "by its name",
    "has its say", "takes turns", "last words", "in turns",
)  # fmt: skip
"""Pictures for which the field has a term."""
BOUNDS: Mapping[str, Mapping[str, float]] = {
    "docstrings": {"openings": 12, "stop words": 17, "idioms": 8},
    "errors": {"openings": 0, "stop words": 8, "idioms": 0},
    "pages": {"openings": 0, "stop words": 10, "idioms": 0},
}
"""The most that each kind of text may have: openings and idioms counted, stop words per 10,000 words."""


def docstrings() -> Iterator[str]:
    """Docstrings of the product: of modules, classes and functions, and below values."""
    for tree in product().trees.values():
        for node in ast.walk(tree):
            body = getattr(node, "body", [])
            values = [one.value for one in body if isinstance(one, ast.Expr)] if isinstance(body, list) else []
            yield from (one.value for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str))


def prose(page: str) -> str:
    """A page without blocks of code and code in lines."""
    return re.sub(r"`[^`]*`", "", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE))


@cache
def texts(kind: str) -> tuple[str, ...]:
    if kind == "docstrings":
        return tuple(docstrings())
    if kind == "errors":
        return tuple({re.sub(r"\{.*?\}", "", error.text) for error in raised_by_the_product()})
    return tuple(prose(by_hand(page)) for page in PAGES if page.name not in ("CONTRIBUTING.md", "CHANGELOG.md"))


def counts(found: tuple[str, ...]) -> dict[str, float]:
    """Openings and idioms as they are, stop words per 10,000 words."""
    words = Counter(word for text in found for word in re.findall(r"[a-z]+", text.lower()))
    said = " ".join(" ".join(text.lower().split()) for text in found)
    return {
        "openings": sum(text.lstrip().split(" ")[0].rstrip(":,") in OPENINGS for text in found),
        "stop words": round(10_000 * sum(words[word] for word in STOP_WORDS) / max(1, sum(words.values())), 1),
        "idioms": sum(len(re.findall(rf"\b{idiom}\b", said)) for idiom in IDIOMS),
    }


@pytest.mark.parametrize("kind", BOUNDS)
def test_the_voice_gets_no_worse(kind: str) -> None:
    found = counts(texts(kind))
    worse = {name: (count, BOUNDS[kind][name]) for name, count in found.items() if count > BOUNDS[kind][name]}
    assert not worse, "(found, bound); the words are those of OPENINGS, STOP_WORDS and IDIOMS"


def test_words_are_counted() -> None:
    found = counts(("Whether it is told.", "Return the shard, as what lies\nin memory.", "What is kept"))
    assert found == {"openings": 2, "stop words": round(10_000 * 5 / 15, 1), "idioms": 2}


if __name__ == "__main__":
    for name in ("docstrings", "errors", "pages"):
        print(name, counts(texts(name)))
