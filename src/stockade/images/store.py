"""The images of a user: root file systems in the state directory, which sandboxes have instead of the host's.

`images/NAME` has the directory `root-RANDOM` and `record.json`. An image is made beside it and renamed, so it
is there as a whole or not at all; it never changes afterwards. A sandbox that uses an image holds a shared
lock on its directory, and an importer an exclusive one on what it makes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator

import msgspec

from stockade import state
from stockade.errors import NotFoundError, SetupError, StockadeError
from stockade.images.names import directory_name, valid_name
from stockade.images.tree_writer import MOST_BYTES, MOST_ENTRIES, ImageError, TreeWriter
from stockade.linux import dirwalk, foreign_files, openat2

IMAGES = "images"
RECORD = "record.json"
_PART = ".import-"


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an image."""

    name: str
    #: The SHA-256 of all names, modes, link targets and contents.
    digest: str
    bytes: int
    entries: int
    #: Devices, pipes and sockets that were left out.
    skipped: int
    #: In seconds since 1970.
    imported: int
    #: The name of the directory with the root.
    root: str


class RegisteredImage(msgspec.Struct, frozen=True):
    """A registered image."""

    record: ImageRecord
    #: The path of its root file system.
    root: str

    @property
    def name(self) -> str:
        return self.record.name


def import_image(
    source: str,
    name: str,
    *,
    home: str | None = None,
    most_bytes: int = MOST_BYTES,
    most_entries: int = MOST_ENTRIES,
    progress: Callable[[int, int], object] = lambda entries, size: None,
) -> RegisteredImage:
    """Register a directory or a tar archive as an image, and return it.

    The source is not trusted. `most_bytes` and `most_entries` bound what it may contain; `progress` gets the
    numbers of entries and bytes so far.
    """
    final = directory_name(name)
    place = _place(home, make=True)
    with openat2.held(os.open(place, dirwalk.DIRECTORY)) as images:
        _sweep(images)
        if os.path.lexists(f"{place}/{final}"):
            raise _exists(name)
        part = f"{_PART}{os.urandom(6).hex()}"
        os.mkdir(part, 0o700, dir_fd=images)
        try:
            with openat2.held(os.open(part, dirwalk.DIRECTORY, dir_fd=images)) as made:
                fcntl.flock(made, fcntl.LOCK_EX)
                inner = f"root-{os.urandom(6).hex()}"
                os.mkdir(inner, 0o700, dir_fd=made)
                with openat2.held(os.open(inner, dirwalk.DIRECTORY, dir_fd=made)) as root:
                    writer = TreeWriter(
                        root, most_bytes=most_bytes, most_entries=most_entries, progress=progress
                    )
                    _fill(writer, source, f"{place}/{part}", place, most_bytes, most_entries)
                    digest = _digest(root)
                record = ImageRecord(
                    name=name,
                    digest=digest,
                    bytes=writer.bytes,
                    entries=writer.entries,
                    skipped=writer.skipped,
                    imported=int(time.time()),
                    root=inner,
                )
                _write_record(made, record)
                ctypes.CDLL(None).syncfs(
                    made
                )  # or after a power cut the name could be there without the files
                try:
                    openat2.rename(images, part, images, final, overwrite=False)
                except FileExistsError:
                    raise _exists(name) from None
        except BaseException:
            foreign_files.remove(images, part)
            raise
    return RegisteredImage(record, f"{place}/{final}/{inner}")


def list_images(home: str | None = None) -> list[RegisteredImage]:
    """Return every registered image, by name."""
    place, found = _place(home), []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir(place):
            if not entry.startswith("."):
                with contextlib.suppress(SetupError):  # it is just being removed, or damaged
                    found.append(_read(place, entry))
    return sorted(found, key=lambda one: one.name)


def find(name: str, home: str | None = None) -> RegisteredImage:
    """Return the image of a name; NotFoundError if there is none."""
    place = _place(home)
    entry = directory_name(name)
    if not os.path.isdir(f"{place}/{entry}"):
        raise NotFoundError(
            f"there is no image {name}",
            hint="`stockade images list` lists them; `stockade images import` adds one",
        )
    return _read(place, entry)


