"""What a commit must not do without being told to.

The program inside chose every name and every byte. Some files are run or
obeyed by the host's tools as soon as they are there, without anyone opening
them: a hook, an editor's tasks, a pipeline. Those are held back until the
user agrees; what the policy protects is held back always.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from stockade.workspace.walk import Found

Reason = Literal["protected", "executes", "special"]

#: Directories whose whole content tools run or obey, and files that they do, wherever they lie.
NAMES = frozenset(
    {
        ".envrc", ".direnvrc", ".vscode", ".idea", ".fleet", ".zed", ".devcontainer", ".devcontainer.json",
        ".claude", ".claude.json", ".cursor", ".cursorrules", ".windsurf", ".windsurfrules", ".clinerules",
        ".roo", ".roorules", ".continue", ".codex", ".gemini", ".aider.conf.yml", ".mcp.json", ".agents",
        "claude.md", "claude.local.md", "agents.md", "gemini.md", ".gitlab-ci.yml", ".circleci",
        ".buildkite", ".woodpecker", ".woodpecker.yml", ".drone.yml", ".travis.yml", "jenkinsfile",
        "azure-pipelines.yml", "bitbucket-pipelines.yml", ".husky", ".pre-commit-config.yaml",
        ".pre-commit-config.yml", "lefthook.yml", ".lefthook.yml", ".bashrc", ".bash_profile",
        ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile",
        ".zlogin", ".zlogout", ".kshrc", ".cshrc", ".tcshrc", ".login", ".logout", ".inputrc", ".xprofile",
        ".xinitrc", ".xsession", ".pam_environment", ".vimrc", ".gvimrc", ".exrc", ".nvimrc", ".nvim.lua",
        ".emacs", ".emacs.d", ".dir-locals.el", ".gdbinit", ".lldbinit", ".tmux.conf", ".screenrc",
        ".gitconfig", ".ssh", ".netrc", ".npmrc", ".yarnrc", ".yarnrc.yml", ".pnpmfile.cjs", ".bazelrc",
        ".mvn", ".mise.toml", "mise.toml", "sitecustomize.py", "usercustomize.py",
    }
)  # fmt: skip
#: The same, of two names: the second in the first.
PAIRS = frozenset(
    {
        (".github", "workflows"),
        (".github", "actions"),
        (".github", "copilot-instructions.md"),
        ("node_modules", ".bin"),
        (".cargo", "config"),
        (".cargo", "config.toml"),
        (".config", "fish"),
        (".config", "git"),
        (".config", "systemd"),
        (".config", "autostart"),
        (".config", "nvim"),
        (".config", "mise"),
    }
)
FIRST = frozenset(first for first, _ in PAIRS)
#: What git obeys in its own directory, at any depth (submodules and worktrees have theirs in it).
GIT = frozenset({"hooks", "config", "config.worktree", "commondir", "gitdir"})


class Held(msgspec.Struct, frozen=True):
    """One path that was not committed, and why not."""

    path: str
    reason: Reason
    detail: str


def held(
    found: Found, protect: Iterable[str], *, allow_exec_config: bool, repository: Callable[[str], bool]
) -> Held | None:
    """Why a change is held back, or None. `repository` says whether a directory has a git HEAD in it."""
    path = found.path
    for wanted in protect:
        # Some file systems take names of either case for the same.
        low, place = path.lower(), wanted.lower()
        # Not only what it names: a directory above it that goes away or is replaced takes it along.
        above = covers(low, place) and (found.kind == "deleted" or "type" in found.what)
        if path and (covers(place, low) or above):
            return Held(path, "protected", f"the policy protects {wanted}")
    if found.after is None:
        return None
    if what := special(found.after.st_mode):
        return Held(path, "special", f"it is {what}")
    if not allow_exec_config and (why := executes(path, found.after.st_mode, repository)):
        return Held(path, "executes", why)
    return None


def executes(path: str, mode: int, repository: Callable[[str], bool]) -> str:
    """Why the host would run or obey a file, or nothing. A directory by itself is neither."""
    names = path.lower().split("/")
    if stat.S_ISDIR(mode):
        return ""
    for index, name in enumerate(names):
        if name in NAMES:
            return f"{name} is run or obeyed by tools of the host"
        if tuple(names[index : index + 2]) in PAIRS:
            return f"{'/'.join(names[index : index + 2])} is run or obeyed by tools of the host"
        if name == ".git" and GIT.intersection(names[index + 1 :]):
            return "git runs what it finds there"
        if name in GIT and ".git" not in names[:index] and repository("/".join(path.split("/")[:index])):
            return "it is in what git takes for a repository"
    if names[-1] == ".git":
        return "it tells git where its configuration is"
    if names[-1] == "head" and ".git" not in names:
        # The configuration may have come before, when it was nothing yet.
        return "with it git takes a directory for a repository, and obeys what is in it"
    if stat.S_ISLNK(mode) and names[-1] in FIRST:
        return "it is a link where tools of the host look for what to run"
    if names[-1].endswith(".pth") and "site-packages" in names:
        return "Python runs what it finds there"
    return ""


def special(mode: int) -> str:
    """What a file is, in words, if it is neither a regular one nor a directory nor a link."""
    kinds = {
        stat.S_IFSOCK: "a socket",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "")


def leads_out(path: str, target: str) -> bool:
    """Whether a link at a path of the workspace leads out of it, as far as its words tell."""
    if target.startswith("/"):
        return True
    return os.path.normpath(os.path.join(os.path.dirname(path), target)).split("/")[0] == ".."


def covers(tree: str, path: str) -> bool:
    """Whether the path is the tree or in it; both are relative to the workspace, which is empty or a dot."""
    return tree in ("", ".") or path == tree or path.startswith(tree + "/")
