"""The rooms of the package, from the top down, and what each imports, which CONTRIBUTING.md shows.

python scripts/rooms.py           write the graph
python scripts/rooms.py --check   exit code 1 if it is stale

A room imports from rooms below it, never from one above, and never another room's underscored names. Imports
inside functions count; those under TYPE_CHECKING do not, nor does `import stockade` for annotations: public
signatures spell what lies above, or what a plain run does not load, as `stockade.Workspace`. That loads
nothing until a program asks for the types.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms: made by scripts/rooms.py -->", "<!-- end of rooms -->"

#: From the top down: each may import from those after it.
ROOMS = {
    "bench": "measurements against rivals, and the bars",
    "face": "`stockade` itself: the public names, loaded when they are used",
    "cli": "one module per command; `ui/` for parsing, output and terminals; `demo/`",
    "integrations": "faces for other programs: one module per framework, `mcp/`, and what writes settings",
    "server": "the HTTP face: lifecycle, relay, zygote, a supervisor for each sandbox and its endpoints",
    "client": "the Python client of that face",
    "images": "root file systems that sandboxes of the server can have instead of the host's",
    "loop": "unattended coding agents: work items, recipes, attempts, judge",
    "agents": "names, policies, switches, handlers",
    "pipeline": "stages, gather: commands and functions at once, connected by pipes of the kernel",
    "functions": "functions in sandboxes: packing, channel, executor, warm Python",
    "sandbox": "the objects that users hold: Sandbox, Process, Workspace, Pool, Spawner; delegation",
    "sessions": "a shell or an interpreter that serves many runs; `attach/` for kept ones",
    "observe": "explain and learn: what a program tried, which wall refused it, what would allow it",
    "runs": "one run from start to end: prepare, launch, evidence, supervise, outcome; the register",
    "egress": "what reaches the network: names, decoders, relay, resolver, records",
    "receipt": "the signed record of a run, the chain of them, verification",
    "backends": "policy to plan, one module per backend; `seccomp/`; `other_systems/`: plans only",
    "resolve": "a policy met with this machine: discovery, trust, paths, programs, toolchains",
    "workspace": "what changed: overlay, diff, commit, journal, merge, snapshots, files, hold-back",
    "host": "what the machine can do, found by doing it",
    "gate": "operations, client and build of the gate; `src/` is the C program",
    "policy": "what may be asked, as values: model, compare, TOML, profiles, the hold-back table",
    "state": "the state directory: layout, schema, upgrades; long lists on the disk",
    "linux": "descriptors, openat2, /proc, mounts, cgroup files, sockets; knows no policy",
    "vocabulary": "errors, controls, result, lazy: what every room speaks in",
    "inside": "apart: everything that runs behind the walls; imports nothing of ours",
}
#: Modules beside the rooms.
VOCABULARY = frozenset({"errors", "controls", "result", "lazy", "_version"})


class Import(NamedTuple):
    """One import of a name or module of the package, as the syntax tree has it."""

    importer: str
    line: int
    module: str
    #: The name taken from the module; empty for the module itself.
    name: str


def modules(sources: Path = SOURCES) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(sources.rglob("*.py")):
        parts = path.relative_to(sources).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """The room that a module lies in."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return "face"
    return "vocabulary" if parts[1] in VOCABULARY else parts[1]


def imports(module: str, tree: ast.AST, known: dict[str, Path]) -> Iterator[Import]:
    """The imports of our own modules, in functions too; what is only for type checkers is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for other in node.orelse:
                yield from imports(module, ast.Module([other], []), known)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "stockade":
                    yield Import(module, node.lineno, alias.name, "")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stockade":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield Import(module, node.lineno, inner, "")
                else:
                    yield Import(module, node.lineno, node.module or "", alias.name)
        else:
            yield from imports(module, node, known)


def only_annotates(tree: ast.AST) -> bool:
    """Whether a module names `stockade` in annotations alone, which are evaluated on request."""
    nodes = list(ast.walk(tree))
    annotations = [getattr(node, field, None) for node in nodes for field in ("annotation", "returns")]
    inside = {name for one in annotations if one is not None for name in ast.walk(one)}
    return all(node in inside for node in nodes if isinstance(node, ast.Name) and node.id == "stockade")


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """The syntax tree of a source file, parsed once."""
    return ast.parse(path.read_text())


@functools.cache
def every_import() -> tuple[Import, ...]:
    """All imports of our own modules in the package, but for what only annotations use."""
    known, found = modules(), list[Import]()
    for name, path in known.items():
        tree = syntax_tree(path)
        free = only_annotates(tree)
        found += [one for one in imports(name, tree, known) if one.module != "stockade" or not free]
    return tuple(found)


def is_upward(one: Import) -> bool:
    """Whether an import leads to a room that is not below its own; the rooms inside import nothing."""
    order = list(ROOMS)
    here, there = room_of(one.importer), room_of(one.module)
    if here == there:
        return False
    return here == "inside" or order.index(there) <= order.index(here)


def graph() -> str:
    """What each room imports, a line for each room, from the top down."""
    below: dict[str, set[str]] = {name: set() for name in ROOMS}
    for one in every_import():
        below[room_of(one.importer)].add(room_of(one.module))
    lines = [BEGIN, "", "| room | holds | imports |", "|---|---|---|"]
    for name, holds in ROOMS.items():
        used = [other for other in ROOMS if other in below[name] - {name, "vocabulary"}]
        shown = f"`{name}/`" if name not in ("face", "vocabulary") else f"*{name}*"
        lines.append(f"| {shown} | {holds} | {', '.join(used) or 'none'} |")
    return "\n".join([*lines, "", END])


def main(arguments: Sequence[str]) -> int:
    """Write the graph, or say whether it is stale."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + graph() + after
    if "--check" in arguments:
        return int(wanted != page)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
