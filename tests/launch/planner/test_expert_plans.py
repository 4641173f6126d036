"""``trine plan`` of a mixture of experts: bytes of its exchange, rounds, the experts of each rank, search."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.launch.cli import main

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "max_position_embeddings": 64,
}  # fmt: skip
RUN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
    "parallel": {"data": 2, "expert": 2}, "optimizer": {"type": "AdamW"},
}  # fmt: skip
TOKENS, WIDTH = 2 * 64, 64


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Returns what the command prints."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    assert main(["plan", str(tmp_path), *options, "--estimate"]) == 0
    return capsys.readouterr().out


def test_a_plan_has_the_bytes_of_shared_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run.json")
    found = json.loads(planned(tmp_path, capsys, run, "--world", "2", "--json"))
    gives = TOKENS * (1 - 3 / 10)  # the other rank has 2 of 5 experts: C(3, 2) of C(5, 2) pairs are elsewhere
    gets = TOKENS * (1 - 1 / 10)
    row, result, routing = (WIDTH + 2) * 2 + 2 * 4, WIDTH * 2, 8 * 5
    forward, backward = gives * row + gets * result + routing, gives * result + gets * (row - 8)
    assert found["experts"]["expected_bytes"] == pytest.approx(4 * 2 * (forward + backward))
    assert found["experts"]["most_bytes"] == 4 * 2 * (TOKENS * (2 * row + 2 * result - 8) + routing)
    assert found["experts"]["first_experts"] == {"5": [0, 3, 5]} and found["seconds"]["ep"] > 0
    text = planned(tmp_path, capsys, run, "--world", "2")
    (line,) = (line for line in text.splitlines() if line.startswith("  exchange "))
    assert line.endswith("5 experts on 2 ranks: 0-2, 3-4") and "average for even routing, at most" in line
    assert "3 on the first rank and 2 on others" in text


@pytest.mark.parametrize("options", [("--estimate",), ()])
def test_the_memory_of_a_plan_has_a_round_of_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | {"mlp_only_layers": [0]}))
    (tmp_path / "run.json").write_text(json.dumps(RUN | {"parallel": {"data": 2, "expert": 2, "pipeline": 2}}))
    (tmp_path / "alone.json").write_text(json.dumps(RUN | {"parallel": {"data": 2, "pipeline": 2}}))
    found = []
    for run in ("run.json", "alone.json"):
        command = ["plan", str(tmp_path), str(tmp_path / run), "--world", "4", *options, "--json"]
        assert main(command) == 0
        made = json.loads(capsys.readouterr().out)
        assert ("by storages on shapes" in made["counted"]) == (options == ())
        found.append([rank["buffers"] for rank in made["memory_bytes"]])
    row, result = (WIDTH + 2) * 2 + 2 * 4, WIDTH * 2
    rounds = (2 * TOKENS + 2 * TOKENS) * (row + result)  # rows of both ranks, and own rows to both
    assert [shared - alone for shared, alone in zip(*found, strict=True)] == [0, rounds]


@pytest.mark.long
def test_a_search_weighs_the_expert_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MIXTURE, "num_experts": 8}))
    assert main(["plan", str(tmp_path), "--world", "8", "--batch", "16", "--search", "--estimate", "--json"]) == 0
    divided = json.loads(capsys.readouterr().out)["tried"]
    (tmp_path / "config.json").write_text(json.dumps({**MIXTURE, "num_experts": 7}))
    assert main(["plan", str(tmp_path), "--world", "8", "--batch", "16", "--search", "--estimate", "--json"]) == 0
    assert divided > json.loads(capsys.readouterr().out)["tried"]
