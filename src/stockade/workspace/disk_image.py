"""Disk images: root's sandboxes write to them under a limit that must outlive their supervisor.

`image` in a layer is a file of the limit's size, fully allocated, with an
ext4 file system in it. It is mounted at no path: the mount is a descriptor,
which the gate attaches out of sight in the sandbox's own namespace, and the
loop device disappears with the last mount. So a killed supervisor leaves only
a file behind. Programs see directories of the file system, never the file or
its device: only the kernel writes what the kernel parses.

When the sandbox has ended, the supervisor copies the changes to the layer as
from private memory and removes the file. Any process that finds the file
later does that first.

The lock on the file belongs to the open file description that the loop device
holds too, so it lasts until the device is released, whichever process dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import time
from collections.abc import Iterator

from stockade.errors import PolicyError, SetupError
from stockade.linux import dirwalk, openat2
from stockade.workspace import metadata, tree_copy
from stockade.workspace.snapshots import open_directory, replace

FILE, PART = "image", "image.new"
#: Where administrators' programs are, whatever PATH says.
PROGRAMS = "/usr/sbin:/sbin:/usr/bin:/bin"
#: Below the first size, blocks are small; below the second, there is no room for a journal.
SMALL, LEAST_JOURNAL = 512 << 20, 16 << 20
#: How long a sandbox whose supervisor was killed may take to end: its grace is two seconds.
ENDED_SECONDS = 10.0

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_CLOEXEC, _NOSUID_NODEV = 1, 6
_LOOP_CONFIGURE, _LOOP_FREE, _AUTOCLEAR = 0x4C0A, 0x4C82, 4


def missing() -> str:
    """Return why this machine cannot make an image; empty if it can."""
    if os.geteuid() != 0:
        return "only root can mount an image"
    if shutil.which("mkfs.ext4", path=PROGRAMS) is None:
        return "mkfs.ext4 is not installed"
    try:
        os.close(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/loop-control cannot be opened: {error.strerror}"
    with open("/proc/filesystems", encoding="ascii") as file:
        return "" if "\text4\n" in file.read() else "the kernel does not know ext4"


def make(layer: str, size: int) -> int:
    """Make the image of a layer, mount it and return the mount, which the caller closes."""
    with _explain_errors(f"cannot make an image of {size} bytes in {layer}"):
        file = os.open(f"{layer}/{PART}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            _format(file, size)
            # Renamed while it is still empty: a file under the other name was never finished.
            os.rename(f"{layer}/{PART}", f"{layer}/{FILE}")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _mount(file)
        finally:
            os.close(file)


def _format(file: int, size: int) -> None:
    import subprocess

    words = [shutil.which("mkfs.ext4", path=PROGRAMS) or "mkfs.ext4", "-q", "-F", "-m", "0"]
    words += ["-b", "1024" if size < SMALL else "4096", "-N", str(max(256, size >> 14))]
    # Discarding would release the allocated blocks.
    words += ["-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"]
    if size < LEAST_JOURNAL:
        words += ["-O", "^resize_inode,^has_journal"]
    else:
        words += ["-O", "^resize_inode", "-J", "size=1" if size < SMALL else "size=4"]
    made = subprocess.run(
        [*words, f"/proc/self/fd/{file}"], pass_fds=[file], stdin=subprocess.DEVNULL, capture_output=True,
        env={"PATH": PROGRAMS, "LC_ALL": "C"}, check=False,
    )  # fmt: skip
    if made.returncode:
        lines = made.stderr.decode("utf-8", "replace").strip().splitlines()
        raise PolicyError(
            f"limits.disk = {size}: cannot make a file system of that size: {lines[-1] if lines else ''}",
            hint="raise limits.disk, or leave out workspace.durable",
        )


def _mount(file: int) -> int:
    """Mount the file system of a file at no path. Its loop device disappears with the last mount."""
    device = _attach_loop(file)
    try:
        context = openat2.call(_FSOPEN, b"ext4", _CLOEXEC)
        try:
            for key, value in ((b"source", b"/proc/self/fd/%d" % device), (b"noinit_itable", None)):
                openat2.call(_FSCONFIG, context, _SET_FLAG if value is None else _SET_STRING, key, value, 0)
            openat2.call(_FSCONFIG, context, _CREATE, None, None, 0)
            return openat2.call(_FSMOUNT, context, _CLOEXEC, _NOSUID_NODEV)
        finally:
            os.close(context)
    finally:
        os.close(device)


def _attach_loop(file: int) -> int:
    """Attach a loop device to the file and return it."""
    # struct loop_config: the file, its block size, and of loop_info64 only the flags.
    wanted = struct.pack("=II52xI176x64x", file, 0, _AUTOCLEAR)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        while True:
            device = os.open(f"/dev/loop{fcntl.ioctl(control, _LOOP_FREE)}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, wanted)
                return device
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # another process was faster
                    raise
    finally:
        os.close(control)


def is_left(layer: str) -> bool:
    """Return whether a layer has an image, of a live sandbox or of one whose supervisor was killed."""
    return os.path.lexists(f"{layer}/{FILE}") or os.path.lexists(f"{layer}/{PART}")


def recover(layer: str) -> None:
    """Copy the contents of an image to its layer, which the caller has locked and no sandbox here uses."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{layer}/{PART}")
    if not os.path.lexists(f"{layer}/{FILE}"):
        return
    with (
        _explain_errors(f"cannot copy the changes out of {layer}/{FILE}"),
        _lock_when_unused(f"{layer}/{FILE}") as file,
        openat2.held(_mount(file)) as mount,
    ):
        # Without this directory, the sandbox never started.
        if dirwalk.look(mount, "upper") is not None:
            with dirwalk.listed(mount, "upper", own=True) as upper:
                left_out = copy_changes(layer, upper).report()
                if left_out:
                    metadata.record_lost(layer, left_out)
    remove(layer)


def remove(layer: str) -> None:
    """Remove an image after its changes were copied to the layer."""
    os.unlink(f"{layer}/{FILE}")


@contextlib.contextmanager
def _lock_when_unused(path: str) -> Iterator[int]:
    """Wait until nothing uses an image, and hold its lock."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        until = time.monotonic() + ENDED_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
            time.sleep(0.01)
        yield file
    finally:
        os.close(file)


def copy_changes(layer: str, upper: int) -> tree_copy.OmittedPaths:
    """Copy the changes to a layer and return the paths that can never be copied.

    A full disk is an error instead, because a second attempt can succeed.
    """
    left_out = tree_copy.OmittedPaths()

    def sure() -> None:
        for number in left_out.numbers.intersection(tree_copy.FULL):
            raise OSError(number, os.strerror(number))

    with open_directory(layer) as top:
        replace(top, upper, left_out, sure)
    return left_out


@contextlib.contextmanager
def _explain_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        busy = isinstance(error, BlockingIOError)
        hint = "its sandbox has not ended: try again later" if busy else "free some space, or fix the cause"
        raise SetupError(
            f"{what}: {error.strerror}", stage="workspace", errno=error.errno or 0, hint=hint
        ) from error
