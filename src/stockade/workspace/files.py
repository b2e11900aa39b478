"""`box.files`: the files of a sandbox, from outside.

The supervisor works on what the program works on: the sandbox's own root, by
a descriptor that its gate has handed out, and never a layer behind a mount. So
each side sees at once what the other does, deleted files are gone, read-only
ones cannot be changed, and a path means what it means inside. Whatever the
program has put there, a link, a pipe, a device, or a directory that it swaps
while it is used, the kernel resolves it below that root (`beneath`). Root lays
its capabilities down meanwhile: it may do what the program may.

When the sandbox has ended, its workspace is still there: by the descriptor of
the overlay, which keeps the mount, or of the host's own directory. Of a kept
workspace there is nothing else from the start (`Workspace.files`).
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO

from stockade.errors import LimitError, PolicyError, SetupError
from stockade.workspace import trees
from stockade.workspace.beneath import (
    AS_INSIDE,
    BENEATH,
    NO_MAGICLINKS,
    STRAIGHT,
    held,
    is_window,
    listed,
    look,
    node,
    not_mounted,
    opened,
    rename,
    status,
    unprivileged,
)
from stockade.workspace.info import FileInfo, Listing, describe
from stockade.workspace.place import NOWHERE, Place, Roots, ended, make_parents, nowhere
from stockade.workspace.refusal import refusal
from stockade.workspace.sink import Sink, unfinished

if TYPE_CHECKING:
    from stockade.policy import Resolved

Path = str | os.PathLike[str]

#: What one read brings into memory, and one download to the host, unless told otherwise.
READ_LIMIT = 64 << 20
DOWNLOAD_LIMIT = 1 << 30
#: How many names a listing and a search give, and how many a search looks at.
LIST_LIMIT = 10_000
SEARCH_LIMIT = 1_000
LOOKED_AT = 1_000_000
#: Links that lead to links, as the kernel counts them.
MOST_LINKS = 40


class Files:
    """The files of one sandbox. Relative paths count from its workspace, else from its home.

    >>> import stockade
    >>> with stockade.Sandbox() as box:
    ...     box.files.write("/tmp/greeting", "hello")
    ...     box.run(["cat", "/tmp/greeting"]).text
    'hello'

    It is safe to use from threads. Whoever makes it closes it.
    """

    def __init__(self, roots: Roots, let_go: Callable[[], None] = lambda: None) -> None:
        """The files behind descriptors, which are taken over; `let_go` is called when they are closed."""
        self._roots = roots
        self._then = let_go
        self._lock = threading.Lock()
        self._using = 0
        self._closed = False

    @classmethod
    def from_descriptors(cls, descriptors: tuple[int, ...], resolved: Resolved, home: str) -> Files:
        """The files behind what a gate has handed out, which is taken over: its root, and its overlay.

        A sandbox without a root of its own hands out nothing; of its files there is the workspace.
        """
        root, *overlay = descriptors or (None,)
        workspace = resolved.workspace
        behind: int | None = overlay[0] if overlay else None
        writable = True
        if workspace is not None and workspace.access != "overlay":
            # What lies over parts of the host's directory goes with the sandbox.
            over = _any_below((grant.path for grant in resolved.grants), workspace.path)
            writable = workspace.access == "write" and not over and not resolved.protected
            if not _any_below(resolved.denied, workspace.path):
                behind = os.dup(workspace.fd)
        return cls(
            Roots(
                root=root,
                workspace=behind,
                path="" if workspace is None else workspace.path,
                home=home,
                uid=os.geteuid(),
                gid=os.getegid(),
                writable=writable,
            )
        )

    def close(self) -> None:
        """Let go of the descriptors; calls that are under way end first."""
        with self._lock:
            self._closed = True
        self._let_go()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_roots"):
            self.close()

    def _let_go(self) -> None:
        with self._lock:
            if not self._closed or self._using or self._roots is NOWHERE:
                return
            roots, self._roots = self._roots, NOWHERE
            for descriptor in (roots.root, roots.workspace):
                if descriptor is not None:
                    os.close(descriptor)
        self._then()

    def read(
        self, path: Path, *, offset: int = 0, length: int | None = None, limit: int = READ_LIMIT
    ) -> bytes:
        """What is in a file, or a part of it. More than `limit` bytes are an error, not a surprise."""
        with self._acting(path) as place, held(_file(place)) as file:
            wanted = _wanted(place, file, offset, length, limit)
            return b"".join(_chunks(file, offset, wanted))

    def write(
        self,
        path: Path,
        data: bytes | str,
        *,
        mode: int | None = None,
        parents: bool = False,
        sync: bool = False,
    ) -> None:
        """Give a file this content, all at once: nobody sees a part of it.

        A file that is there keeps its permission bits unless `mode` is given; other names of it (hard
        links) keep the old content. `parents` makes missing directories, `sync` waits for the disk.
        """
        with (
            self._acting(path, writes=True) as place,
            contextlib.closing(self._sink(place, mode, parents)) as sink,
        ):
            sink.write(_content(data))
            sink.finish(sync=sync)

    def append(self, path: Path, data: bytes | str, *, parents: bool = False) -> None:
        """Add to the end of a file, which is made if it is missing."""
        content = memoryview(_content(data))
        with self._acting(path, writes=True) as place:
            try:
                file = _file(place, os.O_WRONLY | os.O_APPEND)
            except FileNotFoundError:
                with contextlib.closing(self._sink(place, None, parents)) as sink:
                    sink.write(content)
                    sink.finish()
                return
            with held(file):
                while content:
                    content = content[os.write(file, content) :]

    def replace(self, path: Path, old: bytes | str, new: bytes | str, *, count: int | None = None) -> int:
        """Replace a text in a file, everywhere or the first `count` times, and say how often."""
        before, after = _content(old), _content(new)
        if not before:
            raise PolicyError(
                f"{os.fsdecode(path)}: there is no text to replace", hint="`old` must not be empty"
            )
        content = self.read(path)
        found = content.count(before)
        times = found if count is None else min(found, count)
        if times > 0:
            self.write(path, content.replace(before, after, times))
        return max(times, 0)

    def info(self, path: Path) -> FileInfo:
        """What a path names; a link is described itself."""
        with self._acting(path) as place, held(place.node(follow=False)) as found:
            return describe(place.shown, status(found), found, "")

    def list(self, path: Path = ".", *, limit: int = LIST_LIMIT) -> Listing:
        """What is in a directory. A link to one is followed if the path ends with `/`."""
        found: builtins.list[FileInfo] = []
        with self._acting(path) as place, listed(place.root, place.path, place.resolve) as directory:
            with os.scandir(directory) as entries:
                names = [entry.name for _, entry in zip(range(limit + 1), entries, strict=False)]
            for name in sorted(names[:limit]):
                with contextlib.suppress(FileNotFoundError):  # gone again
                    found.append(
                        describe(_joined(place.shown, name), status(directory, name), directory, name)
                    )
        return Listing(tuple(found), f"there are more than {limit} names" if len(names) > limit else "")

    def search(self, pattern: str = "**", path: Path = ".", *, limit: int = SEARCH_LIMIT) -> Listing:
        """Everything below a directory whose path there matches: `*.py`, `src/**/test_?.py`.

        `*`, `?` and `[...]` stand for parts of one name, `**` for any number of directories. Links are
        found and not followed. A pattern that begins with `/` counts from the sandbox's root.
        """
        if not pattern.strip("/"):
            raise PolicyError(f"pattern = {pattern!r}: matches nothing", hint='"**" matches everything')
        glob = trees.Glob(pattern)
        found: builtins.list[FileInfo] = []
        cut = ""
        top = "/" if pattern.startswith("/") else path
        with self._acting(top) as place, held(place.node(directory=True)) as directory:
            for count, (below, seen) in enumerate(trees.search(directory, glob)):
                if count >= LOOKED_AT or len(found) >= limit:
                    cut = f"there is more: {len(found)} found, {count} looked at"
                    break
                if below.endswith("/"):
                    cut = f"{_joined(place.shown, below)} cannot be looked into"
                elif seen is not None:
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # gone again
                        found.append(describe(_joined(place.shown, below), seen, directory, below))
        return Listing(tuple(sorted(found, key=lambda info: info.path)), cut)

    def move(self, source: Path, target: Path, *, overwrite: bool = False, parents: bool = False) -> None:
        """Give a file, directory or link another path. What cannot be renamed there is copied."""
        with self._acting(source, writes=True) as old:
            directory, name = old.parent()
            with held(directory):
                status(directory, name)  # what is missing is missing here, not there
                with self._acting(target, writes=True) as new:
                    if parents:
                        make_parents(new)
                    into, renamed = new.parent()
                    with held(into):
                        _move(directory, name, into, renamed, overwrite)

    def remove(self, path: Path, *, recursive: bool = False) -> None:
        """Remove a file, a link or an empty directory; with `recursive` one with everything in it."""
        with self._acting(path, writes=True) as place:
            directory, name = place.parent()
            with held(directory):
                not_mounted(directory, name)
                if recursive:
                    trees.remove(directory, name)
                    return
                try:
                    os.unlink(name, dir_fd=directory)
                except IsADirectoryError:
                    os.rmdir(name, dir_fd=directory)

    def mkdir(self, path: Path, *, mode: int | None = None, parents: bool = False) -> None:
        """Make a directory; with `parents` also those above it, and none need be missing."""
        with self._acting(path, writes=True) as place:
            if parents:
                make_parents(place)
            directory, name = place.parent()
            with held(directory):
                try:
                    os.mkdir(name, dir_fd=directory)
                except FileExistsError:
                    there = look(directory, name)
                    if not parents or there is None or not stat.S_ISDIR(there.mode):
                        raise
                if mode is not None:
                    with held(node(directory, name, STRAIGHT, directory=True, follow=False)) as made:
                        os.chmod(f"/proc/self/fd/{made}", _mode(mode))

    def chmod(self, path: Path, mode: int) -> None:
        """Set the permission bits of a file or directory; a link is followed."""
        with self._acting(path, writes=True) as place, held(place.node()) as found:
            kind = os.fstat(found).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
            os.chmod(f"/proc/self/fd/{found}", _mode(mode))

    def upload(
        self,
        source: Path | BinaryIO,
        path: Path,
        *,
        mode: int | None = None,
        parents: bool = False,
        sync: bool = False,
        limit: int | None = None,
    ) -> int:
        """Write a file of the host, or what a binary stream has, as `write` does; say how many bytes."""
        with contextlib.ExitStack() as stack:
            if isinstance(source, str | os.PathLike):
                source = stack.enter_context(open(source, "rb"))
            with self._acting(path, writes=True) as place:
                sink = stack.enter_context(contextlib.closing(self._sink(place, mode, parents)))
            count = 0
            while data := source.read(trees.CHUNK):
                count += len(data)
                if limit is not None and count > limit:
                    raise _too_large(place.shown, limit)
                with self._acting(path, writes=True):
                    sink.write(data)
            with self._acting(path, writes=True):
                sink.finish(sync=sync)
            return count

    def download(
        self,
        path: Path,
        target: Path | BinaryIO,
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int | None = DOWNLOAD_LIMIT,
    ) -> int:
        """Copy a file, or a part of it, to a file of the host or a binary stream; say how many bytes.

        A file of the host is replaced when everything has arrived; a link in its place is not followed.
        """
        with self._acting(path) as place:
            file = _file(place)
        with held(file):
            wanted = _wanted(place, file, offset, length, limit)
            chunks = _chunks(file, offset, wanted)
            if not isinstance(target, str | os.PathLike):
                return sum(_given(target, chunk) for chunk in chunks)
            with _host_file(os.fspath(target)) as stream:
                return sum(_given(stream, chunk) for chunk in chunks)

    def _sink(self, place: Place, mode: int | None, parents: bool) -> Sink:
        """Where new content of a file goes; a link is followed to where the file is or would be."""
        mode = None if mode is None else _mode(mode)
        if parents:
            make_parents(place)
        for _ in range(MOST_LINKS):
            directory, name = place.parent()
            try:
                target = os.readlink(name, dir_fd=directory)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOENT):
                    return Sink(directory, name, mode)
                os.close(directory)
                raise
            with held(directory):
                if is_window(directory):
                    break
            place = self._place(os.path.join(os.path.dirname(place.shown), target), writes=True)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    @contextlib.contextmanager
    def _acting(self, path: Path, *, writes: bool = False) -> Iterator[Place]:
        """Be, for a moment, who the program is; the kernel's refusals become errors of ours."""
        with self._lock:
            if self._closed:
                raise SetupError("the files of this sandbox are closed", stage="files")
            self._using += 1
        try:
            if (os.geteuid(), os.getegid()) != (self._roots.uid, self._roots.gid):
                raise SetupError(
                    f"the sandbox is of user {self._roots.uid}, and this process now is {os.geteuid()}",
                    stage="files",
                )
            place = self._place(os.fsdecode(path), writes=writes)
            try:
                with unprivileged():
                    yield place
            except OSError as error:
                if place.root == self._roots.root and not self._roots.living():
                    raise ended(place.shown) from None
                if error.errno == errno.EXDEV and place.resolve == AS_INSIDE:
                    error = OSError(errno.EBUSY, "something in it is mounted by the policy itself")
                raise refusal(error, place.shown) from None
        finally:
            with self._lock:
                self._using -= 1
            self._let_go()

    def _place(self, path: str, *, writes: bool) -> Place:
        if not path or "\0" in path:
            raise PolicyError(f"{path!r} is not a path")
        roots = self._roots
        parts = os.path.join(roots.path or roots.home, path).split("/")
        shown = "/" + "/".join(part for part in parts if part not in ("", "."))
        if path.endswith("/") and shown != "/":
            shown += "/"
        if roots.root is not None and roots.living():
            return Place(shown, roots.root, shown, AS_INSIDE)
        below = f"{shown}/".startswith(f"{roots.path}/") if roots.path else False
        if roots.workspace is None or not below:
            raise nowhere(shown, roots.path) if roots.root is None else ended(shown)
        if writes and not roots.writable:
            raise refusal(OSError(errno.EROFS, os.strerror(errno.EROFS)), shown)
        rest = shown[len(roots.path) :].lstrip("/") or "."
        return Place(shown, roots.workspace, rest, BENEATH | NO_MAGICLINKS)


