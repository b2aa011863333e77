"""Jobs that could not start are refused, and what may stop them is noted, before anything is
written."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.api.presets import preset_text
from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.emit import visible
from disttrain_cli.runtime.launching.emit.startable import check_startable
from disttrain_cli.spec.runfile import Run, read_run
from tests.runtime.launching.test_containers import kubernetes


def make(folder: Path, *settings: str) -> Run:
    """The tiny preset with its data, changed."""
    value = yaml.safe_load(preset_text("tiny"))
    for source in value["data"]["sources"]:
        (folder / source["path"]).mkdir(parents=True, exist_ok=True)
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(value))
    return read_run(folder / "disttrain.yaml", *settings)


def check(run: Run, kind: str, **more: Any) -> list[str]:
    return check_startable(run, kind, run.folder / "out", run.dir.plan, preflight=False, **more)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("slurm", ["cluster.slurm.setup=none.sh"], "cluster.slurm.setup: there is nothing at"),
        ("torchrun", ["cluster.slurm.setup=none.sh"], "cluster.slurm.setup: there is nothing at"),
        ("slurm", ["cluster.slurm.setup=~/env.sh"], "~ stands for no folder"),
        ("slurm", ["cluster.slurm.setup=data"], "is a folder"),
        ("slurm", ["data.tokenizer=./words"], "data.tokenizer: there is nothing at"),
        ("jobset", ["data.sources=[{path: /none}]"], "data.sources[0].path: there is nothing"),
        ("slurm", ["train.on_straggler=replan", "train.restarts=1"], "are not replanned"),
        (
            "slurm",
            ["preprocess.addresses=[grpc+tls://a:8815]", "preprocess.token_file=none"],
            "preprocess.token_file: there is nothing",
        ),
        ("slurm", ["cluster.node_cores=6"], "its share of a node is 1"),
        ("torchrun", ["cluster.port=65535", "train.restarts=3"], "Set a lower cluster.port"),
        ("torchrun", ["cluster.cpu_nodes=2"], "no preprocessing nodes"),
        ("torchrun", ["cluster.hostfile=mixed"], "Other hosts cannot reach localhost"),
        ("torchrun", ["cluster.nodes=2"], "hosts by name"),
        (
            "skypilot",
            ["cluster.device=cpu", "cluster.skypilot.accelerator=H100"],
            "no GPUs, and the run file names some",
        ),
    ],
)
def test_what_could_not_start_is_refused(
    tmp_path: Path, kind: str, settings: list[str], named: str
) -> None:
    run = make(tmp_path, *settings)
    (tmp_path / "mixed").write_text("localhost slots=3\nworker-2 slots=3\n")
    with pytest.raises(SpecError) as caught:
        check(run, kind)
    assert named in str(caught.value)


def test_gpus_of_a_pod_are_the_clusters(tmp_path: Path) -> None:
    for device, gpus, allowed in (("auto", 6, True), ("auto", 4, False), ("cpu", 6, False)):
        spec = yaml.safe_dump(
            kubernetes(tmp_path, resources={"nvidia.com/gpu": gpus}), default_flow_style=True
        )
        run = make(tmp_path, f"cluster.kubernetes={spec}", f"cluster.device={device}")
        if allowed:
            assert check(run, "jobset") == []
            continue
        with pytest.raises(SpecError, match="a pod with ranks gets"):
            check(run, "jobset")


def test_what_other_hosts_do_not_see_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path)
    monkeypatch.setattr(visible, "HOSTS_OWN", (str(tmp_path),))
    (note,) = check(run, "slurm")
    assert f"the run file ({tmp_path}/disttrain.yaml)" in note and "data.sources[1].path" in note
    assert check(run, "torchrun") == []  # on this host alone
    monkeypatch.setattr(visible, "HOSTS_OWN", ())
    assert check(run, "slurm") == []


def test_models_by_name_are_downloaded_by_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path)
    monkeypatch.setattr(Run, "revisions", {"org/model": "0" * 40})
    assert "org/model" in visible.downloads(run)[0]
    assert visible.downloads(run, "[{'name': 'HF_HOME'}]") == []


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        (
            "kubernetes.image",
            ["a", "a/b:1", "localhost/a", "r.example:5000/a/b_c--d:V1.0", f"a@sha256:{'0' * 64}"],
            ["A/b", "a b", "a:", "a:b:c", "a@b", "a//b", "a/b/", "r.example/Name:1", "-a"],
        ),
        ("kubernetes.mount", ["/training", "/mnt/a", "/var/a", "/devices"], ["/", "a", "/a/../b"]),
        ("kubernetes.mount", ["/opt/a"], ["/usr", "/usr/x", "/dev/shm", "/proc", "/a:b", "~/a"]),
        ("kubernetes.namespace", ["a-1"], ["a.b", "A", "a_b", "-a", "a" * 64]),
        ("kubernetes.queue", ["gpus"], ["Gpus", "a_b"]),
        ("kubernetes.claim", ["a.b-c"], ["a..b", "a.-b", "A", "a" * 254]),
        (
            "kubernetes.node_selector",
            ["{node-role.kubernetes.io/gpu: ''}"],
            ["{a: true}", "{-./a: b}", "{a: 1}"],
        ),
        (
            "kubernetes.resources",
            ["{memory: 1500Gi, rdma/ib: 8, hugepages-2Mi: 1Gi}"],
            ["{memroy: 1Gi}", "{memory: -1}", "{memory: lots}", "{gpu: 8}"],
        ),
        ("slurm.time", ["'30'", "1-12", "'12:00:00'", "1-00:30:00"], ["'12:00'", "'5'", "12:00"]),
        ("slurm.mem", ["0", "500G", "null"], ["500GB", "-1", "true", "all"]),
        (
            "slurm.options",
            ["[--exclusive, --gres=gpu:8, --cpus-per-task=4]"],
            ["[--mem=0]", "[--nodes=3]", "[--mem-per-gpu=1G]", "[--array=1-4]", "[--no-requeue]"],
        ),
        ("port", ["29500"], ["80", "70000"]),
    ],
)
def test_values_that_the_cluster_would_not_take_are_refused(
    tmp_path: Path, field: str, allowed: list[str], refused: list[str]
) -> None:
    for value in allowed:
        make(tmp_path, f"cluster.{field}={value}")
    for value in refused:
        try:
            make(tmp_path, f"cluster.{field}={value}")
        except Exception as error:
            assert type(error).__name__ == "UsageError", value
        else:
            pytest.fail(f"cluster.{field} accepts {value}")
