"""The rules of the house that a machine can check: direction of imports, one door, sizes, one import name."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "parallel", "zero", "engine", "launch")
"""Lowest first; a layer imports from itself and from those before it."""

# Bottom of the tower: errors carry no knowledge, and the layers below have to raise them.
EVERYWHERE = {"engine.errors"}
TORCH_FREE = (
    "engine", "engine.config", "engine.config.json_schema", "engine.data.corpus", "engine.errors",
    "engine.launch.checkpoint_command", "engine.launch.cli", "engine.launch.run_folder",
    "engine.launch.schedule_command", "engine.launch.train_options", "engine.parallel.comm.traffic",
    "engine.parallel.grid", "engine.parallel.pipeline.partition.auto_schedule",
    "engine.parallel.pipeline.report.perfetto", "engine.parallel.pipeline.report.svg",
    "engine.parallel.pipeline.report.text",
    "engine.parallel.pipeline.schedule.dependencies", "engine.parallel.pipeline.schedule.kinds",
    "engine.parallel.pipeline.schedule.simulate", "engine.parallel.pipeline.schedule.validate", "engine.zero.layout",
)  # fmt: skip

# (file, function) -> why it is longer, or has more parameters, than the ceiling.
LONG_FUNCTIONS: dict[tuple[str, str], str] = {}
MANY_PARAMETERS = {
    ("engine/api.py", "initialize"): "the public signature is fixed by DESIGN section 4",
    ("engine/verify.py", "verify"): "takes what initialize takes",
}
DATA_OF_OPTIMIZERS = ("zero/optim/flat_optimizers.py",)
"""Constructors with torch's own signatures."""

# (file, function) -> who hears of any exception that this function neither raises nor keeps for a later raise.
BROAD_HANDLERS = {
    ("engine/checkpoint/resume.py", "agreed"): "every rank raises the sentence that it makes of it",
    ("engine/checkpoint/resume.py", "start_weights"): "every rank raises the sentence that it makes of it",
    ("engine/checkpoint/save.py", "_on_first"): "every rank is sent the sentence, and raises it",
    ("engine/checkpoint/save.py", "_report"): "rank 0 is sent the sentence, and every rank raises it",
    ("engine/planning/analysis.py", "_order_of_calls"): "a note of the plan",
    ("engine/planning/profile_calls.py", "run"): "a note of the plan",
    ("engine/planning/tensor_plan_proof.py", "_prove_unit"): "a note of the plan",
    ("engine/planning/tensor_plan_search.py", "_material_of_shorter"): "a note of the plan",
    ("engine/planning/tensor_plan_search.py", "take"): "a reason in the table of the tensor plan",
    ("parallel/kernel_injection/equivalence.py", "agrees"): "nobody: a trial asks whether a module can be replaced",
    ("parallel/tensor/auto/equivalence.py", "_prove"): "the verdict, which is a reason in the table, or a PlanError",
    ("parallel/tensor/layers/planned_traffic.py", "_replay"): "a note of the plan",
}


def sources() -> Iterator[Path]:
    """Every product file, by its real path."""
    for layer in LAYERS:
        folder = ROOT / layer
        yield from sorted(path for path in folder.rglob("*.py") if not path.is_symlink())
    yield ROOT / "train.py"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def product_files() -> list[Path]:
    """Sources without those reached a second time through the links in engine/."""
    return [path for path in sources() if path.resolve() == path.absolute()]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "engine":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "engine"


@pytest.mark.parametrize("path", product_files(), ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    if own == "train.py":
        return
    for module in imports(path):
        layer = layer_of(module)
        if layer is None or module in EVERYWHERE or any(module.startswith(f"{name}.") for name in EVERYWHERE):
            continue
        assert LAYERS.index(layer) <= LAYERS.index(own), f"{name_of(path)} ({own}) imports {module} ({layer})"


@pytest.mark.parametrize("path", product_files(), ids=name_of)
def test_only_comm_talks_to_torch_distributed(path: Path) -> None:
    if name_of(path) not in ("parallel/comm/torch_backend.py", "parallel/comm/host_group.py", "parallel/comm/world.py"):
        distributed = [module for module in imports(path) if module.startswith("torch.distributed")]
        assert not distributed, f"{name_of(path)} imports {distributed}; go through parallel/comm"


@pytest.mark.parametrize("path", product_files(), ids=name_of)
def test_bare_folder_names_are_no_packages(path: Path) -> None:
    bare = [module for module in imports(path) if module.split(".")[0] in ("parallel", "zero", "kernels", "launch")]
    assert not bare, f"{name_of(path)} imports {bare}; there is one import name, engine"


@pytest.mark.parametrize("path", [*product_files(), *sorted((ROOT / "benchmarks").rglob("*.py"))], ids=name_of)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400, f"{name_of(path)} has {len(text.splitlines())} lines, the ceiling is 400"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_kernel(node):
            continue
        key = (name_of(path), node.name)
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        assert length <= 50 or key in LONG_FUNCTIONS, f"{key} has {length} lines, the ceiling is 50"
        given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in given if name not in ("self", "cls")])
        excused = key in MANY_PARAMETERS or name_of(path) in DATA_OF_OPTIMIZERS
        assert count <= 6 or excused, f"{key} has {count} parameters, the ceiling is 6"


@pytest.mark.parametrize("path", product_files(), ids=name_of)
def test_no_exception_is_swallowed_in_silence(path: Path) -> None:
    """What catches any exception raises, keeps it for a later raise, or is listed with whoever hears of it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = {(name_of(path), name) for name, handler in handlers(tree) if is_broad(handler) and not is_heard(handler)}
    assert silent == {key for key in BROAD_HANDLERS if key[0] == name_of(path)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            assert not {"Exception", "BaseException"} & set(map(ast.unparse, node.args)), (
                f"{name_of(path)}:{node.lineno}"
            )


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
    return bool(marks & {"jit", "custom_op", "register_fake"})


@pytest.mark.parametrize("path", product_files(), ids=name_of)
def test_public_things_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name_of(path)}: {node.name} has no docstring"


def test_no_forbidden_names() -> None:
    words = {"util", "utils", "helper", "helpers", "manager", "common", "misc"}
    for path in product_files():
        assert not words & set(path.stem.lower().split("_")), name_of(path)


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


@pytest.mark.parametrize("path", product_files(), ids=name_of)
def test_imports_do_not_read_the_environment(path: Path) -> None:
    """Whoever imports the engine early, as the tests' fork server does, gets the same engine."""
    for node in run_at_import(ast.parse(path.read_text(encoding="utf-8"))):
        word = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert word not in ("environ", "getenv"), f"{name_of(path)} reads the environment when it is imported"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_imports_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0, module


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
