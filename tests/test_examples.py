"""Every script of docs/examples: it is short, runs on its grids and prints the same losses on each."""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launches import Launch, Line
from tests.warm_python import warm_torchrun

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/examples"
DEEPSPEED_PAGE = ROOT / "docs/start/from_deepspeed.md"
QUIET = {"TRINE_QUIET": "1", "TQDM_DISABLE": "1"}
EXACT = 1e-5
"""Largest relative difference of a loss between two grids in fp32."""


@dataclass(frozen=True)
class Example:
    """A script with its configurations, and the command that the index page gives."""

    script: str
    command: tuple[str, ...]
    """Words of the command: torchrun, its options, the script, the configuration and further arguments."""
    configs: Mapping[str, str]
    """File name -> JSON."""

    @property
    def file(self) -> str:
        return next(word for word in self.command if word.endswith(".py"))

    def arguments(self, config: str, steps: int = 500) -> list[str]:
        """Words behind the script, with another configuration and another number of steps."""
        given = self.command[self.command.index(self.file) + 2 :]
        return [config, *(str(steps) if word == "500" else word for word in given)]


def examples() -> dict[str, Example]:
    """Name -> example, from the folders and the commands of the index page."""
    found = {}
    for line in re.findall(r"```bash\n(.*?)\n```", (FOLDER / "index.md").read_text(encoding="utf-8")):
        command = tuple(shlex.split(line))
        name = next(word for word in command if word.endswith(".py")).removesuffix(".py")
        configs = {file.name: file.read_text(encoding="utf-8") for file in (FOLDER / name).glob("*.json")}
        found[name] = Example((FOLDER / name / f"{name}.py").read_text(encoding="utf-8"), command, configs)
    return found


EXAMPLES = examples()


@dataclass(frozen=True)
class Printed:
    """What a run has printed, and where it ran."""

    text: str
    folder: Path

    @property
    def losses(self) -> dict[int, float]:
        """Loss of each step; the validation loss stands at step 0."""
        found = re.findall(r"^(?:step (\d+)|validation) loss ([\d.]+)$", self.text, re.MULTILINE)
        assert len(found) == len(self.text.splitlines()), self.text
        return {int(step or 0): float(loss) for step, loss in found}

    def falls(self) -> bool:
        """Whether the last two losses are below the first two."""
        by_step = [loss for step, loss in self.losses.items() if step]
        return len(by_step) >= 4 and max(by_step[-2:]) < min(by_step[:2])


def run_as_rank(line: Line, script: str, arguments: list[str], folder: str) -> None:
    """What torchrun's process does on a rank: the script as ``__main__`` in the user's folder."""
    os.chdir(folder)
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    line(printed.getvalue())


def copy_out(example: Example, folder: Path, every: int = 100) -> None:
    """Copy script and configurations, with ``every`` steps between checkpoints."""
    (folder / example.file).write_text(example.script)
    for name, text in example.configs.items():
        (folder / name).write_text(text.replace('"every": 100', f'"every": {every}'))


def start(name: str, config: str, folder: Path, steps: int = 500, every: int = 100) -> Printed:
    """Run the example of this name in ``folder`` on the ranks of its command."""
    example = EXAMPLES[name]
    copy_out(example, folder, every)
    ranks = int(example.command[example.command.index("--nproc_per_node") + 1])
    arguments = example.arguments(config, steps)
    with Launch(run_as_rank, ranks, example.file, arguments, str(folder), env=QUIET) as job:
        ended = job.end(180)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    first, *others = (end.said[0] for end in ended)
    assert not any(others), "only rank 0 prints"
    return Printed(first, folder)


def write_inputs(line: Line, folder: str) -> None:
    """A random Llama with a tokenizer, questions with answers, and text."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    here, text = Path(folder), (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    wrapper: Any = PreTrainedTokenizerFast
    wrapper(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(here / "MODEL")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(here / "MODEL")
    pairs = [{"prompt": f"Twice {number} is", "answer": f" {2 * number}."} for number in range(32)]
    (here / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    (here / "text.txt").write_text(text[:2500])


def load_folders(line: Line, *folders: str) -> None:
    """Say what transformers finds in Hugging Face folders: keys that lack, number of layers, sum of the weights."""
    from transformers import AutoModelForCausalLM

    for folder in folders:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        model, info = loaded
        lacks = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
        line((lacks, model.config.num_hidden_layers, sum(float(p.abs().sum()) for p in model.parameters())))


def in_a_process(function: Any, *arguments: str) -> list[Any]:
    """What ``function`` says in a process that has imported transformers already."""
    with Launch(function, 1, *arguments, env=QUIET) as job:
        (ended,) = job.end(120)
    assert ended.code == 0, ended.error
    return ended.said


class Runs:
    """Each script on each grid once; several tests look at the same run."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._inputs: Path | None = None
        self._done: dict[tuple[str, str], Printed] = {}

    @property
    def inputs(self) -> Path:
        """The folder of what the scripts are given: MODEL, pairs.jsonl and text.txt."""
        if self._inputs is None:
            self._inputs = self._factory.mktemp("inputs")
            in_a_process(write_inputs, str(self._inputs))
        return self._inputs

    def __call__(self, name: str, config: str) -> Printed:
        if (name, config) not in self._done:
            folder = self._factory.mktemp(f"{name}-{config}")
            for word in set(EXAMPLES[name].command) & {"MODEL", "pairs.jsonl", "text.txt"}:
                (folder / word).symlink_to(self.inputs / word)
            self._done[name, config] = start(name, config, folder)
        return self._done[name, config]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def assert_same(left: Mapping[int, float], right: Mapping[int, float]) -> None:
    """Losses by step; they are printed with six digits behind the point."""
    assert left.keys() == right.keys()
    for step, loss in left.items():
        assert loss == pytest.approx(right[step], rel=EXACT, abs=1e-6), (step, left, right)


