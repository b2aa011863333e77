"""Incremental reader of the members of a JSON object that arrives in chunks, in one pass.

Values are skipped by regular expressions and stored only if they are short, so memory and time are
bounded whatever precedes the member that is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Longest value that is stored, and most bytes of all stored values.
LONGEST, MOST_BYTES = 8 * 2**20, 64 * 2**20
_FLAT = rb'[^"{}\[\]]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}\[\]]*+)*+'
#: Text up to the next bracket that changes the depth; brackets around flat text are part of it.
_RUN = re.compile(_FLAT + rb"(?:[{\[]" + _FLAT + rb"[}\]]" + _FLAT + rb")*+", re.DOTALL)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb'[^",{}\[\]]*(?=[",{}\[\]])')
#: Bytes that may precede a document: a byte-order mark, and zeros of a file system.
_LEADING = re.compile(rb"[ \t\r\n\0\xef\xbb\xbf]*(?=[^ \t\r\n\0\xef\xbb\xbf])")
_BETWEEN = re.compile(rb"[ \t\r\n,]*(?=[^ \t\r\n,])")
_COLON = re.compile(rb"[ \t\r\n]*:?[ \t\r\n]*(?=[^ \t\r\n:])")


class Members:
    """Iterator over the keys of an object; at each key, `rest` begins with its value.

    A caller that stops at a key can continue with `rest` and the remaining chunks.
    """

    def __init__(self, chunks: Iterator[bytes], inside: bytes | None = None) -> None:
        """Read an object from its beginning, or continue inside one.

        Args:
            chunks: text of the document.
            inside: text inside the object, after a value; None to begin at the document's start.
        """
        self._chunks = chunks
        self._text, self._at = inside or b"", 0
        #: First byte of the document that is no whitespace.
        self.begins = b"{" if inside is not None else self._first()
        self.ended = False  # the object's closing brace was read
        self.values: dict[bytes, bytes] = {}  # of the keys before the current one
        self._left = MOST_BYTES  # bytes that may still be stored

    @property
    def rest(self) -> bytes:
        """Text that was taken from the chunks and is not read yet."""
        return self._text[self._at :]

    def __iter__(self) -> Iterator[bytes]:
        if self.begins != b"{":
            return
        while self._pass(_BETWEEN) is not None:
            if self._text[self._at] != ord('"'):
                self.ended = self._text[self._at] == ord("}")
                return
            key = self._pass(_STRING)
            if key is None or self._pass(_COLON) is None:
                return
            yield key[1:-1]
            value = self._value()
            if value is not None and len(value) <= min(LONGEST, self._left):
                self.values[key[1:-1]] = value
                self._left -= len(value)

    def _first(self) -> bytes:
        if self._pass(_LEADING) is None:
            return b""
        self._at += 1
        return self._text[self._at - 1 : self._at]

    def _pass(self, pattern: re.Pattern[bytes]) -> bytes | None:
        """Consume a match of the pattern; return None if the document ends first."""
        while (found := pattern.match(self._text, self._at)) is None:
            if not self._more():
                return None
        self._at = found.end()
        return found.group()

    def _more(self) -> bool:
        """Double the unread text, so that nothing is scanned often; return False at the end."""
        parts = [self.rest]
        missing = max(len(parts[0]), 1)
        while missing > 0 and (chunk := next(self._chunks, None)) is not None:
            parts.append(chunk)
            missing -= len(chunk)
        self._text, self._at = b"".join(parts), 0
        return len(parts) > 1

    def _value(self) -> bytes | None:
        """Consume the next value and return it; None if it is too long or unterminated."""
        kind = self._text[self._at : self._at + 1]
        if kind == b'"':
            return self._pass(_STRING)
        if kind not in b"{[":
            return self._pass(_SCALAR)
        kept: list[bytes] = []
        begin, size, depth = self._at, 0, 1
        self._at += 1
        while True:
            run = _RUN.match(self._text, self._at)
            assert run is not None  # it matches the empty text
            self._at = run.end()
            bracket = self._text[self._at : self._at + 1]
            if bracket in (b"", b'"'):  # the text ends, perhaps within a string
                size += self._at - begin
                if size <= LONGEST:
                    kept.append(self._text[begin : self._at])
                begin = 0
                if not self._more():
                    return None
                continue
            self._at += 1
            depth += 1 if bracket in b"{[" else -1
            if not depth:
                size += self._at - begin
                end = self._text[begin : self._at]
                return b"".join([*kept, end]) if size <= LONGEST else None
