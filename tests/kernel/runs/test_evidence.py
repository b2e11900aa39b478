"""What is seen of a sandbox before its first program, as values, and how well each control is known."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade import Policy, SetupError
from stockade.backends.mechanisms import LANDLOCK_SCOPES
from stockade.controls import Control, Grade
from stockade.gate import build
from stockade.gate import operations as ops
from stockade.host import host
from stockade.runs import evidence, launch, prepare
from stockade.runs.io.eventloop import Events, drive
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.prepare import RunPreparation
from support.paths import PACKAGE


@pytest.fixture
def living() -> Iterator[tuple[LaunchedSandbox, RunPreparation]]:
    """A sandbox that waits, with the supervisor's view of it."""
    prepared = prepare.prepare(Policy(limits={"files": 512}), living=True)
    try:
        with Events() as events:
            box = drive(launch.launch(prepared, events), events)
            try:
                yield box, prepared
            finally:
                drive(box.closed(events), events)
    finally:
        prepared.close(discard=True)


def test_the_evidence_is_what_the_kernel_says(living: tuple[LaunchedSandbox, RunPreparation]) -> None:
    box, prepared = living
    seen, plan = box.evidence, prepared.plan
    assert set(seen.namespaces) == set(evidence.NAMESPACES)
    for name, number in seen.namespaces.items():
        assert number != os.stat(f"/proc/self/ns/{name}").st_ino
    assert seen.namespaces["net"] == os.fstat(box.network_fd).st_ino
    own = str(os.geteuid())
    assert seen.uid_map == ("0 0 4294967295" if own == "0" else f"{own} {own} 1")
    assert len(seen.mounts) == len(seen.filter) == 64
    assert set(seen.capabilities.values()) == {"0" * 16} and len(seen.capabilities) == 5
    assert seen.no_new_privs and seen.seccomp == 2 and seen.filters >= 1
    assert seen.rlimits["files"] == 512 and seen.rlimits["core"] == 0
    program = plan.ops[-1]
    assert isinstance(program, ops.Seccomp)
    assert seen.filter == hashlib.sha256(program.program).hexdigest()
    assert seen.rules == sum(isinstance(op, ops.BindGrant) for op in plan.ops)
    assert len(seen.canaries) == (4 if host().landlock >= LANDLOCK_SCOPES else 3)


def test_the_limits_in_cgroups_are_those_that_were_read_back() -> None:
    by_cgroup = host().has("cgroup.pids") and os.geteuid() == 0
    prepared = prepare.prepare(Policy(limits={"tasks": 7}))
    try:
        kept = {} if prepared.group is None else prepared.group.kept
        assert kept.get("pids.max") == ("8" if by_cgroup else None)  # the gate is one
    finally:
        prepared.close(discard=True)


def test_a_limit_that_is_not_there_is_noticed(living: tuple[LaunchedSandbox, RunPreparation]) -> None:
    plan = living[1].plan
    table = Path(f"/proc/{os.getpid()}/limits").read_bytes()
    with pytest.raises(SetupError, match=r"limit of \w+ is not"):
        evidence._limits(table, plan)


def test_every_control_has_a_grade_and_words() -> None:
    assert set(evidence.GRADES) == set(evidence.OBSERVED) == set(Control)
    assert not any(grade in (Grade.WEAKER, Grade.ABSENT) for grade in evidence.GRADES.values())


def test_the_gate_digests_as_everybody_does(tmp_path: Path) -> None:
    """At every length around the ends of blocks."""
    sources = PACKAGE / "gate" / "src"
    main = tmp_path / "main.c"
    main.write_text(
        '#include "gate.h"\n#include <stdio.h>\n'
        "int main(void)\n{\n\tchar data[300], text[SHA256_TEXT];\n"
        "\tfor (int i = 0; i < 300; i++)\n\t\tdata[i] = (char)i;\n"
        "\tfor (int n = 0; n < 300; n++) {\n\t\tsha256_text(data, n, text);\n\t\tputs(text);\n\t}\n}\n"
    )
    program = tmp_path / "digest"
    command = [
        *build.compiler(),
        "-I",
        str(sources),
        "-o",
        str(program),
        str(main),
        str(sources / "sha256.c"),
    ]
    subprocess.run(command, check=True)
    found = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    data = bytes(n % 256 for n in range(300))
    assert found == [hashlib.sha256(data[:n]).hexdigest() for n in range(300)]
