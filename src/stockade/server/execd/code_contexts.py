"""Code contexts: interpreters whose state stays from run to run, with values and pictures as results.

A python context is an `AsyncInterpreter` of the library, a bash context an `AsyncShell`. The interpreter
starts with the first run, offline and in a fraction of a second. Each language has one default context, for
requests that name none.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from stockade.result import Outcome, Result
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.server.execd.bash_sessions import export_code
from stockade.server.execd.commands import invalid
from stockade.server.execd.streamed_run import COMMAND_ERROR, RunConclusion, StreamedRun
from stockade.server.execd.variables import SandboxVariables
from stockade.server.wire.errors import ApiError
from stockade.server.wire.events import EventResponse, EventStream
from stockade.server.wire.line_endings import LineRule
from stockade.sessions.interpreter import AsyncInterpreter, CodeResult, Failure
from stockade.sessions.shell import AsyncShell

LANGUAGES = ("python", "bash")
CONTEXT_NOT_FOUND = "CONTEXT_NOT_FOUND"
#: How many contexts a sandbox can have.
MOST_CONTEXTS = 64
#: The longest form of a result: some clients read no event of 4 MiB or more.
LONGEST_FORM = 3 << 20
PLAIN = "text/plain"
#: What a context's code gets when a client interrupts it.
INTERRUPT = "KeyboardInterrupt"


class ContextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The language of a new context."""

    language: str


class ContextAnswer(msgspec.Struct, frozen=True):
    """One context."""

    id: str
    language: str


class ContextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The context of a run: an id, or a language, whose default context it is then."""

    id: str | None = None
    language: str | None = None


class CodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The code of one run."""

    code: str
    context: ContextChoice = ContextChoice()


class CodeContext:
    """One interpreter or shell, and its present run."""

    def __init__(self, language: str, session: AsyncInterpreter | AsyncShell) -> None:
        self.id = str(uuid.uuid4())
        self.language = language
        self.session = session
        #: How many runs it has had.
        self.count = 0
        #: Whether it has the variables of the `EXECD_ENVS` file.
        self._prepared = False
        self._runs: list[StreamedRun] = []

    @property
    def answer(self) -> ContextAnswer:
        """The context as clients see it."""
        return ContextAnswer(self.id, self.language)

    def begin(self, request: CodeRequest, stream: EventStream, variables: SandboxVariables) -> StreamedRun:
        """Start a run whose events go to a stream."""
        run = StreamedRun(request.code)
        self._runs.append(run)
        stream.init(self.id)

        async def work() -> Result:
            if not self._prepared:
                await self._prepare(await variables.added())
            return await self.session.run(request.code, on_stdout=stream.stdout, on_stderr=stream.stderr)

        run.begin(work, lambda end, result: self._tell(run, stream, end, result), self._runs.remove)
        return run

    async def _prepare(self, added: Mapping[str, str]) -> None:
        """Set the variables that the sandbox's programs have besides those of its policy."""
        self._prepared = True
        if added and isinstance(self.session, AsyncShell):
            await self.session.run(export_code(added))
        elif added:
            await self.session.run(f"__import__('os').environ.update({dict(added)!r})")

    def interrupt(self) -> None:
        """Interrupt the run that is going on, and those that wait for their turn; the state stays."""
        for run in self._runs:
            run.interrupt()

    async def close(self) -> None:
        """End the interpreter and its runs."""
        runs = tuple(self._runs)
        self.interrupt()
        await self.session.close()
        for run in runs:
            await run.wait()

    def _tell(self, run: StreamedRun, stream: EventStream, end: RunConclusion, result: Result | None) -> None:
        """Add to the stream what came of a run, and end it."""
        self.count += 1
        stream.execution_count(self.count)
        for display in result.displays if isinstance(result, CodeResult) else ():
            if forms := text_forms(display):
                stream.result(forms)
        if (error := _error(self.language, end, result)) is not None:
            stream.error(*error)
        stream.complete(run.milliseconds)


class CodeError(NamedTuple):
    """An error event: the exception's class, its message and its traceback."""

    name: str
    value: str
    traceback: list[str]


def _error(language: str, end: RunConclusion, result: Result | None) -> CodeError | None:
    """Return the error of a run; None if it ended well."""
    if isinstance(result, CodeResult) and result.error is not None:
        return CodeError(result.error.type, result.error.message, traceback_of(result.error))
    if end.exit_code == 0:
        return None
    if language == "bash":
        return CodeError(COMMAND_ERROR, str(end.exit_code), [end.reason])
    if result is None:
        return CodeError(INTERRUPT, end.reason, [])
    if result.outcome is Outcome.EXITED and isinstance(result, CodeResult):
        return CodeError("SystemExit", str(end.exit_code), [end.reason])
    return CodeError("RuntimeError", end.reason, [end.reason])


