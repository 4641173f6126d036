"""The documents: figures are those of their files, links lead somewhere, examples load, the README is short."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from benchmarks.harness.figures import FOLDER, ROOT, pages, read, section, sections
from engine.config import load_config
from engine.config.deepspeed.keys import TABLE
from engine.config.optim_sections import OPTIMIZERS, SCHEDULERS
from engine.config.reader import OLD_KEYS
from tests.config_page import keys_table

PAGES = [*pages(), ROOT / "CONTRIBUTING.md"]
GENERATED = {"keys": keys_table}
"""Sections that follow from the code, by name."""


def marked() -> Iterator[tuple[Path, str, str]]:
    for page in PAGES:
        for name, text in sections(page.read_text(encoding="utf-8")):
            yield page, name, text


def test_every_marked_section_shows_its_figure() -> None:
    shown = list(marked())
    wrong = [
        name
        for _, name, text in shown
        if text != (GENERATED[name]() if name in GENERATED else section(name, read(name)))
    ]
    assert not wrong, "python -m benchmarks.harness.figures, or python -m tests.config_page --write"
    names = [name for _, name, _ in shown]
    assert sorted(names) == sorted([*GENERATED, *(file.stem for file in FOLDER.glob("*.json"))]), "each in one page"


def test_the_readme_is_read_to_its_end() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 12 * 1024


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"(?<!\\)\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        where = page.parent / file if file else page
        if not target.startswith("http") and not (where.exists() and (not anchor or anchor in anchors(where))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:engine|parallel|zero|kernels|launch|tests|benchmarks|docs)/[\w/]+\.(?:py|json|md|svg))`", text
    )
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configurations_load(page: Path) -> None:
    for block in re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        load_config(json.loads(block), 8)


@cache
def known_keys() -> frozenset[str]:
    """Every key of a configuration with its path: Trine's own, DeepSpeed's, and those of optimizers and schedulers."""
    own = set(re.findall(r"^\| `([\w.]+)` \|", keys_table(), flags=re.MULTILINE))
    kinds = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}
    params = {
        f"{section}.params.{setting.name}"
        for section, known in kinds.items()
        for kind in known.values()
        for setting in fields(kind)
    }
    return frozenset(own | params | set(TABLE) | set(OLD_KEYS))


def unknown_keys(text: str) -> list[str]:
    """What code in prose gives as a key of a configuration and is none: ``section.key``, or ``"key": value``."""
    keys = known_keys()
    heads = {key.partition(".")[0] for key in keys if "." in key}
    names = {part for key in keys for part in key.split(".")}
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    unknown: list[str] = []
    for code in re.findall(r"`([^`]+)`", prose):
        paths = re.findall(r"(?<![\w./])(\w+(?:\.\w+)+)(?![\w/(.])", code)
        unknown += [path for path in paths if path.partition(".")[0] in heads and path not in keys]
        unknown += [name for name in re.findall(r'"(\w+)":', code) if name not in names]
    return unknown


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("`watchdog.max_skipped_steps` and `optimizer.params.lr`", []),
        ("`watchdog.max_skiped_steps`", ["watchdog.max_skiped_steps"]),
        ('`"checkpoint": {"evry": 3}`', ["evry"]),
        ('`optimizer.params.lrate`, `"parallel.tensr"`', ["optimizer.params.lrate", "parallel.tensr"]),
        ("`parallel/tensor/plan.py`, `engine.parallel.tensor`, `optimizer.step()`, `wte.weight`", []),
        ("```python\ncheckpoint.folders = 1\n```", []),
    ],
)
def test_unknown_keys_are_found(text: str, unknown: list[str]) -> None:
    assert unknown_keys(text) == unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_that_a_page_names_exist(page: Path) -> None:
    assert not unknown_keys(page.read_text(encoding="utf-8"))


def test_commands_of_measured_figures_name_files_that_exist() -> None:
    for file in FOLDER.glob("*.json"):
        command = json.loads(file.read_text(encoding="utf-8")).get("command", "")
        assert all((ROOT / word).exists() for word in command.split() if word.startswith("tests/")), command
