"""Every command that README, tour and how-tos print, run as it stands there from an installed
wheel, in a folder for each page."""

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import documented
from tests.analysis.kineto import traces
from tests.analysis.study import megatron
from tests.data.dataset import encoded
from tests.documented import PAGES, ROOT
from tests.whole_models import TEXT, TOWER, spread, tokenizer, write_llava

#: Commands that cannot run here, by how they begin, and why.
ELSEWHERE = {
    "python -m pip install '.[demo]'": "downloads its dependencies",
    "docker ": "needs Docker",
    "kubectl ": "needs Kubernetes",
    "sky ": "needs SkyPilot",
    "pytest ": "is of a checkout, not of a wheel: `make test` and `make test-slow` run these tests",
}
PROFILES = files("disttrain_cli") / "templates" / "presets"
#: Fields of the presets and of own-vlm.md's run file, where their sizes would take hours here.
FEW_STEPS = {"train.steps": 2, "samples.images": 2, "samples.read": 2}
ON_TWO_CORES = {
    "train.global_batch_size": 4,
    "train.steps": 2,
    "train.precision": "fp32",
    "data.sequence_length": 256,
    "data.max_image_pixels": 1024,
    "cluster.gpus_per_node": 2,
}


def edit(file: Path, changes: dict[str, Any]) -> None:
    """Change fields of a run file, by their dotted paths."""
    content = yaml.safe_load(file.read_text())
    for path, value in changes.items():
        *sections, name = path.split(".")
        section = content
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    file.write_text(yaml.safe_dump(content, sort_keys=False))


def preset(name: str, changes: dict[str, Any], folder: Path) -> None:
    """Write the run file of a preset."""
    shutil.copy(str(PROFILES / f"{name}.yaml"), folder / "disttrain.yaml")
    edit(folder / "disttrain.yaml", changes)


