"""Runs inside for a sandboxed function: reads one call, makes it, and sends the sealed result.

The host sends this file as text, and any Python from 3.8 on executes it
inside. The call comes on descriptor 3 and the answer goes to 4, which no child
inherits. Modules that the host sends are imported from memory. Stockade itself
is only a placeholder inside, so that modules that decorate functions can be
imported: the functions stay as they are.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
import types
from _frozen_importlib import ModuleSpec
from _pickle import Unpickler, dumps, loads  # importing `pickle` itself takes as long as everything else

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, NoReturn

#: The longest text of an exception, in characters, and its longest arguments, in bytes.
MOST_TEXT, MOST_ARGS = 1 << 20, 1 << 20
#: By file, the part of its text that the host sent.
TEXTS: dict[str, str] = {}


class HollowType(type):
    """Makes placeholder classes for the names of Stockade."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return hollow(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type)):
            return args[0]  # a decorator
        return super().__call__()


def hollow(name: str) -> Any:
    """Return a placeholder class of that name; its attributes and calls do nothing."""

    def get_attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return hollow(name)()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self)(*args, **kwargs)

    return HollowType(name, (), {"__getattr__": get_attribute, "__call__": call, "__module__": "stockade"})


class SentModules:
    """Imports modules that the host has sent."""

    #: By name: the source, its file, and for a package where else to look for its modules.
    modules: ClassVar[dict[str, tuple[str, str, list[str] | None]]] = {}
    #: The modules of Stockade, compiled, if this Python has the host's version.
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
        add_source(file, source)
        code = cls.codes.get(name) or compile(source, file, "exec", dont_inherit=True)
        exec(code, module.__dict__)

    @classmethod
    def get_source(cls, name: str) -> str:
        return cls.modules[name][0]


def add_source(file: str, source: str) -> None:
    """Let tracebacks show the lines of a file that does not exist inside."""
    TEXTS[file] = source


def add_lines(file: str, line: int, source: str) -> None:
    """Add a part of a file, from that line on."""
    lines, own = TEXTS.get(file, "").splitlines(True), source.splitlines(True)
    lines += ["\n"] * (line - 1 + len(own) - len(lines))
    lines[line - 1 : line - 1 + len(own)] = own
    add_source(file, "".join(lines))


class CallUnpickler(Unpickler):
    """Reads a pickle of the host."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "stockade.functions.packing":
            return {"inside": find_name, "make_function": make_function, "fill_function": fill_function}[name]
        return super().find_class(module, name)


def find_name(module: str, name: str) -> Any:
    """Return the object of a module that the host refers to by its dotted name."""
    value: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def make_function(
    code: bytes, magic: bytes, module: str, globals_used: bool, name: str, qualname: str, cells: int
) -> Any:
    """Return a function made from its code; `fill_function` adds its defaults and its closure."""
    import marshal
    from _frozen_importlib_external import MAGIC_NUMBER

    if magic != MAGIC_NUMBER:
        raise TypeError(
            f"{qualname} has no name at the top of a module, so only the caller's version of Python can load "
            f"it; this is Python {sys.version.partition(' ')[0]}"
        )
    names = {"__name__": module, "__builtins__": builtins}
    if globals_used:
        names = vars(sys.modules.get(module) or importlib.import_module(module))
    closure = tuple(types.CellType() for _ in range(cells))
    function = types.FunctionType(marshal.loads(code), names, name, None, closure)
    function.__qualname__ = qualname
    return function


def fill_function(function: Any, rest: Any) -> None:
    function.__defaults__, function.__kwdefaults__, contents = rest
    for number, content in enumerate(contents):
        if content:
            function.__closure__[number].cell_contents = content[0]


def read(data: bytes) -> Any:
    return CallUnpickler(io.BytesIO(data)).load()


def build(name: str, space: dict[str, Any]) -> None:
    """Build the parts that the call needs of a host's module that cannot be imported here."""
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
    for file, line, source in space["definitions"]:
        add_lines(file, line, source)
        exec(compile("\n" * (line - 1) + source, file, "exec", flag, dont_inherit=True), names)
    for variable, data in space["late"].items():
        names[variable] = read(data)


