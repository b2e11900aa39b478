"""Runs inside as `box.python()`: reads code, executes it, and sends the outcome.

The host sends this file as text, and any Python from 3.8 on executes it
inside, so it imports nothing of Stockade. Requests come on descriptor 3 and
answers go to 4, which no child inherits; the code gets fresh streams for each
run, opened from the pipes. Its variables are those of `__main__`.

If IPython is installed inside, as it is with every Jupyter kernel, its shell
executes the code, with magics, `!`, `await`, and its own ways to display.
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
#: The matplotlib backend whose `show()` sends figures to the host.
BACKEND = "_stockade_matplotlib"
#: The longest reason why a module cannot be imported, message of an exception, and word of a frame.
LONGEST_REASON, LONGEST_MESSAGE, LONGEST_WORD = 2000, 10000, 1000
#: The module that encodes values, `inside/encoder.py`; the code that executes this text defines it.
encoder: Any = globals()["encoder"]


def safe_repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__qualname__}: its repr fails: {type(error).__name__}>"


def is_figure(value: Any) -> bool:
    figures = sys.modules.get("matplotlib.figure")
    return figures is not None and isinstance(value, figures.Figure)


def render_png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()


def call_repr(value: Any, name: str) -> Any:
    """Call a display method of a value; None if it has none, fails, or the value is a class."""
    method = None if isinstance(value, type) else getattr(value, name, None)
    if not callable(method):
        return None
    try:
        form = method()
    except Exception:
        return None
    return form[0] if isinstance(form, tuple) and form else form


def bundle(value: Any) -> dict[str, str | bytes]:
    """Return the value in every form it has, by mime type."""
    forms: dict[str, str | bytes] = {"text/plain": safe_repr(value)}
    if is_figure(value):
        forms["image/png"] = render_png(value)
        return forms
    for mime, name in list(TEXTS.items()) + list(IMAGES.items()):
        form = call_repr(value, name)
        if isinstance(form, bytes if mime in IMAGES else str):
            forms[mime] = form
        elif mime == "application/json" and form is not None:
            forms[mime] = json.dumps(form)
        elif mime in IMAGES and isinstance(form, str):
            forms[mime] = base64.b64decode(form)
    more = call_repr(value, "_repr_mimebundle_")
    if isinstance(more, dict):
        for mime, form in more.items():
            if isinstance(form, (str, bytes)):
                forms[str(mime)] = form
    return forms


class FigureBackend:
    """Makes `matplotlib` draw into memory, and `show()` send the figures to the host."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != BACKEND:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, FigureBackend)  # type: ignore[arg-type]

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
            # Directly into the streams: a terminal of its own would mix stdout and stderr.
            system = InteractiveShell.system_raw

            def ask_exit(self) -> None:
                raise SystemExit

            def silent(self, *_: Any, **__: Any) -> None:
                """Do nothing: the driver reports what was raised."""

            showtraceback = showsyntaxerror = silent

            def enable_gui(self, gui: Any = None) -> None:
                """Do nothing: there is no screen. `%matplotlib inline` calls this too."""

        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = "NoColor"
        del driver.main.__dict__["display"]  # IPython brings its own
        self.shell = Shell.instance(config=config, user_module=driver.main)
        self.shell.compile.get_code_name = lambda *_: driver.name
        self.shell.display_formatter.formatters["image/png"].for_type_by_name(
            "matplotlib.figure", "Figure", driver.draw_and_close
        )
        warnings.filterwarnings("ignore", message="To exit: use")

    def execute(self, code: str) -> Any:
        done = self.shell.run_cell(code, store_history=True)
        done.raise_error()
        return done.result


