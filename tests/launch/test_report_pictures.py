"""The pictures of ``docs/guides/report.md``: the page of a run of four ranks as a browser shows it, light and dark.

``--write-figures`` keeps them in docs/figures. Needs Chromium (apt-get install chromium).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageStat

import engine
from engine.launch.cli import main
from tests.browser import MODES, photographed

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "figures"
SIZE = (1240, 2560)
EXPERTS = (1240, 680)
COLOURS = 128


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


def routed(folder: Path) -> None:
    """A run of a small mixture of experts with a weak loss that balances it, on one rank."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = dict(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_local_experts=16, num_experts_per_tok=2,
        output_router_logits=True, router_aux_loss_coef=0.02,
    )  # fmt: skip
    settings = {
        "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "monitor": {"report": str(folder), "every": 1, "expert_load": True},
    }  # fmt: skip
    text = torch.frombuffer(bytearray((ROOT / "README.md").read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    with engine.initialize(MixtralForCausalLM(MixtralConfig(**sizes)), settings) as eng:
        for _ in range(120):
            starts = torch.randint(len(text) - 64, (8,), generator=generator).tolist()
            tokens = torch.stack([text[start : start + 64] for start in starts])
            eng.train_batch({"input_ids": tokens, "labels": tokens})


def pictured(page: Path, mode: str, size: tuple[int, int] = SIZE) -> Image.Image:
    """The top of the page as Chromium shows it to a reader who prefers ``mode``, in few colours."""
    picture = photographed(page.as_uri(), mode, size, page.with_name(f"{mode}.png"))
    return picture.quantize(COLOURS, dither=Image.Dither.NONE)


@pytest.mark.long
def test_the_page_follows_the_reader_from_light_to_dark(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    trained(tmp_path / "train")
    assert main(["report", str(tmp_path / "train")]) == 0
    for mode in MODES:
        picture, kept = pictured(tmp_path / "train" / "report.html", mode), tmp_path / f"report-{mode}.png"
        picture.save(kept, optimize=True)
        brightness = ImageStat.Stat(picture.convert("L")).mean[0]
        assert (brightness > 220) if mode == "light" else (brightness < 50), f"{mode}: {brightness}"
        assert picture.size == SIZE and kept.stat().st_size < 150_000
        if request.config.getoption("--write-figures"):
            shutil.copy(kept, PICTURES / kept.name)
    _check_trace(tmp_path)


def _check_trace(tmp_path: Path) -> None:
    slices = [e for e in json.loads((tmp_path / "train/trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {one["pid"] for one in slices} == {0, 1, 2, 3}
    assert {one["name"] for one in slices} >= {"step 40", "step 42", "0F3", "1B0", "column inputs", "forward"}


@pytest.mark.long
def test_the_expert_load_follows_it_too(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    routed(tmp_path / "experts")
    assert main(["report", str(tmp_path / "experts")]) == 0
    page = tmp_path / "experts/report.html"
    alone = "section:not(#experts),header,footer{display:none}section{margin:24px 0}</style>"
    page.write_text(page.read_text().replace("</style>", alone))
    for mode in MODES:
        picture, kept = pictured(page, mode, EXPERTS), tmp_path / f"report-experts-{mode}.png"
        picture.save(kept, optimize=True)
        assert kept.stat().st_size < 150_000
        if request.config.getoption("--write-figures"):
            shutil.copy(kept, PICTURES / kept.name)
