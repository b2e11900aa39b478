"""The example: a fetcher with a network, a parser with nothing, a writer with files."""

from __future__ import annotations

import sys
from pathlib import Path

from support.network import Internet
from support.paths import ROOT

EXAMPLE = ROOT / "examples" / "pipelines" / "report.py"
#: What the three stages of the example may do, tried by a program in each of them.
TRY = """
ATTEMPT = '''
import os, socket, sys
sys.stdout.write(sys.stdin.read() if not sys.stdin.isatty() else "")
def tried(what):
    try: what(); return "yes"
    except OSError: return "no"
def dial(): socket.create_connection(("api.good.example", 80), 5).close()
print(sys.argv[1], "network:", tried(dial), "notes:", tried(lambda: open({notes!r}).close()), file=sys.stderr)
'''
python = ["/usr/bin/python3", "-c", ATTEMPT]
from stockade import Policy, Stage
fetcher = Stage(Policy(net=["api.good.example:80"]), [*python, "fetcher"])
parser = Stage(Policy(), [*python, "parser"])
writer = Stage(Policy(workspace={place!r}), [*python, "writer"])
result = (fetcher | parser | writer).run(timeout=60)
for stage in result.stages.values(): print(stage.stderr_text, end="")
"""


def test_the_report_is_written_and_only_the_fetcher_had_a_network(
    internet: Internet, workspace: Path
) -> None:
    served = workspace.parent / "served"
    served.mkdir()
    (served / "page").write_text("three small words")
    internet.publish("api.good.example", served)
    (workspace / "notes.txt").write_text("private\n")
    done = internet.outside([sys.executable, str(EXAMPLE), "http://api.good.example/page", str(workspace)])
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "stage-0: exited 0, network: rules\n"
        "stage-1: exited 0, network: none\n"
        "stage-2: exited 0, network: none\n"
        "private: 3 words, the longest is three\n"
    )
    assert (workspace / "report.txt").read_text() == "private: 3 words, the longest is three\n"


def test_no_stage_has_both_the_network_and_the_notes(internet: Internet, workspace: Path) -> None:
    notes = workspace / "notes.txt"
    notes.write_text("private\n")
    code = TRY.format(notes=str(notes), place=str(workspace))
    done = internet.python(code)
    assert done.stdout.splitlines() == [
        "fetcher network: yes notes: no",
        "parser network: no notes: no",
        "writer network: no notes: yes",
    ], done.stderr
