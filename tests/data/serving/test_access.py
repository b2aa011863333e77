"""Beyond loopback nothing goes without TLS and a token."""

from pathlib import Path

import pytest

from disttrain_cli.data.serving.access import access_of, exposed, is_loopback
from disttrain_cli.data.serving.supervisor import check_open
from disttrain_cli.errors import SpecError, UsageError
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import make_run
from tests.data.serving.services import pulling


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "token").write_text("s3cret\n")
    (tmp_path / "ca.pem").write_text("certificate")
    return make_run(tmp_path)


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("node-7", False),
        ("localhost.example", False),
    ],
)
def test_loopback(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_what_a_rank_brings(run: Run) -> None:
    assert access_of(pulling(run, "grpc://127.0.0.1:8815", "grpc://[::1]:1")) == (None, None)
    whole = pulling(run, "grpc+tls://node-7:8815", tls_ca="ca.pem", token_file="token")
    assert access_of(whole) == (b"certificate", "s3cret")
    assert access_of(pulling(run, "grpc+tls://node-7:8815", token_file="token")).authority is None


@pytest.mark.parametrize(
    ("address", "given", "named"),
    [
        ("grpc://node-7:8815", {"token_file": "token", "tls_ca": "ca.pem"}, "TLS and a token"),
        ("grpc+tls://node-7:8815", {"tls_ca": "ca.pem"}, "TLS and a token"),
        ("127.0.0.1:8815", {}, "not the address"),
        ("http://127.0.0.1:8815", {}, "not the address"),
        ("grpc://127.0.0.1", {}, "not the address"),
        ("grpc://127.0.0.1:99999", {}, "not the address"),
        ("grpc://127.0.0.1:1", {"token_file": "none"}, "cannot read"),
        ("grpc://127.0.0.1:1", {"tls_ca": "."}, "cannot read"),
        ("grpc://127.0.0.1:1", {"token_file": "disttrain.yaml"}, "contains no token"),
    ],
)
def test_what_is_refused(run: Run, address: str, given: dict[str, str], named: str) -> None:
    (run.folder / "disttrain.yaml").write_text("two words")
    with pytest.raises(SpecError, match=named) as caught:
        access_of(pulling(run, address, **given))
    assert "preprocess." in caught.value.what and caught.value.next_step


def test_serving_beyond_loopback() -> None:
    check_open("127.0.0.1", None, None, None)
    check_open("0.0.0.0", "token", "cert", "key")
    for missing in (("token", None, None), (None, "cert", "key"), (None, None, None)):
        with pytest.raises(UsageError, match=r"0\.0\.0\.0") as caught:
            check_open("0.0.0.0", *missing)
        assert ("preprocess.token_file" in caught.value.why) == (missing[0] is None)
        assert ("tls_cert" in caught.value.why) == (missing[1] is None)
    with pytest.raises(UsageError, match="belong together"):
        check_open("127.0.0.1", None, "cert", None)


@pytest.mark.parametrize(("mode", "said"), [(0o600, 0), (0o400, 0), (0o640, 1), (0o604, 1)])
def test_secrets_that_others_can_read_are_named(run: Run, mode: int, said: int) -> None:
    token = run.resolve("token")
    token.chmod(mode)
    sentences = exposed({"preprocess.token_file": token, "--tls-key": None})
    assert len(sentences) == said
    assert all("chmod 600" in one and str(token) in one for one in sentences)
