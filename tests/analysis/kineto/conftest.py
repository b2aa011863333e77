"""What was read is kept in a folder of the test's own."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    return folder / "disttrain"
