"""The command line: `fedcams run demo`."""

from fedcams.cli.app import app

__all__ = ["app"]
