"""The steps of the GitHub Action (`action.yml`): install, check, run.

They run on the runner, outside of any sandbox, with the `python3` that is there, so this file needs nothing
but the standard library. Everything that the sandboxed commands print goes through the runner, which obeys
lines such as `::add-mask::`; and names of their files go to the page of the job. Both are hostile.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Ubuntu 24.04 restricts user namespaces to programs with a profile of AppArmor.
RESTRICTION = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
PROFILE = "/etc/apparmor.d/stockade-gate"
PRINT_PROFILE = """
from stockade import gate
from stockade.host.advice import apparmor_profile
print(apparmor_profile(gate.executable()), end="")
"""
#: How many entries a list on the page of the job has at most.
SHOWN = 50


def main(argv: list[str]) -> int:
    """Do one step and return its exit code."""
    steps = {"install": install, "check": check, "run": run}
    if len(argv) != 1 or argv[0] not in steps:
        sys.exit(f"usage: github_action.py {'|'.join(steps)}")
    return steps[argv[0]]()


def install() -> int:
    """Install Stockade into an environment of its own, for this and later steps."""
    if sys.version_info < (3, 11):  # noqa: UP036  (the runner's Python may be any)
        return failed(
            "Stockade needs Python 3.11 or newer: use actions/setup-python in a step before, or ubuntu-24.04"
        )
    venv.create(place(), with_pip=True, clear=True)
    package = os.environ.get("STOCKADE_PACKAGE") or os.environ["GITHUB_ACTION_PATH"]
    done = subprocess.run([place() / "bin/python", "-m", "pip", "install", "-q", package], check=False)
    if done.returncode != 0:
        return failed(f"pip did not install {package}; its output says why")
    append("GITHUB_PATH", str(place() / "bin"))
    return 0


def check() -> int:
    """Give the gate its profile where AppArmor asks for one, and see whether the walls stand."""
    if RESTRICTION.exists() and RESTRICTION.read_text().strip() == "1":
        # For the gate alone: switching the restriction off would open it for every program of the job.
        profile = subprocess.run(
            [place() / "bin/python", "-c", PRINT_PROFILE], capture_output=True, check=True
        ).stdout
        subprocess.run(["sudo", "tee", PROFILE], input=profile, stdout=subprocess.DEVNULL, check=True)
        subprocess.run(["sudo", "apparmor_parser", "-r", PROFILE], check=True)
    if subprocess.run([place() / "bin/stockade", "doctor"], check=False).returncode != 0:
        return failed("this runner cannot enforce the default policy; the lines above say why, and the fix")
    return 0


def run() -> int:
    """Run the commands, write the summary and the outputs, and return the exit code of `stockade run`."""
    receipts = Path(tempfile.mkdtemp(prefix="stockade-receipts-", dir=os.environ["RUNNER_TEMP"]))
    policy = os.environ.get("STOCKADE_POLICY")
    command = [str(place() / "bin/stockade"), "run", *(["-p", policy] if policy else [])]
    command += [
        *shlex.split(os.environ.get("STOCKADE_OPTIONS", "")),
        "--receipt",
        str(receipts / "receipt.json"),
    ]
    code = guarded(
        [*command, "--json-fd"], ["--", "bash", "-eo", "pipefail", "-c", os.environ["STOCKADE_RUN"]], receipts
    )
    result = json.loads((receipts / "result.json").read_bytes() or b"{}")
    with open(receipts / "key.pem", "wb") as key:
        subprocess.run([place() / "bin/stockade", "keys", "export"], stdout=key, check=False)
    if result.get("outcome") == "setup-failed":
        failed(f"nothing was run: {result['reason']}. {result['hint']}")
    append("GITHUB_STEP_SUMMARY", summary(result, code))
    append("GITHUB_OUTPUT", f"outcome={result.get('outcome', '')}\nexit-code={code}\nreceipts={receipts}")
    return code


def guarded(command: list[str], program: list[str], receipts: Path) -> int:
    """Run a command whose output the runner shows and does not obey; its result goes to a file."""
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        with open(receipts / "result.json", "wb") as file:
            argv = [*command, str(file.fileno()), *program]
            return subprocess.run(argv, pass_fds=[file.fileno()], check=False).returncode
    finally:
        # On a line of its own, wherever the output has ended.
        print(f"\n::{token}::", flush=True)


def summary(result: dict[str, Any], code: int) -> str:
    """Return the page of a run as Markdown."""
    lines = [f"### Stockade: {safe(result.get('reason') or f'exit code {code}')}", ""]
    if hint := result.get("hint"):
        lines += [f"{safe(hint)}", ""]
    if controls := result.get("controls"):
        lines += ["| control | enforced by | seen by |", "|---|---|---|"]
        lines += [
            f"| {name} | {safe(one['mechanism'])} | {safe(one['observed'])} |"
            for name, one in controls.items()
        ]
    changes = [f"{one['kind']} {one['path']}" for one in result.get("changes", ())]
    lines += listed("changed paths", changes)
    refused = [one for one in result.get("network", ()) if one["verdict"] == "denied"]
    lines += listed(
        "refused by the network rules",
        [f"{one['name'] or one['address']} {one['reason']}" for one in refused],
    )
    return "\n".join(lines)


def listed(title: str, entries: Iterable[str]) -> list[str]:
    """Return a list that opens when it is clicked; nothing if it is empty."""
    every = list(entries)
    if not every:
        return []
    shown = "<br>".join(f"<code>{safe(entry)}</code>" for entry in every[:SHOWN])
    more = f"<br>and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ["", f"<details><summary>{len(every)} {title}</summary>{shown}{more}</details>"]


def safe(text: str) -> str:
    """Return text that is nothing but text to Markdown and HTML, on one line."""
    plain = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return "".join(c if c.isalnum() or c in " .,:/-='" else f"&#{ord(c)};" for c in plain)


def failed(reason: str) -> int:
    """Report why a step failed, where the job's page shows it."""
    line = reason.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    print(f"::error title=Stockade::{line}", flush=True)
    return 1


def append(variable: str, text: str) -> None:
    """Add lines to one of the files through which a step talks to the runner."""
    with open(os.environ[variable], "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{text}\n")


def place() -> Path:
    """Return the environment that Stockade is installed in."""
    return Path(os.environ["RUNNER_TEMP"], "stockade")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