def remove_image(name: str, home: str | None = None) -> None:
    """Remove an image that no sandbox uses."""
    find(name, home)
    with openat2.held(os.open(_place(home), dirwalk.DIRECTORY)) as images:
        entry = directory_name(name)
        with openat2.held(os.open(entry, dirwalk.DIRECTORY, dir_fd=images)) as found:
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SetupError(
                    f"a sandbox uses the image {name}", stage="image", hint="delete the sandbox first"
                ) from None
            doomed = f"{dirwalk.REMOVED}{os.urandom(6).hex()}"
            os.rename(entry, doomed, src_dir_fd=images, dst_dir_fd=images)
            foreign_files.remove(images, doomed)


def _fill(
    writer: TreeWriter, source: str, place: str, images: str, most_bytes: int, most_entries: int
) -> None:
    try:
        is_directory = stat.S_ISDIR(os.stat(source).st_mode)
    except OSError as error:
        raise ImageError(
            f"cannot open {source}: {error.strerror}", hint="name a directory or a tar archive"
        ) from None
    if is_directory:
        from stockade.images.directories import DirectoryCopy

        own = os.stat(os.path.dirname(images))
        DirectoryCopy(writer, (own.st_dev, own.st_ino)).copy(source)
    else:
        from stockade.images.archives import extract

        extract(source, writer, place, most_bytes=most_bytes, most_entries=most_entries)
    writer.finish()


def _digest(root: int) -> str:
    """Return the digest of a tree: the same for the same names, modes, link targets and contents."""
    import hashlib

    whole = hashlib.sha256()
    waiting = [""]
    while waiting:
        path = waiting.pop()
        below = []
        with dirwalk.listed(root, path, own=True) as directory:
            for name in sorted(os.listdir(directory)):
                found = os.stat(name, dir_fd=directory, follow_symlinks=False)
                here = f"{path}/{name}" if path else name
                kind, content = f"{found.st_mode:o}", b""
                if stat.S_ISDIR(found.st_mode):
                    below.append(here)
                elif stat.S_ISLNK(found.st_mode):
                    content = os.fsencode(os.readlink(name, dir_fd=directory))
                else:
                    with dirwalk.content(directory, name, own=True) as file:
                        content = _content_digest(file)
                for part in (os.fsencode(here), kind.encode(), content):
                    whole.update(len(part).to_bytes(8, "big") + part)
        waiting += reversed(below)
    return whole.hexdigest()


def _content_digest(file: int) -> bytes:
    import hashlib

    with open(file, "rb", closefd=False, buffering=0) as content:
        return hashlib.file_digest(content, "sha256").digest()


def _write_record(directory: int, record: ImageRecord) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with openat2.held(os.open(RECORD, flags, 0o600, dir_fd=directory)) as file:
        os.write(file, msgspec.json.encode(record))


def _read(place: str, entry: str) -> RegisteredImage:
    path = f"{place}/{entry}/{RECORD}"
    try:
        with open(path, "rb") as file:
            record = msgspec.json.decode(file.read(), type=ImageRecord)
        valid_name(record.name)
        if "/" in record.root or not record.root.startswith("root-"):
            raise ValueError("not the name of a root")
    except (OSError, ValueError, StockadeError) as error:
        raise SetupError(
            f"the image in {place}/{entry} is damaged: {error}",
            stage="image",
            hint=f"remove {place}/{entry}, and import it again",
        ) from None
    return RegisteredImage(record, f"{place}/{entry}/{record.root}")


def _sweep(images: int) -> None:
    """Remove what killed imports and removals left."""
    for name in os.listdir(images):
        if not name.startswith((_PART, dirwalk.REMOVED)):
            continue
        with contextlib.suppress(FileNotFoundError), _unused(images, name):
            foreign_files.remove(images, name)


@contextlib.contextmanager
def _unused(images: int, name: str) -> Iterator[None]:
    with openat2.held(os.open(name, dirwalk.DIRECTORY, dir_fd=images)) as found:
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileNotFoundError(name) from None  # to the caller it is not there
        yield


def _place(home: str | None, *, make: bool = False) -> str:
    from stockade.linux.user import Caller

    caller = Caller.current()
    home = home or state.state_dir(caller.environ, caller.home)
    if make:
        state.ensure(home)
        os.makedirs(f"{home}/{IMAGES}", mode=0o700, exist_ok=True)
    elif os.path.isdir(home):
        state.check(home)
    return f"{home}/{IMAGES}"


def _exists(name: str) -> SetupError:
    return SetupError(
        f"there is an image {name} already", stage="image", hint=f"stockade images remove {name}"
    )
