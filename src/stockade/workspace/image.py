"""What root's sandboxes write under a limit that must outlive their supervisor.

`image` in a layer is a file of the limit's size, all of it allocated, with an
ext4 file system in it. It is mounted nowhere: the mount is a descriptor, which
the gate attaches out of sight in the sandbox's own namespace, and the loop
device goes with the last mount. So a killed supervisor leaves a file and
nothing else. Programs see directories of the file system, never the file or
its device: what is parsed was written by the kernel alone.

When the sandbox has ended, the changes are copied to the layer as from private
memory, and the file is removed. Whoever finds the file later does that first.

The lock on the file belongs to the description that the loop device holds
too, so it lasts until the device has let go, whoever else is dead by then.
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
from stockade.workspace import beneath, copying, descend, record
from stockade.workspace.snapshots import opened, replace

FILE, PART = "image", "image.new"
#: Where the programs of an administrator are, whatever PATH says.
PROGRAMS = "/usr/sbin:/sbin:/usr/bin:/bin"
#: Below this size, blocks are small and there is no room for a journal.
SMALL, LEAST_JOURNAL = 512 << 20, 16 << 20
#: How long a sandbox may take to end whose supervisor was killed: its grace is two seconds.
ENDED_SECONDS = 10.0
#: What a full disk says.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_CLOEXEC, _NOSUID_NODEV = 1, 6
_LOOP_CONFIGURE, _LOOP_FREE, _AUTOCLEAR = 0x4C0A, 0x4C82, 4


def missing() -> str:
    """Why no image can be made here; empty if one can."""
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
    """Make the image of a layer and mount it; the result is the mount, for the caller to close."""
    with _failing(f"cannot make an image of {size} bytes in {layer}"):
        file = os.open(f"{layer}/{PART}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            _format(file, size)
            # Before anything is in it: one without its name was only begun.
            os.rename(f"{layer}/{PART}", f"{layer}/{FILE}")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _mounted(file)
        finally:
            os.close(file)


def _format(file: int, size: int) -> None:
    import subprocess

    words = [shutil.which("mkfs.ext4", path=PROGRAMS) or "mkfs.ext4", "-q", "-F", "-m", "0"]
    words += ["-b", "1024" if size < SMALL else "4096", "-N", str(max(256, size >> 14))]
    # Discarding would give the blocks back that were allocated.
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
        said = made.stderr.decode("utf-8", "replace").strip().splitlines()
        raise PolicyError(
            f"limits.disk = {size}: no file system of that size can be made: {said[-1] if said else ''}",
            hint="write a larger one, or leave out workspace.durable",
        )


def _mounted(file: int) -> int:
    """The file system in a file, mounted nowhere. Its loop device goes with the last mount of it."""
    device = _loop(file)
    try:
        context = beneath.call(_FSOPEN, b"ext4", _CLOEXEC)
        try:
            for key, value in ((b"source", b"/proc/self/fd/%d" % device), (b"noinit_itable", None)):
                beneath.call(_FSCONFIG, context, _SET_FLAG if value is None else _SET_STRING, key, value, 0)
            beneath.call(_FSCONFIG, context, _CREATE, None, None, 0)
            return beneath.call(_FSMOUNT, context, _CLOEXEC, _NOSUID_NODEV)
        finally:
            os.close(context)
    finally:
        os.close(device)


def _loop(file: int) -> int:
    """A loop device of the file."""
    # The file, its block size; of what loop_info64 holds only the flags, of which the last number is read.
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
                if error.errno != errno.EBUSY:  # somebody else was faster
                    raise
    finally:
        os.close(control)


def is_left(layer: str) -> bool:
    """Whether a layer has an image, of a sandbox that lives or whose supervisor was killed."""
    return os.path.lexists(f"{layer}/{FILE}") or os.path.lexists(f"{layer}/{PART}")


def recover(layer: str) -> None:
    """Copy what an image has to the layer, which the caller has locked and no sandbox here uses."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{layer}/{PART}")
    if not os.path.lexists(f"{layer}/{FILE}"):
        return
    with (
        _failing(f"the changes in {layer}/{FILE} cannot be brought out"),
        _free(f"{layer}/{FILE}") as file,
        beneath.held(_mounted(file)) as mount,
    ):
        # Where the sandbox never came so far there is nothing.
        if descend.look(mount, "upper") is not None:
            with descend.listed(mount, "upper", own=True) as upper:
                left_out = bring(layer, upper)
                if left_out:
                    record.lose(layer, left_out)
    remove(layer)


def remove(layer: str) -> None:
    """Remove an image whose changes are in the layer."""
    os.unlink(f"{layer}/{FILE}")


@contextlib.contextmanager
def _free(path: str) -> Iterator[int]:
    """An image that nothing uses any more."""
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


def bring(layer: str, upper: int) -> copying.LeftOut:
    """Let a layer have a copy of the changes; the result is what cannot be copied whatever is done.

    What a full disk does not take is an error: it can be tried again.
    """
    left_out: copying.LeftOut = []

    def sure() -> None:
        for _, why in left_out:
            for number in FULL:
                if why == os.strerror(number):
                    raise OSError(number, why)

    with opened(layer) as top:
        replace(top, upper, left_out, sure)
    return left_out


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        busy = isinstance(error, BlockingIOError)
        hint = (
            "its sandbox has not ended: try again later" if busy else "free some space, or see what is amiss"
        )
        raise SetupError(
            f"{what}: {error.strerror}", stage="workspace", errno=error.errno or 0, hint=hint
        ) from error
