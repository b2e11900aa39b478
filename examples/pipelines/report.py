"""Fetch, parse and write, so that private data never meets the network.

    python3 report.py URL DIRECTORY

- The fetcher runs code that you do not trust with a network: it reaches the host of the URL, and sees no file
  of yours.
- The parser reads what came from the network, so it may be taken over by it: it has neither network nor
  files.
- The writer sees the directory with your private notes, and has no network.

Each has a sandbox of its own. Data passes from left to right only: a program that the data has taken over in
the writer can write nonsense into the report, and cannot send your notes back to the fetcher.
"""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

from stockade import Policy, Stage

FETCH = "import sys, urllib.request; sys.stdout.buffer.write(urllib.request.urlopen(sys.argv[1]).read())"
WRITE = """
import pathlib, sys
notes = pathlib.Path("notes.txt").read_text().strip()
pathlib.Path("report.txt").write_text(f"{notes}: {sys.stdin.read().strip()}\\n")
"""


def parse() -> None:
    """Print the number of words and the longest one."""
    words = sys.stdin.read().split()
    print(len(words), "words, the longest is", max(words, key=len, default="none"))


def main(url: str, directory: str) -> int:
    place = urlsplit(url)
    host = f"{place.hostname}:{place.port or (443 if place.scheme == 'https' else 80)}"
    pipeline = (
        Stage(Policy(net=[host]), ["/usr/bin/python3", "-c", FETCH, url])
        | Stage(Policy(), parse)
        | Stage(
            Policy(workspace=directory),
            ["/usr/bin/python3", "-c", WRITE],
            on_exit="commit",
        )
    )
    result = pipeline.run(timeout=60, stderr="inherit", name="report")
    for place_of, stage in result.stages.items():
        print(f"{place_of}: {stage.outcome} {stage.exit_code}, network: {stage.network_mode}")
    print(Path(directory, "report.txt").read_text(), end="")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
