"""The rules of the house that a machine can check: direction of imports, one door, sizes, names, one import name."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from engine.launch.raised_errors import PUBLIC
from tests.structure import (
    LAYERS,
    ROOT,
    Source,
    Structure,
    cycles,
    last_name,
    path_of,
    product,
    raised_by_the_product,
    source_of,
)  # fmt: skip

PAGE = ROOT / "docs" / "internals" / "architecture.md"
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"

ORDERS: Mapping[str, tuple[str, ...]] = {
    "engine": (
        "errors", "config", "optim", "precision", "program", "planning", "step", "integrity", "checkpoint", "web",
        "outer", "weights_out", "reporting", "watchdog", "build", "dry_run", "data", "models", "generation",
        "engine_parts", "loop", "named_state", "engine", "api", "verify", "serving", "sweep", "hosting",
        "deepspeed", "huggingface", "lightning",
    ),
    "engine.checkpoint": (
        "format", "memory_folder", "memory_checkpoints", "contents", "full_state", "huggingface", "load", "foreign",
        "published_keys", "run_state", "weights_transfer", "resume", "save", "writer", "coordinator",
    ),
    "engine.zero": (
        "layout", "wire_formats", "flat_buckets", "offload", "gather", "reduce", "optim", "state",
    ),
    "engine.parallel": (
        "data_digits", "grid", "shard_table", "comm", "model", "trace", "tensor", "context", "activation_checkpointing",
        "experts", "kernel_injection", "pipeline",
    ),
    "engine.parallel.tensor": (
        "tp_axis", "collectives", "deferred_linear", "global_tensor", "logits", "overlap", "plan", "layers",
        "thread_ranks", "auto",
    ),
    "engine.parallel.pipeline": ("schedule", "partition", "runtime", "report"),
    "engine.kernels": (
        "device", "dispatch", "overlap", "optim", "gpu", "ops", "codecs",
    ),
    "engine.planning.cost_model": (
        "workload", "layout", "hardware", "attention_rates", "links", "expert_exchange", "expert_forms", "estimate",
        "search", "longest",
    ),
    "engine.launch.jobs": (
        "request", "bound_cores", "torchrun", "hostfile", "guard", "probe", "schedulers", "remote", "ssh",
        "launch_command",
    ),
}  # fmt: skip
"""The rooms of a folder, lowest first; a room imports from those before it."""

# Bottom of the tower: errors carry no knowledge, and the layers below have to raise them.
EVERYWHERE = "engine.errors"
TORCH_FREE = (
    "engine", "engine.config", "engine.config.json_schema", "engine.data.corpus", "engine.errors",
    "engine.launch.checkpoint_command", "engine.launch.cli",
    "engine.launch.doctor.doctor_command", "engine.launch.doctor.examined", "engine.launch.jobs.launch_command",
    "engine.launch.planner.plan_command", "engine.launch.planner.plan_request", "engine.launch.run_folder",
    "engine.launch.schedule_command", "engine.parallel.comm.traffic",
    "engine.parallel.grid", "engine.parallel.pipeline.partition.auto_schedule",
    "engine.parallel.pipeline.report.perfetto", "engine.parallel.pipeline.report.svg",
    "engine.parallel.pipeline.report.text",
    "engine.parallel.pipeline.schedule.dependencies", "engine.parallel.pipeline.schedule.kinds",
    "engine.parallel.pipeline.schedule.simulate", "engine.parallel.pipeline.schedule.validate",
    "engine.planning.cost_model.workload", "engine.planning.cost_model.links",
    "engine.planning.cost_model.search", "engine.planning.cost_model.expert_exchange", "engine.zero.layout",
)  # fmt: skip

# (file, function) -> why it is longer, or has more parameters, than the ceiling.
LONG_FUNCTIONS: dict[tuple[str, str], str] = {}
MANY_PARAMETERS = {
    ("engine/api.py", "initialize"): "the public signature is fixed by DESIGN section 4",
    ("engine/verify.py", "verify"): "takes what initialize takes",
}
DATA_OF_OPTIMIZERS = ("zero/optim/flat_optimizers.py",)
"""Constructors with torch's own signatures."""
DEEPSPEED = "engine/deepspeed/"
"""Names and signatures there are DeepSpeed's."""
DISTRIBUTED = (
    "parallel/comm/torch_backend.py", "parallel/comm/host_group.py", "parallel/comm/world.py",
    f"{DEEPSPEED}comm.py",
)  # fmt: skip
"""The files that may import torch.distributed; the last one shows its functions as deepspeed.comm."""
DEVICE_DOOR = "kernels/device.py"
NAMES_OF_DEVICES = {
    "kernels/gpu/": "kernels that Triton compiles",
    "launch/doctor/": "examines NVIDIA's driver and NCCL by their names",
    "parallel/tensor/global_tensor/global_tensor.py": "answers is_cuda as a tensor does",
    "parallel/context/recurrence/placed.py": "answers is_cuda as a tensor does",
    "parallel/trace/recorder.py": "answers is_cuda, is_xpu and the like as a tensor does",
    "parallel/tensor/layers/lazy_head.py": "asks for the meta device, which is none that computes",
}
"""Where types of devices have names, beside the door, and why."""
CRUMBS = {
    "engine.deepspeed.checkpointing": "deepspeed.checkpointing, a door",
    "engine.deepspeed.integrations": "the hook of transformers, a door",
    "engine.deepspeed.ops.adagrad": "deepspeed.ops.adagrad, a door",
    "engine.deepspeed.ops.adam": "deepspeed.ops.adam, a door",
    "engine.deepspeed.runtime.config": "deepspeed.runtime.config, a door",
    "engine.deepspeed.runtime.zero.partition_parameters": "deepspeed.runtime.zero.partition_parameters, a door",
    "engine.zero.gather.outside_calls": "calls beside the passes of a step, apart from those",
    "engine.parallel.pipeline.report.measured": "the report of a run; its importer is the engine itself",
}
"""Files of fewer than 60 lines with one importer, and why they do not live in it."""
STAND_TWICE = {
    "squared_norm": "a public operator and the launch of its GPU kernel",
    "initialize": "DeepSpeed's name too",
    "FusedAdam": "DeepSpeed's name too",
    "main": "the entry of a command, and of DeepSpeed's script beside a checkpoint",
    "Accelerator": "the name of accelerate's class, which it replaces in a script; and what computes",
    "Strategy": "the name of Lightning's class, which it replaces in a script; and a plan for a block",
}
"""Names that stand twice, and why."""
FILES_IN_A_FOLDER = 16

