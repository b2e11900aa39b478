"""LangChain's `BaseSandbox`: deep agents work in a living sandbox.

    with stockade.Sandbox(stockade.Policy(workspace=".")) as box:
        agent = create_deep_agent(model=model, backend=StockadeBackend(box))

The agent's file tools (ls, read, write, edit, grep, glob) and its `execute` see the same files: those of the
sandbox. What it changes in the workspace is reviewed and committed afterwards, as after any other run.
"""

from __future__ import annotations

import errno

import stockade
from stockade.errors import StockadeError
from stockade.integrations import needs_extra
from stockade.result import Outcome
from stockade.runs.io.captured_output import CapturedOutput

with needs_extra("deepagents"):
    from deepagents.backends.protocol import (
        FILE_NOT_FOUND,
        INVALID_PATH,
        IS_DIRECTORY,
        PERMISSION_DENIED,
        ExecuteResponse,
        FileDownloadResponse,
        FileUploadResponse,
    )
    from deepagents.backends.sandbox import BaseSandbox

__all__ = ["StockadeBackend"]

#: Models write bash, whatever /bin/sh is.
SHELL = ("bash", "-c")
#: What the middleware is told, by the kernel's reason.
FILE_ERRORS = {
    errno.ENOENT: FILE_NOT_FOUND,
    errno.EISDIR: IS_DIRECTORY,
    errno.EACCES: PERMISSION_DENIED,
    errno.EPERM: PERMISSION_DENIED,
    errno.EROFS: PERMISSION_DENIED,
    errno.ENOTDIR: INVALID_PATH,
    errno.ENAMETOOLONG: INVALID_PATH,
    errno.ELOOP: INVALID_PATH,
}


class StockadeBackend(BaseSandbox):
    """A backend of deep agents whose commands and files are those of one sandbox.

    The sandbox is the caller's: the backend neither opens nor closes it. `timeout` is that of commands for
    which the agent names none, in seconds; `output_limit` bounds what a command's output may be, in bytes.
    """

    # Every sandbox has the system's shell and coreutils, which the capture of long outputs needs.
    enable_capture_offload = True

    def __init__(
        self, sandbox: stockade.Sandbox, *, timeout: float = 30 * 60, output_limit: int = 10 << 20
    ) -> None:
        self._box = sandbox
        self._timeout = timeout
        self._output_limit = output_limit

    @property
    def id(self) -> str:
        """The sandbox's id, as `stockade ps` shows it."""
        return self._box.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a shell command and return what it printed, both streams as they came.

        A command that took too long, or that a limit ended, has Stockade's reason as the last line; 0 as the
        timeout lets it run for as long as the policy does.
        """
        printed = CapturedOutput(self._output_limit)
        result = self._box.run(
            [*SHELL, command],
            timeout=(self._timeout if timeout is None else timeout) or None,
            on_stdout=printed,
            on_stderr=printed,
        )
        output = printed.text
        if result.outcome not in (Outcome.EXITED, Outcome.SIGNALLED):
            output += (
                f"{'' if output.endswith(chr(10)) or not output else chr(10)}stockade: {result.reason}\n"
            )
        return ExecuteResponse(output=output, exit_code=result.exit_code, truncated=printed.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files, with the directories above them; each has an answer of its own."""
        return [FileUploadResponse(path=path, error=self._upload(path, content)) for path, content in files]

    def _upload(self, path: str, content: bytes) -> str | None:
        if not path.startswith("/"):
            return INVALID_PATH
        try:
            self._box.files.write(path, content, parents=True)
        except (OSError, StockadeError) as error:
            return _told(error)
        return None

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files; each has an answer of its own."""
        return [self._download(path) for path in paths]

    def _download(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error=INVALID_PATH)
        try:
            return FileDownloadResponse(path=path, content=self._box.files.read(path))
        except (OSError, StockadeError) as error:
            return FileDownloadResponse(path=path, error=_told(error))


def _told(error: Exception) -> str:
    """Return the word that deep agents have for an error, else its own words."""
    known = FILE_ERRORS.get(error.errno or 0) if isinstance(error, OSError) else None
    return known or str(error)
