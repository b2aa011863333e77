"""`cluster.kubernetes.pod_patch`: additions to the pods of a JobSet.

Mappings are merged key by key; entries of `containers` and `volumes` are merged by `name`, those of
`volumeMounts` by `mountPath`, as `kubectl patch` does; everything else is added unchanged. The
job's values have priority: a different value for one of them is refused, so that neither is lost.
"""

from __future__ import annotations

from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.runfile import Run

FIELD = "cluster.kubernetes.pod_patch"
#: Key by which the entries of a list are merged; generated pods have no other lists.
MERGED_BY = {"containers": "name", "volumes": "name", "volumeMounts": "mountPath"}
#: Fields of the run file that set fields of the generated pods.
SET_BY = {
    "image": "image",
    "terminationGracePeriodSeconds": "grace_s",
    "nodeSelector": "node_selector or cpu_node_selector",
    "resources": "resources",
    "persistentVolumeClaim": "claim",
}
#: Environment variables of a pod that the job sets, or reads to determine its ranks.
OWN_ENV = (
    "JOB_COMPLETION_INDEX MASTER_ADDR MASTER_PORT RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE"
    " LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE DISTTRAIN_HOSTS DISTTRAIN_WORKERS"
    " DISTTRAIN_LISTENER"
)
#: Keys that pods and containers must not have, with the reason.
ABSENT = {
    "hostname": "JobSet gives pods the names by which they find each other",
    "subdomain": "JobSet gives pods the names by which they find each other",
    "args": "they would reach the job's script, which takes none",
}
#: Labels and annotations of pods that the controllers set.
OWN_LABELS, OWN_DOMAINS = (
    ("job-name", "controller-uid"),
    (
        "jobset.sigs.k8s.io",
        "batch.kubernetes.io",
    ),
)
#: Allowed additions to the job's volumes and mounts.
HARMLESS = ("sizeLimit",)


def patched(run: Run, job: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the pod template of a job: its PodSpec merged with the run file's patch.

    Args:
        job: name of the job and of its container.
        spec: the job's PodSpec.

    Raises:
        SpecError: the patch changes what the job needs, or cannot be merged.
    """
    patch = run.file.cluster.kubernetes.pod_patch
    added = dict(patch.spec)
    if "containers" in added:
        jobs = (job, "ranks", "data") if run.file.cluster.cpu_nodes else (job,)
        containers = _by_key(added["containers"], "name", "spec.containers")
        for name in containers:
            if name not in jobs:
                raise _refused(
                    f"spec.containers: the job has no container {name}",
                    f"it has {', '.join(dict.fromkeys(jobs))}; a pod ends when all its containers"
                    " do",
                    "Correct the name; what runs along the ranks goes into initContainers, with"
                    " restartPolicy: Always.",
                )
        added["containers"] = [containers[job]] if job in containers else []
    if added.get("hostNetwork") and added.get("dnsPolicy") != "ClusterFirstWithHostNet":
        raise _refused(
            "spec.hostNetwork: pods would not find each other by name",
            "the host's name server does not know the cluster's services",
            "Set dnsPolicy: ClusterFirstWithHostNet there, too.",
        )
    merged: dict[str, Any] = _merged(spec, added, "spec")
    for container in merged["containers"]:
        _check_environment(run, container)
    _check_mounts(merged)
    metadata = patch.metadata.model_dump(exclude_defaults=True)
    for key in (key for keys in metadata.values() for key in keys):
        if key in OWN_LABELS or key.rpartition("/")[0] in OWN_DOMAINS:
            raise _refused(
                f"metadata: {key} is set by JobSet and Job themselves",
                "they find their pods by it",
                "Take it out of the patch.",
            )
    return ({"metadata": metadata} if metadata else {}) | {"spec": merged}


def _merged(ours: Any, added: Any, at: str) -> Any:
    """Return the job's value merged with the patch's, at path `at` of the pod."""
    last = at.rpartition(".")[2]
    if isinstance(ours, dict) and isinstance(added, dict):
        fixed = "volumes[" in at or "volumeMounts[" in at
        result = dict(ours)
        for key, value in added.items():
            where = f"{at}.{key}"
            if key in ours:
                result[key] = _merged(ours[key], value, where)
            elif key in ABSENT:
                raise _refused(f"{where} cannot be set", ABSENT[key], "Take it out of the patch.")
            elif fixed and key not in HARMLESS:
                raise _refused(
                    f"{where} would change a volume that the job needs",
                    "the run's files, /dev/shm and secrets are mounted as the job uses them",
                    "Add a volume of another name, mounted elsewhere.",
                )
            else:
                result[key] = value
        return result
    if (by := MERGED_BY.get(last)) and isinstance(ours, list):
        entries = {str(one[by]).rstrip("/"): one for one in ours}
        for name, one in _by_key(added, by, at).items():
            entries[name] = _merged(entries[name], one, f"{at}[{name}]") if name in entries else one
        return list(entries.values())
    if (type(ours) is type(added) and ours == added) or last == "automountServiceAccountToken":
        return added
    field = next((name for key, name in SET_BY.items() if f".{key}" in at), None)
    raise _refused(
        f"{at} is the job's own",
        f"the job: {ours}; the patch: {added}",
        f"Set cluster.kubernetes.{field} instead." if field else "Take it out of the patch.",
    )


def _by_key(entries: Any, by: str, at: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a list by the key that identifies them."""
    found: dict[str, dict[str, Any]] = {}
    for one in entries if isinstance(entries, list) else [entries]:
        name = one.get(by) if isinstance(one, dict) else None
        if not isinstance(entries, list) or not isinstance(name, str) or not name:
            raise _refused(
                f"{at} must be a list of mappings with {by}", f"given: {one}", f"Give each a {by}."
            )
        if name.rstrip("/") in found:
            raise _refused(f"{at} has {name} twice", "one would be lost", "Join the two.")
        found[name.rstrip("/")] = one
    return found


def _check_environment(run: Run, container: dict[str, Any]) -> None:
    """Raise SpecError if the patch sets one of the job's variables, or a variable twice."""
    interface = run.file.cluster.interface
    own = [*OWN_ENV.split(), *(["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"] if interface else [])]
    at = f"spec.containers[{container['name']}].env"
    for name in _by_key(container.get("env", []), "name", at):
        if name in own:
            raise _refused(
                f"{at}: the job sets {name} itself",
                "the value of the patch would be lost, or ranks would not find each other",
                "Set cluster.interface instead."
                if "IFNAME" in name
                else "Take it out of the patch.",
            )


def _check_mounts(spec: dict[str, Any]) -> None:
    """Raise SpecError if a container mounts a volume that the pod does not have."""
    volumes = {volume["name"] for volume in spec["volumes"]}
    others = _by_key(spec.get("initContainers", []), "name", "spec.initContainers")
    for container in (*spec["containers"], *others.values()):
        at = f"{container['name']}.volumeMounts"
        for path, mount in _by_key(container.get("volumeMounts", []), "mountPath", at).items():
            if mount.get("name") not in volumes:
                raise _refused(
                    f"{at}: {path} mounts the volume {mount.get('name')}, which the pod does not"
                    " have",
                    f"volumes: {', '.join(sorted(volumes))}",
                    "Add it to spec.volumes of the patch.",
                )


def _refused(what: str, why: str, next_step: str) -> SpecError:
    return SpecError(f"{FIELD}: {what}", why, next_step)