class Worker:
    """One call, from its request to its answer."""

    def __init__(self, public: bytes, text: bytes) -> None:
        from stockade.inside import channel_crypto, encoder

        self.plain, self.seal = encoder, channel_crypto
        self.pid = os.getpid()
        asks, self.answers = os.dup(3), os.dup(4)
        os.close(3)
        os.close(4)
        try:
            agreement = channel_crypto.KeyAgreement()
        except channel_crypto.SealError as error:
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

    def send(self, kind: bytes, *pieces: Any) -> None:
        if os.getpid() != self.pid:
            self.leave(1)  # a child that the function forked
        for message in self.sealer.record(kind, *pieces):
            self.write(message)

    def serve(self) -> NoReturn:
        stage = "arguments"
        try:
            function, args, kwargs = self.prepare()
            stage = "initializer"
            if self.request["initializer"] is not None:
                initializer, arguments = read(self.request["initializer"])
                initializer(*arguments)
            stage = "function"
            self.send(b"B", b"")
            if self.request["many"]:
                value: Any = [self.final_value(function(*one)) for one in args[0]]
            else:
                value = self.final_value(function(*args, **kwargs))
            if self.request["prints"]:
                value = sys.stdout.flush()  # a full or broken pipe is the function's failure
            stage = "result"
            pieces = self.encode_result(value)
        except BaseException as error:
            self.fail(error, stage)
        self.flush()
        self.send(b"R", *pieces)
        self.leave(0)

    def prepare(self) -> Any:
        request = self.request
        SentModules.modules.update(request["modules"])
        sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
        sys.argv = [""]
        for text in request["texts"]:
            add_lines(*text)
        for name, space in request["spaces"].items():
            build(name, space)
        return read(request["call"])

    def final_value(self, value: Any) -> Any:
        """Return the final value of a function; await a coroutine, and send what a generator yields."""
        many, streams = self.request["many"], self.request["streams"]
        if isinstance(value, types.GeneratorType) and many:
            return list(value)
        if isinstance(value, types.GeneratorType) and streams:
            while True:
                try:
                    item = next(value)
                except StopIteration as end:
                    return end.value
                self.send(b"V", *self.encode_result(item))
        if isinstance(value, types.AsyncGeneratorType) and (many or streams):
            value = self.drain(value)
        if isinstance(value, types.CoroutineType):
            import asyncio

            return asyncio.run(value)
        return value

    async def drain(self, values: Any) -> Any:
        if self.request["many"]:
            return [item async for item in values]
        async for item in values:
            self.send(b"V", *self.encode_result(item))
        return None

    def encode_result(self, value: Any) -> list[Any]:
        if self.request["trust"]:
            return [dumps(value, 4)]
        return self.plain.pieces(value, self.request["most"])

    def fail(self, error: BaseException, stage: str) -> NoReturn:
        content = self.encode_failure(error, stage)
        if self.request["prints"]:
            print(self.trace, end="", file=sys.stderr)
        self.flush()
        self.send(b"E", content)
        self.leave(1)

    def encode_failure(self, error: BaseException, stage: str) -> bytes:
        """Encode an exception as plain data."""
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
            text = message = f"{type(error).__qualname__}: its text cannot be shown"
        if isinstance(error, NameError):
            text += self.explain_missing(error)
        self.trace = text
        arguments = error.args
        if isinstance(error, OSError) and len(arguments) == 2 and error.filename is not None:
            arguments = (*arguments, error.filename)
        try:
            args = self.plain.encode(arguments, MOST_ARGS)
        except Exception:
            args = b""
        kind = type(error)
        record = {
            "type": f"{kind.__module__}:{kind.__qualname__}",
            "message": message[:MOST_TEXT],
            "text": text[-MOST_TEXT:],
            "args": args,
            "stage": stage,
        }
        return self.plain.encode(record, sys.maxsize)

    def explain_missing(self, error: NameError) -> str:
        """Return why the host could not send the name that an error is about; empty for any other name."""
        name = getattr(error, "name", None) or ""
        for space in self.request["spaces"].values():
            if name in space["missing"]:
                return f"({name} could not be sent into the sandbox: {space['missing'][name]})\n"
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
    """Serve one call. `text` is what the host sent: its modules, compiled if that helps, and its key."""
    # Only in a template: functions that were decorated there would try to make a sandbox.
    if "stockade" in sys.modules:
        os.write(4, b"!a preloaded module has imported stockade")
        os._exit(1)
    SentModules.modules.update(sources)
    SentModules.codes = codes
    sys.meta_path.insert(0, SentModules)
    sys.modules["__main__"] = types.ModuleType("__main__")
    Worker(public, text).serve()
