"""Which files and directories may hold secrets, so that a learned policy never grants them unasked.

The lists err on the side of a question: a user can answer one in a second, and cannot take back a secret that
a program has read.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat

import msgspec

from stockade.linux.path_lookup import covers
from stockade.observe.learning.secret_content import secret_in_file
from stockade.resolve.toolchain.installs import looks_like_home

#: Names of files and directories that usually hold a secret, wherever they are, in lower case.
NAMES = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf",
    ".git", ".git-credentials", ".gnupg", ".ssh", ".aws", ".azure", ".kube", ".docker", ".htpasswd",
    ".dockercfg",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore",
    "*.kdbx", "*.ovpn", "*.gpg", "*.asc", "*key.pem", "privkey*.pem", "*.ppk", "*.keytab",
    "*credential*", "*secret*", "*password*", "*passwd*", "*token*.json", "auth.json", "kubeconfig",
    "service-account*.json", "*.tfstate", "*.tfvars", "wallet.dat", "cookies.sqlite", "logins.json",
    "login data", "pip.conf", "wp-config.php", "*_history",
)  # fmt: skip
#: Names that the patterns above match and that hold no secret: modules of programs.
NO_SECRET = (
    "*.py", "*.pyc", "*.pyi", "*.so", "*.so.*", "*.js", "*.mjs", "*.cjs", "*.ts", "*.h", "*.hpp", "*.rb",
    "*.go", "*.rs", "*.pm", "*.class",
)  # fmt: skip
#: The entries of /etc that hold nothing of this machine's own: every install of a system has the like.
PUBLIC_ETC = (
    "debian_version", "gai.conf", "host.conf", "lsb-release", "networks", "os-release", "redhat-release",
    "rpc", "shells", "ethertypes", "nanorc", "screenrc", "vim", "locale.alias",
)  # fmt: skip
#: How many entries of a directory are looked at before it is granted as a whole, and how deep.
MOST_ENTRIES = 3000
MOST_LEVELS = 12
#: How many bytes of its files are read.
MOST_BYTES = 32 << 20
TOO_MUCH = "it has too many files, or too large ones, to look for secrets in all of them"

_NAMED = re.compile("|".join(fnmatch.translate(name) for name in NAMES))
_PLAIN = re.compile("|".join(fnmatch.translate(name) for name in NO_SECRET))


class SecretPlaces(msgspec.Struct, frozen=True):
    """Where this user's secrets may be, and which directories must not be granted as a whole."""

    #: The home, by its real name.
    home: str
    #: Whether `~` stands for the real name of the home.
    tilde: bool = True
    #: Trees that no grant may contain: the workspace, what the program may write, Stockade's own.
    kept_out: tuple[str, ...] = ()
    #: Entries of /etc that a profile shows or could show.
    public_etc: tuple[str, ...] = ()

    def secret(self, path: str, mode: int | None = None) -> str:
        """Say why a path may hold a secret, by its real name and its mode; empty if nothing suggests it."""
        parts = path.split("/")
        if path.startswith(f"{self.home}/."):
            return "settings in your home may hold passwords, tokens or keys"
        if parts[1] == "etc" and not self._is_public_etc(path):
            return "files in /etc may hold passwords and names of this machine"
        if len(parts) > 2 and parts[1] == "root" and self.home != "/root":
            return "it is in the home of another user"
        if len(parts) > 2 and parts[1] == "home" and not covers(self.home, path):
            return "it is in the home of another user"
        for part in parts:
            if is_secret_name(part):
                return "a file or directory of this name often holds secrets"
        if mode is not None and stat.S_ISREG(mode) and not mode & 0o077:
            return "nobody but you may read it"
        if mode is not None and stat.S_ISREG(mode) and not mode & 0o004:
            return "nobody but its owner and its group may read it"
        return ""

    def in_the_way(self, tree: str) -> str:
        """Say why a directory must not be granted as a whole, whatever is in it; empty if it may be."""
        if tree == "/":
            return "it is the whole file system"
        if tree.count("/") < 2:
            return f"{tree} is a directory of the system, with much else in it"
        if covers(tree, self.home):
            return "it contains your home"
        for path in self.kept_out:
            if covers(tree, path):
                return f"it contains {path}"
        if tree.startswith("/home/") and tree.count("/") < 3:
            return "it is the home of another user"
        return "it looks like somebody's home" if looks_like_home(tree) else ""

    def in_file(self, path: str, mode: int) -> str:
        """Say why a file may hold a secret: its name, its mode, its content; empty if nothing suggests it."""
        return self.secret(path, mode) or _content(path)[0]

    def in_tree(self, tree: str) -> str:
        """Say which secret a directory has in it, or that it is too large to tell; empty if it has none."""
        left, unread, levels = MOST_ENTRIES, MOST_BYTES, [(tree, 0)]
        device = _device(tree)
        while levels:
            directory, level = levels.pop()
            try:
                with os.scandir(directory) as entries:
                    for entry in entries:
                        left -= 1
                        if left < 0 or level >= MOST_LEVELS:
                            return TOO_MUCH
                        if why := self._entry_secret(entry, device):
                            return why
                        if entry.is_dir(follow_symlinks=False):
                            levels.append((entry.path, level + 1))
                        elif entry.is_file(follow_symlinks=False):
                            why, size = _content(entry.path)
                            unread -= size
                            if why or unread < 0:
                                return f"{entry.path}: {why}" if why else TOO_MUCH
            except OSError:
                return f"{directory} cannot be listed"
        return ""

    def _entry_secret(self, entry: os.DirEntry[str], device: int) -> str:
        found = entry.stat(follow_symlinks=False)
        if found.st_dev != device:
            return f"another file system is mounted at {entry.path}"
        if is_secret_name(entry.name):
            return f"{entry.path} may hold secrets"
        why = self.secret(entry.path, found.st_mode)
        return f"{entry.path}: {why}" if why else ""

    def _is_public_etc(self, path: str) -> bool:
        return any(covers(f"/etc/{name}", path) for name in (*PUBLIC_ETC, *self.public_etc))


def _content(path: str) -> tuple[str, int]:
    """Say why the content of a file may be a secret, or ""; and how many bytes were read."""
    try:
        what, size = secret_in_file(path)
    except OSError as error:
        return f"it cannot be searched for secrets: {error.strerror}", 0
    return f"it has {what} in it" if what else "", size


def is_secret_name(name: str) -> bool:
    """Whether files of this name usually hold a secret."""
    low = name.lower()
    return _NAMED.match(low) is not None and _PLAIN.match(low) is None


def _device(path: str) -> int:
    try:
        return os.lstat(path).st_dev
    except OSError:
        return -1
