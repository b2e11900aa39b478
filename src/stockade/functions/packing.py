"""Pack a function, its arguments and the modules that they need into one request.

Arguments are pickled. Functions and classes travel by name, together with the
source of their modules, unless the Python inside has these itself. Of a
namespace that cannot be imported (a script, a notebook, a prompt), the source
of each needed definition is sent. A function that has no such name (a lambda, a
function inside a function) travels as its code, with its default arguments and
the variables of the enclosing function that it uses; the Python inside must
then have the caller's version.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import dis
import inspect
import io
import linecache
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
    prints: bool = False,
) -> bytes:
    """Return the whole request as bytes."""
    packing = Package()
    call = packing.pickled((undecorated(function), tuple(args), dict(kwargs)), "the arguments")
    first = None
    if initializer is not None:
        first = packing.pickled((undecorated(initializer[0]), tuple(initializer[1])), "the initializer")
    request = {
        "modules": packing.modules,
        "spaces": {name: space.packed() for name, space in packing.spaces.items()},
        "call": call,
        "initializer": first,
        "texts": packing.texts,
        "trust": trust,
        "most": most,
        "many": many,
        "streams": streams,
        "prints": prints,
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
        #: The lines of functions that are sent as code, for tracebacks: file, first line, source.
        self.texts: list[tuple[str, int, str]] = []
        #: The functions that cannot be found by a name inside.
        self.nameless: set[types.FunctionType] = set()
        self._size = 0

    def pickled(self, value: Any, what: str, touched: list[str] | None = None) -> bytes:
        """Pickle a value for the worker. `touched` collects the definitions that a global needs first."""
        file = io.BytesIO()
        pickler = _Pickler(file, self, touched)
        try:
            pickler.dump(value)
        except SetupError:
            raise
        except Exception as error:  # whatever the value's own methods raise
            for function in pickler.sent:
                _refuse_parts(function)
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
        if "<locals>" in name or (isinstance(value, types.FunctionType) and value in self.nameless):
            return None
        if module != "__main__" and _lookup(module, name) is value:
            self.ship(module)
            return module, name
        names = _namespace(value, module)
        if names is None or not _has(names, name, value):
            return None  # pickle raises an error that says why, unless a function can be sent as code
        if touched is not None:
            touched.append(name)
        self.space(module, names).need(name.partition(".")[0])
        return module, name

    def space(self, module: str, names: dict[str, Any]) -> Space:
        """Return the part to send of a namespace that cannot be imported."""
        return self.spaces.setdefault(module, Space(self, names))

    def as_code(self, function: types.FunctionType) -> Any:
        """Return pickle's instructions to send a function as its code, and pack the globals that it reads."""
        module, names = function.__module__, function.__globals__
        used = {name for name in _globals(function.__code__) if name in names} - {"__name__", "__builtins__"}
        if used and module != "__main__" and vars(sys.modules.get(module, inspect)) is names:
            self.ship(module)
        else:
            self._add_text(function)
            for name in used:
                self.space(module, names).need(name)
        cells = function.__closure__ or ()
        code = marshal.dumps(function.__code__, MARSHALLED)
        start = (code, MAGIC_NUMBER, module, bool(used), function.__name__, function.__qualname__, len(cells))
        # Filled afterwards: a function may be in its own closure.
        rest = function.__defaults__, function.__kwdefaults__, [_cell_content(cell) for cell in cells]
        return make_function, start, rest, None, None, fill_function

    def _add_text(self, function: types.FunctionType) -> None:
        try:
            lines, line = inspect.getsourcelines(function)
        except (OSError, TypeError, SyntaxError, IndexError):
            return
        self.texts.append((function.__code__.co_filename, max(1, line), self.counted("".join(lines))))

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
        #: The functions that it has sent as code.
        self.sent: list[types.FunctionType] = []

    def reducer_override(self, value: Any) -> Any:
        """Tell pickle how to treat a value. Pickle does not call this for plain data, which stays fast."""
        if any(value is one for one in STANDINS):
            return NotImplemented
        bare = undecorated(value)
        if isinstance(bare, types.MethodType) and bare is not value:
            return getattr, (bare.__self__, bare.__name__)
        if isinstance(value, types.FunctionType | type) or bare is not value:
            name = self._packing.named(value, self._touched)
            if name is None and isinstance(bare, types.FunctionType):
                self.sent.append(bare)
                return self._packing.as_code(bare)
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


def make_function(*start: Any) -> None:
    """Stand for a function that the worker makes from its code; never called here."""


def fill_function(function: Any, rest: Any) -> None:
    """Stand for the defaults and the closure that the worker gives a function; never called here."""


