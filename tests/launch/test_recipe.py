"""An unmodified recipe of tinker-cookbook against ``trine serve`` on two ranks, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import models
from tests.launch.test_serve_command import served

NAME = "Qwen/Qwen3-8B"
"""Name by which the recipe finds its chat format; the served model is tiny."""
STEPS = 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_folder(root: Path) -> None:
    """Write what the recipe loads by name: a tokenizer of bytes, and conversations."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({one: number for number, one in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    folder, rows = root / NAME, root / "HuggingFaceH4" / "no_robots"
    folder.mkdir(parents=True)
    rows.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    for split in ("train", "test"):
        (rows / f"{split}.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * STEPS, encoding="utf-8")


@pytest.mark.peers
@pytest.mark.timeout(600)
def test_a_supervised_recipe_trains_an_adapter(tmp_path: Path) -> None:
    pytest.importorskip("tinker_cookbook")
    make_folder(tmp_path)
    model = models.qwen3()
    model.resize_token_embeddings(256 + len(SPECIAL) + 1)  # type: ignore[operator]
    model.config.max_position_embeddings = 128  # type: ignore[union-attr]
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    config = tmp_path / "config.json"
    serve = {"port": 0, "folder": str(tmp_path / "service"), "models": [NAME]}
    config.write_text(json.dumps({"parallel": {"tensor": 2}, "serve": serve}), encoding="utf-8")
    options = [f"model_name={NAME}", "batch_size=1", "lora_rank=4", "learning_rate=1e-2", f"log_path={tmp_path}/log"]
    with served(config, tmp_path / "service.txt") as (url, _):
        environment = os.environ | {
            "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "WANDB_MODE": "disabled",
        }  # fmt: skip
        command = (sys.executable, "-m", "tinker_cookbook.recipes.sl_loop", *options)
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train_mean_nll"] for row in rows]
    assert [row["version"] for row in rows] == [*range(1, STEPS + 1)] and losses == sorted(losses, reverse=True), losses
