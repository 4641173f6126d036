"""GRPO of TRL over the engine, with completions from a vLLM server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.engine.huggingface.host_runs import ENVIRONMENT
from tests.engine.huggingface.trl_runs import even_words
from tests.launches import Launch, Line

WORDS, STEPS = 128, 5
STALE, RENAMED = 4, 5
"""Step before which no weights are published, and step whose version another training replaces."""
LOGGED = {
    "mean": "sampling/sampling_logp_difference/mean", "max": "sampling/sampling_logp_difference/max", "loss": "loss",
    "grad_norm": "grad_norm", "reward": "reward", "reward_std": "reward_std",
}  # fmt: skip
SIZES: Mapping[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "dtype": "float32", "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Served:
    """A run, as plain data for its processes."""

    folder: str
    """With the model."""
    url: str
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 4
    """Of a data rank in a microbatch."""


def save_model(folder: Path) -> Any:
    """Writes a Qwen3 with random weights and a tokenizer of numbers, and returns it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    model.save_pretrained(folder)
    words = models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0")
    wrapper: Any = PreTrainedTokenizerFast
    made = wrapper(tokenizer_object=Tokenizer(words))
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made.pad_token = made.eos_token = "0"
    made.save_pretrained(folder)
    return model


def train_served(line: Line, case: Served) -> None:
    """Trains; says what was logged, the versions of the server after each step, and the sentence of the refusal."""
    import trl as library
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from engine.errors import EngineError
    from engine.huggingface import Trainer

    trl: Any = library
    versions: list[str] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            versions.append(httpx.get(f"{case.url}/weight_info").json()["weight_version"])

    prompts = [" ".join(str((7 * row + 3 * place) % 120 + 1) for place in range(3 + row % 3)) for row in range(32)]
    arguments = trl.GRPOConfig(
        output_dir=f"{case.folder}/out", per_device_train_batch_size=case.rows, gradient_accumulation_steps=2,
        num_generations=4, max_completion_length=8, max_steps=STEPS, learning_rate=1e-2, logging_steps=1, seed=7,
        save_strategy="no", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
        dataloader_pin_memory=False, use_vllm=True, vllm_mode="server",
    )  # fmt: skip
    Tuner: Any = type("Tuner", (Trainer, trl.GRPOTrainer), {})
    trainer = Tuner(
        model=AutoModelForCausalLM.from_pretrained(case.folder), args=arguments, reward_funcs=even_words,
        train_dataset=Dataset.from_list([{"prompt": each} for each in prompts]), callbacks=[Watch()],
        processing_class=AutoTokenizer.from_pretrained(case.folder),
        engine_config={**case.config, "weights_out": {"to": [{"vllm": case.url, "check": True}]}},
    )  # fmt: skip
    publish = trainer.vllm_generation.sync_weights

    def sync_weights() -> None:
        step = trainer.state.global_step + 1
        if step != STALE:
            publish()
        if step == RENAMED and trainer.is_world_process_zero():
            httpx.post(f"{case.url}/update_weight_version", json={"new_version": "99"}).raise_for_status()

    trainer.vllm_generation.sync_weights = sync_weights
    sentence = ""
    try:
        trainer.train()
    except EngineError as error:
        sentence = str(error)
    history = trainer.state.log_history
    logged = {key: [entry[name] for entry in history if name in entry] for key, name in LOGGED.items()}
    line(logged | {"versions": versions, "sentence": sentence, "prompts": len(trainer._logs["prompt"])})


def run_served(case: Served, ranks: int) -> list[dict[str, Any]]:
    """What each rank says."""
    quiet = ENVIRONMENT | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}
    with Launch(train_served, ranks, case, env=quiet) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    return [end.said[0] for end in ended]
