"""``deepspeed.utils.zero_to_fp32``: full fp32 weights from a checkpoint of Trine or DeepSpeed, in one process.

As a script: ``python zero_to_fp32.py CHECKPOINTS OUTPUT [-t TAG]``.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.checkpoint.foreign import open_checkpoint
from engine.checkpoint.format.filesystem import Files, follow_umask, replace_file, resolved
from engine.checkpoint.format.host_image import as_bytes, torch_dtype
from engine.checkpoint.format.pieces import Part
from engine.checkpoint.format.step_folders import steps_of
from engine.checkpoint.format.step_reader import ReadRequest
from engine.errors import CheckpointError

SCRIPT = "zero_to_fp32.py"
"""File name of the script that is written next to a checkpoint."""
TEXT = '''"""Write the full fp32 weights of a checkpoint: python zero_to_fp32.py CHECKPOINTS OUTPUT [-t TAG]."""

from engine.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """Returns the full parameters and buffers of the checkpoint ``checkpoint_dir/tag`` by name; floating-point ones in
    fp32.

    ``tag=None``: the checkpoint that the file ``checkpoint_dir/latest`` names. ``lazy_mode`` has no effect.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    reader = open_checkpoint(Files(), _folder(Path(checkpoint_dir), tag), optimizer=False)
    trained = {name for group in reader.manifest.optimizer.get("groups", ()) for name in group["params"]}
    state: dict[str, Tensor] = {}
    for name, kind in reader.kinds.items():
        family, _, leaf = name.partition("/")
        left = family == "param" and exclude_frozen_parameters and leaf not in trained
        if family not in ("param", "buffer") or left:
            continue
        stored = f"master/{leaf}" if f"master/{leaf}" in reader.kinds else name
        values = torch.empty(kind.shape, dtype=torch_dtype(reader.kinds[stored]))
        reader.read([ReadRequest(stored, Part(tuple(kind.shape)).whole(), as_bytes(values))] if values.numel() else [])
        state[leaf] = values.float() if values.is_floating_point() else values
    state |= {other: state[name] for other, name in reader.manifest.aliases.items() if name in state}
    return state


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Moves ``model`` to the CPU, loads the fp32 weights of the checkpoint ``checkpoint_dir/tag`` into it, and returns
    it.

    ``model`` must not be sharded; parameters that the checkpoint lacks do not change. ``tag=None``: the checkpoint that
    the file ``checkpoint_dir/latest`` names.
    """
    model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str, output_dir: str, max_shard_size: str = "5GB", safe_serialization: bool = True,
    tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Writes the full fp32 weights of the checkpoint ``checkpoint_dir/tag`` into ``output_dir/model.safetensors``.

    ``tag=None``: the checkpoint that the file ``checkpoint_dir/latest`` names. ``max_shard_size`` and
    ``safe_serialization`` have no effect.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(state, folder / "model.safetensors")


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes ``weights`` into the safetensors file ``path``, with the permissions that the umask gives."""
    save_file({name: value.clone() for name, value in weights.items()}, path)  # tied weights share memory
    follow_umask(path)


def write_script(save_dir: Path) -> None:
    """Writes the script ``zero_to_fp32.py`` into the folder ``save_dir``, as DeepSpeed does."""
    replace_file(Files(), save_dir / SCRIPT, TEXT.encode())


def _folder(given: Path, tag: str | None) -> Path:
    """Returns the checkpoint folder of a tag; None: of the tag that ``latest`` names."""
    hint = given / "latest"
    if tag is None and hint.is_file():
        tag = hint.read_text(encoding="utf-8").strip()
    found = resolved(given / tag if tag is not None else given)
    if not found.is_dir():
        raise CheckpointError(f"{found} is no folder; pass the folder of the checkpoints, and a tag inside it.")
    return next(reversed(steps_of(Files(), found)), found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line of ``zero_to_fp32.py``, which writes a checkpoint's fp32 weights into one safetensors file.

    ``arguments=None``: the arguments of this process.
    """
    parser = argparse.ArgumentParser(description="write the full fp32 weights of a checkpoint")
    parser.add_argument("checkpoint_dir", help="folder with the file latest")
    parser.add_argument("output_dir", help="folder for model.safetensors")
    parser.add_argument("-t", "--tag", default=None, help="checkpoint in it; default: the one named by latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    for option in ("--max_shard_size", "--safe_serialization", "-d", "--debug"):
        parser.add_argument(option, nargs="?", help="accepted, has no effect")
    given = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        given.checkpoint_dir,
        given.output_dir,
        tag=given.tag,
        exclude_frozen_parameters=given.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
