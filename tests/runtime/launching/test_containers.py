"""JobSets and SkyPilot tasks: that their readers would take them, and that what their containers
run starts, stops and ends as it should."""

import os
import re
import signal
import stat
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.emit.jobset import emit_jobset
from disttrain_cli.runtime.launching.emit.manifest import to_yaml
from disttrain_cli.runtime.launching.emit.scripts import Emitted, Start
from disttrain_cli.runtime.launching.emit.skypilot import emit_skypilot
from disttrain_cli.spec.rundir import stop_file, stopped_file
from disttrain_cli.spec.runfile import Run
from tests.runtime.launching.manifests import JobSet, PodSpec, SkyTask
from tests.runtime.launching.test_emit import ROOT, make_run, shellcheck

PROTECTED = {
    "tls_ca": "/etc/disttrain/tls/ca.crt",
    "tls_cert": "/etc/disttrain/tls/tls.crt",
    "tls_key": "/etc/disttrain/tls/tls.key",
    "token_file": "/etc/disttrain/token/token",
}


def kubernetes(folder: Path, **more: Any) -> dict[str, Any]:
    return {"image": "registry.local/disttrain:1", "claim": "training", "mount": str(folder)} | more


def emitted(
    folder: Path, cluster: dict[str, Any], *, start: Start | None = None, **sections: Any
) -> tuple[Emitted, Run]:
    """A JobSet of the tiny preset, or with `cluster.skypilot` a task."""
    run, plan, profile = make_run(folder, cluster, **sections)
    emit = emit_skypilot if "skypilot" in cluster else emit_jobset
    begun = start or Start(3)
    return emit(run, plan, profile, folder / "out", begun, plan_file=run.dir.plan), run


def manifest(written: Emitted) -> Any:
    return yaml.safe_load(Path(written.scripts[0]).read_text())


def pod(jobset: JobSet, job: int) -> PodSpec:
    return jobset.spec.replicatedJobs[job].template.spec.template.spec


# ---- JobSet ------------------------------------------------------------------------------------
def test_a_jobset_has_a_job_for_ranks_and_one_for_data(tmp_path: Path) -> None:
    cluster = {
        "nodes": 2,
        "gpus_per_node": 3,
        "device": "auto",
        "cpu_nodes": 4,
        "cpu_node_cores": 32,
        "kubernetes": kubernetes(
            tmp_path,
            namespace="research",
            queue="gpus",
            grace_s=600,
            node_selector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
            cpu_node_selector={"pool": "cpu"},
            resources={"memory": "1500Gi", "rdma/ib": 8},
            tls_secret="data-tls",
            token_secret="data-token",
        ),
    }
    written, _ = emitted(
        tmp_path, cluster, preprocess=PROTECTED | {"workers": 2}, train={"restarts": 3}
    )
    jobset = JobSet.model_validate(manifest(written))
    assert jobset.metadata.labels == {"kueue.x-k8s.io/queue-name": "gpus"}
    assert (jobset.metadata.name, jobset.metadata.namespace) == ("tiny", "research")
    ranks, data = (job.template.spec for job in jobset.spec.replicatedJobs)
    assert (ranks.completions, ranks.parallelism, ranks.backoffLimit) == (2, 2, 0)
    assert (data.completions, data.parallelism) == (4, 4)
    assert jobset.spec.failurePolicy.maxRestarts == 3
    assert jobset.spec.successPolicy.targetReplicatedJobs == ["ranks"]

    container = pod(jobset, 0).containers[0]
    assert container.resources.limits == {"nvidia.com/gpu": 3, "memory": "1500Gi", "rdma/ib": 8}
    # as Slurm gives: a rank, its backward, NCCL, its checkpoints, and the data that it takes
    assert container.resources.requests["cpu"] == 3 * 5
    assert pod(jobset, 1).containers[0].resources.requests == {"cpu": 32}
    assert {pod(jobset, job).terminationGracePeriodSeconds for job in (0, 1)} == {600}
    mounts = {mount.mountPath: mount for mount in container.volumeMounts}
    volumes = {volume.name: volume for volume in pod(jobset, 0).volumes}
    shared = volumes[mounts["/dev/shm"].name].emptyDir
    assert shared is not None and shared.medium == "Memory"
    claim = volumes[mounts[str(tmp_path)].name].persistentVolumeClaim
    assert claim is not None and claim.claimName == "training"
    # ranks have the authority and the token; the key stays where data is served
    assert {*mounts} & {*PROTECTED.values()} == {PROTECTED["tls_ca"], PROTECTED["token_file"]}
    assert {mount.mountPath for mount in pod(jobset, 1).containers[0].volumeMounts} >= {
        *PROTECTED.values()
    }
    texts = {Path(path).name: Path(path).read_text() for path in written.scripts}
    assert [*texts] == ["jobset.yaml", "jobset.sh", "data.sh", "Dockerfile"]
    assert "hosts=(tiny-ranks-0-0.tiny tiny-ranks-0-1.tiny)" in texts["jobset.sh"]
    assert "grpc+tls://tiny-data-0-3.tiny:8830" in texts["jobset.sh"]
    assert "--tls-key /etc/disttrain/tls/tls.key" in texts["data.sh"]
    assert "secret" not in "".join(texts[name] for name in ("jobset.sh", "data.sh"))
    shellcheck(written.scripts[1])
    shellcheck(written.scripts[2])


