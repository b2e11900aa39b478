"""`stockade agents`: list the agents, and switch their sandboxes on or off."""

from __future__ import annotations

import argparse

from stockade.agents import registry
from stockade.agents.registry import Agent
from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import print_json
from stockade.errors import PolicyError
from stockade.linux.user import Caller
from stockade.state import ensure, state_dir

ACTIONS = ("list", "add", "show", "enable", "disable", "remove")


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    action, name = args.action, args.name or ""
    if (action == "list") == bool(name):
        hint = f"stockade agents show {name}" if name else f"stockade agents {action} NAME"
        raise PolicyError(f"{action} takes no name" if name else f"{action} needs a name", hint=hint)
    if (args.category or args.policy) and action != "add":
        raise PolicyError("--category and --policy apply only to add", hint="stockade agents add NAME ...")
    if args.reason and action in ("list", "show"):
        raise PolicyError(
            f"--reason does not apply to {action}, which records nothing",
            hint="stockade agents disable NAME --reason ...",
        )
    caller = Caller.current()
    home = state_dir(caller.environ, caller.home)
    if action == "list":
        return _list(registry.every(home), as_json=args.json)
    if action == "show":
        return _show(registry.get(home, name), caller, as_json=args.json)
    ensure(home)
    if action == "add":
        agent = registry.add(home, name, args.category or "", args.policy or "", args.reason)
        message = f"{agent.name} is in the registry; its calls are {_sandboxed(agent)}"
    elif action == "remove":
        registry.remove(home, name, args.reason)
        message = f"{name} is removed from the registry; a handler of that name is sandboxed"
    else:
        agent = registry.switch(home, name, enabled=action == "enable", reason=args.reason)
        message = f"the calls of {agent.name} are {_sandboxed(agent)} from now on (receipt {agent.place})"
    output.say(message)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade agents",
        description="List the agents, add one or give it another category or policy, and switch its sandbox\n"
        "on or off. A switch takes effect at the agent's next call, affects no other agent, and is recorded\n"
        "in the chain of receipts. The receipts of calls without a sandbox say so.",
        epilog="examples:\n  stockade agents add linter --category reviewers\n"
        '  stockade agents disable linter --reason "needs the GPU; ticket 42"\n'
        "  stockade agents enable linter",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("action", nargs="?", choices=ACTIONS, default="list")
    add("name", nargs="?", metavar="NAME", help="the agent; every action except list needs it")
    add("--category", metavar="NAME", help="add: the agent's category, whose layer applies to it")
    add("-p", "--policy", metavar="FILE", help="add: the agent's policy, copied from the file as it is now")
    add("--reason", metavar="TEXT", default="", help="why; disable needs one")
    add("--json", action="store_true", help="list, show: print JSON")
    return output.add_verbosity(parser)


def _sandboxed(agent: Agent) -> str:
    return "sandboxed" if agent.enabled else "NOT sandboxed"


def _plain(agent: Agent) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(agent)


def _list(found: list[Agent], *, as_json: bool) -> int:
    if as_json:
        print_json([_plain(agent) for agent in found])
    elif found:
        rows = [
            [
                agent.name,
                agent.category or "-",
                "on" if agent.enabled else "OFF",
                output.name(agent.policy) or "-",
                str(agent.place),
            ]
            for agent in found
        ]
        print(output.table(rows, ["AGENT", "CATEGORY", "SANDBOX", "POLICY", "RECEIPT"], cut=(3,)))
    else:
        print("there are no agents")
    return 0


def _show(agent: Agent, caller: Caller, *, as_json: bool) -> int:
    """Print the agent's settings and the policy that they result in."""
    from stockade.agents.policies import policy_for

    policy = policy_for(agent, caller).policy
    if as_json:
        print_json({**_plain(agent), "in_force": policy.table(), "in_force_hash": policy.hash})
        return 0
    rows = [
        ["category", agent.category or "-"],
        ["sandbox", "on" if agent.enabled else "OFF: its calls run without walls"],
        ["policy", output.name(agent.policy) or "from the layers, or your own"],
        ["set by", f"receipt {agent.place}"],
    ]
    print(output.table(rows, ["AGENT", agent.name]))
    print("\n" + output.clean(policy.to_toml() or "# the default policy\n").rstrip())
    return 0
