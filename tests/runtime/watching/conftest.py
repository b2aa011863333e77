import pytest
import torch

from tests.runtime.watching.simulated_gpu import Event, Gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu(ppm=40.0)
    monkeypatch.setattr(Event, "gpu", found, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    return found
