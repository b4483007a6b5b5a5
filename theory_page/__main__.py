"""`python -m theory_page`, or `make theory`: run the experiments of docs/theory.md, and write its numbers and pictures.

With `--draw` it draws and writes what is stored, and the runs in results/, without running anything.
"""

from __future__ import annotations

import sys

from reproduction.page import RESULTS
from reproduction.runs import Results
from theory_page import adaptivity
from theory_page.experiments import FILE, run, stored
from theory_page.page import write

if __name__ == "__main__":  # the processes that run experiments import this file too
    if "--draw" not in sys.argv:
        run(FILE)
        adaptivity.run()
    write(stored(FILE), adaptivity.stored(), Results(RESULTS))
    sys.stdout.write("wrote docs/theory/ and the numbers in docs/theory.md\n")
