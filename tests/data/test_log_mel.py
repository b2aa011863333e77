"""Features equal those that transformers makes for Whisper."""

import numpy as np
import pytest

from disttrain_cli.data.clips import decode_clip
from disttrain_cli.data.log_mel import SILENCE, decode_features, filter_bank, log_mel
from disttrain_cli.spec.heads import AudioInput
from tests.data.test_clips import sound


@pytest.mark.parametrize(("bins", "seconds"), [(80, 30), (128, 30), (16, 1)])
@pytest.mark.parametrize("share", [1e-5, 0.3, 0.9999, 1.0])
def test_features_equal_transformers(bins: int, seconds: int, share: float) -> None:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=bins, chunk_length=seconds)
    random = np.random.default_rng(bins)
    count = max(1, int(share * seconds * 16_000))
    samples = (0.4 * np.sin(np.arange(count) * 0.3) + 0.02 * random.standard_normal(count)).astype(
        np.float32
    )
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"][0]
    features = np.empty((bins, 100 * seconds), np.float32)
    log_mel(samples, AudioInput(module="ear", mel_bins=bins, frames=100 * seconds), features)
    assert np.abs(features - expected).max() < 1e-4
    assert np.abs(filter_bank(bins) - extractor.mel_filters).max() < 1e-12


def test_silence_has_one_value() -> None:
    audio = AudioInput(module="ear", mel_bins=16, frames=100)
    features = np.empty((16, 100), np.float32)
    log_mel(np.zeros(300, np.float32), audio, features)
    assert (features == np.float32(SILENCE)).all()


def test_a_file_becomes_features_or_leaves_what_was_there() -> None:
    audio = AudioInput(module="ear", mel_bins=16, frames=100)
    features = np.full((16, 100), 7, np.float32)
    for bad in (sound("flac")[:-200], sound("wav", seconds=1.1)):
        with pytest.raises(ValueError):
            decode_features(bad, audio, features)
    assert (features == 7).all()
    data, expected = sound("flac", 8_000), np.empty_like(features)
    decode_features(data, audio, features)
    log_mel(decode_clip(data, 1000), audio, expected)
    assert np.array_equal(features, expected) and np.ptp(features) > 1