def test_what_failed_is_told_by_exit_codes(tmp_path: Path) -> None:
    """143 starts the JobSet again uncounted, 1 ends it, and every other code counts."""
    written, _ = emitted(tmp_path, {"nodes": 2, "kubernetes": kubernetes(tmp_path)})
    jobset = JobSet.model_validate(manifest(written))
    policy = jobset.spec.replicatedJobs[0].template.spec.podFailurePolicy
    assert policy is not None
    evicted, codes = policy.rules
    assert evicted.onPodConditions[0].type == "DisruptionTarget"
    assert codes.onExitCodes is not None and codes.onExitCodes.values == [1, 2, 3, 143]

    def action(message: str) -> str:
        """What the JobSet does about a job that failed by its pod failure policy."""
        for rule in jobset.spec.failurePolicy.rules:
            patterns = rule.onJobFailureMessagePatterns
            if not patterns or any(re.search(pattern, message) for pattern in patterns):
                return rule.action
        return "RestartJobSet"

    said = "Container ranks for pod a/tiny-ranks-0-1 failed with exit code {} matching FailJob rule"
    assert action(said.format(143)) == "RestartJobSetAndIgnoreMaxRestarts"
    assert (
        action("Pod a/b has condition DisruptionTarget matching FailJob rule at index 0")
        == "RestartJobSetAndIgnoreMaxRestarts"
    )
    assert action(said.format(1)) == action(said.format(14)) == "FailJobSet"


def test_nodes_with_different_numbers_of_ranks_and_a_preflight(tmp_path: Path) -> None:
    cluster = {"nodes": 2, "gpus_per_node": 4, "cpu_nodes": 2, "kubernetes": kubernetes(tmp_path)}
    written, _ = emitted(tmp_path, cluster, start=Start(3, preflight=True), train={"restarts": 5})
    jobset = JobSet.model_validate(manifest(written))
    assert [job.name for job in jobset.spec.replicatedJobs] == ["ranks"]
    assert jobset.spec.failurePolicy.maxRestarts == 0
    assert "counts=(4 2)" in Path(written.scripts[1]).read_text()


def test_the_same_run_gives_the_same_manifest(tmp_path: Path) -> None:
    cluster = {"nodes": 2, "kubernetes": kubernetes(tmp_path)}
    first = Path(emitted(tmp_path, cluster)[0].scripts[0]).read_bytes()
    assert Path(emitted(tmp_path, cluster)[0].scripts[0]).read_bytes() == first


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("My_Run", "my-run"), ("7b.v2", "b-v2"), ("a" * 60, "a" * 47), ("0", "training")],
)
def test_a_name_that_kubernetes_does_not_allow_is_refused_with_one_that_it_does(
    tmp_path: Path, name: str, allowed: str
) -> None:
    run, plan, profile = make_run(tmp_path, {"nodes": 2, "kubernetes": kubernetes(tmp_path)})
    run = run.model_copy(update={"file": run.file.model_copy(update={"name": name})})
    with pytest.raises(SpecError, match="no JobSet with the name") as caught:
        emit_jobset(run, plan, profile, tmp_path, Start(1), plan_file=run.dir.plan)
    assert caught.value.next_step.endswith(f"cluster.kubernetes.name: {allowed}")
    cluster = {"nodes": 2, "kubernetes": kubernetes(tmp_path, name=allowed)}
    assert manifest(emitted(tmp_path, cluster)[0])["metadata"]["name"] == allowed


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        emitted(tmp_path, {"nodes": 2, "kubernetes": {"image": "a"}})
    assert "kubernetes.claim, cluster.kubernetes.mount" in caught.value.why
    serving = {"nodes": 2, "cpu_nodes": 1, "kubernetes": kubernetes(tmp_path)}
    with pytest.raises(SpecError) as caught:
        emitted(tmp_path, serving, preprocess=PROTECTED)
    assert "tls_secret, cluster.kubernetes.token_secret" in caught.value.why
    with pytest.raises(SpecError, match="needs TLS and a token"):
        emitted(tmp_path, serving)
    serving["kubernetes"] |= {"tls_secret": "a", "token_secret": "b"}
    with pytest.raises(SpecError, match="tls_cert must be an absolute path"):
        emitted(tmp_path, serving, preprocess=PROTECTED | {"tls_cert": "/x/{host}.pem"})
    with pytest.raises(SpecError, match="would not find") as caught:
        emitted(tmp_path, {"nodes": 2, "kubernetes": kubernetes(tmp_path / "other")})
    assert str(tmp_path / "disttrain.yaml") in caught.value.what


