"""The template: an interpreter that loads modules and then becomes a resident gate.

It runs outside every sandbox, as the user, and executes no code from any: only
the standard library and the modules that the user wants preloaded, from
directories that no sandbox can write. Copies of it run in sandboxes, behind
their walls, where `go_on` executes the untrusted code.

An interpreter of the user's choice (3.8 or newer) executes this text, with
CONFIG set. Of Stockade it needs only the gate's library. Its descriptors are
0, 1 and 2, which are /dev/null; 3, the socket to the supervisor; 4, a pidfd of
the supervisor; and 5, this text.
"""

from __future__ import annotations

# Everything that a copy needs is imported before copies are made.
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


class TemplateRefusedError(Exception):
    """This interpreter cannot be a template; the message says why."""


def lies_in(place: str) -> str:
    """The forbidden tree that a path lies in; empty if it lies in none.

    Trees are given by device and inode, because copies must not learn their names.
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
    """Refuse a path in a forbidden tree."""
    tree = lies_in(place)
    if tree:
        raise TemplateRefusedError(f"{place} lies in {tree}, which the policy hides or lets programs write")


class Guard:
    """The first finder of modules: it refuses modules from directories that a sandbox may write."""

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


def package_directories() -> list[str]:
    """The directories of this interpreter's packages. `site` would also execute code from there."""
    prefixes = [sys.prefix, sys.exec_prefix]
    here = os.path.dirname(os.path.abspath(sys.executable))
    for folder in (here, os.path.dirname(here)):
        try:
            with open(os.path.join(folder, "pyvenv.cfg"), encoding="utf-8") as file:
                lines = [line.partition("=") for line in file]
        except OSError:
            continue
        settings = {key.strip().lower(): value.strip().lower() for key, _, value in lines}
        sys.prefix = sys.exec_prefix = os.path.dirname(here)
        prefixes = [sys.prefix]
        if settings.get("include-system-site-packages") == "true":
            prefixes += [sys.base_prefix, sys.base_exec_prefix]
        break
    for word in ("setquit", "setcopyright", "sethelper"):
        getattr(site, word)()
    return [folder for folder in dict.fromkeys(site.getsitepackages(prefixes)) if os.path.isdir(folder)]


def linked_directories(folder: str) -> Iterator[str]:
    """The directories that the .pth files of an install name; code in these files is not executed."""
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".pth") or name.startswith("."):
            continue
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            for line in map(str.rstrip, file):
                place = os.path.join(folder, line)
                if line and not line.startswith(("#", "import ", "import\t")) and os.path.isdir(place):
                    yield place


def load() -> None:
    """Import the modules to preload, from directories that are allowed."""
    for place in (sys.executable, sys.prefix, sys.base_prefix, *sys.path):
        check(place)
    folders = package_directories()
    sys.path += [*CONFIG["paths"], *folders]
    sys.path += [place for folder in folders for place in linked_directories(folder) if not lies_in(place)]
    sys.path[:] = dict.fromkeys(sys.path)
    sys.modules.update(dict.fromkeys(CONFIG["absent"]))
    if CONFIG["own"]:
        gc.disable()  # nothing that is loaded here is garbage
    guard = Guard()
    sys.meta_path.insert(0, guard)
    for name in CONFIG["preload"]:
        try:
            importlib.import_module(name)
        except TemplateRefusedError as error:
            raise TemplateRefusedError(f"preload: {name}: {error}") from None
        except BaseException as error:
            raise TemplateRefusedError(f"preload: {name}: {type(error).__name__}: {error}") from None
    sys.meta_path.remove(guard)
    if CONFIG["own"]:
        gc.enable()


