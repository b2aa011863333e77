"""Files written whole: what they replace, what they leave as it is, and what is no file."""

import os
import stat
import threading
from pathlib import Path

import pytest

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.whole import is_own_file, keep_before, whole_file, write_whole


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_new_file_has_what_the_umask_leaves_and_nothing_stays_beside_it(tmp_path, umask):
    path = write_whole(tmp_path / "new" / "plan.yaml", "a")
    assert mode(path) == 0o666 & ~umask and os.listdir(path.parent) == ["plan.yaml"]


@pytest.mark.parametrize("own", [0o600, 0o664, 0o755])
def test_a_file_keeps_its_mode(tmp_path, own):
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    path.chmod(own)
    write_whole(path, "new")
    assert (mode(path), path.read_text()) == (own, "new")


def test_what_is_written_is_never_more_open_than_the_file_it_replaces(tmp_path):
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o600)
    with whole_file(path) as file:
        (beside,) = (one for one in tmp_path.iterdir() if one != path)
        assert mode(beside) == 0o600
        file.write(b"new")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_keeps_its_owner(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    os.chown(path, 65534, 65534)
    write_whole(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_file_is_written(tmp_path, there):
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "plan.yaml"
    link = tmp_path / "plan.yaml"
    second = tmp_path / "again.yaml"
    if there:
        file.write_text("old")
    link.symlink_to("elsewhere/plan.yaml")
    second.symlink_to(link)
    write_whole(second, "new")
    assert second.is_symlink() and link.is_symlink() and file.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["again.yaml", "elsewhere", "plan.yaml"]


def test_links_in_a_circle_are_an_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(SpecError, match="Cannot write"):
        write_whole(tmp_path / "a", "new")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_folder_is_an_error_and_stays(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpecError, match="Cannot write"):
        write_whole(tmp_path / "folder", "new")
    assert (tmp_path / "folder").is_dir() and os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_takes_the_bytes_and_stays_one(tmp_path, linked):
    pipe, heard = tmp_path / "pipe", []
    os.mkfifo(pipe)
    if linked:
        (tmp_path / "link").symlink_to("pipe")
    reader = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    reader.start()
    write_whole(tmp_path / "link" if linked else pipe, b"x" * 200_000)
    reader.join()
    assert heard == [b"x" * 200_000] and stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.fixture
def device(tmp_path):
    """A character device of our own, of the numbers of the kernel's null (3) or full (7)."""

    def made(minor):
        path = tmp_path / f"device-{minor}"
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
            path.open("wb").close()
        except PermissionError:
            pytest.skip("devices cannot be made here")
        return path

    return made


def test_a_device_stays_one(device):
    null = device(3)
    write_whole(null, "gone")
    assert stat.S_ISCHR(null.stat().st_mode) and os.listdir(null.parent) == [null.name]


def test_a_full_device_is_an_error_of_the_user(device):
    with pytest.raises(SpecError, match="No space left"):
        write_whole(device(7), "gone")


def test_what_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    with pytest.raises(KeyError), whole_file(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.yaml"]


def test_what_is_kept_of_a_link_is_its_content(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "plan.yaml").symlink_to("real")
    kept = keep_before(tmp_path / "plan.yaml")
    assert (
        kept == tmp_path / "plan.yaml.before"
        and kept.read_text() == "old"
        and not kept.is_symlink()
    )
    assert (tmp_path / "plan.yaml").is_symlink() and keep_before(tmp_path / "none") is None


def test_a_descriptor_goes_on_where_it_stands(tmp_path):
    """As stdout is, where a shell has sent it to a file: not replaced, and nothing is put beside
    its name in /dev."""
    shown = tmp_path / "shown.txt"
    with shown.open("wb", buffering=0) as file:
        file.write(b"before ")
        link = tmp_path / "link"
        link.symlink_to(f"/dev/fd/{file.fileno()}")
        for path in (
            link,
            Path(f"/dev/fd/{file.fileno()}"),
            Path(f"/proc/self/fd/{file.fileno()}"),
        ):
            assert keep_before(path) is None and not is_own_file(path)
            write_whole(path, "written ")
        file.write(b"after")
    assert shown.read_text() == "before written written written after"
    assert sorted(os.listdir(tmp_path)) == ["link", "shown.txt"]


def test_links_in_a_circle_are_an_error_of_the_user(tmp_path):
    (tmp_path / "plan.yaml").symlink_to("plan.yaml")
    with pytest.raises(SpecError, match="Too many levels"):
        write_whole(tmp_path / "plan.yaml", "x")
