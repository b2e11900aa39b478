"""`stockade explain`: say whether a program may use a path, a host or a system call, and why.

With a command after `--` it runs the command, as `stockade run --explain` does.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.denial_report import because
from stockade.errors import PolicyError, StockadeError

if TYPE_CHECKING:
    from stockade.observe.access import Access
    from stockade.observe.answer_values import Answer
    from stockade.observe.view import Walls
    from stockade.runs.prepare import RunPreparation

#: What can be asked about a path.
ACTIONS = ("read", "write", "create", "remove", "execute")
#: What is answered about a path if nothing else is asked.
USUAL = ("read", "write")
PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443, "ssh": 22, "git": 9418, "ftp": 21}

_EXAMPLES = """examples:
  stockade explain -- make check              run it, and explain each refusal; all options of `stockade run`
  stockade explain ~/.ssh                     may a program read it, or write it?
  stockade explain ./build api.example.com:443 ptrace
  stockade explain -p stockade.toml --to create /opt/data/new
  stockade explain --json --host db | jq '.answers[].change'

What each word is: /x, ./x and ~/x are paths; HOST:PORT, an address and a URL are hosts; unix:/PATH is a
socket; the name of a system call is a call. Of the others, a name that exists here is a path, and a name with
a dot is a host. --path, --host and --call say so themselves.

The policy is the one that `stockade run` would use here with the same options.

