"""What the README and docs/ tell a reader to type is typed here, and what they show is what comes out."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade import Policy, backends, host
from stockade.policy import Control, Limits, Reuse, Syscalls, WorkspaceRule
from stockade.policy.descriptions import CLAUSES, CONTROLS
from stockade.policy.model import Secret
from support.means import applies, need_program
from support.pages import Block, Session, blocks, steps
from support.paths import GATE_SOURCES, PACKAGE, ROOT

DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in DECISIONS),
]
#: Blocks that nobody can run here. A new one is written down on purpose, with its reason beside it.
NOT_RUN = 19
#: How many lines a page may have.
LONGEST = 300

SCRIPT = "#!/bin/sh\n"
NOTEBOOK = """{"cells": [
  {"cell_type": "markdown", "source": ["# Results"]},
  {"cell_type": "code", "source": ["answer = 6 * 7\\n", "open('figure.svg', 'w').close()"]},
  {"cell_type": "code", "source": ["print('the answer is', answer)"]}
]}"""
FILES = {
    "notes.txt": "my notes\n",
    "job.py": "import sys\nprint(sys.argv)\n",
    "report.py": "import os\nos.makedirs('out', exist_ok=True)\nopen('out/report.json', 'w').write('{}')\n",
    "input.bin": "\0",
    "src/main.c": "int main(void) { return 0; }\n",
    "Makefile": "check:\n\t@true\nformat:\n\t@echo formatted > src/formatted\n",
    ".env": "TOKEN=1\n",
    "keys/private": "key\n",
    "out/.keep": "",
    "install.sh": "echo installing; printf 'a\\nb\\n' > tool\n",
    "untrusted.ipynb": NOTEBOOK,
    "submission/main.py": "print(sum(map(int, input().split())))\n",
    "job": SCRIPT,
    "analyse": SCRIPT,
    "train": SCRIPT,
    "configure": f"{SCRIPT}echo \"configured$1\" > config.h\n",
    "refactor": f"{SCRIPT}echo refactored > notes.txt\n",
    "attempt": f"{SCRIPT}echo attempt > attempt-$1\n",
}  # fmt: skip


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


def known(page: Path) -> list[Block]:
    return list(blocks(page, title(page)))


@pytest.fixture
def session(tmp_path: Path) -> Session:
    for program in ("bash", "make"):
        need_program(program)
    home = tmp_path / "ada"
    for name, text in FILES.items():
        path = home / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith(SCRIPT) else 0o644)
    (home / "data").mkdir()
    shutil.copytree(home / "project", home / "elsewhere")
    kept = {
        name: os.environ[name] for name in ("PYTHONPATH", "STOCKADE_HOME", "TMPDIR") if name in os.environ
    }
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    # Unbuffered, so that both streams come in the order in which they were written.
    return Session(home, home / "project", kept | {"PATH": path, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"})


def has(name: str) -> bool:
    """Whether the host keeps a control, or has a program."""
    if name not in list(Control):
        return shutil.which(name) is not None
    machine = host.host()
    return any(backends.load(one).offers(machine)[Control(name)].available for one in backends.BACKENDS)


def is_run(block: Block) -> bool:
    needs, lacks = block.marks.get("needs"), block.marks.get("lacks")
    return "not run" not in block.marks and not (needs and not has(needs)) and not (lacks and has(lacks))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_what_the_page_says_is_so(page: Path, session: Session) -> None:
    faults = []
    with session:
        for block in filter(is_run, known(page)):
            faults += [f"{block}: {fault}" for fault in session.run(block)]
    assert not faults, "\n\n".join(faults)


CONDITIONAL = [block for page in PAGES for block in known(page) if block.marks.keys() & {"needs", "lacks"}]


@pytest.mark.parametrize("block", CONDITIONAL, ids=str)
def test_a_block_that_needs_something_of_the_host_is_run_or_counted(block: Block) -> None:
    needs, lacks = block.marks.get("needs"), block.marks.get("lacks")
    applies(is_run(block), f"{block} is for hosts {'with' if needs else 'without'} {needs or lacks}")


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left = [block for page in PAGES for block in known(page) if "not run" in block.marks]
    assert all(len(block.marks["not run"]) > 10 for block in left)
    assert len(left) == NOT_RUN, [f"{block}: {block.marks['not run']}" for block in left]


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_no_command_hides_outside_a_block(page: Path) -> None:
    """An indented block is run by nobody, so it must not look like something to type."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    hidden = re.findall(r"^ {4,}(?:\$ |stockade |pip |apt |make |sudo |\.venv/).*$", text, re.MULTILINE)
    assert hidden == []


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS, ROOT / "CONTRIBUTING.md"], ids=title)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    local = [link for link in links if not link.startswith(("http:", "https:"))]
    assert [link for link in local if not leads(page, link)] == []