def _any_below(paths: Iterable[str], directory: str) -> bool:
    return any(path.startswith(f"{directory}/") for path in paths)


def _file(place: Place, flags: int = os.O_RDONLY) -> int:
    with held(place.node()) as found:
        return opened(found, flags)


def _content(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else bytes(data)


def _mode(mode: int) -> int:
    if not 0 <= mode <= 0o777:
        raise PolicyError(
            f"mode = 0o{mode:o}: is not a set of permission bits",
            hint="from 0 to 0o777; what runs with its owner's rights is not made from outside",
        )
    return mode


def _joined(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}"


def _move(directory: int, name: str, into: int, renamed: str, overwrite: bool) -> None:
    not_mounted(directory, name)
    not_mounted(into, renamed)
    try:
        rename(directory, name, into, renamed, overwrite=overwrite)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    # Another mount, or a directory of the host below an overlay.
    if not overwrite and look(into, renamed) is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    temporary = unfinished()
    try:
        trees.copy(directory, name, into, temporary)
        rename(into, temporary, into, renamed, overwrite=overwrite)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            trees.remove(into, temporary)
        raise
    trees.remove(directory, name)


def _wanted(place: Place, file: int, offset: int, length: int | None, limit: int | None) -> int:
    """How many bytes of a file are meant, if they are not too many."""
    if offset < 0 or (length is not None and length < 0):
        raise PolicyError(f"{place.shown}: offset and length are counted from 0")
    there = max(0, os.fstat(file).st_size - offset)
    wanted = there if length is None else min(there, length)
    if limit is not None and wanted > limit:
        raise _too_large(place.shown, limit)
    return wanted


def _too_large(path: str, limit: int) -> LimitError:
    return LimitError(
        f"{path}: is larger than {limit} bytes",
        hint="raise `limit`, or take a part with `offset` and `length`",
    )


def _chunks(file: int, offset: int, wanted: int) -> Iterator[bytes]:
    while wanted > 0 and (data := os.pread(file, min(wanted, trees.CHUNK), offset)):
        yield data
        offset, wanted = offset + len(data), wanted - len(data)


def _given(stream: BinaryIO, data: bytes) -> int:
    view = memoryview(data)
    while view:
        # A raw stream may take a part.
        view = view[stream.write(view) or 0 :]
    return len(data)


@contextlib.contextmanager
def _host_file(path: str) -> Iterator[BinaryIO]:
    """A file of the host, replaced at the end."""
    temporary = os.path.join(os.path.dirname(path), unfinished())
    try:
        with open(temporary, "xb") as stream:
            yield stream
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