# (file, function) -> who hears of any exception that this function neither raises nor keeps for a later raise.
BROAD_HANDLERS = {
    ("engine/outer/exchange.py", "_work_on"): "the next poll, which raises it on all ranks",
    ("engine/outer/exchange.py", "_renew"): "the next request of the training, if it lasts",
    ("engine/outer/exchange.py", "run"): "whoever reads the future",
    ("engine/outer/exchange.py", "close"): "nobody: the store may end before its sites",
    ("engine/web/hosted.py", "run"): "whoever has opened the service, when it ends",
    ("engine/serving/executor.py", "run"): "the client whose command it is, and the log",
    ("engine/checkpoint/save.py", "_on_first"): "every rank is sent the sentence, and raises it",
    ("engine/checkpoint/save.py", "_report"): "rank 0 is sent the sentence, and every rank raises it",
    ("engine/planning/analysis.py", "_order_of_calls"): "a note of the plan",
    ("launch/planner/planned_model.py", "counted_costs"): "a line of the plan",
    ("launch/planner/planned_model.py", "called"): "nobody: every list of blocks counts as one that is called",
    ("launch/planner/planned_model.py", "_sample"): "nobody: the closed form stays, and the count of the plan says it",
    ("engine/planning/profile_calls.py", "run"): "a note of the plan",
    ("engine/planning/step_time/traced_workload.py", "_counted"): "the engine's own trace, which raises it again",
    (
        "engine/planning/materialized_block.py",
        "run",
    ): "the block runs again, with the weights whole that its code has read",
    ("engine/planning/tensor_plan_search.py", "_try_length"): "a note of the plan",
    ("parallel/tensor/auto/search.py", "reference_inside"): "the group is tried in the whole block",
    ("parallel/context/rows/rowwise_proof.py", "_tried"): "a module that raises in a trial runs on global tensors",
    ("parallel/experts/proof.py", "_answer"): "the reason why the experts of a list are not shared",
    ("parallel/experts/proof.py", "_can_copy"): "the reason why experts are not shared",
    ("parallel/experts/proof.py", "_call"): "the reason why the experts of a module are not shared",
    ("parallel/experts/proof.py", "_run"): "the reason why the experts of a list are not shared",
    ("parallel/experts/router_bias.py", "routing"): "nobody: the next width is tried",
    ("parallel/experts/router_choice.py", "_call"): "the reason why the choice of a router is not found",
    ("parallel/comm/agreement.py", "raise_together"): "every rank raises the sentence that it makes of it",
    ("parallel/kernel_injection/equivalence.py", "agrees"): "nobody: a trial asks whether a module can be replaced",
    ("parallel/tensor/auto/equivalence.py", "_prove"): "the verdict, which is a reason in the table, or a PlanError",
    ("parallel/tensor/layers/planned_traffic.py", "_replay"): "a note of the plan",
}


