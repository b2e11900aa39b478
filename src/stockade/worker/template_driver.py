"""The template: an interpreter that loads modules and then becomes a resident gate.

It runs outside every sandbox, as the caller, and runs no code of any: only
the standard library and what the caller wants to be preloaded, and that from
nowhere a sandbox could write. Copies of it run in sandboxes, behind their
walls, and there `go_on` runs the code that is not trusted.

This text is executed by an interpreter of the caller's choice (3.8 or newer),
with CONFIG set. Of Stockade it needs the gate's library only.
Its descriptors are 0, 1 and 2, which lead nowhere; 3, to the supervisor; 4, a
pidfd of that; and 5, this text.
"""

from __future__ import annotations

# All that a copy needs is loaded before it is made.
import atexit
import ctypes
import gc
import importlib
import os
import select
import signal
import site
import sys
import types
from collections.abc import Iterator
from typing import Any

CONFIG: dict[str, Any] = globals().get("CONFIG", {})

CONTROL, SUPERVISOR, TEXT = 3, 4, 5
PR_SET_PDEATHSIG = 1


class RefusedError(Exception):
    """Why this cannot be a template."""


def lies_in(place: str) -> str:
    """The tree that is not to be loaded from and that a path lies in, or nothing.

    They are known by their numbers: copies are not to learn names.
    """
    tree = os.path.realpath(place)
    while True:
        try:
            info = os.stat(tree)
        except OSError:
            info = None
        if info is not None and (info.st_dev, info.st_ino) in CONFIG["roots"]:
            return tree
        if tree == "/":
            return ""
        tree = os.path.dirname(tree)


def check(place: str) -> None:
    tree = lies_in(place)
    if tree:
        raise RefusedError(f"{place} lies in {tree}, which the policy hides or lets programs work in")


class Guard:
    """Asked first where a module is: nothing is loaded from where a sandbox may write."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                for place in (spec.origin, *(spec.submodule_search_locations or ())):
                    if place and place.startswith("/"):
                        check(place)
                return spec
        return None


def installed() -> list[str]:
    """Where packages are installed for this interpreter. `site` would also run code from there."""
    prefixes = [sys.prefix, sys.exec_prefix]
    here = os.path.dirname(os.path.abspath(sys.executable))
    for folder in (here, os.path.dirname(here)):
        try:
            with open(os.path.join(folder, "pyvenv.cfg"), encoding="utf-8") as file:
                lines = [line.partition("=") for line in file]
        except OSError:
            continue
        said = {key.strip().lower(): value.strip().lower() for key, _, value in lines}
        sys.prefix = sys.exec_prefix = os.path.dirname(here)
        prefixes = [sys.prefix]
        if said.get("include-system-site-packages") == "true":
            prefixes += [sys.base_prefix, sys.base_exec_prefix]
        break
    for word in ("setquit", "setcopyright", "sethelper"):
        getattr(site, word)()
    return [folder for folder in dict.fromkeys(site.getsitepackages(prefixes)) if os.path.isdir(folder)]


def linked(folder: str) -> Iterator[str]:
    """The directories that an install names in its .pth files; lines of code there are not run."""
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".pth") or name.startswith("."):
            continue
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            for line in map(str.rstrip, file):
                place = os.path.join(folder, line)
                if line and not line.startswith(("#", "import ", "import\t")) and os.path.isdir(place):
                    yield place


def load() -> None:
    """Import what is to be there, from where it may come."""
    for place in (sys.executable, sys.prefix, sys.base_prefix, *sys.path):
        check(place)
    found = installed()
    sys.path += found + [place for folder in found for place in linked(folder) if not lies_in(place)]
    sys.path[:] = dict.fromkeys(sys.path)
    guard = Guard()
    sys.meta_path.insert(0, guard)
    for name in CONFIG["preload"]:
        try:
            importlib.import_module(name)
        except RefusedError as error:
            raise RefusedError(f"preload: {name}: {error}") from None
        except BaseException as error:
            raise RefusedError(f"preload: {name}: {type(error).__name__}: {error}") from None
    sys.meta_path.remove(guard)


def look() -> None:
    """See that nothing would be shared by copies but memory that each changes for itself."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RefusedError("preload: a module has started a thread, which no copy would have")
    try:
        os.waitpid(-1, os.WNOHANG)
        raise RefusedError("preload: a module has started a process")
    except ChildProcessError:
        pass
    for number in os.listdir("/proc/self/fd"):
        if int(number) > SUPERVISOR:
            try:
                target = os.readlink("/proc/self/fd/" + number)
            except OSError:
                continue  # it was for the look itself
            raise RefusedError(f"preload: a module has opened a descriptor and keeps it: {target}")
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            words = line.split(None, 5)
            name = words[5].strip() if len(words) > 5 else ""
            of_a_file = name.startswith("/") and not name.endswith("(deleted)")
            if words[1][3] == "s" and not (of_a_file and words[1][1] == "-"):
                raise RefusedError(
                    f"preload: a module has made memory that copies would share: {line.strip()}"
                )


