"""The one output sink: names from files cannot steer a terminal, whatever they hold."""

import json

from disttrain_cli.console import Console, format_table, to_json

EVIL = "k\x1b[2J\x1b]0;owned\x07\x9b31m\u202edesrever\x00\rgone\u2028 \udc80"


def harmless(text):
    return not any(letter in text for letter in "\x1b\x07\x9b\u202e\x00\r\u2028\udc80")


def test_what_is_said_cannot_steer_a_terminal(capsys):
    console = Console()
    console.say(EVIL)
    console.note(EVIL)
    console.hint(EVIL)
    console.error(EVIL, EVIL, EVIL)
    console.table(EVIL, [EVIL], [[EVIL]])
    console.answer([EVIL], [[EVIL], ["two\nlines\tand more"]])
    said = capsys.readouterr()
    assert harmless(said.out) and harmless(said.err)
    assert "k?[2J?]0;owned??31m?desrever??gone? ?" in said.out and "two lines and more" in said.out


def test_columns_stay_aligned_and_other_letters_as_they_are():
    assert format_table(["naïve", "µs"], [["größe – × 模型", 5], ["a\nb", 10]]).splitlines() == [
        "naïve         µs", "------------  --", "größe – × 模型   5", "a b           10"]


def test_json_holds_the_same_value_escaped():
    text = to_json({EVIL: [EVIL, "模型", float("nan")]})
    assert harmless(text.replace("\\r", "")) and json.loads(text) == {EVIL: [EVIL, "模型", None]} and "模型" in text
