"""What tools answer: text of ours first, then the output of programs, bounded, in blocks of its own.

A program can print anything, also a line that looks like ours. So our words are the first block of an answer,
and nothing that a program wrote is ever in it except escaped and on one line.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

from mcp_types import CallToolResult, ContentBlock, ImageContent, TextContent

from stockade.integrations.mcp.workbench import PastRun
from stockade.linux.plain_text import clean, clean_line
from stockade.policy.model import SECRET_SOURCES
from stockade.policy.toml import write as write_toml
from stockade.resolve.discovery import PolicySource
from stockade.result import Denial, Result
from stockade.sessions.interpreter import CodeResult
from stockade.workspace.diff.diff import Diff, FileDiff
from stockade.workspace.files.file_info import FileInfo, Listing

#: How many characters of one stream an answer holds, and how many of them are its beginning.
MOST_TEXT, BEGINNING = 30_000, 10_000
#: How many bytes one call of `read` returns.
MOST_READ = 100_000
#: How many lines a list has, such as that of files or of denials.
MOST_LINES = 500
MOST_DENIALS = 20
#: How many pictures of a run an answer holds, and how many bytes each may have.
MOST_PICTURES, LARGEST_PICTURE = 4, 1 << 20
PICTURES = ("image/png", "image/jpeg")
#: How many characters of a value an answer shows.
MOST_VALUE = 5_000
#: What the path of a run's output begins with, for `read`.
OUTPUT = "run:"


def words(*lines: str, error: bool = False) -> CallToolResult:
    """Return an answer of text."""
    return CallToolResult(content=[text("\n".join(lines))], is_error=error)


def text(content: str) -> TextContent:
    """Return a block of text that JSON can hold."""
    return TextContent(type="text", text=content.encode("utf-8", "replace").decode())


def policy(found: PolicySource) -> CallToolResult:
    """Return a policy as the programs inside may know it, and what is enforced.

    As in the files that they find: of variables the names, of what is denied the number, and of secrets not
    where their values are.
    """
    given = found.policy
    rules = () if isinstance(given.net, str) else given.net
    denying = [rule for rule in rules if rule.startswith("!")]
    table = given.table(full=True) | {"env": sorted(given.env)}
    del table["deny"]
    if rules:
        table["net"] = [rule for rule in rules if rule not in denying]
    for secret in table["secrets"].values():
        for source in SECRET_SOURCES:
            secret.pop(source, None)
    return words(
        f"# from: {', '.join(map(clean_line, found.sources)) or 'the default policy'}; "
        "fixed when the server started",
        write_toml(table),
        f"# not named: {len(given.deny)} paths and patterns of deny, {len(denying)} rules of net that deny, "
        "the values of env, and where secrets come from",
        "# what is enforced, and the clause that asks for it:",
        *(f"# {control}: {_key(clean_line(clause))}" for control, clause in given.controls().items()),
        "# commands find it in ${STOCKADE_POLICY:-/run/stockade/policy.json}, and policy.txt beside it",
    )


def _key(clause: str) -> str:
    """Return a clause, without its values if they can name what is denied."""
    return clause.partition(" = ")[0] if clause.startswith(("deny = ", "net = ")) else clause


def run_answer(run: PastRun) -> CallToolResult:
    """Return how a run ended, then what it printed."""
    result = run.result
    blocks: list[ContentBlock] = [text("\n".join(_ending(run)))]
    for stream in ("stdout", "stderr"):
        if written := getattr(result, stream):
            blocks.append(text(f"{stream}:\n{_bounded(written, f'{OUTPUT}{run.number}/{stream}')}"))
    if isinstance(result, CodeResult):
        blocks += _code_blocks(result)
    facts = {"run": run.number, "outcome": str(result.outcome), "exit_code": result.exit_code}
    return CallToolResult(
        content=blocks, is_error=str(result.outcome) != "exited", _meta={"stockade/run": facts}
    )


def _ending(run: PastRun) -> list[str]:
    result = run.result
    how = f"exit code {result.exit_code}" if str(result.outcome) == "exited" else str(result.outcome)
    lines = [f"run {run.number}: {how}"]
    if result.reason and str(result.outcome) != "exited":
        lines.append(f"reason: {clean_line(result.reason)}")
    if result.hint:
        lines.append(f"hint: {clean_line(result.hint)}")
    lines += [f"refused: {_denial(one)}" for one in result.denials[:MOST_DENIALS]]
    for spilled in result.spilled:
        lost = f"; {spilled.lost} more bytes are lost" if spilled.lost else ""
        lines.append(
            f"{spilled.stream} went past the limit of the policy: {spilled.size} more bytes are in the file "
            f"{clean_line(spilled.path)} of the host{lost}"
        )
    return lines


def _bounded(written: bytes, path: str) -> str:
    """Return a stream without its middle, and where to read that."""
    whole = clean(written.decode("utf-8", "replace"))
    if len(whole) <= MOST_TEXT:
        return whole
    left_out = len(whole) - MOST_TEXT
    return (
        f"{whole[:BEGINNING]}\n[… {left_out} characters are left out here; the tool `read` returns all "
        f"{len(written)} bytes: path {path!r}, with offset and length]\n{whole[BEGINNING - MOST_TEXT :]}"
    )


def _code_blocks(result: CodeResult) -> Iterable[ContentBlock]:
    if result.value is not None:
        yield text(f"value:\n{_cut(clean(_written(result.value)), MOST_VALUE)}")
    if result.error is not None:
        frames = [f"  {one.file}:{one.line} in {one.name}: {one.text}" for one in result.error.frames]
        lines = [f"{result.error.type}: {result.error.message}", *frames]
        yield text(f"exception:\n{_cut(clean(chr(10).join(lines)), MOST_VALUE)}")
    pictures = [
        (mime, form) for one in result.displays for mime, form in one.items()
        if mime in PICTURES and isinstance(form, bytes) and len(form) <= LARGEST_PICTURE
    ]  # fmt: skip
    for mime, form in pictures[:MOST_PICTURES]:
        yield ImageContent(type="image", data=base64.b64encode(form).decode(), mime_type=mime)


def _written(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a {type(value).__name__} with more digits than Python writes; print it in another form"


def _cut(whole: str, most: int) -> str:
    return whole if len(whole) <= most else f"{whole[:most]}… ({len(whole) - most} more characters)"


def _denial(one: Denial) -> str:
    count = f" ({one.count} times)" if one.count > 1 else ""
    because = f": {clean_line(one.reason)}" if one.reason else ""
    return (
        f"{one.what} {clean_line(one.target)}{count} by {one.wall}, clause {clean_line(one.clause)}{because}"
    )


def explanation(run: PastRun) -> CallToolResult:
    """Return why a run ended as it did, from its evidence.

    The result's warnings are left out: they are for the user, and name files that programs may not see.
    """
    result = run.result
    lines = [
        f"run {run.number}",
        f"outcome: {result.outcome}, exit code {result.exit_code}"
        + (f", signal {result.signal}" if result.signal is not None else ""),
        f"reason: {clean_line(result.reason) or 'the program ended by itself'}",
    ]
    lines += [f"hint: {clean_line(result.hint)}"] if result.hint else []
    lines += _listed("refused", [_denial(one) for one in result.denials])
    lines += [
        f"  would be allowed by: {clean_line(one.hint)}" for one in result.denials[:MOST_DENIALS] if one.hint
    ]
    lines += _listed("not saved", [f"{clean_line(one.path)}: {clean_line(one.why)}" for one in result.lost])
    lines += [
        f"used: {result.usage.wall:.2f} s, {result.usage.cpu:.2f} s of processor time, "
        f"{result.usage.peak_memory >> 20} MiB at most"
    ]
    lines += [f"network: {result.network_mode}"]
    lines += [
        f"enforced: {control} by {kept.mechanism} ({kept.observed}), "
        f"asked for by {_key(clean_line(kept.requested))}"
        for control, kept in result.controls.items()
    ]
    if result.receipt is not None:
        lines.append(f"receipt: {result.receipt.id}")
    lines.append("the policy was fixed by the user when this server started; no tool can change it")
    return words(*lines)


def _listed(word: str, found: Sequence[str]) -> list[str]:
    lines = [f"{word}: {one}" for one in found[:MOST_DENIALS]]
    more = len(found) - MOST_DENIALS
    return [*lines, f"{word}: and {more} more"] if more > 0 else lines


def output_of(result: Result, stream: str) -> bytes:
    """Return a stream of a run."""
    return result.stdout if stream == "stdout" else result.stderr


def content(path: str, data: bytes, offset: int, size: int) -> CallToolResult:
    """Return a piece of a file: as text if it is UTF-8, else in base64."""
    end = offset + len(data)
    rest = f"; the next piece: offset {end}" if end < size else ""
    head = f"bytes {offset} to {end} of {size} of {clean_line(path)}{rest}"
    whole = _decoded(data)
    if whole is None:
        return CallToolResult(content=[text(f"{head}, in base64"), text(base64.b64encode(data).decode())])
    return CallToolResult(content=[text(head), text(whole)])


def _decoded(data: bytes) -> str | None:
    """Return text, without the character that the end of a piece may have cut; None if it is not UTF-8."""
    for cut in range(4):
        try:
            whole = data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
        return None if "\0" in whole else whole + "\ufffd" * bool(cut)
    return None


def listing(found: Listing) -> CallToolResult:
    """Return a list of files, one on each line."""
    lines = [_file_line(one) for one in found.entries[:MOST_LINES]]
    if (more := len(found.entries) - MOST_LINES) > 0:
        lines.append(f"and {more} more; name a directory or a narrower pattern")
    if found.cut:
        lines.append(found.cut)
    return words(*(lines or ["no files"]))


def _file_line(one: FileInfo) -> str:
    target = f" -> {clean_line(one.target)}" if one.target else ""
    return f"{one.kind:<9}  {one.mode:04o}  {one.size:>10}  {clean_line(one.path)}{target}"


def changes(found: Diff, workspace: str) -> CallToolResult:
    """Return what changed: a line for each path, then the changed lines of texts."""
    if not found.files:
        return words("no changes")
    lines = [f"workspace {workspace}: +{found.added} -{found.removed} lines"]
    lines += change_lines(found.files)
    lines += [f"the list is cut: {found.cut}"] if found.cut else []
    hunks = "".join(
        f"--- {clean_line(one.path)}\n{clean(one.text.decode('utf-8', 'replace'))}\n"
        for one in found.files
        if one.text
    )
    shown = _cut(hunks, MOST_TEXT)
    return CallToolResult(content=[text("\n".join(lines)), *([text(shown)] if shown else [])])


def change_lines(files: Sequence[FileDiff], most: int = MOST_LINES) -> list[str]:
    """Return a line for each changed path; what a commit holds back, or what runs later, comes first."""
    order = sorted(files, key=lambda one: (not one.held, not one.runs, one.path))
    lines = [_change_line(one) for one in order[:most]]
    more = len(order) - most
    return [*lines, f"and {more} more"] if more > 0 else lines


def _change_line(one: FileDiff) -> str:
    was = f"{clean_line(one.was)} -> " if one.was else ""
    why = f": a commit holds it back: {clean_line(one.held)}" if one.held else ""
    why = why or (f": runs at your next command: {clean_line(one.runs)}" if one.runs else "")
    leads = f" (a link to {clean_line(one.target)})" if one.type == "link" else ""
    return f"{one.kind:<8}  {was}{clean_line(one.path)}{leads}{why}"
