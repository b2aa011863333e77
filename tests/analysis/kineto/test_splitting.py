"""Every event of a file is read exactly once, wherever it is cut."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.analysis import json_members
from disttrain_cli.analysis.kineto.splitting import Reading, read_chunks, split_events

TEXT = st.text(
    st.sampled_from('ab"\\{}[],: \n\t/é\u2028😀u') | st.characters(codec="utf-8"), max_size=12
)
VALUES = st.recursive(
    TEXT | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"ph": st.just("X"), "name": TEXT, "ts": st.integers(0, 2**50)},
        optional={"args": st.dictionaries(TEXT, VALUES, max_size=3), "x": VALUES},
    ),
    max_size=12,
)
HEADERS = st.dictionaries(TEXT, VALUES, max_size=4) | st.just(
    {"before": [{"traceEvents": []}, "traceEvents"], "flat": {}, "none": []}
)
INDENTS = st.sampled_from([None, 1])


def read(text: bytes, size: int):
    found = Reading()
    batches = split_events(read_chunks(io.BytesIO(text).read, size), found)
    return [(event.name, event.ts) for batch in batches for event in batch.events], found


def told(events):
    return [(event["name"], event["ts"]) for event in events]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(EVENTS, HEADERS, st.integers(1, 300), INDENTS, st.booleans(), st.booleans())
def test_every_event_is_read_once_and_in_order(events, before, size, indent, bare, escaped):
    document = (
        events if bare else {**before, "traceEvents": events, "behind": [{"ph": "X"}, {"ph": "X"}]}
    )
    text = json.dumps(document, indent=indent, ensure_ascii=escaped).encode()
    seen, found = read(text, size)
    assert seen == told(events) and found.events == len(events)
    assert (found.unreadable, found.truncated, found.problem) == (0, False, "")
    assert bare or found.header == {
        key: value for key, value in document.items() if key != "traceEvents"
    }


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(EVENTS, st.integers(1, 300), INDENTS, st.integers(0, 10_000))
def test_a_truncated_file_gives_the_events_before_its_end(events, size, indent, cut):
    text = json.dumps({"traceEvents": events}, indent=indent).encode()
    cut = min(cut, len(text) - 3)  # within the array, or before it
    seen, found = read(text[:cut], size)
    assert seen == told(events)[: len(seen)] and (found.truncated or found.problem)
    whole = [len(text) - len(rest) for rest in _rests(text, events)]
    assert len(seen) == sum(end <= cut for end in whole)


def _rests(text, events):
    """What follows each event in the text."""
    decoder, rest = json.JSONDecoder(), text.decode()
    at = rest.index("[") + 1
    for _ in events:
        at = rest.index("{", at)
        _, at = decoder.raw_decode(rest, at)
        yield rest[at:].encode()


@settings(max_examples=60, deadline=None)
@given(EVENTS.filter(len), st.data())
def test_a_broken_event_costs_no_other(events, data):
    at = data.draw(st.integers(0, len(events) - 1))
    texts = [json.dumps(event).encode() for event in events]
    texts[at] = data.draw(
        st.sampled_from(
            [
                b'{"ph": "X", "name": "a"b"c", "ts": 5}',
                b'{"ph": "X", "ts": 5, "x": 1e}',
                b'{"ph": "X", "ts" 5}',
            ]
        )
    )
    seen, found = read(
        b'{"traceEvents": [' + b", ".join(texts) + b"]}", data.draw(st.integers(20, 300))
    )
    left = told(events[:at] + events[at + 1 :])
    assert seen == left and found.unreadable == 1


def test_an_odd_quote_loses_its_event_and_at_most_the_next():
    events = [
        {"ph": "X", "name": f"e{number}", "ts": number, "args": {"a": {"b": "c"}}}
        for number in range(50)
    ]
    text = (
        json.dumps({"traceEvents": events}, indent=1).encode().replace(b'"e20"', b'"e20 5" disk"')
    )
    for size in (100, 1000, 100_000):
        seen, found = read(text, size)
        assert seen == told(events[:20] + events[21:]) and found.unreadable == 1, size


def test_a_missing_brace_loses_only_its_event():
    events = [
        {"ph": "X", "name": f"e{number}", "ts": number, "args": {"a": 1}} for number in range(50)
    ]
    text = json.dumps({"traceEvents": events}).encode()
    text = text.replace(b'"ts": 20, "args": {"a": 1}', b'"ts": 20, "args": {"a"')
    seen, found = read(text, 300)
    assert seen == told(events[:20] + events[21:]) and found.unreadable == 1 and not found.truncated


def test_what_is_not_json_is_mended_where_its_meaning_is_certain():
    text = (
        rb'[{"ph": "X", "name": "C:\win\x", "ts": 1}, {"ph": "X", "name": "caf'
        + b"\xe9"
        + rb'", "ts": 2},'
        b'{"ph": "X", "name": "a\nb", "ts": 3, "args": {"x": nan, "y": [-inf, 1]}},'
        rb'{"ph": "X", "name": "half \ud83d", "ts": 4}, {"ph": "X", "name": "nan: \ud83d\ude00",'
        rb' "ts": 5}]'
    )
    seen, found = read(text, 4096)
    assert seen == [
        ("C:\\win\\x", 1),
        ("caf\ufffd", 2),
        ("a\nb", 3),
        ("half \ufffd", 4),
        ("nan: 😀", 5),
    ]
    assert found.unreadable == 0


def test_files_without_events_say_why():
    for text, problem in (
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\0" * 90, "is empty"),
        (b"hello", "is not JSON"),
        (b'{"a": 1}', "contains no traceEvents"),
        (b'{"traceEvents": 5}', "contains no traceEvents"),
    ):
        seen, found = read(text, 7)
        assert seen == [] and found.problem == problem


def test_a_long_header_is_skipped_and_its_short_values_kept(monkeypatch):
    monkeypatch.setattr(json_members, "LONGEST", 500)
    long = [{"a": [{"b": '}]\\"', "c": [[], {}]}]}] * 90
    document = {"rank": 1, "long": long, "text": "x" * 999, "traceEvents": [{"ph": "X", "ts": 1}]}
    for size in (1, 7, 100, 10**6):
        seen, found = read(json.dumps(document).encode(), size)
        assert (seen, found.header, found.problem) == ([("", 1)], {"rank": 1}, "")


def test_text_is_taken_from_a_file_no_more_often_than_it_doubles():
    """A header that is read again for every chunk makes large files quadratic."""
    text = json.dumps({"a": "x" * 10**5, "b": [[1]] * 10**4}).encode()
    joined = []

    class Counted(json_members.Members):
        def _more(self):
            joined.append(len(self.rest))
            return super()._more()

    assert list(Counted(read_chunks(io.BytesIO(text).read, 100))) == [b"a", b"b"]
    assert sum(joined) < 4 * len(text)
