"""`stockade run`: run one command behind every wall of the policy."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from stockade.cli.ui import output
from stockade.cli.ui.fast_args import REST, FastParser, NeedsArgparseError
from stockade.errors import PolicyError, ReceiptError, StockadeError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from stockade.agents.registry import Agent
    from stockade.linux.user import Caller
    from stockade.policy import Policy
    from stockade.receipt.statement import Receipt
    from stockade.resolve.discovery import PolicySource
    from stockade.result import Decision, Result
    from stockade.runs.network.published_ports import PublishedPort
    from stockade.sandbox.workspace import Workspace
    from stockade.sessions.attach.user_terminal import UserTerminal
    from stockade.workspace.diff.change_details import Mark

ABOUT = {
    "run": "Run a command behind walls the kernel keeps.",
    "shell": "Start a shell behind walls the kernel keeps: yours ($SHELL) if it exists inside, or else sh.",
    "plan": "Show what `stockade run` would do, without doing it.",
}

_RUN = """examples:
  stockade run -- python3 job.py              the current directory is an overlay: changes are kept aside
  stockade run --mode ro -- make check        read-only
  stockade run --read /opt/data --timeout 30s -- ./analyse
  stockade run --net api.example.com --net '*.example.org' -- ./job
                                              reaches these two hosts, on ports 80 and 443, and no other
  stockade run --net 'GET https://api.example.com/v1/**' -- ./job
                                              sends these requests, and no others
  stockade run --secret GITHUB_TOKEN -- ./job has a placeholder; only requests to GitHub get the token
  stockade run -w @443c -- make check         continues in the workspace of an earlier run
  stockade run --json -- ./job | jq .outcome

exit codes: the command's own; 128+n killed by signal n; 124 timed out; 125 refused, nothing was run;
126 denied by a wall; 127 not found inside; 130 cancelled

On a terminal the command gets a terminal of its own. Ctrl-] three times within a second ends it."""

EXAMPLES = {
    "run": _RUN,
    "shell": """examples:
  stockade shell                              in an overlay of the current directory
  stockade shell --read /opt/data --discard
  stockade shell -w @443c                     continues in the workspace of an earlier run
  stockade shell --keep                       outlives the terminal; `stockade attach` returns to it

Ctrl-] three times within a second ends the shell and what runs in it. With --keep it only detaches.""",
    "plan": "example: stockade plan -w . --mode ro -- make check",
}

SHOWN_CHANGES = 20

#: How long after its time limit a run still waits for a stalled reader of its output.
STALLED_SECONDS = 1.0


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code that scripts rely on."""
    args = parse_arguments("run", argv)
    return run(args, lambda: [command(args)])


def run(args: argparse.Namespace, commands: Callable[[], list[list[str]]], *, shell: bool = False) -> int:
    """Run the first command that exists inside, report how it ended, and return its exit code.

    A `shell` on a terminal gets a prompt that shows where the user is.
    """
    try:
        return _run_with_receipt(args, commands(), shell)
    except KeyboardInterrupt:
        if args.json or args.json_fd is not None:
            _write_json(args, {"outcome": "cancelled", "ok": False, "exit_code": 130, "reason": "cancelled"})
        elif not args.quiet:
            # Also by a second Ctrl-C, while the first one ends the run: nothing has reported the changes yet.
            kept = "" if args.on_exit == "discard" else "; `stockade workspaces` lists changes that were kept"
            output.say(f"cancelled{kept}")
        return 130
    except BrokenPipeError:
        raise
    except (StockadeError, OSError) as error:
        if not args.json and (args.json_fd is None or not is_open_for(args.json_fd, os.O_WRONLY)):
            raise
        refused = {"outcome": "setup-failed", "ok": False, "exit_code": 125}
        why = (error.message, error.hint) if isinstance(error, StockadeError) else (output.reason(error), "")
        if isinstance(error, ReceiptError) and error.result is not None:
            # The command has run, and the reader of the JSON must learn how it ended.
            _write_json(args, {**plain_result(error.result), "ok": False, "receipt_error": why[0]})
        else:
            _write_json(args, {**refused, "reason": why[0], "hint": why[1]})
        return 125


