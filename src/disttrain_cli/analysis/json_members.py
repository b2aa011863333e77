"""Members of a JSON object that arrives in chunks, one after the other and in one pass.

Values are skipped by regular expressions and kept only while they are short, so memory and time
are bounded whatever lies before the member that is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Values longer than this are not kept, nor more than this of all values.
LONGEST, MOST_BYTES = 8 * 2**20, 64 * 2**20
_FLAT = rb'[^"{}\[\]]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}\[\]]*+)*+'
#: Text up to a bracket that counts; brackets around nothing but a flat text are passed with it.
_RUN = re.compile(_FLAT + rb"(?:[{\[]" + _FLAT + rb"[}\]]" + _FLAT + rb")*+", re.DOTALL)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb'[^",{}\[\]]*(?=[",{}\[\]])')
#: What may be before a document: a byte-order mark, and zeros of a file system.
_LEADING = re.compile(rb"[ \t\r\n\0\xef\xbb\xbf]*(?=[^ \t\r\n\0\xef\xbb\xbf])")
_BETWEEN = re.compile(rb"[ \t\r\n,]*(?=[^ \t\r\n,])")
_COLON = re.compile(rb"[ \t\r\n]*:?[ \t\r\n]*(?=[^ \t\r\n:])")


class Members:
    """Iterate over the keys of an object; at each, `rest` begins with its value.

    Whoever stops at a key goes on with `rest` and the chunks that are left.
    """

    def __init__(self, chunks: Iterator[bytes], inside: bytes | None = None) -> None:
        """Read an object from its beginning, or from its text `inside` it, behind a value."""
        self._chunks = chunks
        self._text, self._at = inside or b"", 0
        #: First byte of the document that is no space.
        self.begins = b"{" if inside is not None else self._first()
        self.ended = False  # the object's closing brace was read
        self.values: dict[bytes, bytes] = {}  # of the keys before the present one
        self._left = MOST_BYTES  # that may still be kept

    @property
    def rest(self) -> bytes:
        """Text that was taken from the chunks and is not read."""
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
        """Go behind what fits the pattern; None where the document ends before it does."""
        while (found := pattern.match(self._text, self._at)) is None:
            if not self._more():
                return None
        self._at = found.end()
        return found.group()

    def _more(self) -> bool:
        """Take as much text again as is not read, so that nothing is read often; False at the end
        of the document."""
        parts = [self.rest]
        missing = max(len(parts[0]), 1)
        while missing > 0 and (chunk := next(self._chunks, None)) is not None:
            parts.append(chunk)
            missing -= len(chunk)
        self._text, self._at = b"".join(parts), 0
        return len(parts) > 1

    def _value(self) -> bytes | None:
        """Go behind the next value and return it; None where it is long or does not end."""
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
            assert run is not None  # it fits the empty text
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
