"""`python -m reproduction`, or `make reproduction`: write the pages, pictures and reports in docs/."""

from __future__ import annotations

import argparse
import sys

from reproduction.page import DOCS, RESULTS, write
from reproduction.runs import Results

argparse.ArgumentParser(prog="python -m reproduction", description=__doc__).parse_args()
write(Results(RESULTS), DOCS)
sys.stdout.write("wrote docs/reproduction.md, docs/reproduction/ and the runs in docs/two-way.md and docs/methods.md\n")