def become_gate() -> tuple[list[bytes], list[bytes]]:
    """Become a resident gate. What returns is the copy that runs a program, and its words."""

    class Continuation(ctypes.Structure):
        _fields_ = (("strings", ctypes.c_void_p), ("size", ctypes.c_size_t), ("argc", ctypes.c_size_t))

    kernel = ctypes.CDLL(None)
    # Until the gate watches the supervisor: a module might take for ever to load.
    kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([SUPERVISOR], [], [], 0)[0]:
        os._exit(1)
    words = [CONFIG[name].encode() for name in ("kind", "order")]
    try:
        library = ctypes.PyDLL(CONFIG["library"])
        if library.template_sealed(words[0]):
            raise RefusedError(f"{sys.executable} is not the interpreter itself but a script that starts it")
        load()
        look()
    except Exception as error:
        said = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
        os.write(CONTROL, said.encode("utf-8", "replace")[:4000])
        os._exit(1)
    found = Continuation()
    calls = (ctypes.pythonapi.PyOS_BeforeFork, ctypes.pythonapi.PyOS_AfterFork_Child)
    around = [ctypes.cast(call, ctypes.c_void_p) for call in calls]
    library.template_main.restype = None
    CONFIG.clear()
    os.environ.clear()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what a module has printed is not for every copy to print
    gc.collect()
    gc.freeze()  # a collection in a copy would write to every page of what was loaded
    kernel.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    os.write(CONTROL, b"ready")
    # No Python runs between the two calls: locks are held there.
    library.template_main(words[0], words[1], *around, ctypes.byref(found))
    strings = ctypes.string_at(found.strings, found.size - 1).split(b"\0")
    return strings[: found.argc], strings[found.argc :]


def go_on(words: list[bytes], environ: list[bytes]) -> None:
    """In a copy, behind the walls: be what `python -c` would be, as far as a copy can."""
    # The C library knows them already: what is left is Python's own copy.
    known: Any = os.environ
    known._data.update(entry.partition(b"=")[::2] for entry in environ)
    argv = list(map(os.fsdecode, words))
    reseed()
    if sys.stdout.isatty():
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.dont_write_bytecode = False
    sys.argv, sys.orig_argv = ["-c", *argv[3:]], argv
    sys.path.insert(0, "")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    os._exit(finished(run(argv[2], main.__dict__)))


def reseed() -> None:
    """No two copies may draw the same numbers. `random` has seen to itself when it was copied."""
    numpy: Any = sys.modules.get("numpy.random")
    ssl: Any = sys.modules.get("_ssl")
    if numpy is not None:
        numpy.seed()
    if ssl is not None:
        ssl.RAND_add(os.urandom(32), 32.0)


def run(code: str, names: dict[str, Any]) -> int:
    """The exit code of some code."""
    try:
        exec(compile(code, "<string>", "exec"), names)
        return 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # Without the line above.
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def finished(status: int) -> int:
    """Do what an interpreter does at its end, but for taking itself apart, which would copy all of it."""
    threading: Any = sys.modules.get("threading")
    try:
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            status = status or 120
    if status == 130:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status


if CONFIG:
    os.close(TEXT)
    os.chdir("/")
    go_on(*become_gate())
