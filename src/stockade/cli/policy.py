"""`stockade policy`: check and compare policies, or see which one an agent gets and why."""

from __future__ import annotations

import argparse

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.errors import PolicyError
from stockade.policy import Caller, Discovered, Policy, discover, load
from stockade.policy.load import config_dir, real_names
from stockade.policy.model import limit_text
from stockade.policy.resolve import unfit
from stockade.policy.values import show
from stockade.state import state_dir

#: Each command: its line of help, what it does, an example.
COMMANDS = {
    "check": (
        "say whether a policy is sound, and what it needs",
        "Say whether a policy is sound, which controls it needs and which clause needs each.",
        "stockade policy check stockade.toml",
    ),
    "resolve": (
        "show the policy that the layers give an agent",
        "Show the policy that the layers give an agent, and which layer each field came from.",
        "stockade policy resolve --agent linter",
    ),
    "diff": (
        "say in words what one policy allows that another does not",
        "Say in words what one policy allows that the other does not. Exit code 1 if there is anything.",
        "stockade policy diff old.toml new.toml",
    ),
    "schema": (
        "print the JSON Schema of policy files",
        "Print the JSON Schema of policy files.",
        "stockade policy schema > schema.json",
    ),
}


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.command == "schema":
        from stockade.policy.schema import schema

        print(_json(schema()))
        return 0
    if args.command == "resolve":
        return _resolve(args)
    return _diff(args) if args.command == "diff" else _check(args)


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    made = Parser(
        prog="stockade policy",
        description="Check and compare policies, or print the JSON Schema of policy files.",
        epilog="examples:\n" + "\n".join(f"  {example}" for _, _, example in COMMANDS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", metavar=" | ".join(COMMANDS), required=True)
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
    add("--category", metavar="NAME", default="", help="its category, where the layers do not say")
    add("--layers", metavar="PATH", help="the file or directory of layers (default: your own)")
    for name in ("a", "b"):
        parsers["diff"].add_argument(name, metavar=name.upper(), help="a policy file")
    for name in ("check", "resolve", "diff"):
        parsers[name].add_argument("--json", action="store_true", help="print JSON")
    for part in parsers.values():
        output.with_manners(part)
    return output.with_manners(made)


def _check(args: argparse.Namespace) -> int:
    from stockade.backends import syscalls

    caller = Caller.current()
    # As `stockade run` would have it: the directory one is in is the workspace if it can be.
    here = None if unfit(caller.cwd, caller, state_dir(caller.environ, caller.home)) else caller.cwd
    found = discover(caller.cwd, caller.environ, caller.home, file=args.file, workspace=here)
    syscalls.check_names(found.policy.syscalls.allow)
    print(_json(_facts(found)) if args.json else _summary(found))
    return 0


def _resolve(args: argparse.Namespace) -> int:
    from stockade.policy import layers

    caller = Caller.current()
    config = config_dir(caller.environ, caller.home)
    place = args.layers or layers.find(config)
    if place is None:
        raise PolicyError(
            "there are no layers",
            hint=f"write them to {config}/{layers.NAME}.toml, or name them: --layers PATH",
        )
    if not (args.agent or args.category):
        raise PolicyError("whose policy?", hint="name an agent or a category: --agent NAME")
    known = layers.Layers.load(place)
    found = known.resolve(args.agent, args.category)
    known.bounded(found.policy, caller.home, caller.cwd, caller.environ)
    if args.json:
        facts = {"policy": found.policy.table(full=True), "hash": found.policy.hash}
        print(_json({**facts, "origins": found.origins, "layers": [layer.name for layer in found.layers]}))
        return 0
    rows = [
        [field, output.clean(_shown(found.policy, field)), ", ".join(names)]
        for field, names in found.origins.items()
    ]
    ceiling = "no ceiling" if known.ceiling is None else "within the ceiling"
    print(output.table(rows, ["FIELD", "VALUE", "FROM"], wrap=(1, 2)))
    print(f"\nall else is the default; {ceiling}\nsha256 {found.policy.hash}")
    return 0


def _shown(policy: Policy, field: str) -> str:
    """The value of a field as one would write it."""
    key, _, part = field.partition(".")
    value = policy.table(full=True)[key]
    if key == "limits":
        return limit_text(part, value[part])
    return show(value[part] if part else value)


def _diff(args: argparse.Namespace) -> int:
    caller = Caller.current()
    one, other = (
        real_names(load(path), caller.home, caller.cwd, caller.environ) for path in (args.a, args.b)
    )
    found = {args.a: one.excess(other), args.b: other.excess(one)}
    if args.json:
        print(_json({"only_a": found[args.a], "only_b": found[args.b]} if args.a != args.b else {}))
    elif not any(found.values()):
        print("neither allows what the other does not")
    else:
        for path, colour in ((args.a, "red"), (args.b, "green")):
            for words in found[path]:
                print(f"only {output.clean(path)}: {output.paint(output.clean(words), colour)}")
    return 1 if any(found.values()) else 0


def _facts(found: Discovered) -> dict[str, object]:
    policy = found.policy
    return {
        "ok": True,
        "sources": found.sources,
        "hash": policy.hash,
        "policy": policy.table(full=True),
        "controls": {
            control.value: {"clause": clause, "required": policy.required(control)}
            for control, clause in policy.controls().items()
        },
    }


def _summary(found: Discovered) -> str:
    policy = found.policy
    rows = [
        [control.value, _weight(policy, control.value), clause]
        for control, clause in policy.controls().items()
    ]
    return (
        f"{output.paint('ok', 'green')}: {output.clean(', '.join(found.sources)) or 'the default policy'}\n"
        f"sha256 {policy.hash}\n\n" + output.table(rows, ["CONTROL", "", "BECAUSE OF"], wrap=(2,))
    )


def _weight(policy: Policy, control: str) -> str:
    if policy.required(control):
        return "required"
    return "accepted weaker" if control in policy.accept else "where the host can"


def _json(value: object) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value)).decode()