class Driver:
    """Serves requests in a loop, and has the state of the current run."""

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
        sys.meta_path.insert(0, FigureBackend)
        os.environ.setdefault("MPLBACKEND", "module://" + BACKEND)
        signal.signal(signal.SIGINT, self.interrupt)
        Driver.current = self

    def interrupt(self, *_: Any) -> None:
        if self.running:
            raise KeyboardInterrupt

    def serve(self) -> None:
        while True:
            request = json.loads(self.read(int(self.read(9))))
            self.open_streams()
            answer: dict[str, Any] = {}
            status = self.run(request, answer)
            if os.getpid() != self.pid:
                os._exit(status)  # a child that the code forked
            self.send(request, status, answer)

    def read(self, size: int) -> bytes:
        return self.take(self.asks, size)

    def open_streams(self) -> None:
        """Open the three streams anew, whatever an earlier run has done to them."""
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

    def run(self, request: dict[str, Any], answer: dict[str, Any]) -> int:
        """Run the code, fill in the answer and return an exit code. Catches whatever the code raises."""
        self.displays = []
        value = None
        try:
            self.running = True
            try:
                if not self.start_ipython(request, answer) or not self.preload(request, answer):
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
            status = self.exit_status(end)
        except BaseException as error:
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
            answer["error"] = self.describe_error(error)
        self.running = False
        self.flush()
        answer.update(self.encode_outcome(value, request["most"]))
        return status

    def start_ipython(self, request: dict[str, Any], answer: dict[str, Any]) -> bool:
        """Start IPython's shell once, if it is installed and wanted; False if it was required and fails."""
        wanted = request.get("ipython")
        if self.begun or wanted is False:
            return True
        from importlib.util import find_spec

        try:
            if wanted or find_spec("IPython") is not None:
                self.cells = Cells(self)
        except Exception as error:
            # An IPython that is too old or broken is ignored, unless the caller required it.
            self.cells = None
            self.main.__dict__["display"] = self.display
            if wanted:
                answer["preload"] = f"IPython: {error}"[:LONGEST_REASON]
                return False
        self.begun = True
        return True

    def preload(self, request: dict[str, Any], answer: dict[str, Any]) -> bool:
        for name in request["preload"]:
            try:
                __import__(name)
            except Exception as error:
                answer["preload"] = f"{name}: {error}"[:LONGEST_REASON]
                return False
        return True

    def execute(self, code: str) -> Any:
        """Execute the code, and return the value of its last statement if that is an expression."""
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
    def exit_status(end: SystemExit) -> int:
        if end.code is None:
            return 0
        if isinstance(end.code, int):
            return end.code & 0xFF
        print(end.code, file=sys.stderr)
        return 1

    def describe_error(self, error: BaseException) -> dict[str, Any]:
        """Return an error as data, and write its traceback to stderr as Python does."""
        trace = error.__traceback__
        while trace is not None and self.is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        error.__traceback__ = trace
        text = "".join(traceback.format_exception(type(error), error, trace))
        with contextlib.suppress(Exception):
            sys.stderr.write(text)
        frames = traceback.extract_tb(trace)
        return {
            "type": self.cut(type(error).__name__),
            "message": str(error)[:LONGEST_MESSAGE],
            "frames": [self.describe_frame(frame) for frame in frames[-100:]],
        }

    def describe_frame(self, frame: traceback.FrameSummary) -> list[Any]:
        return [self.cut(frame.filename), frame.lineno or 0, self.cut(frame.name), self.cut(frame.line)]

    @staticmethod
    def cut(word: str | None) -> str:
        return (word or "")[:LONGEST_WORD]

    def is_ours(self, file: str) -> bool:
        return file == __file__ or (self.cells is not None and "/IPython/core/" in file)

    @staticmethod
    def flush() -> None:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):
                stream.flush()  # type: ignore[union-attr]

    def display(self, *values: Any) -> None:
        """Add values to the displays of this run, in every form they have."""
        for value in values:
            self.displays.append(bundle(value))
            if is_figure(value):
                self.close_figure(value)

    def publish(self, data: dict[str, Any]) -> None:
        """Add the forms that IPython made of a value to the displays."""
        forms: dict[str, str | bytes] = {}
        for mime, form in data.items():
            plain = isinstance(form, (str, bytes))
            text = form if plain else json.dumps(form, default=safe_repr)
            forms[str(mime)] = base64.b64decode(form) if mime in IMAGES and isinstance(form, str) else text
        self.displays.append(forms)

    def draw_and_close(self, figure: Any) -> bytes:
        """Render a figure and close it, so that it is not shown once more at the end."""
        image = render_png(figure)
        self.close_figure(figure)
        return image

    @staticmethod
    def close_figure(figure: Any) -> None:
        plots = sys.modules.get("matplotlib.pyplot")
        if plots is not None:
            plots.close(figure)

    def show_figures(self) -> None:
        plots: Any = sys.modules.get("matplotlib.pyplot")
        for number in plots.get_fignums() if plots is not None else ():
            self.display(plots.figure(number))

    def encode_outcome(self, value: Any, most: int) -> dict[str, Any]:
        """Encode the value and the displays that fit into `most` bytes, and count what is left out."""
        shown, left_out = [], 0
        for forms in self.displays:
            try:
                shown.append(encoder.encode({str(mime): form for mime, form in forms.items()}, most))
                most -= len(shown[-1])
            except OverflowError:
                left_out += 1
        try:
            content = encoder.encode(value, most, safe_repr)
        except (OverflowError, RecursionError, MemoryError):
            left_out += 1
            content = encoder.encode_opaque(value, "<too large to send>")
        return {"value": content, "displays": shown, "left_out": left_out}

    def send(self, request: dict[str, Any], status: int, answer: dict[str, Any]) -> None:
        content = encoder.encode(answer, sys.maxsize)
        text = f"\n{request['number']} {status} {len(content)}\n".encode() + content
        view = memoryview(text)
        while view:
            view = view[os.write(self.answers, view) :]


Driver(globals()["take"]).serve()  # the code that executes this text defines `take`
