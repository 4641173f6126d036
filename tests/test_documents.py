"""The documents: figures are those of their files, links lead somewhere, code names what exists, pages stay short."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.harness.figures import FOLDER, ROOT, Section, pages, read, section, sections, summary, with_sections
from engine.config import load_config
from engine.config.deepspeed.keys import TABLE
from engine.config.optim_sections import OPTIMIZERS, SCHEDULERS
from engine.config.reader import OLD_KEYS
from tests.public_names import PUBLIC, defines, public_names
from tests.reference_pages import GENERATED, keys_table

PAGES = [*pages(), ROOT / "CONTRIBUTING.md"]
MOST_BYTES, MOST_BYTES_IN_ALL = 16 * 1024, 190 * 1024
"""Written by hand: of a page; of README and all pages in the folders of docs/, without their blocks of code."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def expected(one: Section) -> str:
    if one.name in GENERATED:
        return GENERATED[one.name]()
    return summary(read(one.name)) if one.kind == "summary" else section(read(one.name))


def test_every_marked_section_shows_its_figure() -> None:
    marked = [one for page in PAGES for one in sections(page.read_text(encoding="utf-8"))]
    wrong = [one.name for one in marked if one.text != expected(one)]
    assert not wrong, "python -m benchmarks.harness.figures, or python -m tests.reference_pages --write"
    names = {one.name for one in marked}
    assert names == {*GENERATED, *(file.stem for file in FOLDER.glob("*.json"))}, "each in a page"


def by_hand(page: Path) -> str:
    """The text of a page without its generated sections."""
    return with_sections(page.read_text(encoding="utf-8"), lambda one: "")


def test_pages_are_short() -> None:
    long = {name_of(page): size for page in PAGES if (size := len(by_hand(page).encode())) > MOST_BYTES}
    assert not {name for name in long if name.count("/") > 1}
    chosen = [page for page in PAGES if page.name == "README.md" or page.parent.parent == ROOT / "docs"]
    texts = [re.sub(r"^```.*?^```\n", "", by_hand(page), flags=re.DOTALL | re.MULTILINE) for page in chosen]
    whole = sum(len(text.encode()) for text in texts)
    rows = sum(len(line.encode()) for text in texts for line in text.splitlines() if line.startswith("|"))
    print(f"{len(texts)} pages, {whole / 1024:.0f} KB of text by hand, {rows / whole:.0%} of it tables")
    assert whole <= MOST_BYTES_IN_ALL


def test_the_readme_is_read_to_its_end() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 12 * 1024


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"(?<!\\)\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        where = page.parent / file if file else page
        if not target.startswith("http") and not (where.exists() and (not anchor or anchor in anchors(where))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:engine|parallel|zero|kernels|launch|tests|benchmarks|docs)/[\w/]+\.(?:py|json|md|svg))`", text
    )
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_that_a_page_names_exist(page: Path) -> None:
    assert not unknown_keys(page.read_text(encoding="utf-8"))


class CodeBlock(NamedTuple):
    """Python in a page, with the mark in the line above it."""

    page: str
    mark: str
    code: str

    def unknown(self) -> Iterator[str]:
        """Names of the engine in the code that do not exist."""
        for node in ast.walk(ast.parse(self.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "engine":
                yield from (f"{node.module}.{a.name}" for a in node.names if not defines(node.module or "", a.name))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "engine" and not node.attr.startswith("__") and not defines("engine", node.attr):
                    yield f"engine.{node.attr}"
                if node.value.id == "eng" and f"engine.Engine.{node.attr}" not in members():
                    yield f"eng.{node.attr}"


@cache
def members() -> frozenset[str]:
    return frozenset(name.path for name in public_names("engine"))


def code_blocks(page: str, text: str) -> Iterator[CodeBlock]:
    """Blocks of a page. ``<!-- not run: why -->`` above one leaves it out; other marks name the test that runs it."""
    for found in re.finditer(r"(?:^<!-- (.*?) -->\n)?^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield CodeBlock(page, found[1] or "", found[2])


BLOCKS = [block for page in PAGES for block in code_blocks(name_of(page), page.read_text(encoding="utf-8"))]


def test_code_names_what_exists() -> None:
    """Scripts with a mark are run by the test of their page; the lines of the others are checked here."""
    assert len(BLOCKS) > 10
    unknown = {(b.page, name) for b in BLOCKS if not b.mark.startswith("not run: ") for name in b.unknown()}
    assert not unknown


@pytest.mark.parametrize(
    ("code", "unknown"),
    [
        ("eng.train_batch(b)\neng.plan.print()\nengine.initialize(m, c)", []),
        ("eng.train_batches(b)", ["eng.train_batches"]),
        ("engine.initialise(m)", ["engine.initialise"]),
        ("from engine.data import loader, reader", ["engine.data.reader"]),
        ("from engine.datas import loader", ["engine.datas.loader"]),
    ],
)
def test_names_that_do_not_exist_are_found(code: str, unknown: list[str]) -> None:
    (block,) = code_blocks("page", f"text\n<!-- script -->\n```python\n{code}\n```\n")
    assert block.mark == "script" and list(block.unknown()) == unknown


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    text = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)
    direct = [name.path for module in PUBLIC for name in public_names(module) if name.path.rpartition(".")[0] == module]
    assert sorted(shown) == sorted(direct) and len(direct) >= 50
    assert "| `initialize(model, config, loss_fn, " in text and "| `Engine.train_batch(batch)` |" in text


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]))
    there = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.parent.parent == ROOT / "docs"}
    assert not there - listed


def test_commands_of_measured_figures_name_files_that_exist() -> None:
    for file in FOLDER.glob("*.json"):
        command = json.loads(file.read_text(encoding="utf-8")).get("command") or ""
        assert all((ROOT / word).exists() for word in command.split() if word.startswith("tests/")), command
