"""``trine verify``: the verdict, what brings a deviation in, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.launch.cli import main
from engine.launch.verifier.trials import HEAD, VOCABULARY, shrink

SUBJECTS = "tests.launch.verifier.subjects:"
CONFIG: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "parallel": {"data": 4, "tensor": 2},
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "checkpoint": {"folder": "never-written"},
}


def verify(tmp_path: Path, model: str, *more: str, **changes: Any) -> int:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    return main(["verify", SUBJECTS + model if ":" not in model else model, str(tmp_path / "config.json"), *more])


def test_a_sound_plan_trains_as_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(tmp_path, "classifier", "--weights") == 0
    said = capsys.readouterr().out
    assert "Classifier unchanged, 280 parameters" in said
    assert "2 data x 2 tensor x 1 pipeline ranks as threads, ZeRO 1; 3 steps of 4 microbatches, fp32" in said
    assert said.endswith("verdict    trains as one process\n")
    assert {"up.weight", "up.bias", "down.weight", "down.bias"} <= set(said.split())
    assert not Path("never-written").exists()


def test_a_wrong_plan_is_found_and_the_axis_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"tensor_plan": {"up": "column", "down": "row"}, "prove_plan": False}
    assert verify(tmp_path, "classifier", parallel=CONFIG["parallel"] | plan, kernels="reference") == 1
    _, verdict = capsys.readouterr().out.split("verdict    DIFFERS from one process; with one feature switched off:\n")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in verdict.splitlines()}
    assert lines.keys() == {"parallel.tensor", "parallel.data", "zero_optimization"}
    assert lines["parallel.tensor"] == "equal: it causes the deviation"
    assert all(lines[name].startswith("differs: losses ") for name in ("parallel.data", "zero_optimization"))


@pytest.mark.parametrize(
    ("model", "more", "changes", "sentence"),
    [
        ("of_one_row", (), {}, "the sizes [1] in dim 0, but trine verify needs the same size, at least 2,"),
        ("without_rows", (), {}, "has no config.vocab_size to draw tokens from; return (module, rows), with"),
        ("no_model", (), {}, "returns a int; return an nn.Module"),
        ("that_raises", (), {}, "cannot be built (ValueError: no such size)"),
        ("missing", (), {}, "is not found (module 'tests.launch.verifier.subjects' has no attribute 'missing')"),
        (
            "no.such.module:build",
            (),
            {},
            "MODEL no.such.module:build is not found (No module named 'no'); pass module:",
        ),
        ("classifier", ("--steps", "0"), {}, "--steps 0: give a number of at least 1."),
        ("classifier", (), {"parallel": {"tensor": 2}}, 'parallel.data is "auto", which depends on the number of'),
        ("classifier", ("--world", "3"), {"parallel": {"tensor": 2}}, "the world size 3"),
        ("wrong_width", (), {"parallel": {"data": 2}}, "raises RuntimeError in training: "),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, more: tuple[str, ...], changes: Any, sentence: str
) -> None:
    assert verify(tmp_path, model, *more, **changes) == 1
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "empty").mkdir()
    assert main(["verify", str(tmp_path / "empty"), str(tmp_path / "config.json")]) == 1
    assert (
        "has no config.json; give a Hugging Face folder, its config.json, or module:function."
        in capsys.readouterr().err
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["Llama", "GPT2", "Mixtral", "DeepseekV3", "GptOss", "Qwen3", "T5", "Bert", "Gemma3Text"]
)
def test_families_of_hugging_face_train_as_one_process(tmp_path: Path, family: str) -> None:
    import transformers

    getattr(transformers, f"{family}Config")().save_pretrained(tmp_path / "model")
    grid = {"data": 2, "tensor": 2, "pipeline": 2}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"parallel": grid, "zero_optimization": {"stage": 2}}))
    assert main(["verify", str(tmp_path / "model"), str(tmp_path / "config.json")]) == 0


def shrunk(config: Any, tensor: int = 2, layers: int = 2) -> Any:
    shrink(config, tensor, layers)
    return config


def test_keys_stay_shared_by_heads_and_widths_follow() -> None:
    config = shrunk(transformers.LlamaConfig(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8))
    assert (config.num_attention_heads, config.num_key_value_heads, config.hidden_size) == (4, 2, 4 * HEAD)
    assert (config.num_hidden_layers, config.vocab_size, config.intermediate_size) == (2, VOCABULARY, 8 * HEAD)


@pytest.mark.parametrize(("before", "after"), [(32, (8, 8)), (1, (8, 1)), (8, (16, 8))])
def test_each_kind_of_attention_stays(before: int, after: tuple[int, int]) -> None:
    config = shrunk(transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=before), tensor=8)
    assert (config.num_attention_heads, config.num_key_value_heads) == after


def test_experts_and_latent_attention_stay() -> None:
    config = shrunk(transformers.DeepseekV3Config(), tensor=2, layers=4)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.first_k_dense_replace) == (4, 2, 1)
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim) == (16, HEAD, HEAD)


def test_lists_lose_the_layers_that_are_gone_and_nothing_drops() -> None:
    config = shrunk(transformers.GptOssConfig(), layers=4)
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2 and config.sliding_window == 8
    assert config.attention_dropout == 0.0
    dropped = shrunk(transformers.GPT2Config())
    assert (dropped.attn_pdrop, dropped.embd_pdrop, dropped.resid_pdrop) == (0.0, 0.0, 0.0)


def test_tokens_with_a_meaning_are_in_the_vocabulary() -> None:
    config = shrunk(transformers.GPT2Config())
    assert max(config.bos_token_id, config.eos_token_id) == VOCABULARY - 1


def test_a_shallow_model_stays_as_shallow() -> None:
    assert shrunk(transformers.LlamaConfig(num_hidden_layers=1), layers=4).num_hidden_layers == 1
