"""`python -m reproduction`, or `make reproduction`: write the pages, pictures and reports in docs/."""

from __future__ import annotations

import argparse
import sys

from fedcams.errors import FedcamsError
from reproduction.page import DOCS, RESULTS, write
from reproduction.runs import Results
from reproduction.strays import strays

argparse.ArgumentParser(prog="python -m reproduction", description=__doc__).parse_args()
try:
    results = Results(RESULTS)
except FedcamsError as error:
    sys.exit(f"error: {error}")
write(results, DOCS)
sys.stderr.writelines(f"note: {line}\n" for line in strays(results))
sys.stdout.write("wrote docs/reproduction.md, docs/reproduction/ and the runs in docs/two-way.md and docs/methods.md\n")
