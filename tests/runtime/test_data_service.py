"""Training that pulls its data from `disttrain data serve`, as processes: the same losses, whatever
is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.flight as flight
import pytest
import yaml

from disttrain_cli.data.index.sample_index import Index, read_index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.preparing import Request
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.data.serving import wire
from disttrain_cli.data.serving.client import Workers
from disttrain_cli.data.serving.identity import identity_of
from disttrain_cli.data.serving.permits import AT_ONCE
from disttrain_cli.errors import RankFailedError
from disttrain_cli.runtime.train import train
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Layout, Plan, UnitPlan, write_plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.whole import write_whole
from tests.data.dataset import encoded, write_tar
from tests.heads import with_heads
from tests.runtime.factory import make_job

pytestmark = pytest.mark.slow
STEPS = 3
WAIT_S = 60

Job = tuple[Run, Plan, Profile]


class Service:
    """`disttrain data serve` on free ports, or on that of another one."""

    def __init__(self, run: Run, processes: int = 1, port: int = 0) -> None:
        words = [
            "data",
            "serve",
            str(run.path),
            "--json",
            "--port",
            str(port),
            "--processes",
            str(processes),
        ]
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "disttrain_cli", *words],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.popen.stdout is not None and self.popen.stderr is not None
        document = ""
        while not document.endswith("\n}\n"):
            line = self.popen.stdout.readline()
            assert line, self.popen.stderr.read()
            document += line
        told = json.loads(document)
        self.addresses: list[str] = told["addresses"]
        self.pids: list[int] = told["processes"]

    @property
    def ports(self) -> list[int]:
        return [int(address.rpartition(":")[2]) for address in self.addresses]

    def kill(self) -> None:
        """Everything at once, without a word."""
        for pid in (self.popen.pid, *self.pids):
            os.kill(pid, signal.SIGKILL)
        self.popen.wait()

    def end(self, how: signal.Signals = signal.SIGTERM) -> str:
        """End it politely, once; returns what it said."""
        if self.popen.poll() is None:
            self.popen.send_signal(how)
        out, said = self.popen.communicate(timeout=30)
        assert out == ""
        return said


def with_preprocess(job: Job, **preprocess: Any) -> Job:
    """The job with other preprocessing in its run file, in a folder beside it with the same
    artefacts."""
    run, plan, profile = job
    folder = run.folder.parent / f"{run.folder.name}-{len(list(run.folder.parent.iterdir()))}"
    shutil.copytree(run.dir.root, folder / "runs" / run.file.name)
    content = yaml.safe_load(run.path.read_text()) | {"preprocess": preprocess}
    write_whole(folder / "disttrain.yaml", yaml.safe_dump(content))
    return read_run(folder / "disttrain.yaml"), plan, profile


def losses(steps: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    return [(step["losses"]["text"], step["losses"]["image"], step["grad_norm"]) for step in steps]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job over three ranks whose artefacts are written, as `disttrain data serve` reads them."""
    home = tmp_path_factory.mktemp("service")
    write_sample_data(home / "data")
    made = run, plan, profile = make_job(home / "jobs" / "own", home / "data", ordering="best")
    write_whole(run.dir.profile, profile.model_dump_json())
    write_plan(run.dir.plan, plan)
    return made


@pytest.fixture(scope="module")
def without(job: Job) -> list[tuple[float, float, float]]:
    """Losses of the same job that prepares its data itself."""
    return losses(train(*with_preprocess(job), steps=STEPS).steps)


@pytest.fixture
def service(job: Job) -> Iterator[Service]:
    started = Service(job[0], processes=2)
    yield started
    if started.popen.poll() is None:
        started.end()