@pytest.fixture(scope="module")
def structure() -> Structure:
    return product()


@pytest.fixture(scope="module")
def sources(structure: Structure) -> list[Source]:
    """Every product file: to parse and walk them all takes two seconds, so the tests of this file share it."""
    trees = {path: structure.trees[module] for module, path in structure.files.items()}
    return [source_of(path, trees.get(path)) for path in product_files()]


def product_files() -> list[Path]:
    """Every product file, by its real path."""
    return [*product().files.values(), ROOT / "train.py"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.name}:{node.lineno} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "engine"


def test_imports_go_down_only(structure: Structure) -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in structure.imports.items()
        for target in targets
        if target != EVERYWHERE and LAYERS.index(layer_of(target)) > LAYERS.index(layer_of(module))
    ]
    assert not upward


@pytest.mark.parametrize("folder", ORDERS)
def test_rooms_of_a_folder_import_downward(structure: Structure, folder: str) -> None:
    order = ORDERS[folder]
    rooms = structure.rooms(folder)
    assert set(rooms) == set(order), "every room has its place in the order"
    upward = [f"{room} -> {other}" for room in order for other in rooms[room] if order.index(other) > order.index(room)]
    assert not upward


def test_no_cycle_of_files_or_folders(structure: Structure) -> None:
    assert not cycles(structure.imports)
    assert not cycles(structure.folders)


def test_no_public_name_stands_twice(structure: Structure) -> None:
    twice = {name: homes for name, homes in structure.duplicate_names().items() if name not in STAND_TWICE}
    assert not twice


def test_a_small_file_has_several_importers(structure: Structure) -> None:
    assert sorted(structure.crumbs()) == sorted(CRUMBS)


def test_folders_stay_small() -> None:
    folders: dict[str, int] = {}
    for path in product_files()[:-1]:
        folders[name_of(path.parent)] = folders.get(name_of(path.parent), 0) + 1
    assert not {folder: count for folder, count in folders.items() if count > FILES_IN_A_FOLDER}


def test_every_package_is_listed_for_the_wheel(structure: Structure) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    folders = {module.rpartition(".")[0] for module in structure.files if module not in structure.packages}
    assert not [folder for folder in sorted(folders | structure.packages) if f'"{folder}"' not in text]


def test_only_comm_talks_to_torch_distributed(sources: list[Source]) -> None:
    offenders = [
        f"{source.name} imports {module}; go through parallel/comm"
        for source in sources
        if source.name not in DISTRIBUTED
        for module in imports(source)
        if module.startswith("torch.distributed")
    ]
    assert not offenders


def test_only_the_door_knows_types_of_devices(sources: list[Source]) -> None:
    """``is_host(device)`` and the functions beside it, so that another accelerator is a row of a table."""
    found = {
        f"{source.name}:{getattr(node, 'lineno', 0)}"
        for source in sources
        if source.name != DEVICE_DOOR and not source.name.startswith(tuple(NAMES_OF_DEVICES))
        for node in source.nodes
        if names_a_device(node)
    }
    assert found == set()


def names_a_device(node: ast.AST) -> bool:
    """Whether this is ``torch.cuda``, ``tensor.is_cuda``, the name of a type, or a comparison of one."""
    if isinstance(node, ast.Constant):
        return node.value in ("cuda", "xpu", "nccl")
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.Eq | ast.NotEq) and ast.unparse(node.left).endswith("device.type")
    return isinstance(node, ast.Attribute) and (
        node.attr in ("is_cuda", "is_xpu") or ast.unparse(node) in ("torch.cuda", "torch.xpu", "torch.accelerator")
    )


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("torch.cuda.synchronize()", True), ("x.is_cuda", True), ("torch.device('cuda', 1)", True),
        ("device.type == 'cpu'", True), ("is_host(device)", False), ("device.type", False),
    ],
)  # fmt: skip
def test_what_counts_as_a_name_of_a_device(code: str, named: bool) -> None:
    assert any(map(names_a_device, ast.walk(ast.parse(code)))) == named


