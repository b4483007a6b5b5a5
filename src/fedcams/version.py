"""The version, for those who ask while `fedcams` itself is being imported."""

__version__ = "0.1.0"
