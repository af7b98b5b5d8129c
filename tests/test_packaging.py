"""What is installed: all three rooms, from a wheel and from a source distribution, and one command."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("agents", "events", "orchestrator")

BUILD_SDIST = "from setuptools import build_meta; print(build_meta.build_sdist('{out}'))"


def python(*args: object, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel_of(source: Path, out: Path) -> Path:
    """A wheel built from `source` with what is installed here, nothing fetched."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", out]
    python("-m", "pip", "wheel", source, *options, cwd=out)
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is tracked or would be, so that a build leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("checkout") / "relight"
    names = ["pyproject.toml", "README.md", "LICENSE", "src", *ROOMS]
    copy.mkdir()
    subprocess.run(["cp", "-a", *names, copy], cwd=ROOT, check=True)
    for leftover in [*copy.rglob("__pycache__"), *copy.rglob("*.egg-info")]:
        subprocess.run(["rm", "-r", leftover], check=True)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(checkout, tmp_path_factory.mktemp("wheel"))


def modules(checkout: Path) -> set[str]:
    """Every module of ours, as it shall stand in a wheel, and the dashboard's page."""
    ours = {"relight/__init__.py", "relight/py.typed"}
    found = [path for room in ROOMS for path in (checkout / room).rglob("*.py")]
    found += (checkout / "orchestrator" / "dashboard" / "page").iterdir()
    return ours | {f"relight/{path.relative_to(checkout)}" for path in found}


def test_the_wheel_holds_every_module_and_nothing_else(checkout: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == modules(checkout)


def test_the_wheel_says_its_licence_and_its_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.partition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(texts["METADATA"]).decode()
        commands = archive.read(texts["entry_points.txt"]).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "licenses/LICENSE" in texts
    assert "relight = relight.orchestrator.cli.main:main" in commands


def test_a_wheel_built_from_the_source_distribution_is_the_same(
    checkout: Path, wheel: Path, tmp_path: Path
) -> None:
    name = python("-c", BUILD_SDIST.format(out=tmp_path), cwd=checkout).split()[-1]
    (tmp_path / "sdist").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / name, "-C", tmp_path / "sdist"], check=True)
    [unpacked] = (tmp_path / "sdist").iterdir()
    out = tmp_path / "wheel"
    out.mkdir()
    with zipfile.ZipFile(wheel_of(unpacked, out)) as ours, zipfile.ZipFile(wheel) as theirs:
        assert sorted(ours.namelist()) == sorted(theirs.namelist())


def test_an_installed_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """The installed copy is what is imported, and brings no top-level name but its own."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    pip = ["-m", "pip", "--python", place / "bin" / "python", "install"]
    python(*pip, "--no-deps", "--no-index", "--quiet", wheel, cwd=tmp_path)
    code = (
        "import importlib.util as u, relight.events.errors, sys\n"
        "print(relight.__file__)\n"
        "assert not [n for n in ('agents', 'events', 'orchestrator') if u.find_spec(n)]"
    )
    said = subprocess.run(
        [place / "bin" / "python", "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith(str(place))
    version = subprocess.run(
        [place / "bin" / "relight", "--version"], capture_output=True, text=True, check=True
    )
    assert version.stdout.startswith("relight ")


def test_import_relight_costs_less_than_100_ms(tmp_path: Path) -> None:
    """Over a bare interpreter, by its own count of the time that imports take."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import relight"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    [line] = [line for line in done.stderr.splitlines() if line.endswith("| relight")]
    assert int(line.split("|")[1]) < 100_000


def test_the_compose_file_is_accepted() -> None:
    """Where docker-compose is installed; CI brings Debian's."""
    try:
        done = subprocess.run(
            ["docker-compose", "config", "--quiet"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return
    assert done.returncode == 0, done.stderr
