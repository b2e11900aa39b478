"""`box.files`: the files of a sandbox, from outside.

The supervisor works on the same files as the program: on the sandbox's own
root, through a descriptor from its gate, and never on a layer behind a mount.
So each side sees at once what the other does, deleted files are gone,
read-only files cannot be changed, and a path means what it means inside. The
kernel resolves every path below that root (`openat2`), whatever the program
has put there: a link, a pipe, a device, or a directory that it swaps
meanwhile. Root drops its capabilities for the call: it may do what the program
may.

When the sandbox has ended, its workspace remains accessible: through the
descriptor of the overlay, which keeps the mount alive, or of the host's own
directory. A kept workspace has nothing else from the start
(`Workspace.files`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

from stockade.errors import LimitError, PolicyError, SetupError, StockadeError
from stockade.linux.openat2 import (
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
from stockade.workspace.files import tree_operations
from stockade.workspace.files.atomic_write import Sink, temporary_name
from stockade.workspace.files.file_errors import refusal
from stockade.workspace.files.file_info import FileInfo, Listing, ListingBuilder, describe
from stockade.workspace.files.sandbox_paths import (
    NOWHERE,
    Roots,
    SandboxPath,
    ended_error,
    make_parents,
    outside_error,
)

Path = str | os.PathLike[str]

#: The default limits of one read into memory, and of one download to the host.
READ_LIMIT = 64 << 20
DOWNLOAD_LIMIT = 1 << 30
#: How many names a listing and a search return, and how many a search examines.
LIST_LIMIT = 10_000
SEARCH_LIMIT = 1_000
LOOKED_AT = 1_000_000
#: How many characters of a path a message shows.
SHOWN_PATH = 300
#: The kernel's limit of links in a path.
MOST_LINKS = 40


class Files:
    """The files of one sandbox. Relative paths count from its workspace, else from its home.

    >>> import stockade
    >>> with stockade.Sandbox() as box:
    ...     box.files.write("/tmp/greeting", "hello")
    ...     box.run(["cat", "/tmp/greeting"]).text
    'hello'

    It is safe to use from several threads. Its creator closes it.
    """

    def __init__(
        self, roots: Roots, let_go: Callable[[], None] = lambda: None, *, keeps_rights: bool = False
    ) -> None:
        """Take ownership of the descriptors of `roots`; `let_go` is called when they are closed.

        With `keeps_rights`, calls use the capabilities of this process, which are then those of a program.
        """
        self._roots = roots
        self._rights = contextlib.nullcontext if keeps_rights else unprivileged
        self._on_close = let_go
        self._lock = threading.Lock()
        self._using = 0
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Files of {self._roots.path or self._roots.home or '-'}: {state}>"

    def close(self) -> None:
        """Close the descriptors as soon as running calls have ended."""
        with self._lock:
            self._closed = True
        self._close_if_unused()

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

    def _close_if_unused(self) -> None:
        with self._lock:
            if not self._closed or self._using or self._roots is NOWHERE:
                return
            roots, self._roots = self._roots, NOWHERE
            for descriptor in (roots.root, roots.workspace):
                if descriptor is not None:
                    os.close(descriptor)
        self._on_close()

    def read(
        self, path: Path, *, offset: int = 0, length: int | None = None, limit: int = READ_LIMIT
    ) -> bytes:
        """Return the content of a file, or a part of it. More than `limit` bytes are an error."""
        with self._acting(path) as place, held(_open_file(place)) as file:
            wanted = _length_to_read(place, file, offset, length, limit)
            # Usually in one piece: joining pieces takes twice the memory.
            whole = os.pread(file, wanted, offset)
            rest = _chunks(file, offset + len(whole), wanted - len(whole)) if whole else ()
            return b"".join((whole, *rest))

    def write(
        self,
        path: Path,
        data: bytes | str,
        *,
        mode: int | None = None,
        parents: bool = False,
        replace: bool = False,
        sync: bool = False,
    ) -> None:
        """Replace the content of a file atomically: no reader sees a part of it.

        An existing file keeps its permission bits unless `mode` is given; its other names (hard links) keep
        the old content. A file that the program inside may not write, by its permission bits or its owner,
        is refused with a `PermissionError`; with `replace` a new file takes its place. `parents` creates
        missing directories, `sync` waits for the disk.
        """
        with (
            self._acting(path, writes=True) as place,
            contextlib.closing(self._sink(place, mode, parents, replace)) as sink,
        ):
            sink.write(_encode(data))
            sink.finish(sync=sync)

    def append(self, path: Path, data: bytes | str, *, parents: bool = False) -> None:
        """Append to a file, which is created if it is missing."""
        content = memoryview(_encode(data))
        with self._acting(path, writes=True) as place:
            try:
                file = _open_file(place, os.O_WRONLY | os.O_APPEND)
            except FileNotFoundError:
                with contextlib.closing(self._sink(place, None, parents)) as sink:
                    sink.write(content)
                    sink.finish()
                return
            with held(file):
                while content:
                    content = content[os.write(file, content) :]

    def replace(self, path: Path, old: bytes | str, new: bytes | str, *, count: int | None = None) -> int:
        """Replace a text in a file, everywhere or the first `count` times, and return how often."""
        before, after = _encode(old), _encode(new)
        if not before:
            raise PolicyError(
                f"{os.fsdecode(path)}: the text to replace is empty", hint="`old` must not be empty"
            )
        content = self.read(path)
        found = content.count(before)
        times = found if count is None else min(found, count)
        if len(content) + times * (len(after) - len(before)) > READ_LIMIT:
            raise LimitError(
                f"{os.fsdecode(path)} would become larger than {READ_LIMIT} bytes",
                hint="replace fewer, with `count`, or let a command inside do it",
            )
        if times > 0:
            self.write(path, content.replace(before, after, times))
        return max(times, 0)

    def info(self, path: Path) -> FileInfo:
        """Describe the file at a path; for a link, the link itself."""
        with self._acting(path) as place, held(place.node(follow=False)) as found:
            return describe(place.shown, status(found), found, "")

    def list(self, path: Path = ".", *, limit: int = LIST_LIMIT) -> Listing:
        """List a directory. A link to one is followed if the path ends with `/`."""
        gathered = ListingBuilder()
        with self._acting(path) as place, listed(place.root, place.path, place.resolve) as directory:
            with os.scandir(directory) as entries:
                names = [entry.name for _, entry in zip(range(limit + 1), entries, strict=False)]
            if len(names) > limit:
                gathered.cut = f"there are more than {limit} names"
            for name in sorted(names[:limit]):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    shown = _join(place.shown, name)
                    if not gathered.add(describe(shown, status(directory, name), directory, name)):
                        break
        return gathered.listing()

    def search(self, pattern: str = "**", path: Path = ".", *, limit: int = SEARCH_LIMIT) -> Listing:
        """Find all files below a directory whose path there matches: `*.py`, `src/**/test_?.py`.

        `*`, `?` and `[...]` stand for parts of one name, `**` for any number of directories. Links are
        listed but not followed. A pattern that begins with `/` counts from the sandbox's root.
        """
        if not pattern.strip("/"):
            raise PolicyError(f"pattern = {pattern!r}: matches nothing", hint='"**" matches everything')
        glob = tree_operations.Glob(pattern)
        gathered = ListingBuilder()
        top = "/" if pattern.startswith("/") else path
        with self._acting(top) as place, held(place.node(directory=True)) as directory:
            for count, (below, seen) in enumerate(tree_operations.search(directory, glob)):
                if count >= LOOKED_AT or len(gathered.found) >= limit:
                    gathered.cut = f"there are more: {len(gathered.found)} found, {count} examined"
                    break
                shown = _join(place.shown, below)
                if below.endswith("/"):
                    more = "…" if len(shown) > SHOWN_PATH else ""
                    gathered.cut = f"{shown[:SHOWN_PATH]}{more} cannot be searched"
                elif seen is not None:
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile
                        if not gathered.add(describe(shown, seen, directory, below)):
                            break
        return gathered.listing()

    def move(self, source: Path, target: Path, *, overwrite: bool = False, parents: bool = False) -> None:
        """Move a file, directory or link. If it cannot be renamed to the target, it is copied.

        `overwrite` replaces a file at the target, also one that may not be written, as `os.replace` does.
        """
        with self._acting(source, writes=True) as old:
            directory, name = old.parent()
            with held(directory):
                status(directory, name)  # a missing source is an error about the source
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
                    tree_operations.remove(directory, name)
                    return
                try:
                    os.unlink(name, dir_fd=directory)
                except IsADirectoryError:
                    os.rmdir(name, dir_fd=directory)

    def mkdir(self, path: Path, *, mode: int | None = None, parents: bool = False) -> None:
        """Create a directory; with `parents` also those above it, and existing ones are no error."""
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
                        os.chmod(f"/proc/self/fd/{made}", _check_mode(mode))

    def chmod(self, path: Path, mode: int) -> None:
        """Set the permission bits of a file or directory; a link is followed."""
        with self._acting(path, writes=True) as place, held(place.node()) as found:
            kind = os.fstat(found).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
            os.chmod(f"/proc/self/fd/{found}", _check_mode(mode))

    def upload(
        self,
        source: Path | BinaryIO,
        path: Path,
        *,
        mode: int | None = None,
        parents: bool = False,
        replace: bool = False,
        sync: bool = False,
        limit: int | None = None,
    ) -> int:
        """Write a file of the host, or a binary stream, as `write` does; return the number of bytes."""
        with contextlib.ExitStack() as stack:
            if isinstance(source, str | os.PathLike):
                source = stack.enter_context(open(source, "rb"))
            with self._acting(path, writes=True) as place:
                sink = stack.enter_context(contextlib.closing(self._sink(place, mode, parents, replace)))
            count = 0
            while data := source.read(tree_operations.CHUNK):
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
        """Copy a file, or a part of it, to a file of the host or a binary stream; return the number of bytes.

        A file of the host is replaced once everything has arrived; a link in its place is not followed.
        """
        with self._acting(path) as place:
            file = _open_file(place)
        with held(file):
            wanted = _length_to_read(place, file, offset, length, limit)
            chunks = _chunks(file, offset, wanted)
            if not isinstance(target, str | os.PathLike):
                return sum(_write_all(target, chunk) for chunk in chunks)
            with _host_file(os.fspath(target)) as stream:
                return sum(_write_all(stream, chunk) for chunk in chunks)

    def _sink(self, place: SandboxPath, mode: int | None, parents: bool, replace: bool = False) -> Sink:
        """Return the sink for a file's new content; a link is followed to where the file is or would be."""
        mode = None if mode is None else _check_mode(mode)
        if parents:
            make_parents(place)
        directory, name = self._follow(place)
        return Sink(directory, name, mode, replace=replace)

    def _follow(self, place: SandboxPath) -> tuple[int, str]:
        """Follow links to where a file is or would be; return its directory, which the caller closes."""
        for _ in range(MOST_LINKS):
            directory, name = place.parent()
            try:
                target = os.readlink(name, dir_fd=directory)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOENT):
                    return directory, name
                os.close(directory)
                raise
            with held(directory):
                if is_window(directory):
                    break
            place = self._place(os.path.join(os.path.dirname(place.shown), target), writes=True)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    @contextlib.contextmanager
    def _acting(self, path: Path, *, writes: bool = False) -> Iterator[SandboxPath]:
        """Act with the program's rights for one call; raise the kernel's refusals as errors of ours."""
        with self._lock:
            if self._closed:
                raise SetupError("the files of this sandbox are closed", stage="files")
            self._using += 1
        try:
            if (os.geteuid(), os.getegid()) != (self._roots.uid, self._roots.gid):
                raise SetupError(
                    f"the sandbox belongs to user {self._roots.uid}; this process is now user {os.geteuid()}",
                    stage="files",
                )
            place = self._place(os.fsdecode(path), writes=writes)
            try:
                with self._rights():
                    yield place
            except StockadeError:
                raise
            except OSError as error:
                if place.root == self._roots.root and not self._roots.living():
                    raise ended_error(place.shown) from None
                if error.errno == errno.EXDEV and place.resolve == AS_INSIDE:
                    error = OSError(errno.EBUSY, "something in it is mounted by the policy")
                raise refusal(error, place.shown) from None
        finally:
            with self._lock:
                self._using -= 1
            self._close_if_unused()

    def _place(self, path: str, *, writes: bool) -> SandboxPath:
        if not path or "\0" in path:
            raise PolicyError(f"{path!r} is not a path")
        roots = self._roots
        parts = os.path.join(roots.path or roots.home, path).split("/")
        shown = "/" + "/".join(part for part in parts if part not in ("", "."))
        if path.endswith("/") and shown != "/":
            shown += "/"
        if roots.root is not None and roots.living():
            return SandboxPath(shown, roots.root, shown, AS_INSIDE)
        below = f"{shown}/".startswith(f"{roots.path}/") if roots.path else False
        if roots.workspace is None or not below:
            raise outside_error(shown, roots.path) if roots.root is None else ended_error(shown)
        if writes and not roots.writable:
            raise refusal(OSError(errno.EROFS, os.strerror(errno.EROFS)), shown)
        rest = shown[len(roots.path) :].lstrip("/") or "."
        return SandboxPath(shown, roots.workspace, rest, BENEATH | NO_MAGICLINKS)


