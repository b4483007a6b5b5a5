"""`python -m theory_page`, or `make theory`: run the experiments of docs/theory.md, and write what it shows."""

from __future__ import annotations

import argparse
import sys

from reproduction.page import RESULTS
from reproduction.runs import Results
from theory_page import adaptivity
from theory_page.experiments import FILE, run, stored
from theory_page.page import write

if __name__ == "__main__":  # the processes that run experiments import this file too
    parser = argparse.ArgumentParser(prog="python -m theory_page", description=__doc__)
    parser.add_argument("--draw", action="store_true", help="only draw what is stored, and the runs in results/")
    if not parser.parse_args().draw:
        run(FILE)
        adaptivity.run()
    write(stored(FILE), adaptivity.stored(), Results(RESULTS))
    sys.stdout.write("wrote docs/theory/ and the numbers in docs/theory.md\n")
