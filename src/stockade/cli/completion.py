"""`stockade completion`: the scripts that let shells complete `stockade`'s command lines.

The scripts contain every command and option. Ids they get from
`stockade completion --list` when they need them.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.errors import StockadeError

if TYPE_CHECKING:
    from stockade.cli.ui.command_spec import CommandSpec, Option

#: What the scripts ask `stockade completion --list` for.
LISTS = ("workspaces", "sandboxes", "runs", "profiles")

ABOUT = {
    "bash": 'eval "$(stockade completion bash)"     in ~/.bashrc',
    "zsh": 'eval "$(stockade completion zsh)"      in ~/.zshrc, after compinit',
    "fish": "stockade completion fish | source      in ~/.config/fish/config.fish",
}


def main(argv: list[str]) -> int:
    """Print a shell's completion script, or one of the lists that the scripts ask for."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if (args.shell is None) == (args.list is None):
        parser.error("name a shell: bash, zsh or fish")
    if args.list is not None:
        # The shell asks while the user types a line: an error would garble it.
        with contextlib.suppress(StockadeError, OSError):
            for line in _list(args.list):
                print(line)
        return 0
    from stockade.cli.ui.command_spec import commands

    print(WRITERS[args.shell](commands()), end="")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade completion",
        description="Print a script that lets a shell complete commands, options, files and ids.",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in ABOUT.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", nargs="?", choices=list(WRITERS), help="the shell")
    parser.add_argument("--list", choices=LISTS, help="print a list that the scripts need")
    return output.add_verbosity(parser)


def _list(what: str) -> list[str]:
    if what == "workspaces":
        from stockade.sandbox.workspace import Workspace

        return [workspace.id for workspace in Workspace.list()]
    if what == "profiles":
        from stockade.policy.profile import names

        return list(names())
    from stockade.linux.user import Caller
    from stockade.runs.register import register, runlog
    from stockade.state import state_dir

    caller = Caller.current()
    home = state_dir(caller.environ, caller.home)
    if what == "runs":
        return list(dict.fromkeys(ran.sandbox for ran in runlog.read(home)[0] if ran.sandbox))
    return [record.id for record in register.living(home)]


def _every_option(command: CommandSpec) -> list[Option]:
    """Return the options of a command and its subcommands, each once."""
    found = {option.names: option for part in (command, *command.parts) for option in part.options}
    return list(found.values())


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# bash


def _bash(commands: list[CommandSpec]) -> str:
    names = " ".join(command.name for command in commands)
    cases = "\n".join(_bash_case(command) for command in commands)
    runs = "|".join(command.name for command in commands if command.runs)
    return f"""# bash completion for stockade
_stockade() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    local options= words= kinds= value= place known sign=
    COMPREPLY=()
    # bash splits words at = and @, unless COMP_WORDBREAKS is changed.
    if [[ $current == [=@] ]]; then
        sign=$current current=
    elif [[ $before == [=@] ]]; then
        sign=$before before=${{COMP_WORDS[COMP_CWORD-2]}}
    elif [[ $current == @* ]]; then
        sign=@ current=${{current#@}}
    fi
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))
        return
    fi
    case $command in
    {runs})
        for (( place = 2; place < COMP_CWORD; place++ )); do
            if [[ ${{COMP_WORDS[place]}} == -- ]]; then
                if (( place + 1 == COMP_CWORD )); then
                    COMPREPLY=($(compgen -c -- "$current"))
                else
                    compopt -o filenames
                    COMPREPLY=($(compgen -f -- "$current"))
                fi
                return
            fi
        done ;;
    esac
    case $command in
{cases}
    *) return ;;
    esac
    if [[ $value == =* ]]; then
        words=${{value#=}} kinds=
    elif [[ -n $value ]]; then
        words= kinds=$value
    elif [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$current"))
        return
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    for place in {" ".join(LISTS)}; do
        [[ " $kinds " == *" $place "* ]] || continue
        known=$(command stockade completion --list $place 2>/dev/null)
        COMPREPLY+=($(compgen -W "$known" -- "$current"))
    done
    case " $kinds " in *" places "*)
        if [[ $sign == @ ]]; then
            known=$(command stockade completion --list workspaces 2>/dev/null)
            COMPREPLY+=($(compgen -P @ -W "$known" -- "$current"))
        else
            kinds=files
        fi ;;
    esac
    case " $kinds " in *" files "*)
        compopt -o filenames
        COMPREPLY+=($(compgen -f -- "$current")) ;;
    esac
}}
complete -F _stockade stockade
"""


def _bash_case(command: CommandSpec) -> str:
    """Return the case for one command; it sets `value` if the word before takes a value."""
    every = _every_option(command)
    lines = [f"        options={_quoted(' '.join(name for option in every for name in option.names))}"]
    words = sorted({choice for word in command.words for choice in word.choices})
    kinds = sorted({word.kind for part in (command, *command.parts) for word in part.words if word.kind})
    lines += [f"        words={_quoted(' '.join(words))} kinds={_quoted(' '.join(kinds))}"]
    if command.parts:
        lines.append("        (( COMP_CWORD == 2 )) && kinds= || words=")
    with_value = [option for option in every if option.value]
    if with_value:
        lines.append("        case $before in")
        for option in with_value:
            values = "=" + " ".join(option.choices) if option.choices else option.kind or "="
            lines.append(f"        {'|'.join(option.names)}) value={_quoted(values)} ;;")
        lines.append("        esac")
    return f"    {command.name})\n" + "\n".join(lines) + " ;;"


