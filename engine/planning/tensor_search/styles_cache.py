"""Tensor plans that were found before, kept on disk: ``~/.cache/trine/tensor_plans``, or in the folder that the
environment variable TRINE_CACHE names; ``TRINE_CACHE=0`` keeps nothing.

One file for each search, named by its digest (``search_digest``). A file is whole or absent: it is written under
another name and renamed. What is damaged, of another digest or cannot be read is searched anew.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.planning.tensor_search.found_styles import FoundStyles

logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class StylesCache:
    """The folder of kept plans."""

    folder: Path

    @classmethod
    def of_environment(cls) -> "StylesCache | None":
        """The cache that the environment names; None if nothing is to be kept."""
        given = os.environ.get("TRINE_CACHE", "")
        if given == "0":
            return None
        try:
            root = Path(given).expanduser() if given else Path.home() / ".cache" / "trine"
        except RuntimeError:  # a user without a home
            return None
        return cls(root / "tensor_plans")

    def read(self, digest: str) -> FoundStyles | None:
        """What the search with this digest has found; None if it is not kept whole."""
        try:
            kept = json.loads(self._file(digest).read_text(encoding="utf-8"))
            found: str = kept["found"]
            if kept["digest"] != digest or kept["sha256"] != _sha256(found):
                return None
            return FoundStyles.from_bytes(found.encode())
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, digest: str, found: FoundStyles) -> None:
        """Keep what a search has found; a folder that cannot be written is said once and changes nothing."""
        text = found.to_bytes().decode()
        record = json.dumps({"digest": digest, "sha256": _sha256(text), "found": text})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with os.fdopen(number, "w", encoding="utf-8") as file:
                    file.write(record)
                os.replace(name, self._file(digest))
            except OSError:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            logger.info("the tensor plan is not kept for the next start, because %s cannot be written: %s",
                        self.folder, error.strerror)  # fmt: skip

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"


def kept_or_found(digest: Callable[[], str | None], find: Callable[[], FoundStyles]) -> FoundStyles:
    """What is kept for this digest; else what ``find`` finds, which is then kept."""
    cache = StylesCache.of_environment()
    key = digest() if cache is not None else None
    if cache is None or key is None:
        return find()
    if (kept := cache.read(key)) is not None:
        logger.info("the tensor plan is the one that an earlier start has found and proven (%s)", cache.folder)
        return kept
    found = find()
    cache.write(key, found)
    return found


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