#: What the worker has under the same names.
STANDINS = (inside, make_function, fill_function)


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
            elif self._is_ours(value) and (used := self._define(name, value)) is not None:
                pending += used
            else:
                self._hand_in(name, value)

    def _is_ours(self, value: Any) -> bool:
        if not isinstance(value, types.FunctionType | type):
            return False
        return value.__module__ == self._names.get("__name__") and (
            isinstance(value, type) or value.__globals__ is self._names
        )

    def _define(self, name: str, value: Any) -> set[str] | None:
        """Pack the source of a function or class; return the names that it uses.

        None if it has no source under that name and can be sent as code instead.
        """
        try:
            if value.__qualname__ != name:
                raise OSError(f"it was defined as {value.__qualname__}")
            file, lines, line = _source_of(value)
            tree = ast.parse(textwrap.dedent("".join(lines)))
            node: Any = tree.body[0]
            if getattr(node, "name", "") != name:
                raise OSError("it has no definition statement of its own")
        except (OSError, TypeError, SyntaxError, IndexError) as error:
            if isinstance(value, types.FunctionType):
                self._packing.nameless.add(value)
                return None
            raise SetupError(
                f"the source of {value.__qualname__} cannot be found: {error}",
                stage="function",
                hint="define it at the top of a module that is a file",
            ) from None
        if isinstance(value, types.FunctionType) and not hasattr(value, "__wrapped__"):
            node.decorator_list = []
        text, used = _strip_decorators(textwrap.dedent("".join(lines)), node)
        self.definitions.append((file, max(1, line), self._packing.counted(text)))
        return used

    def _hand_in(self, name: str, value: Any) -> None:
        touched: list[str] = []
        try:
            data = self._packing.pickled(value, name, touched)
        except SetupError as error:
            if isinstance(value, types.FunctionType):
                raise
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


def _cell_content(cell: types.CellType) -> tuple[Any, ...]:
    """Return what a closure's cell holds, in a tuple that is empty if the cell is."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _refuse_parts(function: types.FunctionType) -> None:
    """Raise an error that names the closure variable or default argument that cannot be sent, and why."""
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    parts = [
        *((name, "of the enclosing function", cell.cell_contents)
          for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
          if _cell_content(cell)),
        *((name, "as a default argument", value) for name, value in zip(arguments, defaults, strict=True)),
        *((name, "as a default argument", value) for name, value in (function.__kwdefaults__ or {}).items()),
    ]  # fmt: skip
    for name, where, value in parts:
        try:
            _Pickler(io.BytesIO(), Package(), None).dump(value)
        except Exception as error:
            raise SetupError(
                f"{function.__qualname__} uses {name} {where}, which cannot be sent: {error}",
                stage="function",
                hint="pass plain data as an argument, or make it inside the function",
            ) from error


def _source_of(value: Any) -> tuple[str, list[str], int]:
    """Return the file, the lines and the first line of a definition, also of a class in a notebook's cell."""
    try:
        lines, line = inspect.getsourcelines(value)
        return inspect.getsourcefile(value) or "<unknown>", lines, line
    except (OSError, TypeError):
        if not isinstance(value, type):
            raise
    if tuple in value.__bases__ and hasattr(value, "_field_defaults"):
        return _namedtuple_source(value)
    # A notebook has no file in which `inspect` would look for a class; the latest cell counts.
    for file in reversed([name for name in linecache.cache if name.startswith("<") or "ipykernel" in name]):
        text = linecache.getlines(file)
        with contextlib.suppress(SyntaxError):
            for node in reversed(ast.parse("".join(text)).body):
                if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                    return file, text[first - 1 : node.end_lineno], first
    raise OSError("no file and no cell has its definition")


def _namedtuple_source(kind: Any) -> tuple[str, list[str], int]:
    """Return a statement that makes the same class as a call of `namedtuple` did."""
    defaults = {name: f" = {value!r}" for name, value in kind._field_defaults.items()}
    try:
        ast.literal_eval(repr(list(kind._field_defaults.values())))
    except (ValueError, SyntaxError):
        raise OSError("the defaults of its fields are not literals") from None
    fields = "".join(f"    {name}: 'object'{defaults.get(name, '')}\n" for name in kind._fields)
    text = f"class {kind.__name__}(__import__('typing').NamedTuple):\n{fields or '    pass'}"
    return "<namedtuple>", text.splitlines(True), 1


def _lookup(module: str, name: str) -> Any:
    """Return what a module has under a dotted name, without decorators of Stockade."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = undecorated(getattr(value, part, None))  # type: ignore[arg-type]
    return value


def _has(names: dict[str, Any], name: str, value: Any) -> bool:
    """Whether a namespace has a class of a dotted name, or this very function."""
    first, *rest = name.split(".")
    found: Any = undecorated(names.get(first))  # type: ignore[arg-type]
    for part in rest:
        found = undecorated(getattr(found, part, None))  # type: ignore[arg-type]
    return found is not None if isinstance(value, type) else getattr(found, "__func__", found) is value


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
    # Not the prefix of a virtual environment: one that was made in a project has the project's modules in it.
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = [*map(sysconfig.get_path, names), sys.base_prefix, sys.base_exec_prefix]
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
