"""What runs inside as `box.python()`: it takes code, runs it, and says what came of it.

This file is sent in as text and executed there, by whatever Python that is
(3.8 or newer), so it imports nothing of Stockade. Requests come on descriptor
3 and answers go to 4, which no child inherits; the code has fresh streams for
each run, opened from the pipes. Its variables are those of `__main__`.

Where IPython is installed inside, as it is with every kernel of Jupyter's, its
shell executes the code: magics, `!`, `await`, and its own ways to display.
"""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import io
import json
import linecache
import os
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any

IMAGES = {"image/png": "_repr_png_", "image/jpeg": "_repr_jpeg_"}
TEXTS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "application/json": "_repr_json_",
}
#: A backend of matplotlib that shows figures by handing them out.
BACKEND = "_stockade_matplotlib"
DEEPEST = 40


class Bounded:
    """How much may still be said of one value."""

    def __init__(self, room: int) -> None:
        self.room = room

    def take(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise OverflowError


def encoded(value: Any, bounded: Bounded, depth: int = 0) -> Any:
    """Plain data as JSON with a letter for what that does not know; anything else is its type and repr."""
    bounded.take(8)
    kind = type(value)
    if value is None or kind in (bool, float):
        return value
    if kind is int and value.bit_length() < 10000:
        bounded.take(value.bit_length() // 3)
        return value
    if kind is str:
        bounded.take(len(value))
        return value.encode("utf-8", "replace").decode()
    if kind in (bytes, bytearray):
        bounded.take(len(value) * 2)
        return {"b": base64.b64encode(value).decode()}
    if kind in (list, tuple, dict) and depth < DEEPEST:
        parts = value if kind is not dict else [part for item in list(value.items()) for part in item]
        said = [encoded(part, bounded, depth + 1) for part in parts]
        return said if kind is list else {"t" if kind is tuple else "d": said}
    return {"o": [kind.__module__ + "." + kind.__qualname__, safe_repr(value)[: bounded.room // 2]]}


def safe_repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__qualname__}: its repr fails: {type(error).__name__}>"


def is_figure(value: Any) -> bool:
    figures = sys.modules.get("matplotlib.figure")
    return figures is not None and isinstance(value, figures.Figure)


def picture(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()


def asked(value: Any, name: str) -> Any:
    """What a method of the value says of it; classes themselves are not asked."""
    method = None if isinstance(value, type) else getattr(value, name, None)
    if not callable(method):
        return None
    try:
        said = method()
    except Exception:
        return None
    return said[0] if isinstance(said, tuple) and said else said


def bundle(value: Any) -> dict[str, str | bytes]:
    """The value in every form it has, by mime type."""
    found: dict[str, str | bytes] = {"text/plain": safe_repr(value)}
    if is_figure(value):
        found["image/png"] = picture(value)
        return found
    for mime, name in list(TEXTS.items()) + list(IMAGES.items()):
        said = asked(value, name)
        if isinstance(said, bytes if mime in IMAGES else str):
            found[mime] = said
        elif mime == "application/json" and said is not None:
            found[mime] = json.dumps(said)
        elif mime in IMAGES and isinstance(said, str):
            found[mime] = base64.b64decode(said)
    more = asked(value, "_repr_mimebundle_")
    if isinstance(more, dict):
        for mime, said in more.items():
            if isinstance(said, (str, bytes)):
                found[str(mime)] = said
    return found


class Backend:
    """Makes `matplotlib` draw into memory, and `show()` hand the figures out."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != BACKEND:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, Backend)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: Any) -> None:
        return None

    @staticmethod
    def exec_module(module: Any) -> None:
        from matplotlib.backend_bases import FigureManagerBase
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        module.FigureCanvas = FigureCanvasAgg
        module.FigureManager = FigureManagerBase
        module.show = lambda *args, **kwargs: Driver.current.show_figures()


class Cells:
    """IPython's shell, without its terminal, its history and its sockets."""

    def __init__(self, driver: Driver) -> None:
        from IPython.core.displayhook import DisplayHook
        from IPython.core.displaypub import DisplayPublisher
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets import Type
        from traitlets.config import Config

        class Hook(DisplayHook):  # type: ignore[misc]
            def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
                driver.publish(format_dict)

            def start_displayhook(self) -> None:
                pass

            write_output_prompt = finish_displayhook = start_displayhook

        class Publisher(DisplayPublisher):  # type: ignore[misc]
            def publish(self, data: Any, *_: Any, **__: Any) -> None:
                driver.publish(data)

            def clear_output(self, wait: bool = False) -> None:
                driver.displays.clear()

        class Shell(InteractiveShell):  # type: ignore[misc]
            displayhook_class, display_pub_class = Type(Hook), Type(Publisher)
            # Straight into the streams: a terminal of its own would mix them.
            system = InteractiveShell.system_raw

            def ask_exit(self) -> None:
                raise SystemExit

            def silent(self, *_: Any, **__: Any) -> None:
                """The driver tells what was raised."""

            showtraceback = showsyntaxerror = silent

            def enable_gui(self, gui: Any = None) -> None:
                """There is no screen; `%matplotlib inline` asks for this as well."""

        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = "NoColor"
        del driver.main.__dict__["display"]  # it brings its own
        self.shell = Shell.instance(config=config, user_module=driver.main)
        self.shell.compile.get_code_name = lambda *_: driver.name
        self.shell.display_formatter.formatters["image/png"].for_type_by_name(
            "matplotlib.figure", "Figure", driver.drawn
        )
        warnings.filterwarnings("ignore", message="To exit: use")

    def execute(self, code: str) -> Any:
        done = self.shell.run_cell(code, store_history=True)
        done.raise_error()
        return done.result


class Driver:
    """The loop, and what it knows of the run under way."""

    current: Driver

    def __init__(self, take: Callable[[int, int], bytes]) -> None:
        self.take = take
        self.pid = os.getpid()
        self.asks, self.answers = os.dup(3), os.dup(4)
        os.close(3)
        os.close(4)
        self.pipes = [os.dup(number) for number in range(3)]
        self.running = False
        self.count = 0
        self.name = ""
        self.cells: Cells | None = None
        self.begun = False
        self.displays: list[dict[str, str | bytes]] = []
        self.main = types.ModuleType("__main__")
        self.main.__dict__.update(__builtins__=builtins, display=self.display)
        sys.modules["__main__"] = self.main
        sys.argv = [""]
        sys.meta_path.insert(0, Backend)
        os.environ.setdefault("MPLBACKEND", "module://" + BACKEND)
        signal.signal(signal.SIGINT, self.interrupt)
        Driver.current = self

    def interrupt(self, *_: Any) -> None:
        if self.running:
            raise KeyboardInterrupt

    def serve(self) -> None:
        while True:
            request = json.loads(self.read(int(self.read(9))))
            self.streams()
            said: dict[str, Any] = {}
            status = self.guarded(request, said)
            if os.getpid() != self.pid:
                os._exit(status)  # a child that the code has forked
            self.answer(request, status, said)

    def read(self, size: int) -> bytes:
        return self.take(self.asks, size)

    def streams(self) -> None:
        """Open the three streams anew: what an earlier run has done to them is gone."""
        for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
            fresh = os.open(f"/proc/self/fd/{self.pipes[number]}", flags)
            os.dup2(fresh, number, inheritable=True)
            if fresh != number:
                os.close(fresh)
        sys.stdin = io.TextIOWrapper(
            io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape"
        )
        sys.stdout = self.writer(1, "surrogateescape")
        sys.stderr = self.writer(2, "backslashreplace")
        vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)

    @staticmethod
    def writer(number: int, errors: str) -> io.TextIOWrapper:
        file = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        return io.TextIOWrapper(file, "utf-8", errors, line_buffering=True)

    def guarded(self, request: dict[str, Any], said: dict[str, Any]) -> int:
        """Run the code; its exit code. Whatever it raises ends here."""
        self.displays = []
        value = None
        try:
            self.running = True
            try:
                if not self.begin(request, said) or not self.preload(request, said):
                    return 1
                value = self.execute(request["code"])
                if value is not None and self.cells is None:
                    vars(builtins)["_"] = value
                    self.display(value)
                self.show_figures()
                status = 0
            finally:
                self.running = False
        except SystemExit as end:
            status = self.left(end)
        except BaseException as error:
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
            said["error"] = self.failure(error)
        self.running = False
        self.flush()
        said.update(self.sayable(value, request["most"]))
        return status

    def begin(self, request: dict[str, Any], said: dict[str, Any]) -> bool:
        """Once: have IPython's shell, unless it is not wanted or not there."""
        wanted = request.get("ipython")
        if self.begun or wanted is False:
            return True
        from importlib.util import find_spec

        try:
            if wanted or find_spec("IPython") is not None:
                self.cells = Cells(self)
        except Exception as error:
            # One that is too old or broken is as good as none, unless it was asked for.
            self.cells = None
            self.main.__dict__["display"] = self.display
            if wanted:
                said["preload"] = f"IPython: {error}"
                return False
        self.begun = True
        return True

    def preload(self, request: dict[str, Any], said: dict[str, Any]) -> bool:
        for name in request["preload"]:
            try:
                __import__(name)
            except Exception as error:
                said["preload"] = f"{name}: {error}"
                return False
        return True

    def execute(self, code: str) -> Any:
        """Run all of it, and return the value of the last line if that is an expression."""
        self.count += 1
        name = self.name = f"<run {self.count}>"
        if self.cells is not None:
            return self.cells.execute(code)
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        tree: ast.Module = compile(code, name, "exec", ast.PyCF_ONLY_AST)  # type: ignore[assignment]
        last: Any = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self.main.__dict__)
        if last is None:
            return None
        return eval(compile(ast.Expression(last.value), name, "eval"), self.main.__dict__)

    @staticmethod
    def left(end: SystemExit) -> int:
        if end.code is None:
            return 0
        if isinstance(end.code, int):
            return end.code & 0xFF
        print(end.code, file=sys.stderr)
        return 1

    def failure(self, error: BaseException) -> dict[str, Any]:
        """The error as data; its text goes to stderr, as Python does it."""
        trace = error.__traceback__
        while trace is not None and self.is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        error.__traceback__ = trace
        text = "".join(traceback.format_exception(type(error), error, trace))
        with contextlib.suppress(Exception):
            sys.stderr.write(text)
        frames = traceback.extract_tb(trace)
        return {
            "type": type(error).__name__,
            "message": str(error)[:10000],
            "frames": [[f.filename, f.lineno or 0, f.name, f.line or ""] for f in frames[-100:]],
        }

    def is_ours(self, file: str) -> bool:
        return file == __file__ or (self.cells is not None and "/IPython/core/" in file)

    @staticmethod
    def flush() -> None:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):
                stream.flush()  # type: ignore[union-attr]

    def display(self, *values: Any) -> None:
        """Hand values out in every form they have."""
        for value in values:
            self.displays.append(bundle(value))
            if is_figure(value):
                self.close_figure(value)

    def publish(self, data: dict[str, Any]) -> None:
        """Hand out what IPython has made of a value."""
        forms: dict[str, str | bytes] = {}
        for mime, said in data.items():
            plain = isinstance(said, (str, bytes))
            text = said if plain else json.dumps(said, default=safe_repr)
            forms[str(mime)] = base64.b64decode(said) if mime in IMAGES and isinstance(said, str) else text
        self.displays.append(forms)

    def drawn(self, figure: Any) -> bytes:
        """A figure that is displayed is not shown once more at the end."""
        made = picture(figure)
        self.close_figure(figure)
        return made

    @staticmethod
    def close_figure(figure: Any) -> None:
        plots = sys.modules.get("matplotlib.pyplot")
        if plots is not None:
            plots.close(figure)

    def show_figures(self) -> None:
        plots: Any = sys.modules.get("matplotlib.pyplot")
        for number in plots.get_fignums() if plots is not None else ():
            self.display(plots.figure(number))

    def sayable(self, value: Any, most: int) -> dict[str, Any]:
        """The value and the displays, as far as there is room; what is left out is counted."""
        bounded, shown, left_out = Bounded(most), [], 0
        for forms in self.displays:
            try:
                shown.append({str(mime): encoded(form, bounded) for mime, form in forms.items()})
            except OverflowError:
                left_out += 1
                bounded.room = max(bounded.room, 0)
        try:
            said = encoded(value, bounded)
        except OverflowError:
            left_out += 1
            said = {"o": [type(value).__qualname__, "<larger than what is handed out>"]}
        return {"value": said, "displays": shown, "left_out": left_out}

    def answer(self, request: dict[str, Any], status: int, said: dict[str, Any]) -> None:
        content = json.dumps(said).encode("utf-8", "replace")
        if len(content) > request["most"] * 2 + 100000:
            content = b'{"left_out": 1}'
        text = f"\n{request['number']} {status} {len(content)}\n".encode() + content
        view = memoryview(text)
        while view:
            view = view[os.write(self.answers, view) :]


Driver(globals()["take"]).serve()  # whoever executes this text gives it
