"""The version, in its own module so that it can be read while `fedcams` itself is being imported."""

__version__ = "0.2.0"
