"""Pages as headless Chromium shows them, to readers who prefer light or dark."""

import json
import shutil
import subprocess
from pathlib import Path

from PIL import Image

MODES = {"dark": 0, "light": 1}
"""What Chromium calls the reader's preference."""
_SHOWN_MS = 4000


def _run(page: str, mode: str, *options: str) -> str:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "needs Chromium: apt-get install chromium"
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--blink-settings=preferredColorScheme={MODES[mode]}", *options, page,
    ]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, timeout=100, text=True).stdout


def photographed(page: str, mode: str, size: tuple[int, int], picture: Path, *options: str) -> Image.Image:
    """Return the top of the page for a reader who prefers ``mode``; ``picture`` is where Chromium writes it."""
    _run(page, mode, f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}", *options)
    return Image.open(picture).convert("RGB")


def live(page: str, mode: str, size: tuple[int, int], folder: Path) -> tuple[Image.Image, str, set[str]]:
    """Return a page that asks its server: its picture, its elements after a while, and all addresses that it asked."""
    waits, log = f"--virtual-time-budget={_SHOWN_MS}", folder / "net.json"
    picture = photographed(page, mode, size, folder / f"{mode}.png", waits)
    elements = _run(page, mode, waits, f"--log-net-log={log}", "--dump-dom")
    text = log.read_text(encoding="utf-8").rstrip()
    events = json.loads(text if text.endswith("}") else f"{text.rstrip(',')}]}}")["events"]
    found = [event.get("params", {}) for event in events]
    origin = page.rstrip("/")  # the browser asks hosts of its own, without the page as the initiator
    return picture, elements, {one["url"] for one in found if "url" in one and one.get("initiator") == origin}