CHOOSES_GRIDS = (
    "parallel/grid.py", "parallel/data_digits.py", "engine/config/", "engine/planning/", "launch/planner/",
    "launch/verifier/",
)  # fmt: skip
"""Code that gives the axes their sizes, and therefore names them."""


def test_data_axes_go_by_their_meaning(sources: list[Source]) -> None:
    """``grid.rows``, ``copies``, ``sharding`` and the like, so that another axis is a row of a table."""
    found = {
        f"{source.name}:{getattr(node, 'lineno', 0)}"
        for source in sources
        if not source.name.startswith(CHOOSES_GRIDS)
        for node in source.nodes
        if (isinstance(node, ast.Attribute) and node.attr == "dp")
        or (isinstance(node, ast.Constant) and node.value in ("dp", "dp_shard", "dp_replicate"))
    }
    assert found == set()


def test_bare_folder_names_are_no_packages(sources: list[Source]) -> None:
    bare = [
        f"{source.name} imports {module}; there is one import name, engine"
        for source in sources
        for module in imports(source)
        if module.split(".")[0] in ("parallel", "zero", "kernels", "launch")
    ]
    assert not bare


def test_files_and_functions_stay_small(sources: list[Source]) -> None:
    offenders: list[str] = []
    for source in (*sources, *map(source_of, sorted((ROOT / "benchmarks").rglob("*.py")))):
        lines = len((ROOT / source.name).read_text(encoding="utf-8").splitlines())
        if lines > 500:
            offenders.append(f"{source.name} has {lines} lines, the ceiling is 500")
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                offenders += too_large(source.name, node)
    assert not offenders


def too_large(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    key = (name, node.name)
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length > 50 and key not in LONG_FUNCTIONS:
        yield f"{key} has {length} lines, the ceiling is 50"
    given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    count = len([name for name in given if name not in ("self", "cls")])
    if count > 6 and key not in MANY_PARAMETERS and name not in DATA_OF_OPTIMIZERS and not name.startswith(DEEPSPEED):
        yield f"{key} has {count} parameters, the ceiling is 6"


def test_no_exception_is_swallowed_in_silence(sources: list[Source]) -> None:
    """What catches any exception raises, keeps it for a later raise, or is listed with whoever hears of it."""
    silent = set()
    for name, tree, nodes in sources:
        silent |= {
            (name, function) for function, handler in handlers(tree) if is_broad(handler) and not is_heard(handler)
        }
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        quiet = [call for call in calls if last_name(call.func).endswith("suppress")]
        kinds = {ast.unparse(kind) for call in quiet for kind in call.args}
        assert not kinds & {"Exception", "BaseException"}, name
    assert silent == set(BROAD_HANDLERS)


def handlers(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.ExceptHandler]]:
    """Each handler, with the innermost function around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ExceptHandler):
            yield function, node
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from handlers(node, node.name if inside else function)  # type: ignore[attr-defined]


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether it catches any exception."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def is_heard(handler: ast.ExceptHandler) -> bool:
    """Whether it ends by a raise, or gives the exception itself a name that outlives it."""
    last, kept = handler.body[-1], list[ast.expr | None]()
    for node in handler.body:
        if isinstance(node, ast.Assign | ast.Return):
            kept += node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    return isinstance(last, ast.Raise) or any(isinstance(e, ast.Name) and e.id == handler.name for e in kept)


@pytest.mark.parametrize(
    ("body", "silent"),
    [
        ("pass", True),
        ("print(error)", True),
        ("if error.args: raise", True),
        ("problem = str(error)", True),
        ("problem = error", False),
        ("made, self.problem = None, error", False),
        ("return error", False),
        ("tidy(); raise", False),
        ("raise ValueError() from error", False),
    ],
)
def test_what_counts_as_swallowed(body: str, silent: bool) -> None:
    for kind in ("Exception", "BaseException", "(OSError, Exception)"):
        tree = ast.parse(f"def work():\n try: pass\n except {kind} as error:\n  {body}")
        ((name, handler),) = handlers(tree)
        assert name == "work" and is_broad(handler) and is_heard(handler) is not silent
    ((_, bare),) = handlers(ast.parse("try: pass\nexcept: pass"))
    ((_, narrow),) = handlers(ast.parse("try: pass\nexcept OSError: pass"))
    assert is_broad(bare) and not is_broad(narrow)


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Code for a GPU, or the schema of an operator: its parameters are tensors, and no object can stand for several."""
    marks = {ast.unparse(mark).split("(")[0].rpartition(".")[2] for mark in node.decorator_list}
    return bool(marks & {"jit", "fused_operator", "register_fake"})


