"""Hooks for ``mkdocs build``: pages of the repository root, whole figures, links to source files.

README.md, CHANGELOG.md, CONTRIBUTING.md    become pages of the site
<!-- NAME:summary -->                       the whole figure replaces the summary that the repository keeps
links to files outside docs/                become code, because the site has no such page
"""

import re
import sys
from pathlib import Path
from posixpath import normpath, relpath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the repository's root, by path, with their paths on the site."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: "Files", config: Any) -> "Files":
    """Adds the root pages to the site."""
    from mkdocs.structure.files import File

    for source, target in ROOT_PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: "Page", **_: Any) -> str:
    """Inserts whole figures, and rewrites links that leave docs/."""
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT))]  # mkdocs knows no package of the root
    from benchmarks.harness.figures import with_whole_figures

    return with_site_links(with_whole_figures(markdown), page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """Removes Sphinx roles, such as :class:, before code in rendered docstrings."""
    return re.sub(r":(?:class|func|meth|data|attr|mod|exc):(?=<code>)", "", html).replace("<code>~", "<code>")


def with_site_links(markdown: str, uri: str) -> str:
    """Rewrites links of the page ``uri`` to root pages and source files; code blocks are unchanged."""
    origin = next((source for source, target in ROOT_PAGES.items() if target == uri), f"docs/{uri}")

    def rewritten(found: re.Match[str]) -> str:
        mark, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        file = normpath(f"{origin.rpartition('/')[0] or '.'}/{target}")
        site = ROOT_PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else "")
        if site:
            return f"{mark}[{text}]({relpath(site, uri.rpartition('/')[0] or '.')}{anchor})"
        return text if "`" in text else f"`{text}`"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(rewritten, part) for part in parts)
