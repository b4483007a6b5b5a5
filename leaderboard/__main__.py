"""`python -m leaderboard`: write the page; `python -m leaderboard add RUNS`: make entries from finished runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedcams.cli.main import load
from fedcams.errors import FedcamsError
from leaderboard.entry import ENTRIES, add
from leaderboard.page import DOCS, write


def main() -> None:
    """Read the command line and do what it asks; errors of fedcams become one line."""
    parser = argparse.ArgumentParser(prog="python -m leaderboard", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    adding = commands.add_parser("add", help="make an entry of each method among finished runs")
    adding.add_argument("runs", nargs="+", type=Path, help="folders of runs, or folders that hold runs")
    adding.add_argument("--label", help="the name of the entry, if it is only one; default: that of the run")
    adding.add_argument("--source", help="where others find the runs: a folder of results/, a link, or a command")
    adding.add_argument("--import", dest="modules", action="append", default=[], help="a module with your own pieces")
    given = parser.parse_args()
    try:
        if given.command == "add":
            load(given.modules)
            for path in add(given.runs, ENTRIES, label=given.label, source=given.source):
                sys.stdout.write(f"wrote {path}\n")
        write(ENTRIES, DOCS)
    except FedcamsError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write("wrote docs/leaderboard.md and docs/leaderboard/\n")


main()