def leads(page: Path, link: str) -> bool:
    """Whether there is such a file, and in it the heading or the anchor that is meant."""
    name, _, heading = link.partition("#")
    target = page.parent / name if name else page
    if not heading:
        return target.exists()
    text = target.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = re.findall(r'<a id="([^"]+)">', text)
    return heading in anchors + [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("name", ["README.md", "docs/explanation/comparison.md"])
def test_the_numbers_are_those_of_the_specification(name: str) -> None:
    """Whoever measures again writes it there, and here it is noticed."""
    text = (ROOT / name).read_text(encoding="utf-8")
    measured = re.findall(r"^\| .*(?: ms \||×|\| \d).*$", text, re.MULTILINE)
    numbers = set(re.findall(r"\d+(?:\.\d+)?", " ".join(measured)))
    known = set(re.findall(r"\d+(?:\.\d+)?", (ROOT / "SPECIFICATION.md").read_text(encoding="utf-8")))
    assert len(numbers) > 10 and numbers - known == set()


class TestTheReader:
    """The blocks are found and judged as a page means them."""

    def page(self, tmp_path: Path, text: str) -> list[Block]:
        file = tmp_path / "page.md"
        file.write_text(text)
        return list(blocks(file, "page.md"))

    def faults(self, session: Session, tmp_path: Path, text: str) -> list[str]:
        with session:
            return [fault for block in self.page(tmp_path, text) for fault in session.run(block)]

    def test_marks_and_steps_are_read(self, tmp_path: Path) -> None:
        text = "<!-- needs: git -->\n<!-- output varies -->\n```console\n$ a\n> b\nx\n\n$ c\n```\n"
        (block,) = self.page(tmp_path, text)
        assert block.marks == {"needs": "git", "output varies": ""} and block.line == 3
        assert steps(block.text) == [("a\nb", ["x"]), ("c", [])]

    def test_a_language_that_nobody_runs_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"page\.md:1: nobody runs a block of 'ruby'"):
            self.page(tmp_path, "```ruby\nputs 1\n```\n")

    @pytest.mark.parametrize(
        ("body", "fault"),
        [
            ("console\n$ echo one\ntwo", "and not"),
            ("console\n$ false", "ended with 1"),
            ("console\n$ false\n$ echo $?\n0", "and not"),
            ("sh\nexit 3", ""),
            ("python\nprint(1)  # 2", "does not print"),
            ("python\nraise SystemExit(1)", "ended with 1"),
            ("toml\nraed = []", "there is no such key"),
        ],
    )
    def test_what_is_not_so_is_a_fault(self, session: Session, tmp_path: Path, body: str, fault: str) -> None:
        if not fault:
            with pytest.raises(AssertionError, match="the shell ended"):
                self.faults(session, tmp_path, f"```{body}\n```\n")
        else:
            assert fault in "".join(self.faults(session, tmp_path, f"```{body}\n```\n"))

    def test_ids_are_remembered(self, session: Session, tmp_path: Path) -> None:
        text = (
            "```console\n$ echo 0123456789ab; pwd\n443c22c193c6\n/home/ada/project\n$ echo @443c\n@0123\n"
            "$ printf 'a\\nb\\nc 12345'\na\n...\nc 99999\n$ echo x y\nx ...\n"
            "$ echo ba9876543210\n443c22c193c6\n```\n"
        )
        faults = self.faults(session, tmp_path, text)
        assert len(faults) == 1 and "ba9876543210" in faults[0], "an id is the same one wherever it is shown"
        assert session.ids == {"443c22c193c6": "0123456789ab"}


