"""One import name in every way of installing, and no quarrel with other packages called ``kernels``."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from engine.planning.cost_model.hardware import known_gpus

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip builds it, from a copy so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        source, target = ROOT / name, copy / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.readlink(source)) if source.is_symlink() else target.write_bytes(source.read_bytes())
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(copy),
    ]
    subprocess.run(pip, check=True)
    return next(folder.glob("*.whl"))


def test_wheel_has_one_top_level_name_and_real_files(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"engine"}
    for folder in (
        "parallel/grid.py",
        "zero/layout.py",
        "kernels/optim/update_rules.py",
        "kernels/optim/host_update.cpp",
        "kernels/tuned.json",
        "kernels/overlap.json",
        "launch/cli.py",
        "config/__init__.py",
        "kernels/tuned.json",
        *(f"planning/cost_model/gpus/{gpu}.json" for gpu in known_gpus()),
    ):
        assert f"engine/{folder}" in names


def test_installed_wheel_imports_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import engine.parallel.grid as g, engine.launch.cli, json; print(json.dumps(g.__file__))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert json.loads(done.stdout).startswith(str(tmp_path))


@pytest.mark.long
def test_another_package_called_kernels_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("name = 'the other one'\n")
    code = "import kernels, engine.kernels.optim.update_rules; print(kernels.name)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "the other one"


def test_a_file_has_one_module_name() -> None:
    code = "import engine.parallel.grid as a, sys; sys.exit(any(n.split('.')[0] == 'parallel' for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_package_names_its_version_and_its_modules_without_importing_torch() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    code = f"""
import sys, engine
assert engine.__version__ == {version!r}
assert "torch" not in sys.modules and {{"data", "verify", "__version__"}} <= set(dir(engine))
assert callable(engine.verify.verify) and engine.data.__name__ == "engine.data"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