def parse_arguments(command: str, argv: list[str]) -> argparse.Namespace:
    """Parse the command line, without argparse if it is plain."""
    try:
        light = FastParser()
        add_options(light, command)
        args: argparse.Namespace = light.parse(argv)
    except NeedsArgparseError:
        return build_parser(command).parse_args(argv)
    output.set_verbosity(quiet=args.quiet, verbose=args.verbose)
    return args


def build_parser(command: str = "run") -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    import argparse

    from stockade.cli.ui.argument_parser import Parser

    parser = Parser(
        prog=f"stockade {command}",
        description=ABOUT[command],
        epilog=EXAMPLES[command],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, command)
    return parser


def add_policy_options(parser: argparse.ArgumentParser | FastParser) -> None:
    """Add the options that choose the policy; every command that opens a sandbox takes them."""
    add = parser.add_argument
    add("-p", "--policy", metavar="FILE", help="the policy file; no other file is read")
    add("--agent", metavar="NAME", default="", help="use the policy that your layers give this agent")
    add("--category", metavar="NAME", default="", help="its category, if the layers do not name one")
    add("--profile", metavar="NAME", help="the starting point of the policy: `stockade profiles` lists them")
    add("--read", metavar="PATH", action="append", help="show a path read-only")
    add("--write", metavar="PATH", action="append", help="show a path, writable for real")
    add("--deny", metavar="PATH", action="append", help="hide a path or pattern in the workspace")
    add(
        "--unprotect",
        metavar="PATH",
        action="append",
        help="let the program change a protected path in the workspace, such as .git",
    )
    add(
        "--net",
        metavar="RULE",
        action="append",
        help="allow HOST[:PORTS], *.HOST[:PORTS], *[:PORTS] for every host, an address or network, "
        "tcp://HOST:PORT or udp://HOST:PORT; "
        "'GET https://HOST/PATH/**' allows only such requests; !RULE denies; "
        "ask asks you about names that no rule covers; "
        "open shares the host's whole network; none, the default, has none",
    )
    add("--proxy", action="store_true", help="put a proxy inside, for programs that insist on one")
    add("--env", metavar="K=V", action="append", help="set a variable inside")
    add("--pass-env", metavar="K", action="append", help="pass one of your variables")
    add(
        "--secret",
        metavar="NAME@HOST",
        action="append",
        help="give the program a placeholder for your variable NAME, which becomes its value in requests to "
        "HOST; known names need no HOST",
    )
    limits = "a limit: memory, tasks, cpu, cpu_time, wall, files, output, disk, connections, upload, ..."
    add("--limit", metavar="K=V", action="append", help=limits)
    add(
        "-w",
        "--workspace",
        metavar="PATH|@ID",
        help="the directory to work in (default: this one); @ID continues a workspace, @ this directory's",
    )
    add("--mode", choices=("overlay", "rw", "ro"), help="how the workspace appears (default: overlay)")
    add("--cwd", metavar="DIR", help="start in this directory (default: this one, if the workspace has it)")
    add("--toolchain", metavar="NAME", action="append", help="show the install that a command belongs to")
    add("--no-toolchain", action="store_true", help="show only installs that the policy names")
    add("--backend", metavar="NAME", help="use this backend, or refuse to run")


