"""`cluster.kubernetes.pod_patch`: what it adds to pods, and that it changes and loses nothing."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.runfile.containers import PodPatch
from tests.runtime.launching.manifests import JobSet
from tests.runtime.launching.test_containers import PROTECTED, emitted, kubernetes, manifest, pod
from tests.runtime.launching.test_emit import ROOT


def patched(folder: Path, patch: Any, **cluster: Any) -> Any:
    spec = kubernetes(
        folder, pod_patch=patch, tls_secret="a", token_secret="b", node_selector={"pool": "a"}
    )
    preprocess = PROTECTED if cluster.get("cpu_nodes") else {}
    written, _ = emitted(folder, {"nodes": 2, "kubernetes": spec} | cluster, preprocess=preprocess)
    return manifest(written)


def test_the_patch_of_the_how_to_is_in_the_pods(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "howto" / "kubernetes.md").read_text()
    (block,) = (one for one in re.findall(r"```yaml\n(.*?)```", text, re.S) if "pod_patch" in one)
    patch = yaml.safe_load(block)["cluster"]["kubernetes"]["pod_patch"]
    jobset = JobSet.model_validate(patched(tmp_path, patch, cpu_nodes=1))
    for job, template in enumerate(
        each.template.spec.template for each in jobset.spec.replicatedJobs
    ):
        assert template.metadata.annotations == {"sidecar.istio.io/inject": "false"}
        spec = template.spec
        assert spec.serviceAccountName == "trainer" and not spec.automountServiceAccountToken
        assert [one.name for one in spec.imagePullSecrets] == ["registry"]
        assert [one.key for one in spec.tolerations] == ["nvidia.com/gpu"]
        (shared,) = (one.emptyDir for one in spec.volumes if one.name == "shared-memory")
        assert shared is not None and (shared.medium, shared.sizeLimit) == ("Memory", "64Gi")
        (container,) = spec.containers
        names = [one.name for one in container.env]
        assert names == (["NCCL_DEBUG", "HF_HOME"] if job == 0 else [])
        assert bool(container.securityContext) is (job == 0)
    plain = JobSet.model_validate(patched(tmp_path, {}, cpu_nodes=1))
    for job in (0, 1):  # all else is as without it
        assert pod(jobset, job).containers[0].command == pod(plain, job).containers[0].command


def test_nothing_of_a_patch_is_lost(tmp_path: Path) -> None:
    """Empty mappings, volumes, mounts, and a value that the job has, too."""
    spec = {
        "securityContext": {},
        "automountServiceAccountToken": True,
        "restartPolicy": "Never",
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "containers": [
            {"name": "ranks", "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
        ],
    }
    jobset = JobSet.model_validate(patched(tmp_path, {"spec": spec}))
    ranks = pod(jobset, 0)
    assert ranks.automountServiceAccountToken and ranks.securityContext is not None
    assert [one.name for one in ranks.volumes] == ["run", "shared-memory", "scratch"]
    paths = [one.mountPath for one in ranks.containers[0].volumeMounts]
    assert paths == [str(tmp_path), "/dev/shm", "/scratch"]


RANKS = "spec.containers[ranks]"


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"containers": [{"name": "ranks", "command": ["sh"]}]}, f"{RANKS}.command is the job's"),
        ({"containers": [{"name": "ranks", "args": ["-x"]}]}, f"{RANKS}.args cannot be set"),
        ({"containers": [{"name": "ranks", "image": "b"}]}, "Set cluster.kubernetes.image instead"),
        (
            {"containers": [{"name": "ranks", "resources": {"requests": {"cpu": 5}}}]},
            "Set cluster.kubernetes.resources instead",
        ),
        ({"containers": [{"name": "rank"}]}, "no container rank"),
        ({"containers": [{"name": "data"}]}, "no container data"),  # of preprocessing pods
        ({"containers": [{"image": "b"}]}, "a list of mappings with name"),
        ({"containers": {"name": "ranks"}}, "a list of mappings with name"),
        ({"containers": [{"name": "ranks"}, {"name": "ranks"}]}, "has ranks twice"),
        ({"containers": [{"name": "ranks", "env": [{"name": "RANK", "value": "1"}]}]}, "sets RANK"),
        (
            {"containers": [{"name": "ranks", "env": [{"name": "NCCL_SOCKET_IFNAME"}]}]},
            "Set cluster.interface",
        ),
        (
            {"containers": [{"name": "ranks", "env": [{"name": "A"}, {"name": "A"}]}]},
            "has A twice",
        ),
        (
            {"containers": [{"name": "ranks", "volumeMounts": [{"name": "x", "mountPath": "/x"}]}]},
            "which the pod does not have",
        ),
        (
            {
                "containers": [
                    {"name": "ranks", "volumeMounts": [{"name": "run", "mountPath": "/dev/shm/"}]}
                ]
            },
            "[/dev/shm].name is the job's own",
        ),
        ({"initContainers": [{"image": "b"}]}, "spec.initContainers must be a list"),
        ({"volumes": [{"name": "run", "hostPath": {"path": "/x"}}]}, "would change a volume"),
        (
            {"volumes": [{"name": "run", "persistentVolumeClaim": {"readOnly": True}}]},
            "would change a volume",
        ),
        (
            {"volumes": [{"name": "shared-memory", "emptyDir": {"medium": ""}}]},
            "emptyDir.medium is the job's own",
        ),
        ({"terminationGracePeriodSeconds": 1}, "Set cluster.kubernetes.grace_s"),
        ({"nodeSelector": {"pool": "b"}}, "Set cluster.kubernetes.node_selector"),
        ({"restartPolicy": "Always"}, "spec.restartPolicy is the job's own"),
        ({"subdomain": "b"}, "spec.subdomain cannot be set"),
        ({"hostNetwork": True}, "ClusterFirstWithHostNet"),
    ],
)
def test_a_patch_that_changes_what_the_job_needs_is_refused_by_name(
    tmp_path: Path, spec: dict[str, Any], named: str
) -> None:
    with pytest.raises(SpecError) as caught:
        patched(tmp_path, {"spec": spec}, interface="eth0")
    assert named in str(caught.value) and "cluster.kubernetes.pod_patch" in caught.value.what
    assert not (tmp_path / "out").exists()


def test_labels_that_the_controllers_set_are_refused(tmp_path: Path) -> None:
    for label in ("job-name", "jobset.sigs.k8s.io/jobset-name"):
        with pytest.raises(SpecError, match="set by JobSet and Job"):
            patched(tmp_path, {"metadata": {"labels": {label: "a"}}})


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ("tolerations: []", "extra_forbidden"),  # it belongs into spec
        ("metadata: {name: a}", "extra_forbidden"),
        ("metadata: {annotations: {a: true}}", "string_type"),
        ("metadata: {labels: {a: 1.5}}", "string_type"),
        ("spec: {containers: [{name: ranks, env: [{name: A, value: 1}]}]}", "a number (1)"),
        ("spec: {containers: [{name: ranks, env: [{name: on, value: a}]}]}", "true or false"),
        ("spec: {nodeSelector: {a: yes}}", "spec.nodeSelector.a: Kubernetes wants a string"),
        ("spec: {tolerations: [{value: 2026-01-01}]}", "a date (2026-01-01)"),
        ("spec: {initContainers: [{name: a, command: [sleep, 5]}]}", "command[1]"),
        ("spec: {tolerations:}", "a patch removes nothing"),
        ("spec: {nodeSelector: {1: a}}", "the key 1"),
    ],
)
def test_values_that_yaml_reads_as_another_type_are_refused(patch: str, named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PodPatch.model_validate(yaml.safe_load(patch))
    assert named in str(caught.value)
