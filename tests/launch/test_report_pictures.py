"""The pictures of ``docs/report.md``: the page of a run of four ranks as a browser shows it, light and dark.

``--write-figures`` keeps them in docs/figures. Needs Chromium (apt-get install chromium).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageStat

from engine.launch.cli import main

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "figures"
SIZE = (1240, 2560)
COLOURS = 128
MODES = {"dark": 0, "light": 1}
"""What Chromium calls the reader's preference."""


def trained(folder: Path) -> None:
    """A reference run of four ranks that profiles three of its steps."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4", str(ROOT / "train.py"),
        "--profile", "40:42", "--steps", "80", "--layers", "4", "--width", "64", "--context", "64",
        "--out", str(folder), "monitor.every=1",
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            said = job.communicate(timeout=240)[1]
        except BaseException:
            job.terminate()  # torchrun then ends its ranks
            raise
    assert job.returncode == 0, said[-3000:]


def photographed(page: Path, mode: str) -> Image.Image:
    """The top of the page as Chromium shows it to a reader who prefers ``mode``, in few colours."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "needs Chromium: apt-get install chromium"
    picture = page.with_name(f"{mode}.png")
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--blink-settings=preferredColorScheme={MODES[mode]}", f"--window-size={SIZE[0]},{SIZE[1]}",
         f"--screenshot={picture}", page.as_uri()],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    return Image.open(picture).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)


@pytest.mark.long
def test_the_page_follows_the_reader_from_light_to_dark(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    trained(tmp_path / "train")
    assert main(["report", str(tmp_path / "train")]) == 0
    for mode in MODES:
        picture, kept = photographed(tmp_path / "train" / "report.html", mode), tmp_path / f"report-{mode}.png"
        picture.save(kept, optimize=True)
        brightness = ImageStat.Stat(picture.convert("L")).mean[0]
        assert (brightness > 220) if mode == "light" else (brightness < 50), f"{mode}: {brightness}"
        assert picture.size == SIZE and kept.stat().st_size < 150_000
        if request.config.getoption("--write-figures"):
            shutil.copy(kept, PICTURES / kept.name)
    slices = [e for e in json.loads((tmp_path / "train/trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {one["pid"] for one in slices} == {0, 1, 2, 3}
    assert {one["name"] for one in slices} >= {"step 40", "step 42", "0F3", "1B0", "column inputs", "forward"}