def add_options(parser: argparse.ArgumentParser | FastParser, command: str) -> None:
    """Add the options that say what to run and under which policy; `plan` takes them too."""
    add_policy_options(parser)
    add = parser.add_argument
    if command != "plan":
        add(
            "--publish",
            metavar="[HOST:]PORT:PORT",
            action="append",
            help="let the host reach a port inside: 8080:80 leads from 127.0.0.1:8080 to port 80; 8080 is "
            "the same port on both sides; 0 on the host is any free one",
        )
        if command == "run":
            add(
                "--explain",
                action="store_true",
                help="observe the command, and explain each refusal: by which wall, and what would allow it",
            )
        add("--timeout", metavar="T", help="end the command after this long: 30, 250ms, 5m")
        if command == "shell":
            add(
                "--keep",
                action="store_true",
                help="keep the shell itself: it goes on when you leave, and `stockade attach` returns to it; "
                "its changes are kept aside with or without this",
            )
        ends = parser.add_mutually_exclusive_group()
        for word, effect in (
            ("keep", "keep the changes aside when the command has ended (default)"),
            ("discard", "delete the changes"),
            ("commit", "apply the changes to your files if the command ends by itself, even if it fails"),
        )[command == "shell" :]:
            ends.add_argument(f"--{word}", dest="on_exit", action="store_const", const=word, help=effect)
        add(
            "--snapshot", action="store_true", help="take a snapshot of the workspace before the command runs"
        )
        add(
            "--name",
            metavar="NAME",
            default="",
            help="a name for the sandbox, shown by `stockade ps`, in logs and in receipts",
        )
        add("--receipt", metavar="FILE", help="write the signed receipt of the run to a file")
        add(
            "--who",
            metavar="K=V",
            action="append",
            help="who asked for the run, for the receipt: agent, category, action, words",
        )
        add("--json-fd", metavar="N", type=int, help="write the result as JSON to descriptor N")
    if command != "shell":
        add("--json", action="store_true", help="print JSON and nothing else")
    output.add_verbosity(parser, verbose="print what was enforced")
    if command != "shell":
        add("command", nargs=REST, metavar="-- COMMAND ...")


def continued_workspace(args: argparse.Namespace) -> Workspace | None:
    """Return the workspace that `-w @ID` names, and replace the id in `args` by its directory."""
    if args.workspace is None or not args.workspace.startswith("@"):
        return None
    from stockade.cli.ui.workspace_choice import workspace_for
    from stockade.policy.values import literal

    found = workspace_for(args.workspace[1:] or None, "-w @{}", quiet=args.quiet or args.json)
    args.workspace = literal(found.path)
    return found


def discover_policy(args: argparse.Namespace, caller: Caller, home: str) -> PolicySource:
    """Return the policy for these arguments, and warn about what it lets the program do to the host.

    `home` is the state directory.
    """
    found = _policy_of(args, caller, home)
    if not (args.quiet or args.json):
        for warning in (*_warnings(found.policy), *_idle_options(args, found.policy)):
            output.say(f"warning: {warning}")
    return found


def start_directory(args: argparse.Namespace, found: PolicySource) -> str | None:
    """Return where the command starts inside: --cwd, or where the user is; None for the workspace itself.

    If a policy file chose a workspace above the user's directory, say so.
    """
    from stockade.linux.user import Caller

    caller, rule = Caller.current(), found.policy.workspace
    if args.cwd is None and (rule is None or rule.path == caller.cwd):
        return None
    from stockade.cli.ui.start_directory import inside, workspace_above

    root = workspace_above(found.policy, caller)
    if root and args.workspace is None and not (args.quiet or args.json):
        by = f", by {output.name(found.sources[0])}" if len(found.sources) == 1 else ""
        output.say(f"the workspace is {output.name(root)}{by}")
    return inside(root, caller.cwd, args.cwd)


