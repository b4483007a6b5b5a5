"""The command line: `fedcams run demo`."""

from fedcams.cli.main import app

__all__ = ["app"]
