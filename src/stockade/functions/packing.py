"""Pack a function, its arguments and the modules that they need into one request.

Arguments are pickled. Functions and classes travel by name, together with the
source of their modules, unless the Python inside has these itself. Of a
namespace that cannot be imported (a script, a notebook, a prompt), the source
of each needed definition is sent.
"""

from __future__ import annotations
import __future__

import ast
import dis
import inspect
import io
import marshal
import os
import pickle
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.machinery import SOURCE_SUFFIXES
from importlib.util import MAGIC_NUMBER
from typing import Any, ParamSpec, TypeVar

from stockade.errors import PolicyError, SetupError

P = ParamSpec("P")
R = TypeVar("R")

#: The largest total size of the source of modules and definitions.
MOST_SOURCE = 64 << 20
#: The modules of Stockade that the worker has for real; a hollow object stands for the rest.
OWN = (
    "stockade",
    "stockade.errors",
    "stockade._version",
    "stockade.inside",
    "stockade.inside.channel_crypto",
    "stockade.inside.encoder",
)

#: The marshal version for the worker: every Python reads it, though its bytecode may differ.
MARSHALLED = 4
#: Annotations stay text inside, so the names in them are not needed there.
ANNOTATIONS = __future__.annotations.compiler_flag
#: The instructions that read a global; in the body of a class also those that read a local or a global.
READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
#: The module in which the worker finds a dummy for any object of Stockade.
HOLLOW = "stockade.hollow"


def pack(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    initializer: tuple[Callable[..., Any], Sequence[Any]] | None = None,
    trust: bool,
    most: int,
    many: bool = False,
    streams: bool = False,
) -> bytes:
    """Return the whole request as bytes."""
    packing = Package()
    call = packing.pickled((packing.entry(function), tuple(args), dict(kwargs)), "the arguments")
    first = None
    if initializer is not None:
        first = packing.pickled((packing.entry(initializer[0]), tuple(initializer[1])), "the initializer")
    request = {
        "modules": packing.modules,
        "spaces": {name: space.packed() for name, space in packing.spaces.items()},
        "call": call,
        "initializer": first,
        "trust": trust,
        "most": most,
        "many": many,
        "streams": streams,
    }
    return pickle.dumps(request, 4)


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside `sandboxed` and `agent` decorators."""
    while getattr(type(function), "__stockade__", False) is True:
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def plain_function(function: Callable[P, R], decorator: str) -> Callable[P, R]:
    """Return the function to decorate; refuse a class method or static method."""
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise PolicyError(
            f"@{decorator} is for functions, but {function.__func__.__qualname__} is already a {kind}",
            hint=f"write @{kind} above @{decorator}, not below",
        )
    return function


def bound(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return the function and arguments as the worker must call them: a class method takes its class."""
    if not isinstance(function, types.FunctionType) or not args or not isinstance(args[0], type):
        return function, args
    outer, _, name = function.__qualname__.rpartition(".")
    found = getattr(_lookup(function.__module__, outer), "__dict__", {}).get(name) if outer else None
    if isinstance(found, classmethod) and undecorated(found.__func__) is function:
        return types.MethodType(function, args[0]), args[1:]
    return function, args