def test_killing_a_worker_in_mid_epoch_changes_no_loss(
    job: Job, service: Service, without: list[Any]
) -> None:
    assert all(
        "torch" not in Path(f"/proc/{pid}/maps").read_text()
        for pid in (service.popen.pid, *service.pids)
    )

    def kill_one(step: dict[str, Any]) -> None:
        if step["step"] == 0:
            os.kill(service.pids[0], signal.SIGKILL)

    result = train(
        *with_preprocess(job, addresses=service.addresses, wait_s=WAIT_S),
        steps=STEPS,
        on_step=kill_one,
    )
    assert losses(result.steps) == without
    run = pulling(job, service.addresses[:1])
    # the one that was killed: it was started again, at its old place
    with loader(run, job) as alone:
        assert alone.fetch(0, 0)
    children = psutil.Process(service.popen.pid).children()
    assert "killed by SIGKILL" in service.end() and service.popen.returncode == 0
    assert len(children) == 2 and not any(child.is_running() for child in children)


def test_all_workers_gone_and_one_comes_back(job: Job, without: list[Any]) -> None:
    first = Service(job[0])
    later: list[Service] = []

    def kill_all(step: dict[str, Any]) -> None:
        if step["step"] == 0:
            first.kill()

    def bring_back(what: str, done: int, total: int) -> None:
        if what.startswith("waiting for a preprocessing worker") and not later:
            assert first.addresses[0] in what
            later.append(Service(job[0], port=first.ports[0]))

    changed = with_preprocess(job, addresses=first.addresses, wait_s=WAIT_S, prefetch_slots=1)
    result = train(*changed, steps=STEPS, on_step=kill_all, progress=bring_back)
    assert later and losses(result.steps) == without
    later[0].end(signal.SIGINT)
    assert later[0].popen.returncode == 0


def test_all_workers_gone_for_too_long_stops_with_exit_code_4(job: Job, service: Service) -> None:
    changed = with_preprocess(job, addresses=service.addresses, wait_s=2, prefetch_slots=1)
    with pytest.raises(RankFailedError, match="No preprocessing worker answered for 2 s") as caught:
        train(
            *changed,
            steps=STEPS,
            on_step=lambda step: service.kill() if step["step"] == 0 else None,
        )
    assert caught.value.exit_code == 4 and "Connection refused" in caught.value.why
    assert all(address in caught.value.why for address in service.addresses)


def pulling(job: Job, addresses: list[str]) -> Run:
    return with_preprocess(job, addresses=addresses, wait_s=WAIT_S)[0]


def loader(run: Run, job: Job) -> Loader:
    index = read_index(run, job[2].inputs)
    return Loader(
        run,
        Orders(run.file, job[1].plan, index, job[2]),
        unit="image_encoder",
        replica=0,
        fields={"image"},
        source=Workers(run, job[1].plan, index, job[2]),
    )


def test_a_port_in_use_and_data_without_an_index_are_named(job: Job, service: Service) -> None:
    def refused(run: Run, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "disttrain_cli", "data", "serve", str(run.path), *words],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
        return done.stderr

    assert f"cannot listen on {service.addresses[0]}" in refused(
        job[0], "--port", str(service.ports[0])
    )
    moved = with_preprocess(job)[0]
    moved.dir.index.unlink()
    assert "disttrain profile" in refused(moved, "--port", "0")


def test_a_worker_that_hangs_is_left_alone(job: Job, service: Service) -> None:
    """Stopped, it takes connections and says nothing: keepalive notices."""
    slots = [(step, slot) for step in range(4) for slot in range(job[1].plan.microbatches)]
    with loader(pulling(job, service.addresses), job) as pulled:
        pulled.fetch(0, 0)
        os.kill(service.pids[0], signal.SIGSTOP)
        finished = threading.Event()
        fetching = threading.Thread(
            target=lambda: ([pulled.fetch(*slot) for slot in slots], finished.set())
        )
        fetching.start()
        assert finished.wait(45)
        os.kill(service.pids[0], signal.SIGCONT)


