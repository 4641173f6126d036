"""Short seeded runs, recorded to the bit: proof that a refactoring changes nothing.

    python -m tests.recorded record RUNS.json --checkpoints FOLDER     # before
    python -m tests.recorded compare RUNS.json --checkpoints FOLDER    # after: each difference, and exit code 1

Of each run: losses, norms and rates as hexadecimal digits, digests of weights, optimizer, generators and output, what
was planned, sent and held by each rank, the banner, the files of a checkpoint, and a step from that checkpoint on
its own grid and on another one. ``compare`` loads the checkpoints of ``record``. ``--only GLOB``: some of the runs.

Equal bits are promised on one machine only: another processor or torch rounds otherwise.
"""

import argparse
import hashlib
import json
import logging
import os
import platform
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from torch import Tensor

import engine
from tests.ranks import RankError, run_ranks, start_server
from tests.recorded_runs import LOADS, RUNS, STARTED, STEPS, WEIGHTS, Config, Run, ranks_of
from tests.resumed_runs import own_rows

SAVED_AFTER = 2
"""Steps."""
REPORTED = (
    "step", "loss", "weight", "grad_norm", "lr", "tokens", "bytes_sent", "skipped", "nonfinite", "loss_scale",
)  # fmt: skip
"""Of a step: everything but times and the memory of the process."""
Record = dict[str, Any]

# ------------------------------------------------------------------------------------------------ bodies of a rank


def train(name: str, folder: str | None) -> Record:
    """All steps and an evaluation; a checkpoint goes into ``folder``."""
    run, banner = RUNS[name], _Banner()
    batches = run.batches()
    with _initialize(run, run.settings(), batches[0]) as eng:
        record: Record = {"steps": []}
        for number, batch in enumerate(batches[:STEPS], start=1):
            record["steps"].append(_step(run, eng, batch))
            if run.edited and number == 1:
                _edit(eng)
            if folder is not None and number == SAVED_AFTER:
                record |= _save(eng, Path(folder))
        report, output = eng.eval_batch(own_rows(eng, batches[STEPS]), return_output=True)
        record |= {"evaluated": _reported(report), "output": exact(output), "banner": banner.lines}
        return record | _state(eng) | _budget(eng)


def go_on(name: str, folder: str, load: str) -> Record:
    """A step from a checkpoint; ``load``: see ``LOADS``."""
    run = RUNS[name]
    batches, step = run.batches(), str(next(Path(folder).glob("step-*")))
    with _initialize(run, run.settings(load, step), batches[0]) as eng:
        seen = _Seen()
        eng.register_for_checkpointing(seen=seen)
        client = None if load == STARTED else eng.load_checkpoint(step, load_module_only=load == WEIGHTS)
        reported = _step(run, eng, batches[SAVED_AFTER])
        return {"client state": client, "registered": seen.batches, "step": reported} | _state(eng)


def _initialize(run: Run, config: Config, batch: Any) -> engine.Engine:
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    example = _rows(batch, 0, config["train_micro_batch_size_per_gpu"]) if run.example else None
    return engine.initialize(run.build, config, run.loss_fn, example, **run.given)


def _step(run: Run, eng: engine.Engine, batch: Any) -> Record:
    share, micro = own_rows(eng, batch), eng.config.micro
    if run.feed == "whole":
        return _reported(eng.train_batch(share))
    parts = [_rows(share, index * micro, micro) for index in range(eng.config.accumulation)]
    if run.feed == "iterator":
        return _reported(eng.train_batch(iter(parts)))
    report = None
    for part in parts:
        output = eng(part)
        eng.backward(run.loss_fn(output, part) if run.loss_fn else output.loss)
        report = eng.step()
    return _reported(report)


def _rows(batch: Any, start: int, count: int) -> Any:
    if isinstance(batch, dict):
        return {name: tensor[start : start + count] for name, tensor in batch.items()}
    return tuple(tensor[start : start + count] for tensor in batch)


def _edit(eng: engine.Engine) -> None:
    """Write all weights in place, as a user may."""
    with eng.full_parameters() as parameters, torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(0.75)


