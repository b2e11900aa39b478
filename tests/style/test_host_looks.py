"""Only a person gets words that come from a look at the host's files.

`advise` asks for them. Programs and models read what the other faces answer, so no other module may ask; and
what explains a run without it must not be able to look.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

SOURCE = ROOT / "src/stockade"
#: Who may ask: the command line, a kept shell at the user's terminal, and the check of an agent's program
#: before a loop begins, which the user reads.
FOR_PEOPLE = {
    "cli/learn.py",
    "cli/pipe.py",
    "cli/run.py",
    "loop/recipes/recipe.py",
    "sandbox/attach_daemon.py",
}
#: What hands the option on, and what obeys it.
PASSING = {
    "pipeline/stage.py", "receipt/account.py", "runs/explain/ran_and_failed.py", "runs/finish.py",
    "runs/options.py", "runs/outcome.py", "sandbox/async_sandbox.py", "sandbox/sandbox.py",
}  # fmt: skip
#: What explains a run to programs and models.
PLAIN = ("runs/outcome.py", "runs/explain/seen_inside.py", "runs/explain/ran_and_failed.py")
#: The functions there that run only with `advise`.
LOOKING = ("_not_started", "_host_files", "_printed")
#: What may be called of `os`: functions of text, of numbers and of a status.
WITHOUT_LOOKING = {
    "os.path.basename", "os.path.join", "os.path.normpath", "os.path.relpath", "os.strerror",
    "os.WEXITSTATUS", "os.WIFEXITED", "os.WTERMSIG",
}  # fmt: skip


def names(tree: ast.AST) -> Iterator[str]:
    """Yield every name, attribute, parameter, keyword and text of a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                yield word
            case ast.keyword(arg=str(word)) | ast.Constant(value=str(word)):
                yield word


def test_only_faces_for_people_ask_for_a_look_at_the_host() -> None:
    asking = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "advise" in (text := path.read_text()) and "advise" in names(ast.parse(text))
    }
    assert asking == FOR_PEOPLE | PASSING


def test_the_words_for_programs_and_models_are_made_without_a_look_at_the_host() -> None:
    found = {(path, call) for path in PLAIN for call in _looks(SOURCE / path)}
    assert found == set()


def _looks(path: Path) -> Iterator[str]:
    """Yield the calls of a module that could look at files, and its imports of modules that do."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in LOOKING:
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            if call == "open" or (
                call.startswith(("os.", "shutil.", "Path")) and call not in WITHOUT_LOOKING
            ):
                yield call
        elif isinstance(node, ast.ImportFrom):
            words = {node.module, *(one.name for one in node.names)}
            yield from (
                str(word) for word in words if str(word).endswith(("not_started", "host_files", "printed"))
            )
