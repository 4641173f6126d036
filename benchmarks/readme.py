"""Measured figures go into the README between the two markers that carry their name."""

from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def write_section(name: str, text: str, readme: Path = README) -> None:
    """Replace what stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``, lines that have to exist."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = readme.read_text(encoding="utf-8").split(begin)
    readme.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")
