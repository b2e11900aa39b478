"""`stockade mcp`: tools for agents over the Model Context Protocol, all of them behind one policy."""

from __future__ import annotations

import argparse
import os
import re
import secrets
from collections.abc import Callable

from stockade.cli import run
from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.own_command import own_command
from stockade.errors import PolicyError, SetupError

CLIENTS = ("claude", "codex", "gemini", "vscode")
#: The variable that sets the token of the HTTP server.
TOKEN = "STOCKADE_MCP_TOKEN"
#: The shortest token that it may set.
SHORTEST = 16
#: How long the HTTP server keeps a sandbox without calls.
IDLE = "30m"

EPILOG = """examples:
  stockade mcp                                over stdin and stdout, for a client that starts it
  stockade mcp -p agent.toml --allow-commit   the user is asked before changes are applied
  stockade mcp --http 8765                    over HTTP on 127.0.0.1, with a token
  stockade mcp wrap -- npx some-server        run a foreign server behind the policy
  stockade mcp install claude                 show what registers the server, and ask whether to write it"""


def main(argv: list[str]) -> int:
    """Serve, wrap a foreign server, or register this one with a client."""
    options: list[str] = []
    if argv[:1] == ["install"] and "--" in argv:
        argv, options = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    args = build_parser().parse_args(argv)
    args.json = False
    if args.action == "wrap":
        # Streams pass byte by byte, and our own lines go to stderr, as for every run.
        return run.run(args, lambda: [run.command(args)])
    if args.action == "install":
        return _install(args, options)
    return _serve(args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade mcp",
        description="Serve tools that run commands and code in one sandbox, for clients of the Model\n"
        "Context Protocol. The policy is fixed when the server starts; no tool can widen it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_policy_options(parser)
    add = parser.add_argument
    add("--http", metavar="[HOST:]PORT", help="serve over HTTP, by default on 127.0.0.1; 0 is any free port")
    add(
        "--idle",
        metavar="T",
        default=IDLE,
        help=f"over HTTP, close a sandbox without calls (default: {IDLE})",
    )
    add("--allow-commit", action="store_true", help="add the tool `commit`, which asks the user each time")
    add("--discard", action="store_true", help="delete the changes when the server ends")
    output.add_verbosity(parser)
    actions = parser.add_subparsers(dest="action", metavar="wrap | install")
    wrap = actions.add_parser(
        "wrap",
        help="run a foreign MCP server behind the policy",
        description="Run a foreign MCP server behind the policy; its streams are those of this command.",
        epilog="example: stockade mcp wrap --net api.example.com -- npx some-server",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_options(wrap, "run")
    install = actions.add_parser(
        "install",
        help="register the server with a client",
        description="Show what registers the server with a client, and write it if you agree. Options of\n"
        "the server come after --.",
        epilog="example: stockade mcp install codex --write -- -p ~/agent.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    install.add_argument(
        "client", metavar="|".join(CLIENTS), choices=CLIENTS, help="the client whose settings get the entry"
    )
    install.add_argument("--name", default="stockade", help="what the client calls the server")
    install.add_argument("--write", action="store_true", help="write it without asking")
    output.add_verbosity(install)
    return parser


def _serve(args: argparse.Namespace) -> int:
    workspace = run.continued_workspace(args)
    caller, home = run.user_and_state()
    found = run.discover_policy(args, caller, home)
    start = run.start_directory(args, found)
    http = None if args.http is None else _address(args.http)
    idle = run.seconds(args.idle, "--idle") or 0.0
    token = _token() if http is not None else ""
    try:
        from stockade.integrations.mcp import serving
        from stockade.integrations.mcp.workbench import Workbench
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the MCP server needs the Python package {error.name}",
            stage="mcp",
            hint="pip install 'stockade[mcp]'",
        ) from None
    bench = Workbench(found, start=start, resume=workspace, discard=args.discard)
    if http is None:
        serving.serve_stdio(bench, allow_commit=args.allow_commit)
        return 0
    host, port = http
    if host not in ("127.0.0.1", "::1", "localhost"):
        output.say(f"warning: {host} may be reachable from other machines, and the token travels unencrypted")
    serving.serve_http(
        bench, host, port, token, allow_commit=args.allow_commit, idle=idle, announce=_announcer(token)
    )
    return 0


def _address(text: str) -> tuple[str, int]:
    """Parse the value of --http."""
    found = re.fullmatch(r"(?:(?P<host>[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):)?(?P<port>[0-9]{1,5})", text)
    if found is None or int(found["port"]) > 65535:
        raise PolicyError(
            f"--http {text!r} is not an address", hint="write PORT, HOST:PORT or [ADDRESS]:PORT"
        )
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])


def _token() -> str:
    """Return the token that clients must send: the one in the environment, or a new one."""
    given = os.environ.get(TOKEN, "")
    if given and (len(given) < SHORTEST or not given.isascii() or not given.isprintable() or " " in given):
        raise PolicyError(
            f"{TOKEN} is not a token: at least {SHORTEST} characters, without spaces",
            hint="leave it out, and the server makes one; or: openssl rand -hex 32",
        )
    return given or f"stk_{secrets.token_urlsafe(32)}"


def _announcer(token: str) -> Callable[[str], None]:
    """Return what prints where the server is, and its token unless the user chose it."""

    def announce(address: str) -> None:
        print(address, flush=True)
        if not os.environ.get(TOKEN):
            print(f"Authorization: Bearer {token}", flush=True)

    return announce


def _install(args: argparse.Namespace, options: list[str]) -> int:
    from stockade.cli.ui.settings_change import offer
    from stockade.integrations.mcp.registration import registration
    from stockade.linux.user import Caller

    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", args.name) is None:
        raise PolicyError(f"--name {args.name!r} is not a name", hint="use letters, digits, - and _")
    build_parser().parse_args(options)  # a typing error must not end up in the settings
    caller = Caller.current()
    command = [*own_command(), "mcp", *options]
    found = registration(args.client, args.name, command, caller.cwd, caller.home, caller.environ)
    return offer(found.path, found.entry, found.text, write=args.write)
