"""Hints about what a program printed last, such as the name of a module that Python did not find.

A hostile program prints what it likes. So its words only decide what is looked for on the host: a hint states
what was found there, repeats nothing but the name of a module, and never advises to install one. It is for a
person: no program and no model may read it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator

from stockade.gate import client
from stockade.linux.path_lookup import covers
from stockade.resolve.resolved import ResolvedPolicy
from stockade.resolve.toolchain import shims
from stockade.resolve.toolchain.installs import is_venv, looks_like_home, names_in
from stockade.resolve.toolchain.needs import PROJECT, PYTHON, which
from stockade.runs.explain.not_started import is_secret, is_shown

_MISSING = re.compile(rb"No module named '?([A-Za-z_][A-Za-z0-9_]{0,99})\b")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_PIP = re.compile(r"(^|/)pip[0-9.]*$")
#: What OpenSSL, curl, Python, Node, Go, Rust, Java and git print about a certificate that they do not trust.
_UNVERIFIED = re.compile(
    rb"certificate verify failed|SSL certificate problem|unable to get local issuer|SELF_SIGNED_CERT_IN_CHAIN"
    rb"|self.signed certificate in certificate chain|UNABLE_TO_(?:GET|VERIFY)[A-Z_]*CERT"
    rb"|certificate signed by unknown authority|UnknownIssuer|unable to find valid certification path"
)
#: Variables that may name certificates.
_CA_NAME = re.compile(r"(?:^|_)(?:CA|CAS|CACERTS?|CAINFO|CAFILE|CERTS?|SSL|TLS)(?:_|$)", re.IGNORECASE)
BUNDLE_HEAD = 1 << 20
PYTHON_PATH = "PYTHONPATH"
#: How many lines of a .pth file are looked at.
MOST_LINES = 100


def hints(last: bytes, program: client.Program, resolved: ResolvedPolicy) -> list[str]:
    """Return the hints for what a program printed last."""
    found = [_missing_module(last, program, resolved), _read_only_packages(last, program, resolved)]
    if _UNVERIFIED.search(last):
        found.append(_certificates(program, resolved))
    if resolved.workspace is not None and any(re.search(r"\bgit\b", word) for word in program.argv[:64]):
        found.append(_git(last, resolved, resolved.workspace.path))
    return found


def _git(last: bytes, resolved: ResolvedPolicy, workspace: str) -> str:
    """Return a hint about git: the repository that it did not find or cannot change, or who commits."""
    from stockade.resolve import git_repository

    named = git_repository.named_by(f"{workspace}/.git")
    above = git_repository.repository_above(workspace)
    above = above if _may_be_shown(above, resolved) else ""
    if b"Read-only file system" in last and named and is_shown(named, resolved):
        return (
            "the repository of this worktree is read-only inside: `stockade commit` brings the changes to "
            "your files, and `git commit` outside records them"
        )
    if b"not a git repository" in last and named and not is_shown(named, resolved):
        if above and covers(above, named):
            return _work_above(above)
        return (
            f"{workspace}/.git names a repository elsewhere, which is shown only if it names this directory "
            "in turn: `git worktree repair` outside makes it do so"
        )
    if b"not a git repository" in last and above and not os.path.lexists(f"{workspace}/.git"):
        return _work_above(above)
    if b"tell me who you are" in last and not resolved.gitconfig:
        return (
            "your git has no name and e-mail for commits here: `git config --global user.name NAME` and "
            "user.email outside, or `--env GIT_AUTHOR_NAME=...` and its like"
        )
    return ""


def _work_above(above: str) -> str:
    return f"the repository is in {above}, above the workspace: work there, `-w {shlex.quote(above)}`"


def _missing_module(last: bytes, program: client.Program, resolved: ResolvedPolicy) -> str:
    names = _MISSING.findall(last)
    python = _python_inside(program, resolved)
    if not names or not python:
        return ""
    name = names[-1].decode()
    found = f"the Python inside is {python}"
    if place := _project_with(name, python, resolved):
        return f"{found}, and {place} has a module {name}: run {place}/bin/python3, or activate it first"
    if place := _on_python_path(name, program, resolved):
        return f"{found}; {place}"
    for packages, way in _hidden_places(python, resolved):
        if _has(packages, name) and _may_be_shown(os.path.realpath(packages), resolved):
            return (
                f"{found}; a module {name} is in {packages}{way}, which the policy does not show: "
                f"`--read {shlex.quote(packages)}`"
            )
    return f"{found}: it sees the modules of its own install, and those of the workspace"


def _read_only_packages(last: bytes, program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return a hint if pip cannot install because the Python inside is not the workspace's own."""
    workspace, python = resolved.workspace, _python_inside(program, resolved)
    if b"Read-only file system" not in last or not any(_PIP.search(word) for word in program.argv[:3]):
        return ""
    if workspace is None or not python or covers(workspace.path, python):
        return ""
    make = "" if is_venv(f"{workspace.path}/{PROJECT}") else f"python3 -m venv {PROJECT} && "
    return (
        f"the Python inside is {python}, read-only because it is not in the workspace: "
        f"`sh -c '{make}{PROJECT}/bin/pip install ...'` installs into the workspace"
    )


