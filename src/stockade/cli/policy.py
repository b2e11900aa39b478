"""`stockade policy`: check and compare policies, or show which one an agent gets and why."""

from __future__ import annotations

import argparse

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.errors import PolicyError
from stockade.linux.user import Caller
from stockade.policy import Policy
from stockade.policy.model import limit_text
from stockade.policy.net_reach import reach_text
from stockade.policy.toml import load
from stockade.policy.values import show
from stockade.resolve.config_files import config_dir
from stockade.resolve.discovery import PolicySource, discover, real_names, with_workspace
from stockade.resolve.resolution import unfit
from stockade.state import state_dir

#: Each command: its line of help, what it does, an example.
COMMANDS = {
    "check": (
        "check whether a policy is valid, and show what it needs",
        "Check whether a policy is valid, and show which controls it needs and which clause needs each.",
        "stockade policy check stockade.toml",
    ),
    "resolve": (
        "show the policy that the layers give an agent",
        "Show the policy that the layers give an agent, and which layer each field comes from.",
        "stockade policy resolve --agent linter",
    ),
    "diff": (
        "list what one policy allows that another does not",
        "List what one policy allows that the other does not. Exit code 1 if there is anything to list.",
        "stockade policy diff old.toml new.toml",
    ),
    "schema": (
        "print the JSON Schema of policy files",
        "Print the JSON Schema of policy files.",
        "stockade policy schema > schema.json",
    ),
}


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.command == "schema":
        from stockade.policy.schema import schema

        print(output.indented_json(schema()))
        return 0
    if args.command == "resolve":
        return _resolve(args)
    return _diff(args) if args.command == "diff" else _check(args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade policy",
        description="Check and compare policies, or print the JSON Schema of policy files.",
        epilog="examples:\n" + "\n".join(f"  {example}" for _, _, example in COMMANDS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar=" | ".join(COMMANDS), required=True)
    parsers = {
        name: commands.add_parser(
            name,
            help=line,
            description=text,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, (line, text, example) in COMMANDS.items()
    }
    parsers["check"].add_argument(
        "file", nargs="?", help="the policy file; without it, the policy that applies here"
    )
    add = parsers["resolve"].add_argument
    add("--agent", metavar="NAME", default="", help="the agent")
    add("--category", metavar="NAME", default="", help="its category, if the layers do not name one")
    add("--layers", metavar="PATH", help="the file or directory of layers (default: your own)")
    for name in ("a", "b"):
        parsers["diff"].add_argument(name, metavar=name.upper(), help="a policy file")
    for name in ("check", "resolve", "diff"):
        parsers[name].add_argument("--json", action="store_true", help="print JSON")
    for part in parsers.values():
        output.add_verbosity(part)
    return output.add_verbosity(parser)


def _check(args: argparse.Namespace) -> int:
    from stockade.backends.seccomp import syscalls

    caller = Caller.current()
    # As for `stockade run`: the current directory is the workspace if it can be one.
    here = None if unfit(caller.cwd, caller, state_dir(caller.environ, caller.home)) else caller.cwd
    found = discover(caller.cwd, caller.environ, caller.home, file=args.file, workspace=here)
    syscalls.check_names(found.policy.syscalls.allow)
    print(output.indented_json(_facts(found)) if args.json else _summary(found))
    return 0


def _resolve(args: argparse.Namespace) -> int:
    from stockade.resolve import agent_layers, config_files

    caller = Caller.current()
    config = config_dir(caller.environ, caller.home)
    place = args.layers or config_files.find_layers(config)
    if place is None:
        raise PolicyError(
            "there are no layers",
            hint=f"write them to {config}/{config_files.LAYERS}.toml, or say where they are: --layers PATH",
        )
    if not (args.agent or args.category):
        raise PolicyError("resolve needs an agent or a category", hint="name one: --agent NAME")
    known = agent_layers.Layers.load(place)
    found = known.resolve(args.agent, args.category)
    known.bounded(found.policy, caller.home, caller.cwd, caller.environ)
    if args.json:
        facts = {"policy": found.policy.table(full=True), "hash": found.policy.hash}
        print(
            output.indented_json(
                {**facts, "origins": found.origins, "layers": [layer.name for layer in found.layers]}
            )
        )
        return 0
    rows = [[field, _shown(found.policy, field), ", ".join(names)] for field, names in found.origins.items()]
    ceiling = "no ceiling" if known.ceiling is None else "within the ceiling"
    print(output.table(rows, ["FIELD", "VALUE", "FROM"], wrap=(1, 2)))
    print(f"\neverything else is the default; {ceiling}\nsha256 {found.policy.hash}")
    return 0


def _shown(policy: Policy, field: str) -> str:
    """Return the value of a field as a policy file writes it."""
    key, _, part = field.partition(".")
    value = policy.table(full=True)[key]
    if key == "limits":
        return limit_text(part, value[part])
    return show(value[part] if part else value)


def _diff(args: argparse.Namespace) -> int:
    caller = Caller.current()
    both = [load(path) for path in (args.a, args.b)]
    if not any(policy.workspace for policy in both):
        # As for `stockade run`: without a workspace, what they hide in it cannot be compared.
        both = [with_workspace(policy, caller.cwd) for policy in both]
    one, other = (real_names(policy, caller.home, caller.cwd, caller.environ) for policy in both)
    found = {args.a: one.excess(other), args.b: other.excess(one)}
    if args.json:
        print(
            output.indented_json(
                {"only_a": found[args.a], "only_b": found[args.b]} if args.a != args.b else {}
            )
        )
    elif not any(found.values()):
        print("both allow the same")
    else:
        for path, colour in ((args.a, "red"), (args.b, "green")):
            for words in found[path]:
                print(f"only {output.name(path)}: {output.paint(output.name(words), colour)}")
    return 1 if any(found.values()) else 0


def _facts(found: PolicySource) -> dict[str, object]:
    policy = found.policy
    return {
        "ok": True,
        "sources": found.sources,
        "hash": policy.hash,
        "policy": policy.table(full=True),
        "reach": reach_text(policy.net),
        "controls": {
            control.value: {"clause": clause, "required": policy.required(control)}
            for control, clause in policy.controls().items()
        },
    }


def _summary(found: PolicySource) -> str:
    policy = found.policy
    rows = [
        [control.value, _weight(policy, control.value), clause]
        for control, clause in policy.controls().items()
    ]
    return (
        f"{output.paint('ok', 'green')}: {output.name(', '.join(found.sources)) or 'the default policy'}\n"
        + (output.paint(f"WARNING: {reach}", "red") + "\n" if (reach := reach_text(policy.net)) else "")
        + f"sha256 {policy.hash}\n\n"
        + output.table(rows, ["CONTROL", "", "BECAUSE OF"], wrap=(2,))
    )


def _weight(policy: Policy, control: str) -> str:
    if policy.required(control):
        return "required"
    return "accepted weaker" if control in policy.accept else "if the host can"
