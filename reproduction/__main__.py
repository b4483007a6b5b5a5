"""`python -m reproduction`, or `make reproduction`: write the pages, pictures and reports in docs/."""

from __future__ import annotations

import argparse
import sys

from fedcams.errors import FedcamsError
from reproduction.page import DOCS, RESULTS, SMALL, write
from reproduction.runs import Results
from reproduction.small import SETTINGS
from reproduction.strays import strays

argparse.ArgumentParser(prog="python -m reproduction", description=__doc__).parse_args()
try:
    results, small = Results(RESULTS), Results(SMALL, SETTINGS)
except FedcamsError as error:
    sys.exit(f"error: {error}")
write(results, small, DOCS)
sys.stderr.writelines(f"note: {line}\n" for line in (*strays(results), *strays(small)))
sys.stdout.write(
    "wrote docs/reproduction.md, docs/small.md, docs/reproduction/, and the runs in docs/two-way.md and methods.md\n"
)