def _idle_options(args: argparse.Namespace, policy: Policy) -> list[str]:
    """Return warnings about options that change nothing: the user may have mistyped them."""
    unset = [name for name in args.pass_env or () if name not in os.environ]
    found = [f"--pass-env {name}: your environment has no such variable" for name in unset]
    if args.verbose:
        others = (name for name in policy.pass_env if name not in os.environ and name not in unset)
        found += [f"pass_env = {name}: your environment has no such variable" for name in others]
    if args.unprotect:
        from stockade.resolve.paths.protected_paths import guards

        idle = [path for path in args.unprotect if not guards(policy, path)]
        found += [f"--unprotect {path}: the policy does not protect it" for path in idle]
    return found + [
        f"--deny {path}: no such file exists now; Stockade hides it if it appears"
        for path in args.deny or ()
        if not any(letter in path for letter in "*?[$") and not _is_there(path, policy)
    ]


def _is_there(path: str, policy: Policy) -> bool:
    """Whether a name that the command line hides exists; names are relative to the workspace."""
    top = policy.workspace.path if policy.workspace is not None else os.getcwd()
    return os.path.lexists(os.path.join(top, os.path.expanduser(path)))


def _warnings(policy: Policy) -> tuple[str, ...]:
    if not (policy.write or policy.unprotect or policy.accept):
        return ()
    from stockade.runs.prepare import warnings_before

    return warnings_before(policy)


def user_and_state() -> tuple[Caller, str]:
    """Return the user who asks and the state directory: found once, for the policy and for the run."""
    from stockade import state
    from stockade.linux.user import Caller

    caller = Caller.current()
    return caller, state.state_dir(caller.environ, caller.home)


def _policy_of(args: argparse.Namespace, caller: Caller, home: str) -> PolicySource:
    """Return the policy for these arguments, and say so if the run gets no workspace."""
    from stockade.resolve.resolution import unfit

    workspace = None
    if not caller.cwd:
        if args.workspace is None and args.policy is None:
            raise PolicyError(
                "the current directory was removed",
                hint="go to one that exists, or name a directory to work in: -w DIRECTORY",
            )
    elif args.workspace is None and args.mode is not None:
        workspace = caller.cwd  # --mode asks for a workspace: if this one is unfit, that is an error
    elif args.workspace is None:
        reason = unfit(caller.cwd, caller, home)
        workspace = None if reason else caller.cwd
        if reason and not args.quiet:
            output.say(f"no workspace, but a private home that is deleted when the run ends: {reason}")
    found = _policy_with(args, caller, home, workspace)
    if args.secret and not isinstance(found.policy.net, str):
        from stockade.policy.secrets import rules_for

        # A host of --secret needs a rule for requests; as a flag, so that ceilings hold for it too.
        hosts = [one for name in _flags(args)["secrets"] for one in found.policy.secrets[name].hosts]
        if missing := rules_for(hosts, found.policy.net):
            args.net = [*(args.net or ()), *missing]
            found = _policy_with(args, caller, home, workspace)
    return found


def _policy_with(args: argparse.Namespace, caller: Caller, home: str, workspace: str | None) -> PolicySource:
    from stockade.resolve.discovery import discover

    if args.agent and args.policy is None and (known := _registered_agent(args, home)) is not None:
        from stockade.agents.policies import policy_for

        return policy_for(known, caller, flags=_flags(args), workspace=workspace)
    return discover(
        caller.cwd,
        caller.environ,
        caller.home,
        flags=_flags(args),
        file=args.policy,
        workspace=workspace,
        agent=args.agent,
        category=args.category,
    )


def _registered_agent(args: argparse.Namespace, home: str) -> Agent | None:
    """Return the registry's entry of the named agent, and set its category in `args` for the receipt."""
    from stockade.agents import policies, registry

    if registry.NAME.fullmatch(args.agent) is None:
        return None
    found = registry.find(home, args.agent)
    args.category = policies.agreed(found, args.agent, args.category)
    return found