def test_data_that_is_not_on_the_volume_is_named(tmp_path: Path) -> None:
    elsewhere = {"sources": [{"path": "/elsewhere/tars"}]}
    volume = {"volume": "training", "mount": str(tmp_path)}
    for where in ({"kubernetes": kubernetes(tmp_path)}, {"skypilot": volume}):
        with pytest.raises(SpecError, match="would not find /elsewhere/tars"):
            emitted(tmp_path, {"nodes": 2} | where, data=elsewhere)


def test_workers_that_run_already_are_asked_with_secrets(tmp_path: Path) -> None:
    asked = {"addresses": ["grpc+tls://data:8815"], "token_file": "/etc/token", "tls_ca": "/etc/ca"}
    with pytest.raises(SpecError) as caught:
        emitted(tmp_path, {"nodes": 2, "kubernetes": kubernetes(tmp_path)}, preprocess=asked)
    assert "tls_secret, cluster.kubernetes.token_secret" in caught.value.why
    secrets = {"tls_secret": "a", "token_secret": "b"}
    cluster = {"nodes": 2, "kubernetes": kubernetes(tmp_path, **secrets)}
    (job,) = manifest(emitted(tmp_path, cluster, preprocess=asked)[0])["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert [each["secret"]["secretName"] for each in pod["volumes"][2:]] == ["a", "b"]
    mounts = pod["containers"][0]["volumeMounts"][2:]
    assert [each["mountPath"] for each in mounts] == ["/etc/ca", "/etc/token"]
    on_volume = asked | {"token_file": "token", "tls_ca": str(tmp_path / "ca")}
    (job,) = manifest(emitted(tmp_path, cluster, preprocess=on_volume)[0])["spec"]["replicatedJobs"]
    assert len(job["template"]["spec"]["template"]["spec"]["volumes"]) == 2


# ---- YAML --------------------------------------------------------------------------------------
WORDS = [
    "1e3",
    "0x10",
    "0o7",
    "yes",
    "n",
    "NaN",
    ".inf",
    "null",
    "~",
    "2026-11-25",
    "1_000",
    "1:30",
]


@given(st.dictionaries(st.text(), st.text() | st.sampled_from(WORDS) | st.integers(), min_size=1))
def test_every_value_is_read_as_it_was_written(value: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml("", {"top": value})) == {"top": value}


@pytest.mark.parametrize("word", WORDS)
def test_strings_that_another_reader_takes_for_something_else_stand_in_quotes(word: str) -> None:
    assert to_yaml("", {"a": word}).endswith(f'a: "{word}"\n')


# ---- SkyPilot ----------------------------------------------------------------------------------
def test_a_task_of_skypilot(tmp_path: Path) -> None:
    spec = {
        "infra": "kubernetes",
        "accelerator": "H100",
        "image": "registry.local/disttrain:1",
        "volume": "training",
        "mount": str(tmp_path),
        "use_spot": True,
    }
    cluster = {"nodes": 2, "device": "auto", "skypilot": spec}
    written, _ = emitted(tmp_path, cluster, train={"restarts": 2})
    task = SkyTask.model_validate(manifest(written))
    assert task.num_nodes == 2 and task.resources.accelerators == {"H100": 3}
    assert task.volumes == {str(tmp_path): "training"} and task.resources.cpus == "15+"
    assert task.resources.job_recovery.recover_on_exit_codes == [143]
    assert written.commands == [f"sky jobs launch {tmp_path / 'out' / 'skypilot.yaml'}"]
    assert '"$attempt" -ge 2' in Path(written.scripts[1]).read_text()
    shellcheck(written.scripts[1])


@pytest.mark.parametrize("name", ["run-", "run_", "a---b", "a._.b", "7b.v2", "a__b-c"])
def test_skypilot_takes_the_name_of_a_task(tmp_path: Path, name: str) -> None:
    run, plan, profile = make_run(tmp_path, {"nodes": 2, "device": "cpu", "skypilot": {}})
    run = run.model_copy(update={"file": run.file.model_copy(update={"name": name})})
    written = emit_skypilot(run, plan, profile, tmp_path, Start(1), plan_file=run.dir.plan)
    # sky/task.py
    assert re.fullmatch(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", manifest(written)["name"])


def test_what_skypilot_cannot_have_is_refused(tmp_path: Path) -> None:
    for spec, cluster, named in (
        ({}, {"cpu_nodes": 1}, "preprocess.addresses"),
        ({}, {"device": "auto"}, "sky show-gpus"),
        ({"volume": "a"}, {}, "Give both"),
    ):
        with pytest.raises(SpecError) as caught:
            emitted(tmp_path, {"nodes": 2, "skypilot": spec} | cluster)
        assert named in caught.value.next_step


# ---- the image ---------------------------------------------------------------------------------
def test_the_image_is_built_from_the_wheel_of_a_checkout_with_its_pins(tmp_path: Path) -> None:
    written, _ = emitted(tmp_path, {"nodes": 2, "kubernetes": kubernetes(tmp_path)})
    text = Path(written.scripts[-1]).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    steps = re.findall(r"^([A-Z]+) (.+)$", text.replace("\\\n", ""), re.M)
    bases = [words.split()[0] for step, words in steps if step == "FROM"]
    assert len({*bases}) == 1  # a wheel is of the Python that made it
    version = re.fullmatch(r"python:(\d+)\.(\d+)-slim-\w+", bases[0])
    assert version is not None
    assert project["project"]["requires-python"] == f">={version[1]}.{version[2]}"

    copied = [words.split() for step, words in steps if step == "COPY"]
    here = {source for words in copied if words[0] != "--from=build" for source in words[:-1]}
    assert all((ROOT / source).exists() for source in here)
    settings = project["tool"]["setuptools"]
    needed = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    needed |= {path.split("/")[0] for paths in settings["data-files"].values() for path in paths}
    assert here == needed | {"src", "constraints.txt"}
    build, install = (words for step, words in steps if step == "RUN")
    (wheels,) = (words for words in copied if words[0] == "--from=build")
    assert "--wheel-dir /wheels /src" in build and wheels[1] == "/wheels/"
    assert f"set -- {wheels[2]}{project['project']['name']}-*.whl" in install

    extras = re.search(r'"\$1\[(.+?)\]"', install)
    assert extras is not None and "-c /opt/disttrain/constraints.txt" in install
    groups = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"]]
    wanted += [package for extra in extras[1].split(",") for package in groups[extra]]
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    names = [re.split(r"[<>=]", package)[0].replace("_", "-") for package in wanted]
    assert [name for name in names if f"\n{name}==" not in pins] == []
    assert ("CMD", '["disttrain", "--help"]') in steps
    assert "disttrain" in project["project"]["scripts"]


# ---- what the containers run -------------------------------------------------------------------
class Pods:
    """Node scripts in a stand-in for their image: a `python3` that begins, or trains until it is
    told to stop."""

    def __init__(self, folder: Path, written: Emitted, run: Run) -> None:
        self.folder, self.written, self.run = folder, written, run
        logs = run.dir.logs
        logs.mkdir(parents=True, exist_ok=True)
        tools = folder / "tools"
        tools.mkdir()
        (tools / "getent").write_text(
            f'#!/bin/bash\ntouch "{folder}/asked-$NODE"\n[[ ! -e {folder}/unknown ]]\n'
        )
        (tools / "python3").write_text(f"""#!/bin/bash
echo "$*" >> {folder}/calls
case "$*" in
*launching.begin*) rm -f {stop_file(logs)} {stopped_file(logs)}; exit "$BEGIN" ;;
*mitigation.learned*) exit 1 ;; # the training succeeded even if it cannot be judged
*'data serve'*) touch {folder}/serving; exec sleep 600 ;;
esac
while [[ "$NODE" != 0 && ! -e "{folder}/up-0" ]]; do sleep 0.05; done # hosts meet first
touch "{folder}/up-$NODE"
while [[ "$RANKS" == wait && ! -e {stop_file(logs)} ]]; do sleep 0.05; done
if [[ "$RANKS" == wait ]]; then
  stopped="$(cat {stop_file(logs)})"
  echo "${{stopped:-stop file}}" > "{folder}/stopped-$NODE" # whole or not at all, as ranks do
  mv "{folder}/stopped-$NODE" {stopped_file(logs)}
  exit 0
fi
exit "$RANKS"
""")
        for tool in tools.iterdir():
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        self.environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}

    def start(self, ranks: str, begin: int = 0, script: int = 1) -> list[subprocess.Popen[bytes]]:
        """Start both nodes' scripts, or the one of a preprocessing node."""
        for path in (*self.folder.glob("up-*"), *self.folder.glob("asked-*")):
            path.unlink()
        (self.folder / "calls").write_text("")
        return [
            subprocess.Popen(
                ["bash", self.written.scripts[script]],
                env=self.environment
                | {"JOB_COMPLETION_INDEX": str(node), "NODE": str(node)}
                | {"SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
                | {"RANKS": ranks, "BEGIN": str(begin)},
                start_new_session=True,
            )
            for node in range(2 if script == 1 else 1)
        ]

    def wait_for(self, *names: str) -> None:
        for _ in range(600):
            if all((self.folder / name).exists() for name in names):
                return
            time.sleep(0.05)
        raise AssertionError(names)

    def calls(self) -> str:
        return (self.folder / "calls").read_text()


def codes(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    return [process.wait(timeout=60) for process in processes]


@pytest.mark.slow
def test_pods_end_with_the_code_that_the_jobset_acts_on(tmp_path: Path) -> None:
    cluster = {
        "nodes": 2,
        "gpus_per_node": 4,
        "cpu_nodes": 1,
        "kubernetes": kubernetes(tmp_path, tls_secret="a", token_secret="b"),
    }
    pods = Pods(tmp_path, *emitted(tmp_path, cluster, preprocess=PROTECTED))
    refused = pods.start("0", begin=1)
    assert refused[0].wait(timeout=60) == 1
    (tmp_path / "up-0").touch()
    refused[1].wait(timeout=60)
    assert "mitigation.learned" not in pods.calls()
    assert codes(pods.start("0")) == [0, 0]
    assert pods.calls().count("mitigation.learned") == 1  # the first node's
    assert "begin" in pods.calls() and "--again 0" in pods.calls()
    agents = [line for line in pods.calls().splitlines() if "launching.agent" in line]
    assert sorted(re.findall(r"--node-rank=(\d) --nproc-per-node=(\d)", " ".join(agents))) == [
        ("0", "4"),
        ("1", "2"),
    ]
    assert "--master-addr=tiny-ranks-0-0.tiny" in agents[0]
    assert codes(pods.start("1")) == [4, 4] and "--again 1" in pods.calls()
    assert "mitigation.learned" not in pods.calls()
    assert codes(pods.start("139")) == [4, 4]

    waiting = pods.start("wait")
    pods.wait_for("up-0", "up-1")
    waiting[1].send_signal(signal.SIGTERM)  # one node is drained
    assert codes(waiting) == [143, 143]
    (tmp_path / "unknown").touch()  # the first node's name
    waiting = pods.start("wait")
    pods.wait_for("asked-0", "asked-1")
    for process in waiting:
        process.send_signal(signal.SIGTERM)
    assert codes(waiting) == [143, 143] and not pods.calls()
    (tmp_path / "unknown").unlink()
    waiting = pods.start("wait")
    pods.wait_for("up-0", "up-1")
    stop_file(pods.run.dir.logs).touch()
    assert codes(waiting) == [0, 0]


@pytest.mark.slow
def test_workers_serve_until_the_ranks_have_ended(tmp_path: Path) -> None:
    cluster = {
        "nodes": 2,
        "cpu_nodes": 1,
        "kubernetes": kubernetes(tmp_path, tls_secret="a", token_secret="b"),
    }
    pods = Pods(tmp_path, *emitted(tmp_path, cluster, preprocess=PROTECTED))
    ranks = pods.start("wait")
    pods.wait_for("up-0", "up-1")
    (workers,) = pods.start("wait", script=2)
    pods.wait_for("serving")
    workers.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        workers.wait(timeout=1.5)
    ranks[0].send_signal(signal.SIGTERM)
    assert codes(ranks) == [143, 143]
    assert workers.wait(timeout=60) == 143


def test_skypilots_nodes_start_their_ranks_again_themselves(tmp_path: Path) -> None:
    written, run = emitted(tmp_path, {"nodes": 2, "skypilot": {}}, train={"restarts": 1})
    pods = Pods(tmp_path, written, run)
    assert codes(pods.start("7")) == [4, 4]
    assert pods.calls().count("launching.agent") == 4
    assert "--again 0" in pods.calls() and "--again 2" in pods.calls()
    assert "--master-addr=10.0.0.1 --master-port=29501" in pods.calls()