def test_every_folder_has_a_command_and_a_link() -> None:
    page = (FOLDER / "index.md").read_text(encoding="utf-8")
    folders = {folder.name for folder in FOLDER.iterdir() if folder.is_dir()}
    assert folders == set(EXAMPLES) and all(f"]({name}/{name}.py)" in page for name in folders)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_script_is_short_and_its_command_names_its_files(name: str) -> None:
    example = EXAMPLES[name]
    lines = example.script.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 120
    compile(example.script, example.file, "exec")
    named = {word for word in example.command if word.endswith(".json")}
    assert named <= set(example.configs) and len(set(example.configs) - {"teacher.json"}) >= 2


def test_the_examples_show_all_axes() -> None:
    asked = [json.loads(text) for example in EXAMPLES.values() for text in example.configs.values()]
    axes = {axis for config in asked for axis, size in config.get("parallel", {}).items() if size == 2}
    stages = {config["zero_optimization"]["stage"] for config in asked if "zero_optimization" in config}
    assert axes == {"tensor", "pipeline"} and stages == {2, 3}
    assert any("parallel" not in config and "zero_optimization" not in config for config in asked), "dp alone"


@pytest.mark.parametrize("then", ["zero2.json", pytest.param("tp2.json", marks=pytest.mark.long)])
def test_nanogpt_goes_on_on_another_grid(then: str, tmp_path: Path, warm_python: str) -> None:
    """Begun by the real torchrun, it goes on on another grid as if nothing had happened."""
    for place in ("whole", "broken"):
        (tmp_path / place / "FOLDER").mkdir(parents=True)
        for file in ("README.md", "engine/engine.py", "engine/api.py", "engine/verify.py"):
            (tmp_path / place / "FOLDER" / Path(file).name).write_bytes((ROOT / file).read_bytes())
    example, broken = EXAMPLES["nanogpt"], tmp_path / "broken"
    copy_out(example, broken, every=3)
    command = [*warm_torchrun(warm_python), *example.command[1:4], *example.arguments("pp2.json", steps=3)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=broken, env=environment, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr
    begun = Printed(done.stdout, broken)
    ended = start("nanogpt", then, broken, steps=6, every=3)
    whole = start("nanogpt", then, tmp_path / "whole", steps=6)
    assert whole.falls() and list(whole.losses) == [1, 2, 3, 4, 5, 6, 0]
    assert list(begun.losses) == [1, 2, 3, 0] and list(ended.losses) == [4, 5, 6, 0]
    steps = {step: loss for step, loss in begun.losses.items() if step} | ended.losses
    assert_same(steps, whole.losses)
    saved = broken / "runs/nanogpt"
    assert sorted(path.name for path in saved.glob("step-*")) == ["step-00000003", "step-00000006"]


@pytest.mark.long
def test_finetune_gives_a_folder_that_transformers_loads(runs: Runs) -> None:
    printed = runs("finetune", "zero3.json")
    assert printed.falls() and (printed.folder / "tuned/tokenizer.json").exists()
    (lacks, layers, after), (_, _, before) = in_a_process(
        load_folders, str(printed.folder / "tuned"), str(runs.inputs / "MODEL")
    )
    assert not lacks and layers == 4 and after != before


@pytest.mark.long
def test_lora_saves_adapters_alone(runs: Runs) -> None:
    from safetensors.numpy import load_file

    printed = runs("lora", "tp2.json")
    assert printed.falls()
    saved = load_file(printed.folder / "adapters.safetensors")
    wrapped = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    pairs = [f"{name}.lora_{half}.weight" for name in wrapped for half in ("down", "up")]
    assert sorted(saved) == sorted(f"model.layers.{layer}.{pair}" for layer in range(4) for pair in pairs)
    assert saved["model.layers.0.self_attn.q_proj.lora_down.weight"].shape == (4, 32)
    assert all(abs(weight).max() > 0 for weight in saved.values()), "what was zero at the start has learned"


def merged_logits(line: Line, base: str, adapters: str, merged: str) -> None:
    """Say how far the logits of a merged folder are from those of its base with adapters, and how far from the base."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids, load = torch.arange(40).view(2, 20), AutoModelForCausalLM.from_pretrained
    models: list[Any] = [load(base), load(merged), PeftModel.from_pretrained(load(base), adapters)]
    with torch.no_grad():
        plain, whole, tuned = (model.eval()(ids).logits for model in models)
    line((float((whole - tuned).abs().max()), float((plain - tuned).abs().max())))


@pytest.mark.long
def test_adapters_of_peft_are_saved_and_merged(runs: Runs) -> None:
    from safetensors.numpy import load_file

    printed = runs("peft_lora", "tp2.json")
    assert printed.falls()
    saved = load_file(printed.folder / "adapters/adapter_model.safetensors")
    assert len(saved) == 4 * 7 * 2, "a pair beside each of seven layers in four blocks"
    assert all(abs(weight).max() > 0 for weight in saved.values()), "what was zero at the start has learned"
    folders = (runs.inputs / "MODEL", printed.folder / "adapters", printed.folder / "adapters-merged")
    ((merged, learned),) = in_a_process(merged_logits, *map(str, folders))
    assert merged < 1e-5 and learned > 1e-2


@pytest.mark.long
def test_adapters_learn_over_a_base_in_four_bits(runs: Runs) -> None:
    printed, exact = runs("peft_lora", "qlora.json"), runs("peft_lora", "tp2.json")
    assert printed.falls() and printed.losses[1] != exact.losses[1]
    assert printed.losses[1] == pytest.approx(exact.losses[1], rel=0.05)
    folders = (runs.inputs / "MODEL", printed.folder / "adapters", printed.folder / "adapters-merged")
    ((merged, learned),) = in_a_process(merged_logits, *map(str, folders))
    assert merged < 1e-5 and learned > 1e-2


@pytest.mark.long
def test_unet_prints_the_same_losses_on_every_grid(runs: Runs) -> None:
    import torch

    printed = runs("unet", "dp2.json")
    assert printed.falls() and len(printed.losses) == 20
    assert_same(printed.losses, runs("unet", "pp2.json").losses)
    weights = torch.load(printed.folder / "unet.pt", weights_only=True)
    assert weights["mask.weight"].shape == (1, 16, 1, 1)


@pytest.mark.long
def test_a_student_learns_from_its_teacher(runs: Runs) -> None:
    printed = runs("distill", "pp2.json")
    assert printed.falls()
    ((lacks, layers, _),) = in_a_process(load_folders, str(printed.folder / "student"))
    assert not lacks and layers == 2


def test_a_deepspeed_script_prints_the_same_losses_in_both_stages(runs: Runs) -> None:
    printed = runs("signs", "zero2.json")
    assert printed.falls() and len(printed.losses) == 24
    assert_same(printed.losses, runs("signs", "zero3.json").losses)
    assert (printed.folder / "runs/signs/step-00000024/COMMIT").exists()


def test_tensor_ranks_of_the_deepspeed_script_read_the_same_rows(runs: Runs, tmp_path: Path) -> None:
    config = json.loads(EXAMPLES["signs"].configs["zero2.json"]) | {"zero_optimization": {"stage": 0}}
    config["parallel"] = {"tensor": 2, "tensor_plan": {"0": "column", "2": "row"}}
    (tmp_path / "tp2.json").write_text(json.dumps(config))
    losses, others = start("signs", "tp2.json", tmp_path).losses, runs("signs", "zero2.json").losses
    assert list(losses) == list(others)
    assert list(losses.values()) == pytest.approx(list(others.values()), rel=0.05)  # bf16


def test_the_diff_is_that_of_the_script() -> None:
    script = EXAMPLES["signs"].script.splitlines()
    (diff,) = re.findall(r"```diff\n(.*?)```", DEEPSPEED_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for line in diff.splitlines() if line != "@@"]
    gone = [line[1:] for line in lines if line.startswith("-")]
    stays = [line[1:] for line in lines if not line.startswith("-")]
    assert len(gone) >= 6 and not set(gone) & set(script)
    assert [line for line in script if line in stays] == stays, "in the order of the script"
    assert not [line for line in script if "deepspeed." in line]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "grids"),
    [
        ("finetune", ("zero3.json", "pp2.json")),
        ("lora", ("tp2.json", "zero2.json")),
        ("peft_lora", ("tp2.json", "zero3.json")),
        ("distill", ("pp2.json", "zero3.json")),
    ],
)
def test_losses_are_the_same_on_every_grid(name: str, grids: tuple[str, str], runs: Runs) -> None:
    assert_same(*(runs(name, grid).losses for grid in grids))
