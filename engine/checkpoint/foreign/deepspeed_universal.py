"""A universal folder of DeepSpeed's: one file a tensor, in full.

zero/NAME/fp32.pt, exp_avg.pt, ...    {"param": tensor}
zero/NAME/step.pt                     updates of that parameter; not written from ZeRO 3
zero/optimizer_state.pt               loss scaler, options of the groups
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.foreign.deepspeed_zero import Shapes
from engine.checkpoint.foreign.foreign_step import ParameterGroup, described_group, spanned
from engine.checkpoint.foreign.torch_file import read_torch_file, tensor_of, value_dict, value_list
from engine.checkpoint.format.file_spans import SpannedTensor
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.pieces import Part
from engine.checkpoint.format.safetensors_file import TensorKind

COMMON = "optimizer_state.pt"


@dataclass(frozen=True, slots=True)
class UniversalFolder:
    """Trained parameters, their moments, and the optimizer."""

    tensors: Mapping[str, SpannedTensor]
    groups: list[ParameterGroup]
    loss_scaler: Any


def read_universal(files: Files, folder: Path, shapes: Shapes, others: set[str]) -> UniversalFolder:
    """Read the folder ``zero``.

    Args:
        shapes: trained parameters by group, from the model's file; where it has none, all in the folder are one group.
        others: names of buffers and second names of tied parameters, which have folders too.
    """
    known = {name: shape for group in shapes for name, shape in group.items()}
    groups = [list(group) for group in shapes] or [[name for name in files.names(folder) if name not in others]]
    tensors: dict[str, SpannedTensor] = {}
    steps: dict[str, Any] = {}
    for name in [name for group in groups for name in group]:
        for file in files.names(folder / name) if files.is_folder(folder / name) else ():
            value = read_torch_file(files, folder / name / file) if file.endswith(".pt") else None
            if file == "step.pt":
                steps[name] = value
            elif value is not None:
                held = tensor_of(value.get("param") if isinstance(value, dict) else value, f"{name}/{file}")
                family = "param" if file == "fp32.pt" else file.removesuffix(".pt")
                kind = TensorKind(held.kind.dtype, known.get(name, held.kind.shape))  # from ZeRO 3 they are flat
                tensors[f"{family}/{name}"] = spanned(kind, [held.span(Part(kind.shape).whole(), 0, name)])
    common = _common(files, folder)
    inner = value_dict(common.get("optimizer_state_dict") or {}, COMMON)
    options = value_list(common.get("param_groups") or inner.get("param_groups") or [], COMMON)
    states = value_dict(inner.get("state") or {}, COMMON)
    step = next((value_dict(state, COMMON).get("step") for state in states.values()), 0)
    described = [
        described_group(
            [name for name in group if f"param/{name}" in tensors],
            value_dict(options[index], COMMON) if index < len(options) else {},
            {"step": next((steps[name] for name in group if name in steps), step)},
            files,
        )
        for index, group in enumerate(groups)
    ]
    return UniversalFolder(tensors, described, common.get("loss_scaler"))


def _common(files: Files, folder: Path) -> dict[Any, Any]:
    return value_dict(read_torch_file(files, folder / COMMON), COMMON) if COMMON in files.names(folder) else {}