def command(args: argparse.Namespace, name: str = "run") -> list[str]:
    """Return the command without the -- before it; `name` is the command of Stockade that runs it."""
    words: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        hint = f"write it after --: stockade {name} -- COMMAND ..."
        raise PolicyError("there is no command to run", hint=hint)
    if args.verbose and ":/" in words[0] and not os.path.lexists(words[0]):
        raise PolicyError(
            f"-v {words[0]}: -v makes Stockade say more, and mounts nothing",
            hint="write --read /path, or --write /path: a path has the same name inside",
        )
    return words


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    workspace = {key: value for key, value in (("path", args.workspace), ("mode", args.mode)) if value}
    flags: dict[str, Any] = {
        "profile": args.profile,
        "read": args.read,
        "write": args.write,
        "deny": args.deny,
        "unprotect": args.unprotect,
        "pass_env": args.pass_env,
        "net": _net(args.net),
        "proxy": True if args.proxy else None,
        "backend": args.backend,
        "env": _pairs("--env", args.env),
        "limits": _pairs("--limit", args.limit),
        "workspace": workspace,
        "toolchain": False if args.no_toolchain else args.toolchain,
    }
    if args.secret:
        from stockade.policy.secret_services import from_words

        flags["secrets"] = from_words(args.secret)
    return {key: value for key, value in flags.items() if value or value is False}


def _net(words: list[str] | None) -> list[str] | str | None:
    """Return the network that --net asks for: open, none, or rules."""
    whole = next((word for word in words or () if word in ("open", "none")), None)
    if not words or whole is not None:
        other = next((word for word in words or () if word != whole), None)
        if other is not None:
            effect = "shares the host's whole network" if whole == "open" else "gives no network"
            raise PolicyError(
                f"--net {whole} and --net {other} contradict each other: --net {whole} {effect}",
                hint="leave out one of them",
            )
        return whole
    from stockade.policy.net_errors import NetRuleError
    from stockade.policy.net_rules import parse_rule
    from stockade.policy.suggestions import closest

    for word in words:
        try:
            parse_rule(word)
        except NetRuleError as error:
            hint = error.hint.replace('net = "open"', "--net open").replace('net = "none"', "--net none")
            hint = hint.replace("write one rule for", "write --net once for")
            hint = hint.replace("* for every", "'*' for every")
            raise PolicyError(f"--net {word or repr(word)}: {error.problem}", hint=hint) from None
        if word != "ask" and (near := closest(word, ("open", "none", "ask"))):
            hint = f"did you mean --net {near}? For a host of that name, write --net {word}:443"
            raise PolicyError(f"--net {word}: is neither none nor open nor ask", hint=hint)
    return words


def who_asks(args: argparse.Namespace) -> dict[str, str] | None:
    """Return what the receipt says about who asked: --agent, --category and --who."""
    policy = {"agent": args.agent, "category": args.category}
    who = _pairs("--who", args.who)
    for name, value in policy.items():
        if value and who.get(name, value) != value:
            raise PolicyError(
                f"--who {name}={who[name]} contradicts --{name} {value}",
                hint=f"leave out --who {name}=; the receipt gets the value of --{name}",
            )
    return {name: value for name, value in (policy | who).items() if value} or None