class Package:
    """Everything that one call needs inside."""

    def __init__(self) -> None:
        self.modules: dict[str, tuple[str, str, list[str] | None]] = {}
        self.spaces: dict[str, Space] = {}
        self._size = 0

    def entry(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call; refuse one that cannot be sent."""
        function = undecorated(function)
        if isinstance(function, types.FunctionType):
            check(function)
        return function

    def pickled(self, value: Any, what: str, touched: list[str] | None = None) -> bytes:
        """Pickle a value for the worker. `touched` collects the definitions that a global needs first."""
        file = io.BytesIO()
        try:
            _Pickler(file, self, touched).dump(value)
        except SetupError:
            raise
        except Exception as error:  # whatever the value's own methods raise
            raise SetupError(
                f"{what} cannot be pickled: {error}",
                stage="function",
                hint="pass plain data, or objects that pickle can find by name",
            ) from error
        return file.getvalue()

    def named(self, value: Any, touched: list[str] | None) -> tuple[str, str] | None:
        """Return where the worker finds a function or class, and pack it; None to leave it to pickle."""
        value = undecorated(value)
        module = getattr(value, "__module__", None)
        name = getattr(value, "__qualname__", "")
        if not isinstance(module, str) or module == "builtins":
            return None
        if isinstance(value, types.FunctionType):
            check(value)
        if module != "__main__" and _lookup(module, name) is value:
            self.ship(module)
            return module, name
        names = _namespace(value, module)
        if names is None or names.get(name.partition(".")[0]) is None:
            return None  # pickle raises an error that says why
        if touched is not None:
            touched.append(name)
        space = self.spaces.get(module)
        if space is None:
            space = self.spaces[module] = Space(self, names)
        space.need(name.partition(".")[0])
        return module, name

    def ship(self, name: str) -> None:
        """Send a module, its packages and what it has imported, unless the Python inside has them."""
        pending = [name]
        while pending:
            name = pending.pop()
            module = sys.modules.get(name)
            if module is None or name in self.modules or _is_inside(module):
                continue
            source = self.source(module)
            if source is None:
                continue
            path = list(module.__path__) if hasattr(module, "__path__") else None
            self.modules[name] = (source, module.__file__ or "<package>", path)
            self._around(name)
            for value in list(vars(module).values()):
                other = value.__name__ if isinstance(value, types.ModuleType) else _module_of(value)
                if isinstance(other, str) and other not in self.modules:
                    pending.append(other)

    def _around(self, name: str) -> None:
        """Send the packages around a module."""
        while name := name.rpartition(".")[0]:
            if name in sys.modules:
                self.ship(name)
            else:  # the module was loaded without its package
                self.modules.setdefault(name, ("", "<package>", []))

    def source(self, module: types.ModuleType) -> str | None:
        """Return the source of a module; None if it has none."""
        file = getattr(module, "__file__", None)
        if file is None and hasattr(module, "__path__"):
            return ""
        if not isinstance(file, str) or not file.endswith(tuple(SOURCE_SUFFIXES)):
            return None
        try:
            with open(file, "rb") as opened:
                return self.counted(_decode_source(opened.read()))
        except (OSError, SyntaxError, UnicodeDecodeError):
            return None

    def counted(self, text: str) -> str:
        self._size += len(text)
        if self._size > MOST_SOURCE:
            raise SetupError(
                f"the source of the function's modules takes more than {MOST_SOURCE >> 20}M",
                stage="function",
                hint="move the function to a module that imports less, or install what it imports",
            )
        return text


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, packing: Package, touched: list[str] | None) -> None:
        super().__init__(file, 4)
        self._packing, self._touched = packing, touched

    def reducer_override(self, value: Any) -> Any:
        """Tell pickle how to treat a value. Pickle does not call this for plain data, which stays fast."""
        if value is inside:
            return NotImplemented
        bare = undecorated(value)
        if isinstance(bare, types.MethodType) and bare is not value:
            return getattr, (bare.__self__, bare.__name__)
        if isinstance(value, types.FunctionType | type) or bare is not value:
            name = self._packing.named(value, self._touched)
            return NotImplemented if name is None else (inside, name)
        module = type(value).__module__
        if module.startswith("stockade.") and not isinstance(value, Exception):
            if self._touched is None:
                raise SetupError(
                    f"a {type(value).__name__} of Stockade cannot be passed to a sandboxed function",
                    stage="function",
                    hint="pass the plain data that the function needs from it",
                )  # fmt: skip
            return inside, (HOLLOW, type(value).__name__)
        return NotImplemented


def inside(module: str, name: str) -> None:
    """Stand for an object that the worker finds by name; never called here."""


class Space:
    """The needed part of a namespace that cannot be imported."""

    def __init__(self, packing: Package, names: dict[str, Any]) -> None:
        self._packing, self._names = packing, names
        self._needed: set[str] = set()
        self.imports: dict[str, str] = {}
        self.early: dict[str, bytes] = {}
        self.late: dict[str, bytes] = {}
        self.missing: dict[str, str] = {}
        self.definitions: list[tuple[str, int, str]] = []

    def packed(self) -> dict[str, Any]:
        return {
            "imports": self.imports, "early": self.early, "late": self.late, "missing": self.missing,
            "definitions": sorted(self.definitions, key=lambda one: one[1]),
        }  # fmt: skip

    def need(self, name: str) -> None:
        """Pack what the name refers to, and everything that this needs."""
        pending = [name]
        while pending:
            name = pending.pop()
            if name in self._needed or name not in self._names:
                continue
            self._needed.add(name)
            value = undecorated(self._names[name])
            if isinstance(value, types.ModuleType):
                self._packing.ship(value.__name__)
                self.imports[name] = value.__name__
            elif self._is_ours(value):
                pending += self._define(value)
            else:
                self._hand_in(name, value)

    def _is_ours(self, value: Any) -> bool:
        if not isinstance(value, types.FunctionType | type):
            return False
        return value.__module__ == self._names.get("__name__") and (
            isinstance(value, type) or value.__globals__ is self._names
        )

    def _define(self, value: Any) -> set[str]:
        """Pack the source of a function or class; return the names that it uses."""
        if isinstance(value, types.FunctionType):
            check(value)
        file = inspect.getsourcefile(value) or "<unknown>"
        try:
            lines, line = inspect.getsourcelines(value)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError) as error:
            raise SetupError(
                f"the source of {value.__qualname__} cannot be found: {error}",
                stage="function",
                hint="define it in a module that is a file",
            ) from None
        node: Any = tree.body[0]
        if isinstance(value, types.FunctionType) and not hasattr(value, "__wrapped__"):
            node.decorator_list = []
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            raise SetupError(
                f"{value.__qualname__} has no definition statement of its own", stage="function",
                hint="define it with `def` or `class`",
            )  # fmt: skip
        text, used = _strip_decorators(textwrap.dedent("".join(lines)), node)
        self.definitions.append((file, max(1, line), self._packing.counted(text)))
        return used

    def _hand_in(self, name: str, value: Any) -> None:
        touched: list[str] = []
        try:
            data = self._packing.pickled(value, name, touched)
        except SetupError as error:
            self.missing[name] = str(error.__cause__ or error)
            return
        (self.late if touched else self.early)[name] = data


def _strip_decorators(text: str, node: Any) -> tuple[str, set[str]]:
    """Return a definition's text without its removed decorators, and the names that it uses."""
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    lines = text.splitlines(True)
    kept = "".join("\n" if number < first else line for number, line in enumerate(lines, 1))
    module = ast.Module([node], [])
    return kept, _globals(compile(module, "?", "exec", ANNOTATIONS, dont_inherit=True))


def _globals(code: types.CodeType) -> set[str]:
    """Return the globals that some code reads, without arguments and local variables."""
    used = {one.argval for one in dis.get_instructions(code) if one.opname in READS}
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            used |= _globals(part)
    return used


def check(function: types.FunctionType) -> None:
    """Refuse a function that cannot be found by its name."""
    name = function.__qualname__
    if function.__closure__ and not getattr(function, "__wrapped__", None) and "<locals>" in name:
        free = ", ".join(function.__code__.co_freevars)
        raise SetupError(
            f"{name} is a closure: it uses {free} of the function around it",
            stage="function",
            hint="define it at the top of a module, and pass what it uses as arguments",
        )
    if "<lambda>" in name or "<locals>" in name:
        what = "is a lambda" if "<lambda>" in name else "is defined inside another function"
        raise SetupError(
            f"{name} {what}, so the sandbox cannot find it by its name",
            stage="function",
            hint="define it with `def` at the top of a module",
        )


def _lookup(module: str, name: str) -> Any:
    """Return what a module has under a dotted name, without decorators of Stockade."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = undecorated(getattr(value, part, None))  # type: ignore[arg-type]
    return value


def _namespace(value: Any, module: str) -> dict[str, Any] | None:
    if isinstance(value, types.FunctionType):
        return value.__globals__
    found = sys.modules.get(module)
    return None if found is None else vars(found)


def _module_of(value: Any) -> Any:
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return value.__module__
    return getattr(type(value), "__module__", None)


@cache
def _trees() -> tuple[str, ...]:
    """Return the directories of the modules that the Python inside has itself."""
    found = [*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, sys.exec_prefix]
    paths = {os.path.realpath(path) for path in found}
    return ("/usr/lib/", *(path + "/" for path in paths if path not in ("/", "/usr", "/usr/local")))


def _is_inside(module: types.ModuleType) -> bool:
    """Whether the Python inside has the module itself."""
    name = module.__name__
    file = getattr(module, "__file__", None)
    if name in ("__main__", "stockade") or name.startswith("stockade."):
        return True
    return isinstance(file, str) and os.path.realpath(file).startswith(_trees())


def _decode_source(data: bytes) -> str:
    import importlib.util

    return importlib.util.decode_source(data)


@cache
def _prelude() -> tuple[Any, ...]:
    """Return the worker's source, the modules of Stockade that it has, and both compiled.

    A Python inside of the same version as this one need not compile them again, which would take a while.
    """
    from importlib.resources import files

    def text(module: str, package: bool) -> str:
        names = module.split(".")[1:] + (["__init__"] if package else [])
        return files("stockade").joinpath("/".join(names) + ".py").read_text(encoding="utf-8")

    sources: dict[str, tuple[str, str, list[str] | None]] = {}
    for name in OWN:
        package = name in ("stockade", "stockade.inside")
        sources[name] = (text(name, package), f"<{name}>", [] if package else None)
    driver = text("stockade.inside.function_worker", False)
    every = {"": (driver, "<stockade>"), **{name: one[:2] for name, one in sources.items()}}
    codes = {
        name: compile(source, file, "exec", dont_inherit=True, optimize=0)
        for name, (source, file) in every.items()
    }
    return MAGIC_NUMBER, marshal.dumps(codes, MARSHALLED), driver, sources


def worker_text(public: bytes) -> bytes:
    """Return what a Python inside reads to become the worker of the owner of this public key."""
    return marshal.dumps((public, *_prelude()), MARSHALLED)