exit codes: 0 if every answer is yes, 1 if one is no, 125 if there is no answer"""


def main(argv: list[str]) -> int:
    """Answer every question of the command line, or run its command and explain what was refused."""
    if "--" in argv:
        from stockade.cli import run

        return run.main(["--explain", *argv])
    args = build_parser().parse_intermixed_args(argv)
    return _print_answers(args, _questions(args), argv)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    from stockade.cli.run import add_policy_options

    parser = Parser(
        prog="stockade explain",
        usage="stockade explain [OPTION ...] PATH|HOST|CALL ...\n"
        "       stockade explain [OPTION OF stockade run ...] -- COMMAND ...",
        description="Say whether a program may use a path, a host or a system call, and why. Nothing runs. "
        "With a command after --, run it behind the walls of the policy, observe what it tries, and explain "
        "each refusal.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("word", nargs="*", metavar="PATH|HOST|CALL", help="what to ask about")
    add("--path", metavar="PATH", action="append", default=[], help="a path, whatever it looks like")
    add("--host", metavar="HOST[:PORT]", action="append", default=[], help="a host, whatever it looks like")
    add("--call", metavar="NAME", action="append", default=[], help="a system call, whatever it looks like")
    add(
        "--to", choices=ACTIONS, help="what the program wants to do with the paths (default: read, and write)"
    )
    add(
        "--command",
        metavar="NAME",
        default="",
        help="as for a run of this command, whose install is shown too",
    )
    add_policy_options(parser)
    add("--json", action="store_true", help="print JSON and nothing else")
    return output.add_verbosity(parser)


def _questions(args: argparse.Namespace) -> list[Access]:
    """Return what the words of the command line ask about."""
    found: list[Access] = []
    for word in args.word:
        kind = _kind(word)
        found += _PARSERS[kind](word, args)
    for kind, parse in _PARSERS.items():
        for word in getattr(args, kind):
            found += parse(word, args)
    if not found:
        hint = "write a path, a host or a system call: stockade explain ~/.ssh example.com:443 ptrace"
        raise PolicyError("there is nothing to explain", hint=hint)
    return list(dict.fromkeys(found))


def _kind(word: str) -> str:
    """Return what a word is: a path, a host or a call."""
    from stockade.observe.network_answers import is_address, split_target

    if word.startswith(("/", "./", "../", "~")) or word in (".", ".."):
        return "path"
    if "://" in word or word.startswith("unix:") or word == "localhost" or is_address(word.strip("[]")):
        return "host"
    if _is_call(word):
        return "call"
    if os.path.lexists(word) or "/" in word:
        return "path"
    if split_target(word)[1] or "." in word.strip("."):
        return "host"
    raise _unknown(word)


def _unknown(word: str) -> PolicyError:
    from stockade.backends.seccomp import bpf, syscalls
    from stockade.policy.socket_options import NAMES
    from stockade.policy.suggestions import closest

    known = sorted({*syscalls.ALLOWED, *syscalls.REFUSED, *syscalls.ABSENT, *bpf.BOUNDED, *NAMES})
    near = closest(word, known)
    hint = f"did you mean the system call {near}? Write" if near else "write"
    return PolicyError(
        f"{word!r} is no system call, no file here, and has no port or dot as a host has",
        hint=f"{hint} ./{word} for a path, {word}:443 for a host",
    )


def _is_call(word: str) -> bool:
    if not word.replace("_", "").isalnum() or not word.isascii() or word.isdigit():
        return False
    import pyseccomp

    from stockade.policy.socket_options import is_option

    return is_option(word) or int(pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, word)) >= 0


def _path(word: str, args: argparse.Namespace) -> list[Access]:
    from stockade.observe.access import Access, Action

    path = os.path.abspath(os.path.expanduser(word))
    return [Access(action=Action(name), target=path) for name in ((args.to,) if args.to else USUAL)]


def _host(word: str, args: argparse.Namespace) -> list[Access]:
    from urllib.parse import urlsplit

    from stockade.observe.access import Access, Action

    target = word
    if "://" in word:
        url = urlsplit(word)
        usual = "write udp://HOST:PORT" if url.scheme == "udp" else "write HOST:PORT"
        if not url.hostname:
            raise PolicyError(f"{word!r} names no host", hint=usual)
        try:
            port = url.port or PORTS.get(url.scheme, 0)
        except ValueError:
            raise PolicyError(f"{word!r}: the port is not a number from 1 to 65535", hint=usual) from None
        host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        target = f"{host}:{port}" if port else host
        if url.scheme == "udp" and not port:
            raise PolicyError(f"{word!r} has no port", hint=f"write udp://{host}:123")
        target = f"udp://{target}" if url.scheme == "udp" else target
    return [Access(action=Action.CONNECT, target=target)]


def _call(word: str, args: argparse.Namespace) -> list[Access]:
    from stockade.observe.access import Access, Action

    if not _is_call(word):
        raise _unknown(word)
    return [Access(action=Action.CALL, target=word)]


_PARSERS = {"path": _path, "host": _host, "call": _call}


def _print_answers(args: argparse.Namespace, questions: list[Access], argv: list[str]) -> int:
    from stockade.observe.answers import answer
    from stockade.observe.view import Walls

    prepared, sources = _prepared(args)
    try:
        walls = Walls(prepared.resolved, prepared.plan.backend, sources)
        answers = [_with_possible_change(answer(question, walls), argv) for question in questions]
    finally:
        prepared.close(discard=True)
    if args.json:
        sys.stdout.buffer.write(output.as_json(_facts(answers, walls)))
    else:
        _print(answers, walls)
    return 0 if all(one.allowed for one in answers) else 1


def _prepared(args: argparse.Namespace) -> tuple[RunPreparation, tuple[str, ...]]:
    """Return what a run with these options would be prepared as, and the files of its policy."""
    from stockade.cli.run import continued_workspace, discover_policy, user_and_state, with_location
    from stockade.runs.prepare import prepare

    workspace = continued_workspace(args)
    found = discover_policy(args, *user_and_state())
    try:
        prepared = prepare(
            found.policy, pinned=found.pinned, dry=True, command=[args.command], workspace=workspace
        )
    except PolicyError as error:
        raise with_location(error, found) from None
    return prepared, found.sources


def _with_possible_change(answer: Answer, argv: list[str]) -> Answer:
    """Return an answer without its change if a run with it would be refused, such as by a ceiling."""
    if answer.change is None or not answer.change.flag:
        return answer
    import shlex

    import msgspec

    try:
        wider = build_parser().parse_intermixed_args([*argv, *shlex.split(answer.change.flag)])
        wider.quiet = True
        _prepared(wider)[0].close(discard=True)
    except StockadeError as error:
        why = error.message.partition("\n")[0].rstrip(":")
        reason = f"{answer.reason}; a run with {answer.change.flag} would be refused: {why}"
        return msgspec.structs.replace(answer, change=None, reason=reason)
    return answer


def _facts(answers: list[Answer], walls: Walls) -> dict[str, Any]:
    import msgspec

    return {
        "policy": {"sources": walls.sources, "hash": walls.resolved.policy.hash, "backend": walls.backend},
        "answers": [msgspec.to_builtins(one) for one in answers],
    }


def _print(answers: list[Answer], walls: Walls) -> None:
    shown = ""
    for one in answers:
        if one.access.target != shown:
            shown = one.access.target
            print(output.paint(output.name(shown), "bold"))
        for line in lines(one):
            print(f"  {line}")
    sources = ", ".join(output.name(source) for source in walls.sources) or "the default policy"
    print(f"\nfrom {sources}; backend {walls.backend}")


def lines(answer: Answer) -> list[str]:
    """Return an answer as the lines of a report."""
    verdict = output.paint("yes", "green") if answer.allowed else output.paint("no", "red")
    found = [f"{answer.access.action}: {verdict}, {output.name(answer.reason)}"]
    found.append(f"  {because(answer.clause, answer.place, allowed=answer.allowed)} (control: {answer.wall})")
    if answer.allowed:
        return found
    if answer.change is None:
        return [*found, "  no change of the policy allows it"]
    found.append(f"  to allow it: {output.name(answer.change.describe())}")
    if answer.change.danger:
        found.append(f"  {output.paint('dangerous', 'red')}: {output.name(answer.change.danger)}")
    return found
