"""`--emit jobset`: a Kubernetes JobSet with a job for the ranks, and one for data preprocessing.

Follows the API jobset.x-k8s.io/v1alpha2 of JobSet 0.10, batch/v1 and core/v1 of Kubernetes.
A pod is a node. Pods exit with 143 after a stop request with a checkpoint: then the JobSet restarts
all of them without counting it; with 1 when the job was refused: then it fails; otherwise restarts
are counted (`train.restarts`).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.emit.containers import (
    PYTHON,
    write_dockerfile,
    write_script,
)
from disttrain_cli.runtime.launching.emit.cores import cpus_per_rank
from disttrain_cli.runtime.launching.emit.hosts import numbered_nodes
from disttrain_cli.runtime.launching.emit.manifest import to_yaml, without_nothing
from disttrain_cli.runtime.launching.emit.pod_patch import patched
from disttrain_cli.runtime.launching.emit.scripts import Emitted, Start, filled, write_job
from disttrain_cli.runtime.launching.emit.serving import addresses, check_protected, serve_command
from disttrain_cli.runtime.launching.emit.visible import check_mounted
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.containers import DNS_LABEL
from disttrain_cli.spec.whole import write_whole

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile

RANKS, DATA = "ranks", "data"  # names of the jobs, and of their containers
GPU = "nvidia.com/gpu"  # resource name
HOST_NAME = 63  # longest name of a pod, which ends in five letters that Kubernetes adds
REFUSED, STOPPED = (1, 2, 3), 143  # exit codes of a node's script (`templates/launch/node.sh`)


#: File that each key of a secret is mounted as, by secret (tls, token) and key.
Secrets = dict[str, dict[str, str | None]]


def emit_jobset(
    run: Run, plan: Plan, profile: Profile, folder: Path, start: Start, *, plan_file: Path
) -> Emitted:
    """Write the manifest, the scripts of its pods, a job file and the image's Dockerfile.

    Raises:
        SpecError: as `check`, or the plan needs more nodes.
    """
    serving = run.file.cluster.cpu_nodes > 0 and not start.preflight
    check(run, folder, serving, plan_file=plan_file)
    nodes = numbered_nodes(run, plan, profile)
    name = _name(run)
    job = write_job(run, plan, profile, folder, nodes, start)
    hosts = [f"{name}-{RANKS}-0-{number}.{name}" for number in range(len(nodes))]
    place = f'node="$JOB_COMPLETION_INDEX"\nhosts=({shlex.join(hosts)})'
    ended = shlex.quote(str((folder / "ended").resolve()))
    scripts = [
        write_script(
            run,
            job,
            start,
            nodes,
            kind="jobset",
            place=place,
            restarts=0,
            workers=_workers(run, name, ended) if serving else "",
        )
    ]
    if serving:
        tls = run.file.preprocess
        command = serve_command(
            run, plan_file, "--tls-cert", str(tls.tls_cert), "--tls-key", str(tls.tls_key)
        )
        text = filled(
            "data.sh",
            {"run": run.file.name, "ended": ended, "python": PYTHON, "command": command},
        )
        scripts.append(write_whole(folder / "data.sh", text))
    most = max(len(node.ranks) for node in nodes)
    jobs = [_ranks_job(run, scripts[0], len(nodes), most, serving)]
    if serving:
        jobs.append(_data_job(run, scripts[1]))
    comment = f"The run {run.file.name}; written by: disttrain train --emit jobset"
    jobset = without_nothing(_jobset(run, start, name))
    jobset["spec"]["replicatedJobs"] = jobs
    manifest = write_whole(_file(folder), to_yaml(comment, jobset))
    written = [manifest, *scripts, write_dockerfile(folder)]
    return Emitted(job=str(job), scripts=[str(path) for path in written], commands=commands(folder))


def check(run: Run, folder: Path, serving: bool, *, plan_file: Path) -> None:
    """Refuse a job that could not start, before there is a plan.

    Raises:
        SpecError: a name that Kubernetes does not allow; required fields of `cluster.kubernetes`
            that are missing, or forbidden ones in its `pod_patch`; files outside the volume;
            preprocessing nodes without TLS and a token.
    """
    cluster, spec = run.file.cluster, run.file.cluster.kubernetes
    _name(run)
    _check_said(run, serving)
    assert spec.mount is not None
    check_mounted(run, spec.mount, [folder, plan_file], "cluster.kubernetes.mount")
    _ranks_job(run, folder / "jobset.sh", cluster.nodes, cluster.gpus_per_node, serving)
    if serving:
        _data_job(run, folder / "data.sh")


def commands(folder: Path) -> list[str]:
    """Return the commands for the user to run."""
    return [shlex.join(["kubectl", "apply", "--filename", str(_file(folder).resolve())])]


def _file(folder: Path) -> Path:
    return folder / "jobset.yaml"


def _name(run: Run) -> str:
    """Return the JobSet's name; its pods are called NAME-ranks-0-N-xxxxx.

    Raises:
        SpecError: Kubernetes does not allow such names.
    """
    cluster = run.file.cluster
    name, pods = cluster.kubernetes.name or run.file.name, max(cluster.nodes, cluster.cpu_nodes)
    longest = HOST_NAME - len(f"-{RANKS}-0-{pods - 1}-xxxxx")
    if re.fullmatch(DNS_LABEL, name) and len(name) <= longest:
        return name
    allowed = re.sub(r"[^a-z0-9]+", "-", name.lower())
    allowed = re.sub(r"^[^a-z]+", "", allowed)[:longest].strip("-") or "training"
    raise SpecError(
        f"Kubernetes allows no JobSet with the name {name}",
        f"small letters, digits and hyphens, a letter first, at most {longest} characters (its pods"
        " have longer names)",
        f"Set another in the run file: cluster.kubernetes.name: {allowed}",
    )


def _check_said(run: Run, serving: bool) -> None:
    """Raise SpecError if the run file lacks fields that the manifest needs."""
    spec, tls = run.file.cluster.kubernetes, run.file.preprocess
    if serving:
        check_protected(run)
    needed = {"image": spec.image, "claim": spec.claim, "mount": spec.mount}
    needed |= {f"{name}_secret": _secret(run, name) for name in _secrets(run, serving)}
    missing = [f"cluster.kubernetes.{name}" for name, value in needed.items() if value is None]
    if missing:
        raise SpecError(
            "A JobSet needs an image and a volume"
            + ", and secrets to be served data" * (len(needed) > 3),
            f"missing in the run file: {', '.join(missing)}",
            "docs/howto/kubernetes.md says what they are.",
        )
    gpus = spec.resources.get(GPU)
    if gpus is not None and str(gpus) != str(_gpus(run)):
        raise SpecError(
            f"cluster.kubernetes.resources: a pod with ranks gets {_gpus(run)} of {GPU}",
            f"given: {gpus}; cluster.device: {run.file.cluster.device}, cluster.gpus_per_node:"
            f" {run.file.cluster.gpus_per_node}",
            "Take it out of resources, or correct cluster.gpus_per_node and plan again.",
        )
    for name, path in (
        ("tls_ca", tls.tls_ca),
        ("tls_cert", tls.tls_cert),
        ("tls_key", tls.tls_key),
        ("token_file", tls.token_file),
    ):
        if serving and (
            "{host}" in str(path) or ":" in str(path) or not Path(str(path)).is_absolute()
        ):
            raise SpecError(
                f"preprocess.{name} must be an absolute path inside the pods, the same in all",
                f"given: {path}",
                "Name where the secret is to be mounted, such as /etc/disttrain/tls/tls.crt; one"
                " certificate serves all pods (*.NAME, see docs/howto/kubernetes.md).",
            )


def _gpus(run: Run) -> int:
    """Return the GPUs of a pod with ranks."""
    cluster = run.file.cluster
    return 0 if cluster.device == "cpu" else cluster.gpus_per_node


def _secrets(run: Run, serving: bool) -> Secrets:
    """Return the files that ranks read from secrets, by secret and key.

    Where preprocessing workers run already, only files that are not on the volume.
    """
    given, mount = run.file.preprocess, run.file.cluster.kubernetes.mount
    files = {"tls": {"ca.crt": given.tls_ca}, "token": {"token": given.token_file}}
    if serving:
        return files
    return {
        secret: {key: str(run.resolve(path))}
        for secret, keys in files.items()
        for key, path in keys.items()
        if given.addresses and path and mount and not run.resolve(path).is_relative_to(mount)
    }


def _secret(run: Run, kind: str) -> str | None:
    spec = run.file.cluster.kubernetes
    return spec.tls_secret if kind == "tls" else spec.token_secret


def _workers(run: Run, name: str, ended: str) -> str:
    """Return lines of shell that export the workers' addresses and stop the workers at the end.

    Creating the file `ended` stops the preprocessing workers.
    """
    hosts = [f"{name}-{DATA}-0-{number}.{name}" for number in range(run.file.cluster.cpu_nodes)]
    lines = [
        f"export DISTTRAIN_WORKERS={addresses(run, hosts)}",
        'if [[ "$node" -eq 0 ]]; then',
        f"  rm -f {ended}",
        f"  trap {shlex.quote(f'touch {ended}')} EXIT",
        "fi",
    ]
    return "\n".join(lines)


def _jobset(run: Run, start: Start, name: str) -> dict[str, Any]:
    """Return the JobSet without its jobs."""
    spec = run.file.cluster.kubernetes
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "namespace": spec.namespace,
            "labels": {"kueue.x-k8s.io/queue-name": spec.queue},
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [RANKS]},
            "failurePolicy": {
                "maxRestarts": start.restarts(run),
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "stopped",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "onJobFailureMessagePatterns": [
                            "DisruptionTarget",
                            f"exit code {STOPPED} ",
                        ],
                        "targetReplicatedJobs": [RANKS],
                    },
                    {
                        "name": "refused",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "targetReplicatedJobs": [RANKS],
                    },
                ],
            },
        },
    }


def _ranks_job(run: Run, script: Path, nodes: int, most: int, serving: bool) -> dict[str, Any]:
    """Return the job of the ranks: a pod for every node, which takes all its GPUs."""
    spec = run.file.cluster.kubernetes
    devices = {GPU: gpus} if (gpus := _gpus(run)) else {}
    limits = devices | spec.resources
    requests = {"cpu": cpus_per_rank(run, serving) * most} | limits
    secrets = _secrets(run, serving)
    policy = {
        "rules": [
            {
                "action": "FailJob",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {
                "action": "FailJob",
                "onExitCodes": {
                    "containerName": RANKS,
                    "operator": "In",
                    "values": [*REFUSED, STOPPED],
                },
            },
        ]
    }
    pod = {"restartPolicy": "Never", "nodeSelector": dict(spec.node_selector)} | _pod(
        run, RANKS, script, {"requests": requests, "limits": limits}, secrets
    )
    return _job(run, RANKS, nodes, {"backoffLimit": 0, "podFailurePolicy": policy}, pod)


def _data_job(run: Run, script: Path) -> dict[str, Any]:
    """Return the job of the preprocessing nodes; a pod whose workers fail is restarted in place."""
    cluster, spec, tls = run.file.cluster, run.file.cluster.kubernetes, run.file.preprocess
    secrets = _secrets(run, serving=True)
    secrets["tls"] |= {"tls.crt": tls.tls_cert, "tls.key": tls.tls_key}
    pod = {"restartPolicy": "OnFailure", "nodeSelector": dict(spec.cpu_node_selector)} | _pod(
        run, DATA, script, {"requests": {"cpu": cluster.cpu_node_cores}}, secrets
    )
    return _job(run, DATA, cluster.cpu_nodes, {}, pod)


def _job(
    run: Run, name: str, pods: int, policy: dict[str, Any], pod: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "parallelism": pods,
                "completions": pods,
                **policy,
                "template": patched(run, name, without_nothing(pod)),
            }
        },
    }


def _pod(
    run: Run,
    name: str,
    script: Path,
    resources: dict[str, Any],
    secrets: Secrets,
) -> dict[str, Any]:
    """Return the parts common to pods of both jobs: volume, shared memory, secrets by reference.

    Args:
        secrets: see `_secrets`.
    """
    spec = run.file.cluster.kubernetes
    volumes: list[dict[str, Any]] = [
        {"name": "run", "persistentVolumeClaim": {"claimName": spec.claim}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "run", "mountPath": spec.mount},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for volume, keys in secrets.items():
        volumes.append({"name": volume, "secret": {"secretName": _secret(run, volume)}})
        mounts += [
            {"name": volume, "mountPath": path, "subPath": key, "readOnly": True}
            for key, path in keys.items()
        ]
    return {
        "terminationGracePeriodSeconds": spec.grace_s,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": name,
                "image": spec.image,
                # $$ escapes $: Kubernetes replaces $(NAME) by a variable's value
                "command": ["bash", str(script.resolve()).replace("$", "$$")],
                "resources": resources,
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
