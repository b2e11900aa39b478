"""Paths looked up by descriptor, link by link.

A relative path keeps the directory that it is relative to: `./data` in a file
of /project becomes `/project/./data`. So the code that looks it up knows that
the author of the policy did not write the links below /project.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

import msgspec

# Not every system has these flags; there policies can be checked, but nothing runs.
_OPEN = getattr(os, "O_PATH", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
#: Separates the directory that a path is relative to from the path itself.
COUNTED = "/./"
#: As many links as the kernel follows.
MOST_LINKS = 40
#: Marks, among the names of a path, the end of the directory that it is relative to.
_GROUND = -1
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "pipe",
    stat.S_IFLNK: "link",
}


class PathLink(msgspec.Struct, frozen=True):
    """A symbolic link that a path leads through, by real names."""

    at: str
    leads: str
    """Where it ends, all further links followed; missing parts are kept."""
    rest: str = ""
    """What comes after it in the path, as the path and the links before it write it."""


class Lookup(msgspec.Struct, frozen=True):
    """What a path names now, and the links on the way to it."""

    name: str
    """Its real name; missing parts are kept."""
    ground: str
    """The real name of the directory that it is relative to; empty for an absolute path."""
    links: tuple[PathLink, ...] = ()
    fd: int = -1
    """The caller closes it; -1 if nothing is there."""
    mode: int = 0
    error: OSError | None = None
    """Why nothing was opened."""
    moved: bool = False
    """Whether what was opened has been renamed meanwhile."""

    @property
    def kind(self) -> str:
        """The kind of file, in one word."""
        return _KINDS.get(stat.S_IFMT(self.mode), "device") if self.error is None else "absent"

    def close(self) -> Lookup:
        """Close the descriptor and return the lookup without it."""
        if self.fd >= 0:
            os.close(self.fd)
        return msgspec.structs.replace(self, fd=-1)


def counted(path: str, base: str) -> str:
    """Make a relative path absolute, and keep in it the directory that it is relative to.

    >>> counted("./data", "/project"), counted("../data", "/project/sub"), counted(".", "/project")
    ('/project/./data', '/project/./data', '/project')
    """
    parts = _parts(path)
    base = base.rstrip("/")
    while parts and parts[0] == "..":
        base = os.path.dirname(base).rstrip("/")
        del parts[0]
    return f"{base}{COUNTED}{'/'.join(parts)}" if parts else base or "/"


def plain(path: str) -> str:
    """The one normal spelling of an absolute path, without the mark of `counted`."""
    # POSIX lets two slashes mean something else; Linux does not.
    return "/" + os.path.normpath("/" + path).lstrip("/")


def covers(tree: str, path: str) -> bool:
    """Whether the path is the tree or lies in it; both are real names."""
    return path == tree or path.startswith(tree if tree.endswith("/") else tree + "/")


def look_up(path: str) -> Lookup:
    """Open what an absolute path names, following one link after the other.

    The descriptor (O_PATH) is of the very file that was found, so nothing is looked up twice.
    """
    return _look_up_without_links(path) or _look_up_link_by_link(path)


def names_on_the_way(path: str) -> tuple[str, ...]:
    """Every real name that decides what an absolute path leads to: of each link on the way, and of the end.

    A program that replaces one of them decides where the path leads. The rest of the path is added to the
    name of a link, because a directory may take the link's place.

    >>> names_on_the_way("/nothing/here")
    ('/nothing/here',)
    """
    found = look_up(path).close()
    return tuple(dict.fromkeys((*(plain(f"{link.at}/{link.rest}") for link in found.links), found.name)))


def _look_up_without_links(path: str) -> Lookup | None:
    """Open a path in a few calls; None if its name in the kernel differs, because a link is on the way."""
    if sys.platform != "linux":
        return None
    name = plain(path)
    before, dot, _ = path.partition(COUNTED)
    ground = plain(before) if dot else ""
    try:
        found = os.open(path, _OPEN)
    except FileNotFoundError as error:
        # Its traceback would keep the frames above alive, with all their objects.
        return Lookup(name, ground, error=error.with_traceback(None)) if _is_absent(name) else None
    except OSError:
        return None
    try:
        mode = os.fstat(found).st_mode
        if not stat.S_ISLNK(mode) and _name_of(found) == name:
            found, kept = -1, found
            return Lookup(name, ground, (), kept, mode)
        return None
    finally:
        if found >= 0:
            os.close(found)


def _is_absent(name: str) -> bool:
    """Whether nothing has that name, and no link is on the way as far as it exists."""
    while name != "/":
        name, part = os.path.split(name)
        try:
            here = os.open(name, _OPEN)
        except FileNotFoundError:
            continue
        except OSError:
            return False
        try:
            if _name_of(here) == name:
                os.readlink(part, dir_fd=here)
            return False
        except OSError as error:
            return error.errno == errno.ENOENT
        finally:
            os.close(here)
    return False


def _name_of(descriptor: int) -> str:
    """The current name of an open file in the kernel; empty if it is too long."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _look_up_link_by_link(path: str) -> Lookup:
    """Open each name of a path in the directory before it; after an error, go on with the text alone."""
    before, dot, after = path.partition(COUNTED)
    todo: list[str | int] = [*_parts(before), *([_GROUND] if dot else ()), *_parts(after)]
    todo.reverse()
    name, ground, error = "", "", None
    at: list[tuple[str, str]] = []
    leads: dict[int, str] = {}
    here = os.open("/", _OPEN)
    try:
        while todo:
            part = todo.pop()
            if isinstance(part, int):
                if part == _GROUND:
                    ground = name or "/"
                else:
                    leads[part] = name or "/"
                continue
            target = ""
            if error is None:
                try:
                    target = _link_target(part, here)
                    if target and len(at) == MOST_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    # A link is relative to the directory that it is in, unless it is absolute.
                    onto = "/" if target.startswith("/") else "." if target else part
                    below = os.open(onto, _OPEN, dir_fd=here)
                    os.close(here)
                    here = below
                except OSError as failed:
                    error, target = failed, ""
            if target:
                rest = "/".join(str(after) for after in reversed(todo) if not isinstance(after, int))
                todo += [len(at), *_parts(target)[::-1]]
                at.append((f"{name}/{part}", rest))
                name = "" if target.startswith("/") else name
            else:
                name = os.path.dirname(name).rstrip("/") if part == ".." else f"{name}/{part}"
        name = name or "/"
        links = tuple(PathLink(place, leads[number], rest) for number, (place, rest) in enumerate(at))
        if error is None:
            mode = os.fstat(here).st_mode
            here, kept = -1, here
            moved = sys.platform == "linux" and _name_of(kept) != name
            return Lookup(name, ground, links, kept, mode, moved=moved)
        return Lookup(name, ground, links, error=error.with_traceback(None))
    finally:
        if here >= 0:
            os.close(here)


def _link_target(name: str, directory: int) -> str:
    """The target of a link; empty for a file that is not a link."""
    if name == "..":
        return ""
    try:
        return os.readlink(name, dir_fd=directory)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return ""


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
