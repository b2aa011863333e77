"""YAML from strangers: what grows, nests or refers to itself is refused by its line, at once."""

import pytest
import yaml

from disttrain_cli.spec.yaml_text import MOST_NESTED, lines_of, load_yaml


def multiplied(times):
    """Ten values, ten times ten, …: 10^times in few lines."""
    rows = ["a0: &a0 [" + ", ".join("1" * 10) + "]"]
    return "\n".join(
        rows + [f"a{row}: &a{row} [{', '.join([f'*a{row - 1}'] * 10)}]" for row in range(1, times)]
    )


def chained(levels):
    """Lists in lists, each level by an alias of the one before."""
    return "\n".join(
        ["a0: &a0 [1]", *(f"a{level}: &a{level} [*a{level - 1}]" for level in range(1, levels))]
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (multiplied(12), "more than 200,000 values, counting those of aliases, in line 6"),
        ("a: [" + "1, " * 200_001 + "]", "more than 200,000 values"),
        ("a: &a\n  b: [*a]", "the alias *a is inside the value that it refers to, in line 2"),
        ("a: &a\n  <<: *a", "the alias *a is inside the value that it refers to, in line 2"),
        (chained(MOST_NESTED + 1), "nested more than 64 levels deep"),
        ("[" * 100_000, "nested more than 64 levels deep, in line 1"),
        ('a: 1\nb: "x\\0y"', "a null character, which file names cannot contain, in line 2"),
        ("a: *b", "found undefined alias"),
        ("a: 1\nb: " + "9" * 5_000, "in line 2, column 4"),
        ("a: 1\nb: 2024-99-99", "in line 2, column 4"),
        ("a: 1\nb: !!int x", "in line 2, column 4"),
        ("a: 1\nb: -1:30.5", "-1:30.5 is -90.5 in YAML, which reads it in base 60"),
        ("a: 1\nb: 0360", "0360 is 240 in YAML, which reads it in base 8"),
        ("a: 1\na: 2", "the key 'a' is given twice\n  in line 2"),
        ("a: 1\n\tb: 2", "in line 2"),
    ],
)
def test_what_is_refused_has_a_place(text, named):
    with pytest.raises(ValueError, match=r".") as refused:
        load_yaml(text)
    assert named in str(refused.value) and "<" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        multiplied(5),
        chained(MOST_NESTED - 1),
        "a: &a {b: 1}\nc: {<<: *a, d: 2}",
        "a: &a 1\nb: *a",
        "",
        "x",
        "a: &a [1]\nb: &b [*a, 2]\nc: *b",
    ],
)
def test_what_is_small_is_read_as_ever(text):
    assert load_yaml(text) == yaml.safe_load(text)


def test_lines_of_places():
    text = "a:\n  b:\n  - c: 1\n  - {c: 2,\n     d: 3}\ne: 4\n"
    assert lines_of(
        text,
        [("a", "b", 1, "d"), ("a", "b", 0, "missing"), ("e", "float"), ("missing",), ("a", "b", 7)],
    ) == [5, 3, 6, None, 2]
    assert lines_of("a: [", [("a",)]) == [None]
