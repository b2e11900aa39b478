"""The rooms of the package: arrows point down, and nobody reaches into another room's private names."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.paths import ROOT


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooms", ROOT / "scripts" / "rooms.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rooms"] = module
    spec.loader.exec_module(module)
    return module


rooms = script()


def test_every_module_lies_in_a_room() -> None:
    assert {rooms.room_of(module) for module in rooms.modules()} == set(rooms.ROOMS)


def test_no_import_goes_up() -> None:
    assert [one for one in rooms.every_import() if rooms.is_upward(one)] == []


def test_no_room_imports_private_names_of_another() -> None:
    private = [
        one
        for one in rooms.every_import()
        if rooms.room_of(one.importer) != rooms.room_of(one.module)
        and (one.name or one.module.rpartition(".")[2]).startswith("_")
        and not (one.name or one.module.rpartition(".")[2]).endswith("_version__")
        and one.module != "stockade._version"
    ]
    assert private == []


def test_no_room_uses_private_members_of_anothers_objects() -> None:
    trees = {module: rooms.syntax_tree(path) for module, path in rooms.modules().items()}
    own: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            else:
                continue
            own.setdefault(name, set()).add(rooms.room_of(module))
    # What namedtuples and the standard library call private and mean for everybody; os.environ has `_data`.
    public = {"_replace", "_asdict", "_exit", "_fields", "_fields_", "_run_exitfuncs", "_data"}
    reached = [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in public
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and node.attr in own
        and rooms.room_of(module) not in own[node.attr]
    ]
    assert reached == []


def test_what_runs_inside_needs_the_standard_library_alone() -> None:
    # What else is used where it is installed: without it a module does its work in another way.
    known = sys.stdlib_module_names | {"stockade", "IPython", "matplotlib", "traitlets", "cryptography"}
    for module, path in rooms.modules().items():
        if rooms.room_of(module) != "inside":
            continue
        for node in ast.walk(rooms.syntax_tree(path)):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert {name.split(".")[0] for name in names} <= known, module


def test_the_graph_in_contributing_is_the_real_one() -> None:
    assert rooms.main(["--check"]) == 0, "run python scripts/rooms.py"


@pytest.mark.parametrize("upward", ["from stockade.cli import output", "import stockade.sandbox.sandbox"])
def test_control_an_import_inside_a_function_is_seen(upward: str) -> None:
    tree = ast.parse(f"def f():\n    {upward}\n")
    (found,) = rooms.imports("stockade.linux.user", tree, rooms.modules())
    assert rooms.is_upward(found)


def test_control_an_import_for_type_checkers_is_not() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    from stockade.cli import output\n")
    assert list(rooms.imports("stockade.linux.user", tree, rooms.modules())) == []


@pytest.mark.parametrize(
    ("code", "free"),
    [
        ("import stockade\ndef f(box: stockade.Sandbox) -> list[stockade.Result]: ...", True),
        ("import stockade\nclass C:\n    box: stockade.Sandbox | None = None", True),
        ("import stockade\ndef f() -> stockade.Result:\n    return stockade.run(['true'])", False),
    ],
)
def test_control_a_name_that_only_annotates_is_told_from_one_that_is_used(code: str, free: bool) -> None:
    assert rooms.only_annotates(ast.parse(code)) is free


def test_no_class_is_named_by_a_participle_and_no_two_share_a_name() -> None:
    found: dict[str, list[str]] = {}
    for module, path in rooms.modules().items():
        for node in rooms.syntax_tree(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
    endings = ("ed", "ing", "ept", "old", "ade", "iven", "aken", "een")
    assert [name for name in found if name.endswith(endings) and name not in NOUNS] == []


#: Nouns that end like participles.
NOUNS = frozenset(
    {
        "DemoFinding",
        "Finding",
        "Grade",
        "Keyring",
        "Landing",
        "Listing",
        "LoopWarning",
        "RunEnding",
        "Spending",
        "Screening",
        "Setting",
    }
)


def test_paths_in_the_rooms_are_folders() -> None:
    for name in rooms.ROOMS:
        if name not in ("face", "vocabulary"):
            assert Path(rooms.SOURCES, "stockade", name, "__init__.py").is_file()
