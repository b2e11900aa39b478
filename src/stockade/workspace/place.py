"""Where a sandbox's files are, and what a path of it means to the kernel."""

from __future__ import annotations

import contextlib
import os

import msgspec

from stockade.errors import PolicyError, SetupError, StockadeError
from stockade.workspace.beneath import held, node


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sandbox's files are: descriptors, and the paths that go with them."""

    #: The sandbox's root. What is mounted in it goes with the sandbox; a kept workspace has none.
    root: int | None
    #: The workspace for itself, for afterwards: the overlay, or the host's directory.
    workspace: int | None = None
    #: Where it is inside; empty if there is none.
    path: str = ""
    home: str
    #: The user inside.
    uid: int
    gid: int
    #: Whether the workspace's own descriptor may be written through.
    writable: bool = True

    def living(self) -> bool:
        """Whether the root's mounts are there: /proc is in every sandbox, and goes with the others."""
        return (
            self.root is not None and os.stat("proc", dir_fd=self.root).st_dev != os.fstat(self.root).st_dev
        )


class Place(msgspec.Struct, frozen=True):
    """A path as the kernel is asked for it."""

    #: Inside; for the eyes of the user.
    shown: str
    root: int
    path: str
    resolve: int

    def node(self, *, directory: bool = False, follow: bool = True) -> int:
        return node(self.root, self.path, self.resolve, directory=directory, follow=follow)

    def parent(self) -> tuple[int, str]:
        """Its directory, for the caller to close, and its name there."""
        head, _, name = self.path.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            raise PolicyError(f"{self.shown}: names no file in a directory")
        above = head or ("/" if self.path.startswith("/") else ".")
        return node(self.root, above, self.resolve, directory=True), name


#: When everything is let go of.
NOWHERE = Roots(root=None, home="", uid=-1, gid=-1)


def ended(path: str) -> StockadeError:
    """What to tell about a path that went with the sandbox."""
    return SetupError(
        f"{path}: the sandbox has ended",
        stage="files",
        hint="its workspace can still be looked at; use the rest while the sandbox is open",
    )


def nowhere(path: str, workspace: str) -> StockadeError:
    """What to tell about a path beside a workspace that no sandbox has, or one without a root of its own."""
    if not workspace:
        return PolicyError(
            f"{path}: the files of this sandbox are the host's own, and it has no workspace",
            hint="give it one: of such a sandbox only the workspace can be looked at from here",
        )
    return PolicyError(
        f"{path}: is not in the workspace {workspace}, and there is no sandbox with files of its own",
        hint="name paths below it, or open a sandbox: `Sandbox(workspace=...)`",
    )


def make_parents(place: Place) -> None:
    """Make the directories above a path that are missing."""
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
