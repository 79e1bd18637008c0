"""The wheel: built once from a copy of the checkout, looked into, installed, imported.

The three top folders reach the package through symlinks and hold no __init__.py, so that nothing
but the wheel itself shows whether a user gets them.
"""

import email
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from graphengine.doctor.host import TESTED

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    *("pyproject.toml", "README.md", "LICENSE"),
    *("graphengine", "kernels", "capture", "profiles", "tests", "tools"),
)


def run(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without isolation (so without a network) in a copy, which stays clean."""
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "build", "-w", "-n", "-x", "-o", str(out)], source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def metadata_file(wheel: Path, name: str) -> str:
    archive = zipfile.ZipFile(wheel)
    (path,) = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
    return archive.read(path).decode()


def test_one_top_level_name(wheel: Path, names: set[str]) -> None:
    """Bug: a top-level `kernels` is installed and shadows Hugging Face's package of that name."""
    assert metadata_file(wheel, "top_level.txt").split() == ["graphengine"]
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"graphengine"}


@pytest.mark.parametrize("folder", ["", "models/", "kernels/", "capture/", "profiles/"])
def test_every_module_is_in_the_wheel(names: set[str], folder: str) -> None:
    """Bug: a folder that arrives through a symlink is left out, and only the checkout works."""
    real = ROOT / "graphengine" / folder  # follows the symlink
    expected = {f"graphengine/{folder}{path.name}" for path in real.glob("*.py")}
    assert expected
    assert expected <= names


def test_assets_are_in_the_wheel(names: set[str]) -> None:
    """Bug: the bundled pair, a preset or py.typed works in the checkout alone."""
    package = ROOT / "graphengine"
    files = [
        path
        for folder in ("assets", "presets")
        for path in (package / folder).rglob("*")
        if path.is_file() and path.suffix not in (".md", ".py", ".pyc")
    ]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    assert expected <= names
    assert "graphengine/py.typed" in names


def test_no_tests_results_or_caches_in_the_wheel(names: set[str]) -> None:
    """Bug: stored results, documents of developers, tests or caches are shipped."""
    unwanted = ("tests/", "tools/", "/results/", "__pycache__", "profiles/README", "profiles/LOG")
    assert [name for name in names if any(part in name for part in unwanted)] == []
    assert [name for name in names if name.endswith((".md", ".nsys-rep", ".sqlite"))] == []


def test_metadata(wheel: Path) -> None:
    """Bug: plain `torch` (any version) is required, a triton without bound, or no licence given."""
    found = email.message_from_string(metadata_file(wheel, "METADATA"))
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == "<3.15,>=3.11"
    requires = found.get_all("Requires-Dist") or []
    assert "torch<2.16,>=2.11" in requires
    assert {"cuda", "dev", "test"} <= set(found.get_all("Provides-Extra") or [])
    scripts = metadata_file(wheel, "entry_points.txt")
    assert "graphengine = graphengine.__main__:main" in scripts
    assert metadata_file(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_what_is_installed_is_what_is_tested() -> None:
    """Bug: pip installs a version that nobody has run, or doctor calls a tested one untested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    for package, ends in TESTED.items():
        if package == "python":
            bounds = project["requires-python"]
        else:
            (bounds,) = (line for line in listed if re.match(rf"{package}[<>=]", line))
        low, limit = (f"{'.'.join(map(str, end))}" for end in ends)
        assert f">={low}" in bounds
        last = {"flashinfer-python": "<=0.7.2.post1"}  # a post-release
        assert last.get(package, f"<{limit}") in bounds.partition(";")[0].split(",")[1]


def test_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    """Bug: the package imports only where the checkout is the working folder."""
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    run([*pip, "--target", str(target), str(wheel)], elsewhere)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import graphengine\n"
        "from graphengine import names; from graphengine.profiles import result_schema\n"
        "import graphengine.kernels.accept\n"
        "print(graphengine.__file__, names.__file__, graphengine.kernels.accept.__file__)\n"
        "print(graphengine.__version__)"
    )
    lines = run([sys.executable, "-c", code, str(target)], elsewhere).splitlines()
    assert all(path.startswith(str(target)) for path in lines[0].split()), lines
    assert f"-{lines[1]}-" in wheel.name


def test_declared_extras_cover_what_this_file_needs() -> None:
    """Bug: the wheel cannot be built in a fresh environment, since `build` or setuptools lacks."""
    for package in ("build", "setuptools", "wheel"):
        assert importlib.metadata.version(package)
