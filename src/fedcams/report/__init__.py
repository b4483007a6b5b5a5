"""Reports: runs side by side, as a page to explore, figures to print and numbers to work with."""

from fedcams.report.collection import Collection, Method, collect
from fedcams.report.page import report
from fedcams.report.profiles import PROFILES, Profile
from fedcams.report.summary import Row, Summary, summarize

__all__ = ["PROFILES", "Collection", "Method", "Profile", "Row", "Summary", "collect", "report", "summarize"]
