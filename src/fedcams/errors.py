"""The errors that fedcams raises on purpose; each message names the field, shows the value and says how to fix it."""

from __future__ import annotations


class FedcamsError(Exception):
    """The base class of all errors in fedcams: `except FedcamsError` catches everything that fedcams refuses.

    Examples:
        >>> import fedcams
        >>> try:
        ...     fedcams.compressor("topk(ratio=2)")
        ... except fedcams.FedcamsError as error:
        ...     print(type(error).__name__)
        SpecError
    """


class SpecError(FedcamsError, ValueError):
    """A spec string or a hyperparameter that cannot be accepted; the message says what is allowed.

    Examples:
        >>> import fedcams
        >>> fedcams.compressor("topk(ratio=2)")
        Traceback (most recent call last):
        fedcams.errors.SpecError: topk: ratio=2: out of range; allowed: a number in (0, 1]
    """

    def within(self, where: str) -> SpecError:
        """Return an error of the same class whose message starts with `where`, the place where it was found."""
        return type(self)(f"{where}: {self}")


class UnknownName(SpecError):
    """A spec string with an unknown name: it is misspelt, or its module was not imported."""


class LayoutError(FedcamsError, ValueError):
    """A vector, model or layout that does not fit the others; the message shows both shapes.

    Examples:
        >>> import fedcams, torch
        >>> fedcams.Layout.flat(3).check(torch.zeros(4))
        Traceback (most recent call last):
        fedcams.errors.LayoutError: got torch.float32 (4,); this layout needs float vectors [..., 3]
    """


class UpdateError(FedcamsError, ValueError):
    """An update that cannot be counted: not finite, sent twice, or with an invalid weight."""


class DataError(FedcamsError):
    """Data that is missing, damaged or not what the task needs."""


class ResidualError(FedcamsError):
    """Stored client state that is damaged, belongs to another run, or cannot be read or written."""


class WireError(FedcamsError, ValueError):
    """Bytes that are not a valid payload or message; each kind of mistake has a subclass.

    Examples:
        >>> import fedcams
        >>> fedcams.decode(b"not a payload")
        Traceback (most recent call last):
        fedcams.errors.BadMagic: a payload starts with b'FCMS', this data with b'not '
    """


class Truncated(WireError):
    """The data is shorter than its header says."""


class TrailingBytes(WireError):
    """Bytes follow the end of the payload or message."""


class BadMagic(WireError):
    """The data does not start with the magic bytes of this kind of payload or message."""


class UnknownVersion(WireError):
    """The data was written in a version of the format that this reader does not know."""


class ChecksumMismatch(WireError):
    """The bytes were changed after they were written."""


class UnknownCodec(WireError):
    """The codec spec is not registered with this reader, or not in canonical form."""


class TooLarge(WireError):
    """The payload claims more coordinates than the reader allows."""


class LayoutMismatch(WireError):
    """The payload has a different layout from the reader's."""


class NonFinite(WireError):
    """A real number in the payload is NaN or infinite."""


class BadMagnitude(WireError):
    """A magnitude is negative."""


class BadPosition(WireError):
    """A coordinate's position is outside the vector."""


class BadChangeCount(WireError):
    """The payload claims more changes of sign than there are signs that follow."""


class BadPadding(WireError):
    """Bits after the last symbol of a field are not zero."""


class NonCanonical(WireError):
    """Something is encoded in a different way from the one that the format prescribes."""


class BadStreamCount(WireError):
    """A message has no stream, or more than the format allows."""


class BadStreamName(WireError):
    """The name of a stream is empty, too long, or has a character that the format does not allow."""


class UnorderedStreams(WireError):
    """The streams of a message are not in ascending order of their names, or one appears twice."""


class WrongStreams(WireError):
    """A message does not carry exactly the streams that its reader expects."""


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, to quote in ours.

    Arguments:
        error: the error, whose text may be empty or of many lines.

    Returns:
        The line without a full stop, or the error's name if it has no text.

    Examples:
        >>> from fedcams.errors import first_line
        >>> first_line(ValueError("no such file.\\nSee the manual."))
        'no such file'
    """
    return str(error).strip().partition("\n")[0].removesuffix(".") or type(error).__name__


def first_sentence(error: Exception) -> str:
    """Return the first sentence of another library's error, if what follows is only about that library.

    Arguments:
        error: the error, whose text may be empty or of many sentences.

    Returns:
        The sentence without its full stop, or the error's name if it has no text.

    Examples:
        >>> from fedcams.errors import first_sentence
        >>> first_sentence(RuntimeError("no such device. Compile with another flag.\\nSee the manual."))
        'no such device'
    """
    return first_line(error).partition(". ")[0]