def check_for_shared_state() -> None:
    """Refuse to be a template if copies would share more than copy-on-write memory."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise TemplateRefusedError("preload: a module has started a thread, which copies would not have")
    try:
        os.waitpid(-1, os.WNOHANG)
        raise TemplateRefusedError("preload: a module has started a process")
    except ChildProcessError:
        pass
    for number in os.listdir("/proc/self/fd"):
        if int(number) > SUPERVISOR:
            try:
                target = os.readlink("/proc/self/fd/" + number)
            except OSError:
                continue  # the descriptor of this listing itself
            raise TemplateRefusedError(f"preload: a module keeps a descriptor open: {target}")
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            words = line.split(None, 5)
            name = words[5].strip() if len(words) > 5 else ""
            of_a_file = name.startswith("/") and not name.endswith("(deleted)")
            if words[1][3] == "s" and not (of_a_file and words[1][1] == "-"):
                raise TemplateRefusedError(
                    f"preload: a module has mapped memory that copies would share: {line.strip()}"
                )


def become_gate() -> tuple[list[bytes], list[bytes]]:
    """Become a resident gate. The call returns only in a copy, with the program's argv and environment."""

    class Continuation(ctypes.Structure):
        _fields_ = (("strings", ctypes.c_void_p), ("size", ctypes.c_size_t), ("argc", ctypes.c_size_t))

    kernel = ctypes.CDLL(None)
    # Until the gate watches the supervisor, the kernel does: a module might take forever to load. The kernel
    # watches the thread that started this process, which may end before Stockade's own modules are loaded.
    if not CONFIG["own"]:
        kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([SUPERVISOR], [], [], 0)[0]:
        os._exit(1)
    words = [CONFIG[name].encode() for name in ("kind", "order")]
    try:
        library = ctypes.PyDLL(CONFIG["library"])
        if library.template_sealed(words[0]):
            raise TemplateRefusedError(
                f"{sys.executable} is not the interpreter itself but a script that starts it"
            )
        load()
        check_for_shared_state()
    except Exception as error:
        reason = str(error) if isinstance(error, TemplateRefusedError) else f"{type(error).__name__}: {error}"
        os.write(CONTROL, reason.encode("utf-8", "replace")[:4000])
        os._exit(1)
    program = Continuation()
    calls = (ctypes.pythonapi.PyOS_BeforeFork, ctypes.pythonapi.PyOS_AfterFork_Child)
    around = [ctypes.cast(call, ctypes.c_void_p) for call in calls]
    library.template_main.restype = None
    CONFIG.clear()
    os.environ.clear()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise every copy would print what a module has printed
    gc.collect()
    gc.freeze()  # a collection in a copy would write to every page of loaded modules
    kernel.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    os.write(CONTROL, b"ready")
    # No Python code runs between the two callbacks, because they hold locks.
    library.template_main(words[0], words[1], *around, ctypes.byref(program))
    strings = ctypes.string_at(program.strings, program.size - 1).split(b"\0")
    return strings[: program.argc], strings[program.argc :]


def go_on(words: list[bytes], environ: list[bytes]) -> None:
    """Behave like `python -c`, as far as a copy can; called in a copy, behind the walls."""
    # The C library has them already; this updates Python's own copy.
    variables: Any = os.environ
    variables._data.update(entry.partition(b"=")[::2] for entry in environ)
    argv = list(map(os.fsdecode, words))
    reseed()
    if sys.stdout.isatty():
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.dont_write_bytecode = False
    sys.argv, sys.orig_argv = ["-c", *argv[3:]], argv
    sys.path.insert(0, "")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    os._exit(finish(run(argv[2], main.__dict__)))


def reseed() -> None:
    """Reseed generators, so that no two copies draw the same numbers; `random` does so itself at a fork."""
    numpy: Any = sys.modules.get("numpy.random")
    ssl: Any = sys.modules.get("_ssl")
    if numpy is not None:
        numpy.seed()
    if ssl is not None:
        ssl.RAND_add(os.urandom(32), 32.0)


def run(code: str, names: dict[str, Any]) -> int:
    """Execute some code and return its exit code."""
    try:
        exec(compile(code, "<string>", "exec"), names)
        return 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # Without the frame of this function.
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def finish(status: int) -> int:
    """Do what an interpreter does at its end, except freeing its memory, which would copy all of it."""
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
