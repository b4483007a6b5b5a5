"""The grammar of spec strings: `name(key=value, …)`, with numbers, words, "strings", specs or `a + b` as values."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fractions import Fraction

from fedcams.errors import SpecError
from fedcams.registry.numbers import PATTERN, parse_number

MAX_LENGTH = 1000
MAX_DEPTH = 8

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Call:
    """A parsed `name(arguments)`; a positional argument has the key None."""

    name: str
    arguments: tuple[tuple[str | None, Value], ...]


@dataclass(frozen=True)
class Word:
    """A bare word: `true`, a choice, or a spec without arguments; the field that it is given for decides which."""

    text: str


@dataclass(frozen=True)
class Several:
    """Two or more specs joined by `+`, as in `a + b(...) + c`."""

    calls: tuple[Call, ...]


Value = Fraction | Word | str | Call | Several


def parse_call(text: str) -> Call:
    """Return the syntax tree of a spec string; refuses what is not one, naming the column."""
    reader = _Reader(text)
    call = reader.call(depth=0)
    reader.end()
    return call


def parse_several(text: str) -> tuple[Call, ...]:
    """Return the syntax trees of specs joined by `+`; none for a blank string. Refuses what `parse_call` refuses."""
    reader = _Reader(text)
    if reader.at == len(text):
        return ()
    calls = [reader.call(depth=0)]
    while reader.sees("+"):
        calls.append(reader.call(depth=0))
    reader.end()
    return tuple(calls)


def quote(text: str) -> str:
    """Return a string as it is written in a spec: bare if it reads back as itself, otherwise in JSON quotes."""
    return text if WORD.fullmatch(text) and text not in ("true", "false") else json.dumps(text)


class _Reader:
    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise SpecError(f"a spec of {len(text)} characters; allowed: at most {MAX_LENGTH}")
        self.text = text
        self.at = 0
        self.skip()

    def end(self) -> None:
        """Refuse anything that follows."""
        if self.at < len(self.text):
            raise self.error("nothing more")

    def skip(self) -> None:
        match = SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        self.skip()
        return match.group()

    def sees(self, character: str) -> bool:
        """Consume the character if it comes next; return whether it did."""
        if not self.text.startswith(character, self.at):
            return False
        self.at += 1
        self.skip()
        return True

    def error(self, expected: str) -> SpecError:
        found = repr(self.text[self.at :][:20]) if self.at < len(self.text) else "the end"
        return SpecError(f"spec {self.text!r}: expected {expected} at column {self.at + 1}, found {found}")

    def call(self, depth: int) -> Call:
        if depth > MAX_DEPTH:
            raise SpecError(f"spec {self.text!r}: nested deeper than {MAX_DEPTH}")
        name = self.take(WORD)
        if name is None:
            raise self.error("a name")
        return Call(name, self.arguments(depth) if self.sees("(") else ())

    def arguments(self, depth: int) -> tuple[tuple[str | None, Value], ...]:
        arguments: list[tuple[str | None, Value]] = []
        while not self.sees(")"):
            if arguments and not self.sees(","):
                raise self.error("',' or ')'")
            arguments.append(self.argument(depth))
        return tuple(arguments)

    def argument(self, depth: int) -> tuple[str | None, Value]:
        start = self.at
        key = self.take(WORD)
        if key is not None and self.sees("="):
            return key, self.value(depth)
        self.at = start
        return None, self.value(depth)

    def value(self, depth: int) -> Value:
        if number := self.take(PATTERN):
            return self.number(number)
        if quoted := self.take(QUOTED):
            return self.unquote(quoted)
        call = self.call(depth + 1)
        bare = not call.arguments and not self.text[: self.at].rstrip().endswith(")")
        calls = [call]
        while self.sees("+"):
            calls.append(self.call(depth + 1))
        if len(calls) > 1:
            return Several(tuple(calls))
        return Word(call.name) if bare else call

    def number(self, text: str) -> Fraction:
        try:
            return parse_number(text)
        except SpecError as error:
            raise error.within(f"spec {self.text!r}") from None

    def unquote(self, quoted: str) -> str:
        try:
            return str(json.loads(quoted))
        except json.JSONDecodeError:
            raise SpecError(f"spec {self.text!r}: {quoted} is not a valid quoted string") from None
