"""`python -m theory_page`, or `make theory`: run the experiments of docs/theory.md, and write what it shows."""

from __future__ import annotations

import argparse
import sys

from reproduction.page import RESULTS
from reproduction.runs import Results
from theory_page.measured import STUDIES, made, run, stored
from theory_page.page import write

if __name__ == "__main__":  # the processes that run experiments import this file too
    parser = argparse.ArgumentParser(prog="python -m theory_page", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--draw", action="store_true", help="run nothing; only draw the stored numbers and the runs in results/"
    )
    which.add_argument("--only", choices=STUDIES, help="run one study, and keep the numbers of the others")
    given = parser.parse_args()
    for name in [] if given.draw else [given.only] if given.only else STUDIES:
        sys.stdout.write(f"running {name}\n")
        sys.stdout.flush()
        run(name)
        sys.stdout.write(f"wrote {STUDIES[name][0].name} in {made()[STUDIES[name][0].name]['seconds']} s\n")
    write(stored(Results(RESULTS)))
    sys.stdout.write("wrote docs/theory/ and the numbers in docs/theory.md\n")
