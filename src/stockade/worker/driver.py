"""What runs inside for a function: it takes one call, makes it, and seals what came of it.

This file is sent in as text and executed there, by whatever Python that is
(3.8 or newer). The call comes on descriptor 3 and the answer goes to 4, which
no child inherits. Modules that the host has sent are imported from memory. Of
Stockade itself there is only a shell inside, so that modules that decorate
functions can be imported: what it decorates stays as it is.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
import types
from _frozen_importlib import ModuleSpec
from _pickle import Unpickler, dumps, loads  # `pickle` itself takes as long to load as everything else

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, NoReturn

#: What is told of an exception at most, in characters, and of its arguments in bytes.
MOST_TEXT, MOST_ARGS = 1 << 20, 1 << 20
#: By file: what was sent of its text.
TEXTS: dict[str, str] = {}


class Hollow(type):
    """Makes classes that stand for what Stockade offers outside."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return hollow(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type)):
            return args[0]  # a decorator
        return super().__call__()


def hollow(name: str) -> Any:
    """Something of that name that does nothing, whatever is done with it."""

    def another(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return hollow(name)()

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self)(*args, **kwargs)

    return Hollow(name, (), {"__getattr__": another, "__call__": called, "__module__": "stockade"})


class Sent:
    """Imports what the host has sent."""

    #: By name: the source, its file, and for a package where else it has modules.
    modules: ClassVar[dict[str, tuple[str, str, list[str] | None]]] = {}
    #: Those of Stockade, compiled, where this Python is the host's.
    codes: ClassVar[dict[str, Any]] = {}

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name in cls.modules:
            _, file, path = cls.modules[name]
            spec = ModuleSpec(name, cls, origin=file, is_package=path is not None)  # type: ignore[arg-type]
            spec.submodule_search_locations = path
            spec.has_location = not file.startswith("<")
            return spec
        if name.startswith("stockade."):
            return ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: Any) -> None:
        return None

    @classmethod
    def exec_module(cls, module: Any) -> None:
        name = module.__name__
        if name not in cls.modules:
            module.__getattr__ = hollow
            return
        source, file, _ = cls.modules[name]
        known(file, source)
        code = cls.codes.get(name) or compile(source, file, "exec", dont_inherit=True)
        exec(code, module.__dict__)

    @classmethod
    def get_source(cls, name: str) -> str:
        return cls.modules[name][0]


def known(file: str, source: str) -> None:
    """Let tracebacks show the lines of a file that is not here."""
    TEXTS[file] = source


class Reader(Unpickler):
    """Reads what the host has pickled."""

    def find_class(self, module: str, name: str) -> Any:
        return found if module == "stockade.worker.carry" else super().find_class(module, name)


def found(module: str, name: str) -> Any:
    """What the host calls by a name."""
    value: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def read(data: bytes) -> Any:
    return Reader(io.BytesIO(data)).load()