def resident_mib(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def large_job(folder: Path, template: Job) -> tuple[Job, Index, float]:
    """A job of slots with large pixels, its index, and the MiB of its largest slot."""
    jpeg = encoded(512, 512)
    write_tar(
        folder / "data" / "interleaved" / "0.tar",
        [
            (f"{n:03d}{end}", data)
            for n in range(64)
            for end, data in ((".jpg", jpeg), (".txt", b"a caption"))
        ],
    )
    write_tar(
        folder / "data" / "captions" / "0.tar", [("0.txt", b"words"), ("0.jpg", encoded(16, 16))]
    )
    content = yaml.safe_load(template[0].path.read_text())
    content["data"] |= {
        "max_image_pixels": 2**18,
        "sequence_length": 2**13,
        "sources": [{"path": str(folder / "data" / name)} for name in ("interleaved", "captions")],
    }
    write_whole(folder / "disttrain.yaml", yaml.safe_dump(content))
    run = read_run(folder / "disttrain.yaml")
    image = template[2].inputs.image
    assert image is not None
    inputs = with_heads(
        template[2].inputs.model_copy(update={"sequence_length": 2**13}),
        "image",
        image.model_copy(update={"max_pixels": 2**18}),
    )
    index = build_index(run, inputs)
    units = [
        UnitPlan(name=name, modules=[name], gpus=1, layers_per_stage=[len(module.layers)])
        for name, module in template[2].modules.items()
    ]
    layout = Layout(
        global_batch_size=6, microbatch_size=3, microbatches=2, gpus_used=3, units=units
    )
    plan = template[1].model_copy(update={"plan": layout})
    profile = template[2].model_copy(update={"inputs": inputs})
    write_whole(run.dir.profile, profile.model_dump_json())
    write_plan(run.dir.plan, plan)
    with Loader(
        run,
        Orders(run.file, layout, index, profile),
        unit="image_encoder",
        replica=0,
        fields={"image"},
    ) as own:
        sizes = [
            sum(block.nbytes for block in own.fetch(step, slot).items["image"].values[0])
            for step in range(3)
            for slot in range(2)
        ]
    return (run, plan, profile), index, max(sizes) / 2**20


def test_memory_of_a_worker_behind_a_client_that_reads_nothing(job: Job, tmp_path: Path) -> None:
    """At most AT_ONCE slots, and what gRPC holds of them, however many are asked for."""
    (run, plan, profile), index, slot_mib = large_job(tmp_path, job)
    assert slot_mib > 8
    service = Service(run)
    try:
        own = fingerprint(identity_of(run, plan.plan, index, profile))
        # windows that do not grow: else gRPC may take in a slot that nobody reads
        client = flight.FlightClient(
            service.addresses[0], generic_options=[("grpc.http2.bdp_probe", 0)]
        )
        requests = [
            Request(n // 2 % 6, n % 2, "image_encoder", 0, frozenset({"image"}))
            for n in range(6 * AT_ONCE)
        ]
        tickets = [flight.Ticket(wire.request_bytes(request, own)) for request in requests]
        start_mib = resident_mib(service.pids[0])
        streams = [client.do_get(ticket) for ticket in tickets]
        # calls may arrive in another order; those that are served have their first piece read,
        # before which they have beats too
        served: list[flight.FlightStreamReader] = []

        def read_others() -> None:
            others = [one for one in streams if one not in served]
            served.extend(one for one in others if one.read_chunk().app_metadata is not None)

        while len(served) < AT_ONCE:
            read_others()
        # a beat per second: the worker has time to go beyond its bound, if it would
        for _ in range(5):
            read_others()
        # a machine so slow that a client counts as stalled gives its permit away
        assert len(served) < 2 * AT_ONCE
        grown_mib = resident_mib(service.pids[0]) - start_mib
        print(
            f"slot {slot_mib:.0f} MiB, worker {start_mib:.0f} MiB + {grown_mib:.0f} MiB,"
            f" {len(tickets)} asked for, {len(served)} served"
        )
        assert slot_mib < grown_mib < (len(served) + 1) * slot_mib + 64
        for stream in streams:
            stream.cancel()
    finally:
        service.end()
