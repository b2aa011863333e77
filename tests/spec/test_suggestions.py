"""What a user meant is named: close keys and values, and what other tools call them."""

import re
from importlib.resources import files

import pytest
import yaml

from disttrain_cli.api.presets import preset_text
from disttrain_cli.errors import DisttrainError
from disttrain_cli.spec.runfile import RunFile, read_run
from disttrain_cli.spec.suggestions import field_paths

OTHERS = yaml.safe_load((files("disttrain_cli") / "templates" / "other_tools.yaml").read_text())


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("train.stepz", 3, "train.stepz: unknown key; did you mean steps?"),
        ("trian", {}, "trian: unknown key; did you mean train?"),
        ("train.lr", 1, "it is train.optimizer.lr"),
        ("train.learning_rate", 1, "here it is train.optimizer.lr"),
        ("train.Learning-Rate", 1, "here it is train.optimizer.lr"),
        ("learning_rate", 1, "here it is train.optimizer.lr"),
        ("train.epochs_", 1, "unknown key; did you mean epochs?"),
        ("train.num_train_epochs", 1, "here it is train.epochs"),
        ("train.xyzzy", 1, "unknown key; allowed here: activation_checkpointing,"),
        ("train.gpu", 1, "here it is cluster.gpus_per_node"),
        ("train.tensor_parallel_size", 2, "here it is chosen by `disttrain plan`"),
        ("data.sources.0.wieght", 2, "did you mean weight?"),
        ("model.modules.llm.lora_rank", 8, "here it is model.modules.NAME.lora.r"),
        ("train.precision", "bfloat16", "(given: 'bfloat16'); here it is bf16"),
        ("train.optimizer.schedule", "cosin", "did you mean cosine?"),
        ("cluster.device", "gpu", "auto, cpu, cuda, analytic:NAME (given: 'gpu'); here it is cuda"),
        ("train.optimizer", "adamw", "should be a mapping; allowed in it: betas, eps, lr"),
        ("cluster.slurm.partition", "a b", "allowed: letters, digits and _ . , : @ % / + [ ] -"),
        ("cluster.slurm.options", ["x"], "allowed: --option or --option=value"),
        ("cluster.kubernetes.image", "a b", "allowed: REGISTRY/NAME:TAG"),
        ("cluster.kubernetes.resources", {"m": "x x"}, "resources.m: allowed: a quantity"),
        ("name", "a/b", "allowed: letters, digits, . _ and -"),
        ("name", "a\n", "allowed: letters, digits, . _ and -"),
    ],
)
def test_a_wrong_field_says_what_is_right(tmp_path, path, value, said):
    content = yaml.safe_load(preset_text("tiny"))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    section = content
    for part in parents:
        section = section.setdefault(part, {}) if isinstance(section, dict) else section[part]
    section[last] = value
    file = tmp_path / "disttrain.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(DisttrainError) as refused:
        read_run(file)
    assert said in refused.value.why
    assert not re.search(
        r"\^|\[A-Z|Spec\b|constrained|function-", refused.value.why.split("(given")[0]
    )


def test_names_of_other_tools_lead_to_fields_that_exist_and_are_none_themselves():
    paths = {*field_paths(RunFile), "chosen"}
    assert not {
        name: ours
        for name, ours in OTHERS["keys"].items()
        if re.split("[ ,;]", ours)[0] not in paths
    }
    assert not [name for name in OTHERS["keys"] if name != name.lower().replace("-", "_")]
    top = {path for path in paths if "." not in path}
    assert not top & OTHERS["keys"].keys()