def _pairs(option: str, words: list[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words or []:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise PolicyError(f"{option} {word!r} is not K=V", hint=f"write {option} NAME=VALUE")
        pairs[key] = value
    return pairs


def _run_with_receipt(args: argparse.Namespace, commands: list[list[str]], shell: bool) -> int:
    if args.json_fd is not None and not is_open_for(args.json_fd, os.O_WRONLY):
        raise PolicyError(
            f"--json-fd {args.json_fd}: the descriptor is not open for writing",
            hint="open it: --json-fd 3 3> result.json",
        )
    with _receipt_writer(args) as keep:
        return _run_and_report(args, commands, keep, shell)


def _run_and_report(
    args: argparse.Namespace,
    commands: list[list[str]],
    keep: Callable[[Receipt | None], None],
    shell: bool,
) -> int:
    workspace = continued_workspace(args)
    caller, home = user_and_state()
    found = discover_policy(args, caller, home)
    if found.policy.net and found.policy.net != "open":
        from stockade.runs.network import egress_template

        # It takes longest, so it loads its modules while this process still loads its own.
        egress_template.warm_up()
    if args.on_exit in ("keep", "commit") and found.policy.workspace is None:
        raise PolicyError(
            f"--{args.on_exit}: this run has no workspace, so its changes are deleted when it ends",
            hint="name a directory to work in: -w DIRECTORY",
        )
    from stockade.runs.io.streams import OutputCopy
    from stockade.sandbox import sandbox

    start = start_directory(args, found)
    quiet = args.quiet or args.json
    for_model = getattr(args, "for_model", False)
    earlier = None if workspace is None or quiet else _marks(workspace)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, cancel)
    # `nohup` gives its command a stdin that it cannot read.
    stdin: int | None = 0 if is_open_for(0, os.O_RDONLY) else None
    at_terminal = stdin is not None and os.isatty(stdin)
    if at_terminal:
        stdin = None
    timeout = seconds(args.timeout)
    limits = [limit for limit in (timeout, found.policy.limits.wall) if limit is not None]
    until = time.monotonic() + min(limits) + STALLED_SECONDS if limits else None
    sinks = None if args.json else (OutputCopy(1, until), OutputCopy(2, until))
    for words in commands:
        terminal = _terminal(until) if at_terminal and sinks else None
        try:
            result = sandbox.run_once(
                words,
                found.policy,
                {
                    "env": _prompt(words, found.policy) if shell and terminal is not None else None,
                    "cwd": start,
                    "timeout": timeout,
                    "on_stdout": sinks and sinks[0],
                    "on_stderr": sinks and sinks[1],
                    "on_exit": args.on_exit or "keep",
                    "resume": workspace,
                    "snapshot": args.snapshot,
                    "name": args.name,
                    "publish": args.publish or (),
                    "on_ask": terminal.ask if terminal is not None else None,
                    "who": who_asks(args),
                    "explain": getattr(args, "explain", False),
                    "advise": not for_model,
                },
                sandbox.RunExtras(
                    stdin=stdin,
                    keep_output=bool(args.json),
                    pinned=found.pinned,
                    cancelled_by=(KeyboardInterrupt,),
                    terminal=terminal,
                    caller=caller,
                    state=home,
                    on_decision=_decision_printer(args, found.policy, raw=terminal is not None),
                    on_published=_published_printer(args),
                    sources=tuple(found.sources),
                ),
            )
        except PolicyError as error:
            raise with_location(error, found) from None
        finally:
            if terminal is not None:
                terminal.close()
        if (result.outcome, result.exit_code) != ("setup-failed", 127):
            break
    try:
        keep(result.receipt)
    except ReceiptError as error:
        error.result = result
        raise
    if args.json or args.json_fd is not None:
        _write_json(args, plain_result(result))
    if not quiet:
        result = report_denials(result)
        # Warnings are for the user: some name files that programs may not see.
        report_handoffs(result, printed=result.warnings if for_model else _warnings(found.policy))
    if sinks:
        if terminal is None or result.signal != signal.SIGINT:  # a user who typed Ctrl-C knows why it ended
            why = "you pressed Ctrl-] three times" if terminal is not None and terminal.left else ""
            report_end(result, quiet=quiet, why=why)
        if any(sink.lost for sink in sinks) or (terminal is not None and terminal.lost):
            output.error("output was lost: its reader did not read it before the time was over")
    if result.exit_code and not (quiet or for_model) and workspace is None:
        report_kept(result, words, start, found.policy)
    if not quiet and not getattr(args, "brief", False):
        report(result, verbose=args.verbose, discarded=args.on_exit == "discard", earlier=earlier)
    if result.lost and not args.json:
        from stockade.result import describe_lost
        from stockade.workspace.overlay import what_keeps

        output.error(describe_lost(result.lost), hint=what_keeps(result.lost))
    if result.commit_error and not args.json:
        reason, _, hint = result.commit_error.rpartition("\n")
        output.error(f"not committed: {reason or hint}", hint=hint if reason else "")
    return result.exit_code


def with_location(error: PolicyError, found: PolicySource) -> PolicyError:
    """Return the error with the file and the line of the clause that it is about."""
    from stockade.resolve.provenance import located

    return located(error, found.sources)


def _receipt_writer(
    args: argparse.Namespace,
) -> contextlib.AbstractContextManager[Callable[[Receipt | None], None]]:
    """Return a context manager that writes the receipt to the file of --receipt, if there is one."""
    if args.receipt is None:
        return contextlib.nullcontext(lambda receipt: None)
    from stockade.cli.ui.receipt_file import receipt_written_to

    workspace = args.workspace if args.workspace and not args.workspace.startswith("@") else None
    return receipt_written_to(args.receipt, [*(args.write or ()), *([workspace] if workspace else ())])


def _marks(workspace: Workspace) -> Mapping[str, Mark]:
    from stockade.sandbox.workspace import marks_of

    return marks_of(workspace)


def _decision_printer(
    args: argparse.Namespace, policy: Policy, *, raw: bool
) -> Callable[[Decision], object] | None:
    """Return what prints the decisions of network rules as they happen, if the user wants to see them.

    A `raw` terminal does not return to the first column by itself.
    """
    has_egress = args.publish or (policy.net and policy.net != "open")
    if not args.verbose or args.json or not has_egress:
        return None
    from stockade.cli.ui.network_report import decision_line

    def tell(one: Decision) -> None:
        if raw:
            output.say_raw(decision_line(one))
        else:
            output.say(decision_line(one))

    return tell


def _published_printer(
    args: argparse.Namespace,
) -> Callable[[tuple[PublishedPort, ...]], object] | None:
    """Return what prints where the published ports are, unless the user wants to see nothing."""
    if not args.publish or args.quiet or args.json:
        return None

    def tell(ports: tuple[PublishedPort, ...]) -> None:
        for one in ports:
            output.say(f"{one.address} leads to port {one.port} inside")

    return tell


def _prompt(command: list[str], policy: Policy) -> dict[str, str]:
    from stockade.cli.ui.shell_prompt import environment

    return environment(command, policy)


def _terminal(until: float | None) -> UserTerminal:
    from stockade.sessions.attach.user_terminal import UserTerminal

    return UserTerminal(until)


def seconds(text: str | None, option: str = "--timeout") -> float | None:
    """Parse the value of an option: a duration as policies write it, or a number of seconds."""
    from stockade.policy import Limits

    if text is None:
        return None
    try:
        number = text.isascii() and text.replace(".", "", 1).isdigit()
        return Limits(wall=float(text) if number else text).wall
    except PolicyError as error:
        raise PolicyError(f"{option} {text!r} is not a time", hint=error.hint) from None


def cancel(number: int, _: object) -> NoReturn:
    """Handle a signal that ends the run, as Ctrl-C does."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def is_open_for(descriptor: int, way: int) -> bool:
    """Whether the descriptor is open for `way`, O_RDONLY or O_WRONLY, or for both."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE in (way, os.O_RDWR)
    except (OSError, ValueError, OverflowError):  # the last two for numbers that are no descriptor
        return False


def report_end(result: Result, *, quiet: bool, why: str = "") -> None:
    """Print why the command ended, if not by itself; `why` is a reason that only the terminal knows."""
    if result.outcome == "cancelled":
        if not quiet:
            output.say(f"cancelled: {why or result.reason}")
    elif result.outcome == "exited":
        if result.hint and not quiet:
            output.say(f"hint: {result.hint}")
    elif result.outcome == "setup-failed":
        output.error(result.reason, hint=result.hint)
    else:
        output.error(f"{result.outcome}: {result.reason}", hint=result.hint)


def report_kept(result: Result, command: list[str], start: str | None, policy: Policy) -> None:
    """Print which kept workspace has a file that a failed command names and the user's files lack."""
    if policy.workspace is None or str(result.outcome) not in ("exited", "setup-failed"):
        return
    from stockade import state
    from stockade.cli.ui.kept_hint import kept_hint
    from stockade.cli.ui.start_directory import workspace_root
    from stockade.linux.user import Caller

    caller = Caller.current()
    tree = workspace_root(policy, caller)
    home = state.state_dir(caller.environ, caller.home)
    if hint := kept_hint(command, os.path.join(tree, start or ""), tree, home, without=result.workspace_id):
        output.say(f"hint: {hint}")


def report_denials(result: Result) -> Result:
    """Print what walls refused; return the result without a hint that says the same."""
    if result.observed:
        from stockade.cli.ui import denial_report

        denial_report.report(result)
    if not result.denials:
        return result
    import msgspec

    from stockade.cli.ui.network_report import other_hints, refused_line

    if not result.observed:
        output.say(refused_line(result.denials))
    return msgspec.structs.replace(result, hint=other_hints(result.hint))


def report_handoffs(result: Result, printed: Sequence[str] = ()) -> None:
    """Print the handoffs and warnings of a run; `printed` are warnings that the user has seen already."""
    if result.handoffs:
        output.say("warning: your tools run or obey these new files: read them before you use those tools")
    for one in result.handoffs[:SHOWN_CHANGES]:
        output.say(f"  {output.name(f'{one.path}: {one.reason}')}")
    if (more := len(result.handoffs) - SHOWN_CHANGES) > 0:
        output.say(f"  and {more} more")
    for warning in result.warnings:
        if warning not in printed:
            output.say(f"warning: {output.name(warning)}")


def report(
    result: Result,
    *,
    verbose: bool,
    discarded: bool,
    count: int = 0,
    earlier: Mapping[str, Mark] | None = None,
) -> None:
    """Print what changed, and if `verbose` what was enforced.

    `count` is the number of changes, if the result has only some of them; `earlier` are the changes that a
    continued workspace had before.
    """
    if result.changes or result.changes_cut or earlier:
        from stockade.cli.ui.change_report import next_steps, report_lines

        for line in report_lines(result, discarded=discarded, verbose=verbose, count=count, earlier=earlier):
            output.say(line)
        if result.committed is not None:
            from stockade.cli.commit import remarks

            remarks(result.committed)
        elif result.workspace_id and not discarded:
            for line in next_steps(result, continued=earlier is not None):
                output.say(line)
    if verbose:
        if result.network_mode == "open":
            from stockade.result import OPEN_NETWORK

            output.say(f"network: {OPEN_NETWORK}")
        for name, kept in result.controls.items():
            output.say(f"{name}: {kept.mechanism} ({kept.observed})")


def plain_result(result: Result) -> dict[str, Any]:
    """Return the result as JSON shows it: output as text, or base64 if it is not UTF-8."""
    import msgspec

    # Long lists are converted while they are written, piece by piece.
    plain: dict[str, Any] = msgspec.structs.asdict(result)
    plain["workspace"] = plain.pop("workspace_id")
    for name in ("stdout", "stderr"):
        try:
            plain[name] = getattr(result, name).decode("utf-8")
        except UnicodeDecodeError:
            plain[f"{name}_base64"] = msgspec.to_builtins(plain.pop(name))
    plain["ok"] = result.ok
    if (receipt := result.receipt) is not None:
        plain["receipt"] = {"id": receipt.id, "hash": receipt.hash, "key": receipt.predicate.key}
    return plain


def _write_json(args: argparse.Namespace, value: dict[str, Any]) -> None:
    if args.json:
        sys.stdout.flush()
    from stockade.runs.io.streams import OutputCopy

    write = OutputCopy(1 if args.json else args.json_fd)
    for piece in output.json_pieces(value):
        write(piece)