def build(name: str, space: dict[str, Any]) -> None:
    """A module of the host's that nobody can import, as far as it is needed."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    names = module.__dict__
    names["__builtins__"] = builtins
    for variable, imported in space["imports"].items():
        importlib.import_module(imported)
        names[variable] = sys.modules[imported]
    for variable, data in space["early"].items():
        names[variable] = read(data)
    import __future__

    flag = __future__.annotations.compiler_flag
    texts: dict[str, list[str]] = {}
    for file, line, source in space["definitions"]:
        lines, own = texts.setdefault(file, []), source.splitlines(True)
        lines += ["\n"] * (line - 1 + len(own) - len(lines))
        lines[line - 1 : line - 1 + len(own)] = own
        known(file, "".join(lines))
        exec(compile("\n" * (line - 1) + source, file, "exec", flag, dont_inherit=True), names)
    for variable, data in space["late"].items():
        names[variable] = read(data)


class Worker:
    """One call, from its request to its answer."""

    def __init__(self, public: bytes, text: bytes) -> None:
        from stockade.worker import plain, seal

        self.plain, self.seal = plain, seal
        self.pid = os.getpid()
        asks, self.answers = os.dup(3), os.dup(4)
        os.close(3)
        os.close(4)
        try:
            agreement = seal.Agreement()
        except seal.SealError as error:
            self.write(b"!" + str(error).encode()[:1000])
            self.leave(1)
        self.write(b"=" + agreement.public)
        self.sealer, opener = agreement.agree(public, text, first=False)
        self.request = self.receive(asks, opener)
        os.close(asks)

    def receive(self, asks: int, opener: Any) -> dict[str, Any]:
        while True:
            data = os.read(asks, 1 << 20)
            if not data:
                os._exit(1)
            for _, content in opener.feed(data, sys.maxsize):
                return loads(content)  # type: ignore[no-any-return]

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.answers, view) :]

    def say(self, kind: bytes, *pieces: Any) -> None:
        if os.getpid() != self.pid:
            self.leave(1)  # a child that the function has forked
        for message in self.sealer.record(kind, *pieces):
            self.write(message)

    def serve(self) -> NoReturn:
        stage = "arguments"
        try:
            function, args, kwargs = self.prepare()
            stage = "initializer"
            if self.request["initializer"] is not None:
                first, given = read(self.request["initializer"])
                first(*given)
            stage = "function"
            self.say(b"B", b"")
            if self.request["many"]:
                value: Any = [self.finished(function(*one)) for one in args[0]]
            else:
                value = self.finished(function(*args, **kwargs))
            stage = "result"
            pieces = self.encoded(value)
        except BaseException as error:
            self.fail(error, stage)
        self.flush()
        self.say(b"R", *pieces)
        self.leave(0)

    def prepare(self) -> Any:
        request = self.request
        Sent.modules.update(request["modules"])
        sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
        sys.argv = [""]
        for name, space in request["spaces"].items():
            build(name, space)
        return read(request["call"])

    def finished(self, value: Any) -> Any:
        """What a function returns in the end: a coroutine is awaited, what is yielded is said at once."""
        many, streams = self.request["many"], self.request["streams"]
        if isinstance(value, types.GeneratorType) and many:
            return list(value)
        if isinstance(value, types.GeneratorType) and streams:
            while True:
                try:
                    item = next(value)
                except StopIteration as end:
                    return end.value
                self.say(b"V", *self.encoded(item))
        if isinstance(value, types.AsyncGeneratorType) and (many or streams):
            value = self.drained(value)
        if isinstance(value, types.CoroutineType):
            import asyncio

            return asyncio.run(value)
        return value

    async def drained(self, values: Any) -> Any:
        if self.request["many"]:
            return [item async for item in values]
        async for item in values:
            self.say(b"V", *self.encoded(item))
        return None

    def encoded(self, value: Any) -> list[Any]:
        if self.request["results"] == "pickle":
            return [dumps(value, 4)]
        return self.plain.pieces(value, self.request["most"])

    def fail(self, error: BaseException, stage: str) -> NoReturn:
        content = self.failure(error, stage)
        self.flush()
        self.say(b"E", content)
        self.leave(1)

    def failure(self, error: BaseException, stage: str) -> bytes:
        """The exception as plain data."""
        import linecache
        import traceback

        for file, source in TEXTS.items():
            linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == "<stockade>":
            trace = trace.tb_next
        try:
            text = "".join(traceback.format_exception(type(error), error, trace))
            message = str(error)
        except Exception:
            text = message = f"{type(error).__qualname__}: it cannot be shown"
        if isinstance(error, NameError):
            text += self.missing(error)
        told = error.args
        if isinstance(error, OSError) and len(told) == 2 and error.filename is not None:
            told = (*told, error.filename)
        try:
            args = self.plain.encode(told, MOST_ARGS)
        except Exception:
            args = b""
        kind = type(error)
        said = {
            "type": f"{kind.__module__}:{kind.__qualname__}",
            "message": message[:MOST_TEXT],
            "text": text[-MOST_TEXT:],
            "args": args,
            "stage": stage,
        }
        return self.plain.encode(said, sys.maxsize)

    def missing(self, error: NameError) -> str:
        name = getattr(error, "name", None) or ""
        for space in self.request["spaces"].values():
            if name in space["missing"]:
                return f"({name} could not be handed in: {space['missing'][name]})\n"
        return ""

    @staticmethod
    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the function may have closed or replaced it
                continue

    def leave(self, status: int) -> NoReturn:
        os._exit(status)


def main(sources: dict[str, Any], codes: dict[str, Any], public: bytes, text: bytes) -> None:
    """The host calls it with what it sent as `text`: its own modules, compiled if that helps, and its key."""
    if (
        "stockade" in sys.modules
    ):  # in a template: functions that were decorated there would look for a sandbox
        os.write(4, b"!a module that was preloaded has imported stockade")
        os._exit(1)
    Sent.modules.update(sources)
    Sent.codes = codes
    sys.meta_path.insert(0, Sent)
    sys.modules["__main__"] = types.ModuleType("__main__")
    Worker(public, text).serve()
