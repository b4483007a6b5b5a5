"""Every error this package raises on purpose; each names the field, shows the value and says the fix."""

from __future__ import annotations


class FedcamsError(Exception):
    """The root: `except FedcamsError` catches whatever fedcams refuses."""


class SpecError(FedcamsError, ValueError):
    """A spec string or a hyperparameter that cannot be accepted."""

    def within(self, where: str) -> SpecError:
        """The same error, of the same class, with the place where it was found in front."""
        return type(self)(f"{where}: {self}")


class UnknownName(SpecError):
    """A spec string that names nothing registered: misspelt, or its module was not imported."""


class LayoutError(FedcamsError, ValueError):
    """A vector, a model or a layout that do not belong together."""


class UpdateError(FedcamsError, ValueError):
    """An update that must not enter the sum: not finite, sent twice, badly weighted."""


class DataError(FedcamsError):
    """Data that are missing, damaged or not what the task needs."""


class ResidualError(FedcamsError):
    """A stored residual that is damaged, foreign or cannot be written."""


class WireError(FedcamsError, ValueError):
    """Bytes that are not a valid payload or message; one subclass for each way to be wrong."""


class Truncated(WireError):
    """The data end before what they announce."""


class TrailingBytes(WireError):
    """Something follows after the end of the payload."""


class BadMagic(WireError):
    """The data do not start as a payload or message of this kind does."""


class UnknownVersion(WireError):
    """Written by a version of the format that this reader does not know."""


class ChecksumMismatch(WireError):
    """The bytes were changed after they were written."""


class UnknownCodec(WireError):
    """The codec spec is not one that this reader has registered, or not in canonical form."""


class TooLarge(WireError):
    """The payload claims more coordinates than the reader allows."""


class LayoutMismatch(WireError):
    """The payload belongs to another layout than the reader's."""


class NonFinite(WireError):
    """A real number in the payload is NaN or infinite."""


class BadPosition(WireError):
    """A coordinate position is outside of the vector."""


class BadPadding(WireError):
    """Bits after the last symbol of a field are not zero."""


class NonCanonical(WireError):
    """A symbol was coded in another way than the one the format prescribes."""


class BadStreamCount(WireError):
    """A message has no stream, or more than the format allows."""


class BadStreamName(WireError):
    """The name of a stream is empty, too long or has a character that the format does not allow."""


class UnorderedStreams(WireError):
    """The streams of a message do not stand in ascending order of their names, or one comes twice."""


class WrongStreams(WireError):
    """A message carries other streams than its reader needs."""