def _open_file(place: SandboxPath, flags: int = os.O_RDONLY) -> int:
    with held(place.node()) as found:
        return opened(found, flags)


def _encode(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else bytes(data)


def _check_mode(mode: int) -> int:
    if not 0 <= mode <= 0o777:
        raise PolicyError(
            f"mode = 0o{mode:o}: is not a set of permission bits",
            hint="use 0 to 0o777: set-uid and set-gid bits cannot be set from outside",
        )
    return mode


def _join(directory: str, name: str) -> str:
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
    # The target is on another mount, or the source is a directory of the host below an overlay.
    if not overwrite and look(into, renamed) is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    temporary = temporary_name()
    try:
        tree_operations.copy(directory, name, into, temporary)
        rename(into, temporary, into, renamed, overwrite=overwrite)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            tree_operations.remove(into, temporary)
        raise
    tree_operations.remove(directory, name)


def _length_to_read(place: SandboxPath, file: int, offset: int, length: int | None, limit: int | None) -> int:
    """Return how many bytes to read, or raise an error if that exceeds the limit."""
    if offset < 0 or (length is not None and length < 0):
        raise PolicyError(f"{place.shown}: offset and length must not be negative")
    there = max(0, os.fstat(file).st_size - offset)
    wanted = there if length is None else min(there, length)
    if limit is not None and wanted > limit:
        raise _too_large(place.shown, limit)
    return wanted


def _too_large(path: str, limit: int) -> LimitError:
    return LimitError(
        f"{path} is larger than {limit} bytes",
        hint="raise `limit`, or read a part with `offset` and `length`",
    )


def _chunks(file: int, offset: int, wanted: int) -> Iterator[bytes]:
    while wanted > 0 and (data := os.pread(file, min(wanted, tree_operations.CHUNK), offset)):
        yield data
        offset, wanted = offset + len(data), wanted - len(data)


def _write_all(stream: BinaryIO, data: bytes) -> int:
    view = memoryview(data)
    while view:
        # A raw stream may accept only a part.
        view = view[stream.write(view) or 0 :]
    return len(data)


@contextlib.contextmanager
def _host_file(path: str) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces a file of the host at the end."""
    temporary = os.path.join(os.path.dirname(path), temporary_name())
    try:
        with open(temporary, "xb") as stream:
            yield stream
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