def _save(eng: engine.Engine, folder: Path) -> Record:
    """Save, and export for Hugging Face; digests of the files on rank 0."""
    seen = _Seen()
    seen.batches = SAVED_AFTER
    eng.register_for_checkpointing(seen=seen)
    step = eng.save_checkpoint(folder, {"after": SAVED_AFTER, "share": 0.1}).wait()
    eng.save_pretrained(folder / "exported")
    if eng.grid.rank:
        return {}
    return {"checkpoint": _digests(step), "exported": _digests(folder / "exported")}


class _Seen:
    """Something of the user's that is saved too."""

    batches = 0

    def state_dict(self) -> Record:
        return {"batches": self.batches}

    def load_state_dict(self, state: Record) -> None:
        self.batches = state["batches"]


class _Banner(logging.Handler):
    """Keeps what the engine says of its plan; other messages tell of times and folders."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("trine")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("trine\n"):
            self.lines += text.splitlines()


# ------------------------------------------------------------------------------------------------ what it leaves


def exact(value: Any) -> Any:
    """The same in JSON, to the bit: floats as hexadecimal digits, tensors as a digest."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().clone(memory_format=torch.contiguous_format)  # numpy() fixes a storage's size
        text = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
        return hashlib.sha256(text + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): exact(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [exact(each) for each in value]
    return value if isinstance(value, int | str | None) else f"a {type(value).__name__}"


def _reported(report: Any) -> Record:
    return {name: exact(getattr(report, name)) for name in REPORTED}


def _state(eng: engine.Engine) -> Record:
    """Weights, on rank 0 those of the whole model; this rank's optimizer, buffers, generator and counters."""
    with eng.full_parameters() as parameters:
        held = exact(parameters)
    return {
        "weights": exact(eng.full_state_dict()),
        "parameters": held,
        "optimizer": exact(eng.optimizer.state_dict()),
        "buffers": exact({name: buffer for name, buffer in eng.module.named_buffers() if not buffer.is_meta}),
        "generator": exact(torch.get_rng_state()),
        "counters": exact({"steps": eng.step_count, "skipped": eng.skipped_steps, "lr": eng.lr}),
    }


def _budget(eng: engine.Engine) -> Record:
    """What this rank should hold and send, and what it does."""
    plan = eng.plan.rank(eng.grid.rank)
    state = [value for values in eng.optimizer.state.values() for value in values.values()]
    return {
        "planned": {"parameters": plan.parameters, "state bytes": dict(plan.state_bytes)},
        "planned traffic": _traffic(plan.traffic),
        "sent": _traffic(eng.sent.rows()),
        "traffic report": eng.traffic_report().splitlines(),
        "held bytes": {"parameters": _bytes(list(eng.module.parameters())), "optimizer": _bytes(state)},
    }


def _traffic(rows: Any) -> Record:
    return {f"{row.axis} {row.label}": f"{row.bytes} bytes in {row.calls} calls" for row in rows}


def _bytes(values: list[Any]) -> int:
    tensors = [value for value in values if isinstance(value, Tensor) and not value.is_meta]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _digests(folder: Path) -> Record:
    """Of each file of a checkpoint but those that carry the name of the save; of each part of its manifest."""
    files = [path for part in ("model", "optim", "state", ".") for path in sorted((folder / part).glob("*"))]
    named = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if path.is_file()}
    parts: Record = json.loads(named.pop("manifest.json", b"{}"))
    for name in ("COMMIT", "checksums.safetensors"):
        named.pop(name, None)
    for name in ("attempt", "checksum", "signature"):
        parts.pop(name, None)
    for name in ("time", "versions"):
        parts.get("info", {}).pop(name, None)
    texts = {f"manifest.json, {key}": json.dumps(part, sort_keys=True).encode() for key, part in parts.items()}
    return {name: hashlib.sha256(content).hexdigest() for name, content in (named | texts).items()}


# ------------------------------------------------------------------------------------------------ all runs