def traceback_of(failure: Failure) -> list[str]:
    """Return the lines of a traceback as Python prints them."""
    lines = ["Traceback (most recent call last):"] if failure.frames else []
    for frame in failure.frames:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.name}')
        lines += [f"    {frame.text}"] if frame.text else []
    return [*lines, f"{failure.type}: {failure.message}" if failure.message else failure.type]


def text_forms(display: Mapping[str, str | bytes]) -> dict[str, str]:
    """Return the forms of a value as texts: bytes in base64, and plain text under the name `text`."""
    found: dict[str, str] = {}
    for mime, form in display.items():
        text = form if isinstance(form, str) else base64.b64encode(form).decode("ascii")
        # JSON may take six bytes for one.
        if len(msgspec.json.encode(text.encode("utf-8", "replace").decode())) <= LONGEST_FORM:
            found["text" if mime == PLAIN else mime] = text
    if not found and display:
        found["text"] = "<too large to send>"
    return found


class CodeContexts:
    """The code contexts of one sandbox."""

    def __init__(self, box: AsyncSandbox, variables: SandboxVariables) -> None:
        self._box, self._variables = box, variables
        self._contexts: dict[str, CodeContext] = {}
        #: The ids of the default contexts, by language.
        self._defaults: dict[str, str] = {}

    def create(self, request: ContextRequest) -> ContextAnswer:
        """Make a context."""
        return self._make(request.language).answer

    def list(self, language: str | None) -> list[ContextAnswer]:
        """Return the contexts, or those of one language."""
        return [one.answer for one in self._contexts.values() if language in (None, "", one.language)]

    def get(self, identifier: str) -> ContextAnswer:
        """Return one context."""
        return self._find(identifier).answer

    def run(self, request: CodeRequest, rule: LineRule) -> EventResponse:
        """Run code in a context and return the answer that streams it."""
        if not request.code.strip():
            raise invalid("code: must not be empty")
        if "\0" in request.code:
            raise invalid("code: contains a NUL byte")
        context = self._chosen(request.context)
        stream = EventStream(rule, code=True)
        run = context.begin(request, stream, self._variables)
        return EventResponse(stream, run.interrupt)

    def interrupt(self, identifier: str) -> None:
        """Interrupt what runs in a context."""
        self._find(identifier).interrupt()

    async def delete(self, identifier: str) -> None:
        """End a context."""
        context = self._find(identifier)
        del self._contexts[context.id]
        if self._defaults.get(context.language) == context.id:
            del self._defaults[context.language]
        await context.close()

    async def delete_all(self, language: str) -> None:
        """End the contexts of one language."""
        _check_language(language)
        await asyncio.gather(*(self.delete(one.id) for one in self.list(language)))

    async def close(self) -> None:
        """End all contexts."""
        await asyncio.gather(*(self.delete(identifier) for identifier in tuple(self._contexts)))

    def _chosen(self, choice: ContextChoice) -> CodeContext:
        if choice.id:
            context = self._find(choice.id)
            if choice.language and choice.language != context.language:
                raise invalid(f"context.language: the context is one of {context.language}")
            return context
        language = choice.language or LANGUAGES[0]
        if language not in self._defaults:
            self._defaults[language] = self._make(language).id
        return self._contexts[self._defaults[language]]

    def _make(self, language: str) -> CodeContext:
        _check_language(language)
        if len(self._contexts) >= MOST_CONTEXTS:
            raise ApiError(429, "LIMIT_EXCEEDED", f"the sandbox has {MOST_CONTEXTS} contexts already")
        session: Any = self._box.shell() if language == "bash" else self._box.python()
        context = CodeContext(language, session)
        self._contexts[context.id] = context
        return context

    def _find(self, identifier: str) -> CodeContext:
        context = self._contexts.get(identifier)
        if context is None:
            raise ApiError(404, CONTEXT_NOT_FOUND, "there is no such context")
        return context


def _check_language(language: str) -> None:
    if language not in LANGUAGES:
        known = " and ".join(LANGUAGES)
        words = (
            f"language: {language!r:.50} has no contexts here; {known} have. A command can run any program."
        )
        raise ApiError(400, "NOT_SUPPORTED", words)
