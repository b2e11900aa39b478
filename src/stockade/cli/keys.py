"""`stockade keys`: show, export and rotate the keys that sign receipts."""

from __future__ import annotations

import argparse
import os
import sys
import time

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.errors import PolicyError
from stockade.linux.user import Caller
from stockade.receipt import chain, ed25519, keys
from stockade.receipt.statement import ROTATED
from stockade.state import ensure, state_dir


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.id and args.action != "export":
        raise PolicyError(f"{args.id!r}: only export takes an id", hint="stockade keys export ID")
    if args.passphrase_file and args.action != "rotate":
        raise PolicyError(
            "--passphrase-file applies only to rotate", hint="stockade keys rotate --passphrase-file FILE"
        )
    caller = Caller.current()
    home = ensure(state_dir(caller.environ, caller.home))
    if args.action == "rotate":
        return _rotate(home, args.passphrase_file)
    log = chain.of(home)
    if not keys.known(home):
        keys.signer(home, log.settings)  # makes the first key
    if args.action == "export":
        sys.stdout.write(ed25519.public_pem(keys.find(home, args.id or "").public).decode())
        return 0
    _show(keys.known(home), as_json=args.json)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade keys",
        description="Show the keys that have signed receipts here, export a public key, or replace the\n"
        "signing key by a new one. Receipts that older keys signed stay verifiable. Older keys cannot\n"
        "sign any more, because their private keys are deleted.",
        epilog="examples:\n  stockade keys export > stockade.pem      for those who verify\n"
        "  stockade keys rotate --passphrase-file ~/.stockade-passphrase      the new key is encrypted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=["show", "export", "rotate"], default="show")
    parser.add_argument("id", nargs="?", metavar="ID", help="export: a key other than the current one")
    parser.add_argument(
        "--passphrase-file", metavar="FILE", help="rotate: encrypt the new key with the passphrase in FILE"
    )
    parser.add_argument("--json", action="store_true", help="show: print JSON")
    return output.add_verbosity(parser)


def _rotate(home: str, file: str | None) -> int:
    passphrase = None if file is None else keys.secret(file).rstrip(b"\r\n")
    if passphrase == b"":
        raise PolicyError(f"{file} is empty", hint="put the passphrase on its first line")
    log = chain.of(home)
    id = log.rotate(passphrase)
    print(id)
    output.say("this key signs receipts from now on; earlier receipts stay verifiable")
    last = log.rows(newest=1)
    if not last or last[0].action != ROTATED:
        output.say("the previous key could not be used, so it does not vouch for this one")
    if file is not None:
        path = os.path.abspath(file)
        output.say(f'to use this key, add to your config.toml: [receipts], passphrase_file = "{path}"')
    return 0


def _show(found: list[keys.Key], *, as_json: bool) -> None:
    if as_json:
        from stockade.cli.ui.formats import print_json

        print_json(
            [{"id": key.id, "current": key.current, "made": key.made, "path": key.path} for key in found]
        )
        return
    rows = [
        [key.id, "current" if key.current else "", time.strftime("%Y-%m-%d %H:%M", time.localtime(key.made))]
        for key in found
    ]
    print(output.table(rows, ["KEY", "", "MADE"]))