# zsh


def _zsh(commands: list[CommandSpec]) -> str:
    described = "\n".join(f"        {_quoted(f'{one.name}:{one.help}')}" for one in commands)
    cases = "\n".join(_zsh_case(command) for command in commands)
    lists = "\n".join(f"_stockade_{name}() {{ _stockade_list {name} }}" for name in LISTS)
    return f"""#compdef stockade
_stockade_list() {{
    local -a found
    found=(${{(f)"$(command stockade completion --list $1 2>/dev/null)"}})
    (( $#found )) && compadd "${{@[2,-1]}}" -a found
}}
{lists}
_stockade_places() {{
    if [[ $PREFIX == @* ]]; then
        compset -P @
        _stockade_list workspaces -P @
    else
        _files -/
    fi
}}
_stockade() {{
    local -a commands
    commands=(
{described}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{cases}
    esac
}}
if [[ $funcstack[1] == _stockade ]]; then
    _stockade "$@"
else
    compdef _stockade stockade
fi
"""


def _zsh_case(command: CommandSpec) -> str:
    specs = [_zsh_option(option) for option in _every_option(command)]
    words = list(command.words)
    for part in command.parts:
        words += part.words
    for number, word in enumerate(words, 1):
        place, action = "*" if word.again else str(number), _zsh_action(word)
        # The id is optional: a path may come first.
        if number == 1 and len(words) == 2 and words[1].kind == "files" and words[1].again:
            action = f"{{{action}; _files}}"
        specs.append(_quoted(f"{place}::{_zsh_escaped(word.value or command.name)}:{action}"))
    if command.runs:
        specs.append("'*::command: _normal'")
    return (
        f"    {command.name})\n        _arguments -s -S \\\n"
        + " \\\n".join(f"            {spec}" for spec in specs)
        + " ;;"
    )


def _zsh_option(option: Option) -> str:
    value = f":{_zsh_escaped(option.value)}:{_zsh_action(option)}" if option.value else ""
    about = f"[{_zsh_escaped(option.help)}]{value}"
    again = "*" if option.again else ""
    others = "" if option.again else f"({' '.join(option.names)})"
    if len(option.names) == 1:
        return _quoted(f"{again}{option.names[0]}{about}")
    return f"{_quoted(others or again)}{{{','.join(option.names)}}}{_quoted(about)}"


def _zsh_action(option: Option) -> str:
    if option.choices:
        return f"({' '.join(option.choices)})"
    return {"": " ", "files": "_files"}.get(option.kind, f"_stockade_{option.kind}")


def _zsh_escaped(text: str) -> str:
    for sign in "\\[]:":
        text = text.replace(sign, f"\\{sign}")
    return text


# fish


def _fish(commands: list[CommandSpec]) -> str:
    lines = [
        "# fish completion for stockade",
        "function __stockade_command",
        "    set -l words (commandline -opc)",
        "    test (count $words) -ge 2; or return 1",
        "    contains -- $words[2] $argv; and not contains -- -- $words",
        "end",
        "function __stockade_none",
        "    test (count (commandline -opc)) -eq 1",
        "end",
        "function __stockade_after",
        "    contains -- -- (commandline -opc)",
        "end",
        "function __stockade_places",
        "    stockade completion --list workspaces 2>/dev/null | string replace -r '^' '@'",
        "end",
        "complete -c stockade -f",
        "complete -c stockade -n __stockade_after -a '(__fish_complete_subcommand --fcs-skip=3)'",
    ]
    for command in commands:
        lines.append(f"complete -c stockade -n __stockade_none -a {command.name} -d {_quoted(command.help)}")
        here = f"complete -c stockade -n '__stockade_command {command.name}'"
        for option in _every_option(command):
            lines.append(f"{here} {_fish_option(option)}")
        for part in (command, *command.parts):
            for word in part.words:
                if values := _fish_values(word):
                    lines.append(f"{here} {values}")
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    parts = [f"-s {name[1:]}" if len(name) == 2 else f"-l {name[2:]}" for name in option.names]
    if option.value:
        takes = "-r" if option.kind in ("files", "places") else "-x"
        parts.append(f"{takes} {_fish_values(option)}".strip())
    return f"{' '.join(parts)} -d {_quoted(option.help)}"


def _fish_values(option: Option) -> str:
    if option.choices:
        return f"-a {_quoted(' '.join(option.choices))}"
    if option.kind in LISTS:
        return f"-a '(stockade completion --list {option.kind} 2>/dev/null)'"
    return {"files": "-F", "places": "-F -a '(__stockade_places)'"}.get(option.kind, "")


WRITERS: dict[str, Callable[[list[CommandSpec]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
