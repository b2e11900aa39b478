"""`stockade images`: register root file systems for the server's sandboxes, list and remove them."""

from __future__ import annotations

import argparse
import os
import sys
import time

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import age, many, print_json, size
from stockade.errors import PolicyError
from stockade.images import store
from stockade.images.tree_writer import MOST_BYTES, MOST_ENTRIES

#: Where an image has its shell, from its root.
SHELLS = ("bin/sh", "usr/bin/sh", "bin/bash", "usr/bin/bash")
#: Each command: its line of help, what it does, an example.
COMMANDS = {
    "import": (
        "register a directory or a tar archive as an image",
        "Copy a directory, or unpack a tar archive (also .gz, .bz2, .xz), into Stockade's state as the root\n"
        "file system of sandboxes. The source need not be trusted: nothing is written elsewhere, devices\n"
        "are left out, and set-user-id bits are dropped.",
        "stockade images import ./rootfs.tar.gz tools:1",
    ),
    "list": ("list the images", "List the images.", "stockade images list"),
    "remove": (
        "remove an image that no sandbox uses",
        "Remove an image that no sandbox uses.",
        "stockade images remove tools:1",
    ),
}


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.command == "import":
        return _import(args)
    if args.command == "remove":
        store.remove_image(args.name)
        output.say(f"image {args.name} is removed")
        return 0
    return _list(as_json=args.command is not None and args.json)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade images",
        description="Register root file systems for sandboxes of `stockade serve`. Without an image,\n"
        "a sandbox has the system of the host. Without a command, list them.",
        epilog="examples:\n" + "\n".join(f"  {example}" for _, _, example in COMMANDS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar=" | ".join(COMMANDS))
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
    add = parsers["import"].add_argument
    add("source", metavar="PATH", help="the directory, or the tar archive")
    add("name", metavar="NAME", help="what to call it: small letters, digits and . _ - : /")
    add(
        "--most-bytes",
        metavar="SIZE",
        default=str(MOST_BYTES),
        help=f"how large its files may be together (default: {size(MOST_BYTES)})",
    )
    add(
        "--most-entries",
        metavar="N",
        default=str(MOST_ENTRIES),
        help=f"how many files and directories it may have (default: {MOST_ENTRIES})",
    )
    parsers["remove"].add_argument("name", metavar="NAME", help="the image")
    for name in ("import", "list"):
        parsers[name].add_argument("--json", action="store_true", help="print JSON")
    for part in parsers.values():
        output.add_verbosity(part)
    return output.add_verbosity(parser)


def _import(args: argparse.Namespace) -> int:
    from stockade.policy.values import size as bytes_of

    if not args.most_entries.isdecimal() or int(args.most_entries) < 1:
        raise PolicyError(f"--most-entries {args.most_entries}: not a number", hint="write 1 or more")
    most_bytes = args.most_bytes
    progress = _ImportProgress()
    try:
        image = store.import_image(
            args.source,
            args.name,
            most_bytes=bytes_of("--most-bytes", int(most_bytes) if most_bytes.isdecimal() else most_bytes)
            or MOST_BYTES,
            most_entries=int(args.most_entries),
            progress=progress,
        )
    finally:
        progress.end()
    record = image.record
    if args.json:
        print_json(_plain(image))
        return 0
    left_out = f"; {record.skipped} devices, pipes and sockets are left out" if record.skipped else ""
    content = f"{many(record.entries, 'file')} and directories, {size(record.bytes)}"
    output.say(f"image {image.name} is registered: {content}{left_out}")
    if not any(os.path.lexists(f"{image.root}/{shell}") for shell in SHELLS):
        output.say("warning: it has no /bin/sh, so sandboxes can run programs by their path only")
    return 0


def _list(*, as_json: bool) -> int:
    found = store.list_images()
    if as_json:
        print_json([_plain(image) for image in found])
    elif found:
        rows = [
            [
                image.name,
                age(max(0.0, time.time() - image.record.imported)),
                size(image.record.bytes),
                str(image.record.entries),
                image.record.digest[:12],
            ]
            for image in found
        ]
        print(output.table(rows, ["IMAGE", "AGE", "SIZE", "ENTRIES", "DIGEST"], cut=(0,)))
    else:
        print("there are no images")
    return 0


def _plain(image: store.RegisteredImage) -> dict[str, object]:
    record = image.record
    return {
        "name": record.name,
        "digest": record.digest,
        "bytes": record.bytes,
        "entries": record.entries,
        "skipped": record.skipped,
        "imported": record.imported,
        "root": image.root,
    }


class _ImportProgress:
    """A progress line on a terminal, shown once an import takes longer than a moment."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 0.5
        self._shown = False

    def __call__(self, entries: int, written: int) -> None:
        if time.monotonic() >= self._next and output.obeys_escapes(sys.stderr) and not output.Verbosity.quiet:
            line = f"\rstockade: {entries} entries, {size(written)}"
            print(line, end="\x1b[K", file=sys.stderr, flush=True)
            self._shown, self._next = True, time.monotonic() + 0.1

    def end(self) -> None:
        if self._shown:
            print("\r", end="\x1b[K", file=sys.stderr, flush=True)
            self._shown = False
