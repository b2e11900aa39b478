"""Git's configuration, read as git reads it, by somebody who must not run git."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

from stockade.workspace.version_control.git_config import parse
from support.means import need_program

PIECES = [
    "[core]", '[a "b c"]', "[a.B]", '[A "q\\"w"] k=v', "\n", "\n", "\n", " ", "\t", "key", "Key-2", " = ",
    "=", '"', "\\", "\\\n", "\\t", '\\"', "\\\\", "#c", ";d", "value", "~/x", "!sh -c", "ä", "\r\n", "1a",
    "fsmonitor = ",
]  # fmt: skip


def test_whatever_git_takes_is_read_as_git_reads_it(tmp_path: Path) -> None:
    git, file, taken = need_program("git"), tmp_path / "config", 0
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    for _ in range(300):
        text = "[core]\n" + "".join(chance.choice(PIECES) for _ in range(chance.randint(1, 20)))
        file.write_bytes(text.encode())
        done = subprocess.run(
            [git, "config", "--list", "-z", "--file", str(file)], capture_output=True, check=False, timeout=60
        )
        found = [(one.name, one.value.split()) for one in parse(text.encode())]
        if done.returncode == 0:
            pairs = [one.partition("\n") for one in done.stdout.decode().split("\0")[:-1]]
            # Versions of git differ in which blanks they keep within a value, and at its end.
            assert found == [(name, value.split() if has else ["true"]) for name, has, value in pairs], (
                seed,
                text,
            )
            taken += 1
    assert taken > 10