def _python_inside(program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return the path of the Python that the command starts, or that its PATH finds."""
    name = program.argv[0] if _PYTHON.fullmatch(os.path.basename(program.argv[0])) else PYTHON
    if "/" in name:
        return os.path.normpath(os.path.join(program.cwd, name))
    return which(name, program.env.get("PATH", ""), "/")[0]


def _project_with(name: str, python: str, resolved: ResolvedPolicy) -> str:
    """Return the workspace's own environment if it has a module that the Python inside does not have."""
    venv = "" if resolved.workspace is None else f"{resolved.workspace.path}/{PROJECT}"
    if not venv or covers(venv, python) or not is_venv(venv):
        return ""
    return venv if any(_has(packages, name) for packages in _site_packages(venv)) else ""


def _on_python_path(name: str, program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return a hint if the caller's PYTHONPATH leads to a module, and the program has no such variable."""
    for place in resolved.caller.environ.get(PYTHON_PATH, "").split(":"):
        path = os.path.normpath(os.path.join(resolved.caller.cwd or "/", place)) if place else ""
        # Not listed: it may be in a repository, which must not choose how long the search takes.
        if not path or not any(os.path.lexists(f"{path}/{name}{end}") for end in ("", ".py")):
            continue
        shown = is_shown(path, resolved)
        if not shown and not _may_be_shown(os.path.realpath(path), resolved):
            continue
        flags = [] if PYTHON_PATH in program.env else [f"--pass-env {PYTHON_PATH}"]
        flags += [] if shown else [f"--read {shlex.quote(path)}"]
        if flags:
            return f"a module {name} is in {path}, which your {PYTHON_PATH} names: `{' '.join(flags)}`"
    return ""


def _certificates(program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return a hint about certificates that the caller's environment names and the program did not get."""
    from stockade.resolve.host_network import DIRECTORIES, FILES

    known = (*FILES, *DIRECTORIES)
    network = resolved.network
    left_out = [] if network is None else [*network.warnings, *network.notes]
    if why := next((line for line in left_out if line.startswith(known)), ""):
        return f"the program did not trust a certificate, and {why}"
    for name, path in sorted(resolved.caller.environ.items()):
        if not _CA_NAME.search(name) or not path.startswith("/") or not _is_bundle(path):
            continue
        real = os.path.realpath(path)
        shown = is_shown(real, resolved)
        secret = is_secret(real, resolved) and not covers("/etc", real)
        if secret or (name in program.env and shown):
            continue
        flags = [] if name in program.env else [f"--pass-env {name}"]
        flags += [] if shown else [f"--read {shlex.quote(real)}"]
        return (
            f"the program did not trust a certificate, and does not get the bundle that your {name} names: "
            f"`{' '.join(flags)}` passes it"
        )
    return ""


def _is_bundle(path: str) -> bool:
    """Whether a file has certificates, and no private key, as far as its beginning shows."""
    head = shims.first_bytes(path, BUNDLE_HEAD)
    return b"BEGIN CERTIFICATE" in head and b"PRIVATE KEY" not in head


def _hidden_places(python: str, resolved: ResolvedPolicy) -> Iterator[tuple[str, str]]:
    """Yield the directories of modules that only the Python outside sees, and how it comes to each."""
    for packages in _site_packages(f"{resolved.caller.home}/.local"):
        if not is_shown(packages, resolved):
            yield packages, " (pip install --user)"
    for packages in _site_packages(os.path.dirname(os.path.dirname(python))):
        # A repository must not choose what a hint advises to show, nor how long the search takes.
        for file in () if _may_be_hostile(packages, resolved) else names_in(packages):
            if not file.endswith(".pth"):
                continue
            text = shims.first_bytes(f"{packages}/{file}").decode("utf-8", "replace")
            for line in text.splitlines()[:MOST_LINES]:
                if line.startswith("/") and "\0" not in line and not is_shown(line.rstrip(), resolved):
                    yield line.rstrip(), f" ({file} of {packages} leads there)"


def _may_be_hostile(path: str, resolved: ResolvedPolicy) -> bool:
    """Whether a path is in the workspace, or where programs may write."""
    trees = [grant.path for grant in resolved.grants if grant.access == "write"]
    trees += [] if resolved.workspace is None else [resolved.workspace.path]
    return any(covers(tree, os.path.realpath(path)) for tree in trees)


def _may_be_shown(path: str, resolved: ResolvedPolicy) -> bool:
    """Whether a hint may advise to show a directory: no place of secrets, no home, and nothing around one."""
    home = os.path.realpath(resolved.caller.home)
    return not (is_secret(path, resolved) or covers(path, home) or looks_like_home(path))


def _site_packages(prefix: str) -> list[str]:
    return [
        f"{prefix}/lib/{name}/site-packages"
        for name in names_in(f"{prefix}/lib")
        if name.startswith(("python3", "pypy3"))
    ]


def _has(packages: str, module: str) -> bool:
    """Whether a directory has a module or a package of that name."""
    return any(
        name == module or (name.startswith(f"{module}.") and name.endswith((".py", ".so")))
        for name in names_in(packages)
    )