@pytest.mark.parametrize("name", ["policy_reference", "holdback_reference", "command_reference"])
def test_a_reference_is_made_from_the_code(name: str) -> None:
    script = ROOT / "scripts" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_clause_and_control_has_words() -> None:
    models = {
        "": Policy,
        "workspace.": WorkspaceRule,
        "limits.": Limits,
        "syscalls.": Syscalls,
        "reuse.": Reuse,
    }
    clauses = {prefix + name for prefix, model in models.items() for name in model.__struct_fields__}
    clauses |= {f"secrets.NAME.{name}" for name in Secret.__struct_encode_fields__}
    assert set(CLAUSES) == clauses, "write what the clause says in src/stockade/policy/descriptions.py"
    assert set(CONTROLS) == set(Control), (
        "write what the control promises in src/stockade/policy/descriptions.py"
    )


@pytest.mark.parametrize(
    ("policy", "clause"),
    [
        (Policy(read=["/srv"]), "read"),
        (Policy(write=["/srv"]), "write"),
        (Policy(deny=["/srv"]), "deny"),
        (Policy(exec=["/usr/bin/*"]), "exec"),
        (Policy(net=["api.example.com"]), "net"),
        (Policy(workspace=".", protect=["a"]), "protect"),
        (Policy(workspace="."), "workspace.mode"),
        (Policy(syscalls={"deny": ["bpf"]}), "syscalls.deny"),
        *((Policy(limits={name: "2M" if name in ("memory", "output", "disk") else 100}), f"limits.{name}")
          for name in Limits.__struct_fields__),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_control_beside_a_clause_is_the_one_that_it_asks_for(policy: Policy, clause: str) -> None:
    control = CLAUSES[clause].control
    assert control is not None and policy.controls()[control].startswith(f"{clause} = ")


def test_the_python_reference_has_every_public_name_once() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs/reference/python").glob("*.md"))
    named = re.findall(r"^::: stockade\.(?:\w+\.)?(\w+)$", text, re.MULTILINE)
    rooms = [importlib.import_module(f"stockade.{room}").__all__ for room in stockade._ROOMS]
    assert sorted(named) == sorted(
        {*stockade.__all__, *(name for room in rooms for name in room)} - {"__version__"}
    )


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_no_page_is_long(page: Path) -> None:
    """A page does one job; a table that a script makes is as long as the code has entries."""
    made = page.name in ("command-line.md", "holdback.md")
    assert made or page.read_text(encoding="utf-8").count("\n") <= LONGEST


def phrases() -> list[str]:
    """Every text in the sources; what is filled in later is left out of it."""
    found = [source.read_text(encoding="utf-8") for source in GATE_SOURCES.glob("*.c")]
    for module in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("…".join(part.value for part in node.values if isinstance(part, ast.Constant)))
    return found


def test_the_messages_in_troubleshooting_are_ours() -> None:
    """Three words in a row of each message are in the sources as well."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE)
    messages = [cell.split("`")[1] for cell in cells if "printed by" not in cell]
    said = phrases()

    def is_ours(message: str) -> bool:
        parts = re.split(r"\.\.\.|\b[A-Z]+\b|\d+|\"[^\"]*\"|hint: |[:;()=]", message)
        words = [part.split() for part in parts]
        runs = [one[at : at + 3] for one in words if len(one) > 1 for at in range(max(1, len(one) - 2))]
        return any(" ".join(run) in text for run in runs for text in said)

    strange = [message for message in messages if not is_ours(message)]
    assert len(messages) > 40 and strange == []


def test_the_list_of_decisions_has_all_of_them_by_number() -> None:
    index = (ROOT / "docs/adr/index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \| \[.+\]\((0.+\.md)\) \|$", index, re.MULTILINE)
    assert listed == [(str(number), page.name) for number, page in enumerate(DECISIONS[:-1], 1)]
