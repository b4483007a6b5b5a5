"""Reports: what runs were, side by side, as a page to look at, figures to print and numbers to go on with."""

from fedcams.report.collect import Collection, Method, collect
from fedcams.report.profiles import PROFILES, Profile
from fedcams.report.summary import Row, Summary, summarize
from fedcams.report.write import report

__all__ = ["PROFILES", "Collection", "Method", "Profile", "Row", "Summary", "collect", "report", "summarize"]