def perform(name: str, stored: Path, into: Path) -> Record:
    """A run, its checkpoint written into ``into``, and all that is done with the one in ``stored``."""
    run, record = RUNS[name], {}
    saves = run.other is not None
    record["trained"] = _on_ranks(train, run.settings(), name, str(into / name) if saves else None)
    for load in LOADS if saves else ():
        record[load] = _on_ranks(go_on, run.settings(load), name, str(stored / name), load)
    return record


def _on_ranks(body: Callable[..., Record], config: Config, *arguments: Any) -> Record:
    """By rank; or why there is nothing."""
    try:
        records = run_ranks(body, ranks_of(config), *arguments, seconds=900.0)
    except RankError as error:
        return {"error": str(error).splitlines()}
    return {f"rank {rank}": record for rank, record in enumerate(records)}


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Fields that are not equal, and what they were and are."""
    if isinstance(before, dict) and isinstance(after, dict):
        pairs = [(key, before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in {**before, **after}]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(str(index), *pair) for index, pair in enumerate(zip(before, after, strict=True))]
    else:
        if before != after:
            yield path, f"{_shown(before)} -> {_shown(after)}"
        return
    for key, old, new in pairs:
        yield from differences(old, new, f"{path} / {key}" if path else str(key))


_ABSENT = "(absent)"


def _shown(value: Any) -> str:
    if isinstance(value, str) and "0x" in value and "p" in value:
        return f"{value} ({float.fromhex(value):.9g})"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def machine() -> Record:
    """What bits depend on beside the code."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    models = sorted({line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")})
    return {"python": platform.python_version(), "torch": str(torch.__version__), "processor": models}


def record(file: Path, checkpoints: Path, names: list[str]) -> int:
    """Write ``file``; 1 if a run fails. With ``--only`` other runs in it stay."""
    runs: Record = json.loads(file.read_text())["runs"] if file.exists() and len(names) < len(RUNS) else {}
    failed = 0
    for name in names:
        shutil.rmtree(checkpoints / name, ignore_errors=True)
        started = time.perf_counter()
        runs[name] = perform(name, checkpoints, checkpoints)
        errors = [f"{part}: {lines['error'][-1]}" for part, lines in runs[name].items() if "error" in lines]
        failed += bool(errors)
        print(f"{name:<40} {time.perf_counter() - started:6.1f} s  {'; '.join(errors)}", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
    return int(failed > 0)


def compare(file: Path, checkpoints: Path, names: list[str]) -> int:
    """Print what differs from ``file``; 1 if anything does."""
    before = json.loads(file.read_text())
    for field, text in differences(before["machine"], machine()):
        print(f"another machine, bits may differ: {field}: {text}")
    different = 0
    for name in names:
        started = time.perf_counter()
        with TemporaryDirectory() as folder:
            after = perform(name, checkpoints, Path(folder))
        found = differences(before["runs"].get(name, _ABSENT), json.loads(json.dumps(after)))
        unsteady = RUNS[name].unsteady
        lines = [f"{field}: {text}" for field, text in found if not any(fnmatch(field, each) for each in unsteady)]
        different += bool(lines)
        verdict = f"{len(lines)} differences" if lines else "equal"
        print(f"{name:<40} {time.perf_counter() - started:6.1f} s  {verdict}", flush=True)
        print("".join(f"    {name}: {line}\n" for line in lines), end="", flush=True)
    print(f"{len(names) - different} of {len(names)} runs are equal to the bit")
    return int(different > 0)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.recorded", description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="JSON, written by record")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder, written by record")
    parser.add_argument("--only", default="*", metavar="GLOB", help="names of runs")
    given = parser.parse_args()
    names = [name for name in RUNS if fnmatch(name, given.only)]
    if not names:
        parser.error(f"no run is named like {given.only}; there are {', '.join(RUNS)}")
    print(f"engine of {Path(engine.__file__).resolve().parents[1]}", flush=True)
    os.environ["TRITON_INTERPRET"] = "1"  # as in all tests: without a GPU kernels are interpreted
    start_server()
    action = record if given.action == "record" else compare
    return action(given.file, given.checkpoints.resolve(), names)


if __name__ == "__main__":
    sys.exit(main())
