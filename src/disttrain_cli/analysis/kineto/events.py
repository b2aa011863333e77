"""Decoder of the events of a Chrome trace: fast for valid JSON of the expected types, else lenient.

msgspec decodes straight into typed objects and skips every field that is not named here, so it
builds no dictionary per event and accepts numbers in strings. orjson parses as fast but has to
build every dictionary: 2.1 to 3.4 times the time on the same chunks (20 MB of a DLRM trace), and
dictionaries of all arguments in memory.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

import msgspec

NOTHING = msgspec.Raw()


class Args(msgspec.Struct, gc=False, frozen=True):
    """Arguments that are used; −1 and "" stand for missing ones."""

    stream: int = -1
    device: int = -1
    correlation: int = -1
    external_id: int = msgspec.field(name="External id", default=-1)
    bytes: int = -1
    name: str = ""
    collective: str = msgspec.field(name="Collective name", default="")
    group: str = msgspec.field(name="Process Group Name", default="")
    group_about: str = msgspec.field(name="Process Group Description", default="")
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default="")
    group_size: int = msgspec.field(name="Group size", default=-1)
    elements: int = msgspec.field(name="In msg nelems", default=-1)
    dtype: str = ""
    source: int = msgspec.field(name="Src Rank", default=-1)
    destination: int = msgspec.field(name="Dst Rank", default=-1)
    rank: int = -1
    step_num: int = -1
    iteration: int = -1
    allocated: int = msgspec.field(name="Total Allocated", default=-1)
    reserved: int = msgspec.field(name="Total Reserved", default=-1)
    memory_device: int = msgspec.field(name="Device Id", default=-1)
    device_type: int = msgspec.field(name="Device Type", default=-1)
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=NOTHING)
    types: msgspec.Raw = msgspec.field(name="Input type", default=NOTHING)
    concrete: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=NOTHING)


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event; `ts` and `dur` in µs, as written."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: int | float | None = None
    dur: int | float | None = None
    args: Args | None = None


class _ExactTime(msgspec.Struct, gc=False):
    ts: Decimal | None = None


_EVENTS = msgspec.json.Decoder(list[Event], strict=False)
_EXACT_TIMES = msgspec.json.Decoder(list[_ExactTime], strict=False)
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
#: Not valid in JSON, but written by profilers.
_NO_NUMBER = rb"[-+]?(?:nan|inf(?:inity)?)(?![\w.])"
_NO_NUMBER_OF_A_KEY = re.compile(rb'((?<!\\)"\s*:\s*)' + _NO_NUMBER, re.IGNORECASE)
_TO_MEND = re.compile(_STRING + rb"|(?<![\w.])" + _NO_NUMBER, re.DOTALL | re.IGNORECASE)
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL
)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
#: Beyond this, a float of µs cannot represent single nanoseconds.
EXACT_BELOW_US = 2.0**41


def decode(text: bytes) -> list[Event]:
    """Decode the events of `text`, complete JSON objects with commas between them.

    Raises:
        ValueError: it is not that; `text` may have been cut inside an event, or contain invalid
            JSON.
    """
    return _EVENTS.decode(b"[" + text + b"]")


def exact_starts_ns(text: bytes) -> list[int | None]:
    """Return the start times of the same events without conversion to float."""
    return [
        None if event.ts is None else int(event.ts * 1000)
        for event in _EXACT_TIMES.decode(b"[" + text + b"]")
    ]


def mend_bytes(text: bytes) -> bytes:
    """Replace invalid UTF-8, and nan or inf as a key's value by null; fast."""
    return _NO_NUMBER_OF_A_KEY.sub(rb"\1null", text.decode("utf-8", "replace").encode())


def mend(text: bytes) -> bytes:
    """Repair as `mend_bytes`, and bad escapes, control characters, nan and inf in lists; slow."""
    return _TO_MEND.sub(_mend_token, mend_bytes(text))


def _mend_token(escaped: re.Match[bytes]) -> bytes:
    token = escaped.group()
    if not token.startswith(b'"'):
        return b"null"
    if b"\\" in token:
        token = _ESCAPE.sub(_mend_escape, token)
    return _CONTROL.sub(lambda match: b"\\u%04x" % match.group()[0], token)


def _mend_escape(match: re.Match[bytes]) -> bytes:
    escape = match.group()
    if escape[1:2] in b'"\\/bfnrt':
        return escape
    if len(escape) == 12:  # a surrogate pair
        return escape
    if len(escape) == 6:  # half of a pair is no character
        return b"\\ufffd" if 0xD800 <= int(escape[2:], 16) <= 0xDFFF else escape
    return b"\\" + escape


def decode_patiently(text: bytes) -> Event | None:
    """Decode one event with values of any types; None if it is not an event."""
    try:
        plain = json.loads(mend(text), strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(plain, dict):
        return None
    args = plain.get("args")
    return Event(
        ph=_text(plain.get("ph")),
        cat=_text(plain.get("cat")),
        name=_text(plain.get("name")),
        pid=_text(plain.get("pid")),
        tid=_text(plain.get("tid")),
        ts=_number(plain.get("ts")),
        dur=_number(plain.get("dur")),
        args=_args(args) if isinstance(args, dict) else None,
    )


def _args(plain: dict[str, Any]) -> Args:
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(Args):
        value = plain.get(field.encode_name)
        if value is None:
            continue
        if field.type is msgspec.Raw:  # parsed later, if needed
            values[field.name] = msgspec.Raw(json.dumps(value).encode())
        elif field.type is int:
            number = _number(value)
            values[field.name] = -1 if number is None else int(number)
        else:
            values[field.name] = _text(value)
    return Args(**values)


def _number(value: Any) -> int | float | None:
    try:
        number = value if isinstance(value, int | float) else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _text(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return _LONE_SURROGATE.sub("\ufffd", text)
