"""Where a sandbox's files are, and how to ask the kernel for a path in it."""

from __future__ import annotations

import contextlib
import os

import msgspec

from stockade.errors import PolicyError, SetupError, StockadeError
from stockade.linux.openat2 import held, node


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sandbox's files are: descriptors, and the paths that belong to them."""

    #: The sandbox's root. Its mounts disappear with the sandbox; a kept workspace has no root.
    root: int | None
    #: The workspace alone, for use after the sandbox's end: the overlay, or the host's directory.
    workspace: int | None = None
    #: Its path inside; empty without a workspace.
    path: str = ""
    home: str
    #: The user inside.
    uid: int
    gid: int
    #: Whether calls may write through the workspace's own descriptor.
    writable: bool = True

    def living(self) -> bool:
        """Return whether the root's mounts exist: every sandbox has /proc, which disappears with the rest."""
        return (
            self.root is not None and os.stat("proc", dir_fd=self.root).st_dev != os.fstat(self.root).st_dev
        )


class SandboxPath(msgspec.Struct, frozen=True):
    """A path in the form in which the kernel gets it."""

    #: The path inside, for messages.
    shown: str
    root: int
    path: str
    resolve: int

    def node(self, *, directory: bool = False, follow: bool = True) -> int:
        return node(self.root, self.path, self.resolve, directory=directory, follow=follow)

    def parent(self) -> tuple[int, str]:
        """Return its directory, which the caller closes, and its name there."""
        head, _, name = self.path.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            raise PolicyError(f"{self.shown} does not name a file in a directory")
        above = head or ("/" if self.path.startswith("/") else ".")
        return node(self.root, above, self.resolve, directory=True), name


#: After close: no descriptors at all.
NOWHERE = Roots(root=None, home="", uid=-1, gid=-1)


def ended_error(path: str) -> StockadeError:
    """Return the error about a path that disappeared with the sandbox."""
    return SetupError(
        f"{path}: the sandbox has ended",
        stage="files",
        hint="only its workspace is still accessible; use other files while the sandbox is open",
    )


def outside_error(path: str, workspace: str) -> StockadeError:
    """Return the error about a path outside the workspace when no sandbox has files of its own."""
    if not workspace:
        return PolicyError(
            f"{path}: the files of this sandbox are the host's own, and it has no workspace",
            hint="give it a workspace: nothing else of such a sandbox is accessible from here",
        )
    return PolicyError(
        f"{path} is not in the workspace {workspace}, and there is no sandbox with files of its own",
        hint="name paths below it, or open a sandbox: `Sandbox(resume=...)`",
    )


def make_parents(place: SandboxPath) -> None:
    """Create the missing directories above a path."""
    above = place.path.rstrip("/").rpartition("/")[0]
    try:
        os.close(node(place.root, above or ".", place.resolve, directory=True))
        return
    except FileNotFoundError:
        pass
    for index in [at for at, letter in enumerate(above) if at and letter == "/"] + [len(above)]:
        one = msgspec.structs.replace(place, path=above[:index])
        try:
            os.close(one.node(directory=True))
        except FileNotFoundError:
            directory, name = one.parent()
            with held(directory), contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=directory)
