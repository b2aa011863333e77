"""Units that each strategy may have."""

from disttrain_cli.planning.units import Cluster, groupings
from disttrain_cli.spec.plan import Strategy
from tests.planning import synthetic


def test_strategies_group_modules() -> None:
    """Each one's own unit, all in one, or any run around the LLM, as far as there are devices."""
    profile = synthetic.with_audio(synthetic.tiny(synthetic.run_file(batch=24, gpus=8)))
    image, audio, llm, generator = profile.modules

    def found(strategy: Strategy, gpus: int = 8) -> list[list[tuple[str, ...]]]:
        groups = groupings(profile, Cluster(gpus, 8, 4.0, 1, 24), strategy)
        return [[unit.modules for unit in units] for units in groups]

    alone = [(image,), (audio,), (llm,), (generator,)]
    whole = [(image, audio, llm, generator)]
    every = [
        alone,
        [(image,), (audio,), (llm, generator)],
        [(image,), (audio, llm), (generator,)],
        [(image,), (audio, llm, generator)],
        [(image, audio, llm), (generator,)],
        whole,
    ]
    assert found("auto") == every
    assert found("disaggregated") == [alone]
    assert found("megatron") == [whole]
    assert found("auto", 3) == every[1:]
    assert found("auto", 1) == found("disaggregated", 1) == [whole]
    units = groupings(profile, Cluster(8, 8, 4.0, 1, 24), "auto")
    assert [unit.name for unit in units[4]] == [f"{image}+{audio}+{llm}", generator]
    assert units[5][0].name == "model" and units[0][0] is units[1][0]


def test_each_module_beside_the_llm_is_divided_or_whole() -> None:
    """Every choice, as U-Nets may not divide where an encoder is too large to be whole."""
    profile = synthetic.tiny(synthetic.run_file(batch=24, gpus=8), tps=(1, 2))
    image, _, generator = profile.modules

    def found(strategy: Strategy) -> set[tuple[str, ...]]:
        groups = groupings(profile, Cluster(8, 8, 4.0, 1, 24), strategy)
        return {units[0].replicated for units in groups if len(units) == 1}

    every = {(), (image,), (generator,), (image, generator)}
    assert found("auto") == found("megatron") == every
    assert found("disaggregated") == set()