def test_public_things_have_docstrings(sources: list[Source]) -> None:
    bare: list[str] = []
    for name, tree, _ in sources:
        if not ast.get_docstring(tree):
            bare.append(name)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                bare += [] if ast.get_docstring(node) else [f"{name}: {node.name}"]
    assert not bare


def test_no_forbidden_names() -> None:
    words = {"util", "utils", "helper", "helpers", "manager", "common", "misc"}
    found = [name_of(path) for path in product_files() if words & set(path.stem.lower().split("_"))]
    assert found == [f"{DEEPSPEED}runtime/utils.py", f"{DEEPSPEED}runtime/zero/utils.py"]


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What of ``node`` an import evaluates: of functions only decorators and defaults."""
    yield node
    children: Iterable[ast.AST | None] = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children = (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults)
    elif isinstance(node, ast.Lambda):
        children = (*node.args.defaults, *node.args.kw_defaults)
    for child in children:
        if child is not None:
            yield from run_at_import(child)


def test_imports_do_not_read_the_environment(sources: list[Source]) -> None:
    """Whoever imports the engine early, as the tests' fork server does, gets the same engine."""
    readers: list[str] = []
    for name, tree, _ in sources:
        for node in run_at_import(tree):
            word = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if word in ("environ", "getenv"):
                readers.append(f"{name}:{getattr(node, 'lineno', 0)}")
    assert not readers


def test_modules_import_without_torch() -> None:
    code = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if "torch" in sys.modules:
        sys.exit(f"{module} imports torch")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *TORCH_FREE], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_configuration_and_grid_work_without_torch() -> None:
    code = """
import sys, engine
from engine.parallel.grid import Grid
config = engine.load_config({"train_batch_size": 8, "parallel": {"data": 2, "tensor": 2}}, 4)
assert config.micro == 4 and Grid(dp=2, tp=2, rank=3).coord().dp == 1
try:
    engine.load_config({"train_batch": 8})
except engine.ConfigError as error:
    assert "train_batch_size" in str(error)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# -------------------------------------------------------------------------------------- docs/internals/architecture.md


def test_the_glossary_has_every_folder(structure: Structure) -> None:
    text = GLOSSARY.read_text(encoding="utf-8").partition("## Folders")[2].partition("\n## ")[0]
    folders = {structure.folder(module) for module in structure.files} | {"engine.kernels"}
    cells = re.findall(r"^\| (`[\w/]+`(?:, `[\w/]+`)*) \|", text, re.MULTILINE)
    listed = [folder for cell in cells for folder in cell.replace("`", "").split(", ")]
    assert sorted(listed) == sorted(map(path_of, folders))


def test_the_page_has_the_orders_and_the_layers_of_patches() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Folders")[0]
    orders = dict(re.findall(r"^\| `([\w/]+)` \| (.+) \|$", text, re.MULTILINE))
    assert orders == {path_of(folder): ", ".join(order) for folder, order in ORDERS.items()}
    layers = re.findall(
        r"^    ([A-Z0-9]+) = \d+$", (ROOT / "parallel/model/forward_patch.py").read_text(), re.MULTILINE
    )
    assert re.findall(r"^\| ([A-Z0-9]+) \|", text, re.MULTILINE) == [layer for layer in layers if layer != "PARAMETERS"]


def test_errors_are_sentences() -> None:
    """They end with a full stop, or with a value or a command that does."""
    errors = [error for error in raised_by_the_product() if error.kind in PUBLIC]
    unfinished = [error.text for error in errors if error.text[-1] not in ".?})\"'"]
    assert len(errors) > 300 and not unfinished
