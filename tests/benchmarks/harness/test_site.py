"""Hooks of the site: links that leave docs/ are rewritten, code stays as it is."""

import pytest

from benchmarks.harness.site import on_page_content, with_site_links


@pytest.mark.parametrize(
    ("uri", "given", "shown"),
    [
        ("index.md", "[a](docs/start/quickstart.md#run)", "[a](start/quickstart.md#run)"),
        ("index.md", "[a](LICENSE) and [b](https://x.org/y)", "`a` and [b](https://x.org/y)"),
        ("guides/zero.md", "[a](../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("guides/zero.md", "[a](tensor.md), [b](#below)", "[a](tensor.md), [b](#below)"),
        ("guides/zero.md", "![p](../drawings/x.svg)", "![p](../drawings/x.svg)"),
        ("guides/zero.md", "[`f.py`](../../engine/f.py)", "`f.py`"),
        ("guides/zero.md", "```\n[a](../../x.py)\n```", "```\n[a](../../x.py)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(uri: str, given: str, shown: str) -> None:
    assert with_site_links(given, uri) == shown


def test_roles_of_docstrings_are_removed() -> None:
    assert on_page_content("a :class:<code>Config</code> or :func:<code>~x.y</code>: <code>z</code>") == (
        "a <code>Config</code> or <code>x.y</code>: <code>z</code>"
    )
