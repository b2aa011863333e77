"""What is trained decides what backwards do."""

from disttrain_cli.costs.freezing import backwards
from tests.planning import synthetic


def test_nothing_is_before_an_encoder() -> None:
    """A frozen audio encoder has no backward, though the image encoder beside it is trained; the
    LLM passes on."""
    profile = synthetic.with_audio(synthetic.tiny(synthetic.run_file()))
    does = {
        name: set(states)
        for name, states in backwards(profile, ["image_encoder", "image_generator"]).items()
    }
    assert does == {
        "image_encoder": {"trained"},
        "audio_encoder": {"still"},
        "llm": {"passes"},
        "image_generator": {"trained"},
    }
    assert set(backwards(profile, ["image_generator"])["llm"]) == {"still"}
    assert set(backwards(profile, ["audio_encoder"])["llm"]) == {"passes"}


def test_only_encoders_and_the_llm_are_before_a_generator() -> None:
    profile = synthetic.with_refiner(synthetic.tiny(synthetic.run_file()))
    does = {name: set(states) for name, states in backwards(profile, ["image_generator"]).items()}
    assert does["image_generator"] == {"trained"} and does["refiner"] == {"still"}
    assert set(backwards(profile, ["llm"])["refiner"]) == {"passes"}
