"""Results that are read back equal those that were computed, and nothing else is ever read."""

from pathlib import Path

import pytest

from disttrain_cli.models import disk_cache, flash4
from disttrain_cli.models.disk_cache import from_disk
from disttrain_cli.models.flops import LayerFlops, count_flops
from disttrain_cli.profiling.analytic import _counted
from disttrain_cli.profiling.footprints import running
from disttrain_cli.profiling.tp_overlap import _events
from disttrain_cli.spec.layer_costs import Polynomial
from tests.cases import first_fast


def flops(model: str) -> dict[int, list[LayerFlops]]:
    counted = Polynomial(per_item=0.1 + len(model), per_token=2.0**60)
    return {2: [LayerFlops(7, counted, Polynomial(), counted, Polynomial())]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "disttrain" / "layers"


def asked(key: str) -> tuple[object, bool]:
    """A result, and whether it was computed."""
    computed: list[str] = []

    def compute() -> object:
        computed.append(key)
        return flops(key)

    return from_disk(flops, key, compute), bool(computed)


def test_a_result_is_computed_once_for_all_that_decides_it(monkeypatch):
    assert asked("a") == (flops("a"), True) and asked("a") == (flops("a"), False)
    assert asked("bb") == (flops("bb"), True)
    for room, name, other in (
        (disk_cache, "_libraries", lambda: ["torch 0"]),
        (disk_cache, "sources", lambda: "others"),
        (flash4, "_version", 4),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(room, name, other)
            assert asked("a") == (flops("a"), True), name
    assert asked("a") == (flops("a"), False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data.replace(b"7", b"8"),
        lambda data: disk_cache._digest(b"[1]") + b"\n[1]",
    ],
    ids=["empty", "cut off", "altered", "of another type"],
)
def test_damaged_files_are_computed_again_and_replaced(folder, damage):
    asked("a")
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert asked("a") == (flops("a"), True) and asked("a") == (flops("a"), False)


def test_without_a_cache_folder_it_computes(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert asked("a") == asked("a") == (flops("a"), True)

    def homeless() -> Path:
        raise RuntimeError("no home folder")

    monkeypatch.setattr(disk_cache, "cache_folder", homeless)
    assert asked("a") == (flops("a"), True)


def test_what_does_not_survive_json_is_not_stored(folder):
    def endless() -> list[float]:
        return [float("inf")]

    assert from_disk(endless, "", endless) == [float("inf")]
    assert not folder.exists()


def test_the_least_recently_used_files_are_removed(folder, monkeypatch):
    asked("a")
    (first,) = folder.iterdir()
    monkeypatch.setattr(disk_cache, "MOST_BYTES", 5 * first.stat().st_size // 2)
    for key in "bcd":
        asked(key)
    assert asked("d") == (flops("d"), False) and len(list(folder.iterdir())) == 2
    assert asked("a") == (flops("a"), True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "given", "named"),
    first_fast(
        [
            (count_flops, (), {}),
            (_counted, ("image_encoder", False), {"tp": 2}),
            (running, ("image_encoder", [1, 2]), {}),
            (_events, ("image_encoder", [1, 2]), {}),
        ]
    ),
    ids=["FLOPs", "operators", "memory and messages", "events"],
)
def test_results_about_layers_are_stored(folder, make_run, function, given, named):
    """Types that JSON cannot tell apart would be computed every time."""
    computed = function(make_run(), *given, **named)
    (path,) = folder.iterdir()
    content = path.read_bytes().partition(b"\n")[2]
    assert disk_cache._adapter(function.__wrapped__).validate_json(content) == computed


@pytest.mark.parametrize("reason", ["_extended", "_edited"])
def test_results_that_other_sources_may_decide_are_not_kept(folder, monkeypatch, reason):
    """Layers of other packages, and files that changed after this process imported them."""
    monkeypatch.setattr(disk_cache, reason, lambda: True)
    assert asked("a") == asked("a") == (flops("a"), True) and not folder.exists()
