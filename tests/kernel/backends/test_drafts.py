"""Plans for systems that are not here, checked as values: macOS, OpenBSD and Windows are pretended.

Nothing of this has run on its own system. What is tested is that a plan says what the policy says, that no
name gets out of its quotes, and that a run is refused.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stockade import PolicyError, backends
from stockade.backends.other_systems import seatbelt
from support import sbpl

MAC = seatbelt.SeatbeltInputs(
    command=("make", "check"),
    cwd="/Users/ann/.local/state/stockade/scratch/1",
    environ=(("HOME", "/Users/ann/.local/state/stockade/scratch/1"), ("PATH", "/usr/bin:/bin")),
    tag="a1b2",
    scratch="/Users/ann/.local/state/stockade/scratch/1",
    files=1024,
    own_network=True,
)
changed = msgspec.structs.replace


class TestSeatbelt:
    def profile(self, **given: Any) -> sbpl.Profile:
        return sbpl.read(seatbelt.profile(changed(MAC, **given)))

    def test_the_prelude_really_sets_the_limits_and_passes_every_argument_on(self, tmp_path: Path) -> None:
        program = "import os, resource as r, sys; print(repr((sys.argv[1:], dict(os.environ), "
        program += "[r.getrlimit(n) for n in (r.RLIMIT_NOFILE, r.RLIMIT_CPU, r.RLIMIT_CORE)])))"
        words = ("a b", "$HOME", '"', "'; exit 3 #", "", "-x", "\\", "A=b")
        environ = (("A", "x y=z"), ("B", "$A"), ("LD_PRELOAD", "/evil"), ("ENV", "/evil"))
        command = (sys.executable, "-I", "-c", program, *words)
        argv = seatbelt.argv(
            changed(MAC, files=77, cpu_time=10, command=command, environ=environ), "the profile"
        )
        at = argv.index(
            seatbelt.SANDBOX_EXEC
        )  # there is none here: first another program stands in its place
        seen = [*argv[:at], sys.executable, "-I", "-c", program, *argv[at + 1 :]]
        done = subprocess.run(seen, capture_output=True, text=True, cwd=tmp_path, check=True)
        arguments, before, limits = eval(done.stdout)
        behind = argv.index("--") + 1
        assert arguments == ["-D", f"SCRATCH={MAC.scratch}", "-p", "the profile", "--", *argv[behind:]]
        assert limits == [(77, 77), (10, 10), (0, 0)]
        # What the policy sets is not there before the profile holds.
        assert set(before) <= {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
        done = subprocess.run(argv[behind:], capture_output=True, text=True, cwd=tmp_path, check=True)
        arguments, after, _ = eval(done.stdout)
        assert arguments == list(words) and set(environ) <= set(after.items())
        assert set(after) <= {*dict(environ), "LC_CTYPE"}
        for name in ("A=b", "-S"):
            with pytest.raises(PolicyError, match="for an option or a variable"):
                seatbelt.compile_plan(changed(MAC, command=(name, "x")))

    def test_a_limit_that_cannot_be_set_starts_nothing(self, tmp_path: Path) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        given = changed(MAC, files=hard + 1 if hard != resource.RLIM_INFINITY else 1 << 62, environ=())
        argv = list(seatbelt.argv(given, "p"))
        argv[argv.index(seatbelt.SANDBOX_EXEC)] = "/bin/echo"
        before = ["setpriv", "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []
        done = subprocess.run([*before, *argv], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode != 0 and done.stdout == ""


class TestDoctor:
    #: Runs commands as on another system: what Python lacks there is taken away first.
    PROGRAM = """
import os, sys
import argparse, ctypes, platform, shutil, subprocess, textwrap  # Python's own may use what is taken away
sys.platform = sys.argv[1]
if sys.platform == "win32":
    for name in ("uname", "getuid", "geteuid", "getgid", "fork", "killpg", "O_NOFOLLOW", "O_CLOEXEC"):
        if hasattr(os, name):
            delattr(os, name)
    for name in ("fcntl", "pwd", "grp", "resource", "termios", "pty", "tty"):
        sys.modules[name] = None
from stockade.cli import main
sys.exit(max([main(words.split()) for words in sys.argv[2:]]))
"""

    def stockade(self, system: str, *commands: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", self.PROGRAM, system, *commands]
        environ = {**os.environ, "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)

    @pytest.mark.parametrize(
        ("system", "missing"),
        [
            ("darwin", "sandbox-exec was not found: /usr/bin/sandbox-exec"),
            ("openbsd7", "this OpenBSD has no pledge"),
            ("win32", "this Windows has no CreateJobObjectW"),
        ],
    )
    def test_on_a_pretended_system_it_says_what_is_missing(self, system: str, missing: str) -> None:
        done = self.stockade(system, "doctor -v", "doctor --json")
        assert done.returncode == 1 and done.stderr == "", done.stderr
        text, json_text = done.stdout.split("\n{", 1)
        told = " ".join(text.split())
        assert missing in told and "would run nothing" in told and "native (Linux)" in told
        known = json.loads("{" + json_text)
        assert known["host"]["system"] == system.rstrip("7")
        assert set(known["backends"]) == set(backends.names())
        assert known["default_policy"]["enforced"] is False
        ran = self.stockade(system, "run -- true")
        assert ran.returncode == 125 and ran.stderr.startswith("stockade: error: ")
        assert "Traceback" not in ran.stderr and "stockade: hint: " in ran.stderr
