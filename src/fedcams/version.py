"""The version, for those who ask while `fedcams` itself is being imported."""

__version__ = "0.2.0"
