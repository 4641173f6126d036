"""The glossary: each folder and each public name is a word of it, and files that it names exist."""

import re

import pytest

from benchmarks.harness.figures import ROOT
from tests.public_names import PUBLIC, public_names
from tests.reference_pages import WITHOUT_DOCSTRING, folders, folders_table

GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
LAYERS = ("engine", "parallel", "zero", "kernels", "launch")


def words() -> set[str]:
    """Return the code in the glossary."""
    return set(re.findall(r"`([^`]+)`", GLOSSARY.read_text(encoding="utf-8")))


@pytest.mark.parametrize("layer", LAYERS)
def test_every_folder_is_a_word_of_the_glossary(layer: str) -> None:
    holding = {file.parent.relative_to(ROOT).as_posix() for file in (ROOT / layer).rglob("*.py")}
    assert layer in holding and not holding - words()


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_a_word_of_the_glossary(module: str) -> None:
    names = {name.path.rpartition(".")[2] for name in public_names(module)}
    assert names and not names - words()


def test_every_folder_has_a_meaning() -> None:
    assert not re.findall(r"^\| `[^|]+\|  \|$", folders_table(), flags=re.MULTILINE)
    assert not {one for one in WITHOUT_DOCSTRING if one not in folders() or (ROOT / one / "__init__.py").exists()}


def test_a_term_has_one_row() -> None:
    by_hand = GLOSSARY.read_text(encoding="utf-8").partition("## Folders")[0]
    terms = [term for row in re.findall(r"^\| ([^|`]+) \|", by_hand, flags=re.MULTILINE) for term in row.split(", ")]
    terms = [term for term in terms if term not in ("term",)]
    assert len(terms) > 60 and len(terms) == len(set(terms))


def test_files_of_terms_exist() -> None:
    by_hand = GLOSSARY.read_text(encoding="utf-8").partition("## Folders")[0]
    files = re.findall(r"`((?:engine|parallel|zero|kernels|launch)/[\w/.]+)`", by_hand)
    assert len(files) > 40 and not [file for file in files if not (ROOT / file).exists()]