def talks(folder: Path) -> None:
    """Write conversations about pictures into talks.jsonl."""
    lines = []
    for number in range(24):
        (folder / f"{number}.jpg").write_bytes(encoded(40, 60, shade=10 * number))
        asked = [{"type": "image", "image": f"{number}.jpg"}, {"type": "text", "text": "Which?"}]
        said = [{"type": "text", "text": f"Number {number % 3}."}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": turns}))
    (folder / "talks.jsonl").write_text("\n".join(lines))


def own_model(folder: Path) -> None:
    (folder / "model").rename(folder / "qwen2.5-vl-7b")
    talks(folder)


def published_llava(folder: Path) -> None:
    write_llava(folder / "llava-1.5-7b-hf")
    talks(folder)


def two_folders(folder: Path) -> None:
    """Write a vision tower, an LLM with its tokenizer, and the page's run file that joins them."""
    import transformers

    tower = transformers.SiglipVisionConfig(**TOWER)
    spread(transformers.SiglipVisionModel(tower)).save_pretrained(folder / "siglip")
    llm = transformers.Qwen2Config(**TEXT, max_position_embeddings=8192)
    spread(transformers.Qwen2ForCausalLM(llm)).save_pretrained(folder / "qwen2.5-7b")
    tokenizer().save_pretrained(folder / "qwen2.5-7b")
    written = documented.blocks_of(ROOT / "docs" / "howto" / "own-vlm.md", "yaml")
    (folder / "disttrain.yaml").write_text(written[0])


def own_data(folder: Path) -> None:
    """Name the data as the page does in its second run file, and train the projectors first."""
    (folder / "data").mkdir()
    talks(folder / "data")
    written = documented.blocks_of(ROOT / "docs" / "howto" / "own-vlm.md", "yaml")
    file = folder / "disttrain.yaml"
    content = yaml.safe_load(file.read_text())
    content["data"].pop("distribution")
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    of_page = yaml.safe_load(written[1])
    given = {
        f"{section}.{name}": value
        for section, fields in of_page.items()
        for name, value in fields.items()
    }
    edit(file, given | ON_TWO_CORES | {"model.trained": ["projectors"]})


def joint(folder: Path) -> None:
    shutil.copy(folder / "disttrain.yaml", folder / "joint.yaml")
    changes = {"name": "joint", "model.trained": ["projectors", "llm"]}
    edit(folder / "joint.yaml", changes)


def demo(folder: Path, changes: dict[str, Any]) -> None:
    """Write the demo's run file and data."""
    command = ["disttrain", "init", "demo", "--preset", "tiny", "--sample-data"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    for path in (folder / "demo").iterdir():
        path.rename(folder / path.name)
    edit(folder / "disttrain.yaml", changes)


def on_kubernetes(folder: Path) -> None:
    section = {"image": "registry.example/disttrain:1", "claim": "training", "mount": str(folder)}
    demo(folder, FEW_STEPS | {"cluster.kubernetes": section})
    subprocess.run(["disttrain", "profile"], cwd=folder, check=True, capture_output=True)


def on_skypilot(folder: Path) -> None:
    section = {"accelerator": "H100", "image": "registry.example/disttrain:1"}
    where = {"infra": "kubernetes", "volume": "training", "mount": str(folder)}
    edit(folder / "disttrain.yaml", {"cluster.skypilot": section | where})


def on_slurm(folder: Path) -> None:
    (folder / "env.sh").touch()
    section = {"partition": "gpu", "time": "12:00:00", "setup": "env.sh"}
    demo(folder, FEW_STEPS | {"cluster.slurm": section})


def by_ssh(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=6\n")
    edit(folder / "disttrain.yaml", {"cluster.hostfile": "hosts"})


def rehearsed(folder: Path) -> None:
    changes = {"cluster.nodes": 3, "train.global_batch_size": 48}
    preset("mllm-9b", changes, folder)
    for words in (["profile"], ["plan"]):
        subprocess.run(["disttrain", *words], cwd=folder, check=True, capture_output=True)


def priced(folder: Path) -> None:
    """Change the run file as the page says, to what would be bought and for how much."""
    (written,) = documented.blocks_of(ROOT / "docs" / "howto" / "plan-before-buying.md", "yaml")
    fields = yaml.safe_load(written)["cluster"]
    edit(folder / "disttrain.yaml", {f"cluster.{name}": value for name, value in fields.items()})


def kineto(name: str, folder: Path) -> None:
    (folder / name).mkdir()
    traces.job(folder / name, [[400, 410, 405, 402]] * 7 + [[900, 905, 910, 915]])


def operations(folder: Path) -> None:
    (folder / "straggler-ST").mkdir()
    rows = megatron.rows(megatron.Job())
    megatron.write(folder / "straggler-ST" / "trace.parquet", rows)


LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
#: By page: what a command needs in its folder that no command of the page has written.
NEEDS: dict[str, dict[str, Callable[[Path], None]]] = {
    "README.md": {
        "disttrain analyze traces/": partial(kineto, "traces"),
        "disttrain plan --gpus 8,64 --device H100,B200": partial(preset, "qwen2.5-vl-7b", {}),
        "disttrain init my-run --folder qwen2.5-vl-7b --data talks.jsonl": own_model,
    },
    "docs/tour.md": {
        "disttrain profile": partial(demo, changes={}),
        "disttrain train --rehearse": rehearsed,
    },
    "docs/howto/kubernetes.md": {
        "disttrain plan": on_kubernetes,
        "disttrain train --emit skypilot": on_skypilot,
    },
    "docs/howto/lora.md": {
        "disttrain profile": partial(demo, changes=FEW_STEPS | {"model.modules.llm.lora": LORA}),
    },
    "docs/howto/own-vlm.md": {
        "disttrain init my-vlm --folder llava-1.5-7b-hf --data talks.jsonl": published_llava,
        "disttrain profile": two_folders,
        "disttrain data check": own_data,
        "disttrain profile joint.yaml": joint,
    },
    "docs/howto/plan-before-buying.md": {
        "disttrain plan --gpus 8,16,64 --device H100,B200": priced,
    },
    "docs/howto/pytorch-traces.md": {
        "disttrain analyze dlrm-8rank --html report.html": partial(kineto, "dlrm-8rank"),
        "disttrain analyze straggler-ST": operations,
    },
    "docs/howto/slurm.md": {
        "disttrain profile": on_slurm,
        "disttrain train --emit torchrun --out scripts": by_ssh,
    },
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def why_elsewhere(command: str) -> str | None:
    return next((why for first, why in ELSEWHERE.items() if command.startswith(first)), None)


def test_what_is_left_out_and_prepared_is_of_commands_that_pages_print() -> None:
    printed = {name_of(page): list(documented.commands_of(page)) for page in PAGES}
    every = [command for commands in printed.values() for command in commands]
    assert len(every) > 70
    assert all(any(one.startswith(first) for one in every) for first in ELSEWHERE)
    assert all(not of.keys() - set(printed[page]) for page, of in NEEDS.items())


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of the environment in which the wheel is installed."""
    return documented.install_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.benchmark
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_a_page_runs_as_printed(
    page: Path,
    variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    where, needs = tmp_path / "where", dict(NEEDS.get(name_of(page), {}))
    here = tmp_path / "page"
    here.mkdir()
    for command in documented.commands_of(page):
        if why := why_elsewhere(command):
            print(f"not run, as it {why}: {command}")
            continue
        if prepare := needs.pop(command, None):  # once, before the first of its name
            prepare(here)
        done = subprocess.run(
            ["bash", "-c", f'{command}\ncode=$?; pwd > "{where}"; exit $code'],
            cwd=here,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        print(f"$ {command}\n{done.stdout}{done.stderr}")
        assert done.returncode == 0 and "Traceback" not in done.stderr, command
        here = Path(where.read_text().strip())
