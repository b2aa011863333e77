"""What installed packages add is found; what cannot be added is named with its package."""

from importlib.metadata import EntryPoint

import pytest

from disttrain_cli.errors import SpecError
from disttrain_cli.spec import plugins

GROUP = "disttrain.heads"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Entry points of the group, of packages that are taken for installed."""
    entries: list[EntryPoint] = []
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [e for e in entries if e.group == group]
    )
    return entries


def test_what_packages_add_stands_behind_what_is_there(installed: list[EntryPoint]) -> None:
    installed += [EntryPoint("b", "math:pi", GROUP), EntryPoint("a", "math:e", GROUP)]
    installed.append(EntryPoint("c", "math:tau", "others"))
    assert [*plugins.with_plugins(GROUP, {"z": 0.0})] == ["z", "a", "b"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("image", "math:pi", "the name image is taken"),
        ("curve", "no_such_package:head", "ModuleNotFoundError"),
        ("curve", "math:no_such_head", "AttributeError"),
    ],
)
def test_what_cannot_be_added_is_named(
    installed: list[EntryPoint], name: str, value: str, why: str
) -> None:
    installed.append(EntryPoint(name, value, GROUP))
    with pytest.raises(SpecError) as caught:
        plugins.with_plugins(GROUP, {"image": 1.0})
    assert name in caught.value.what and value.partition(":")[0] in caught.value.next_step
    assert why in caught.value.why
