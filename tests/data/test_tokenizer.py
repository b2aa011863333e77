"""Bytes, a local folder or a name on Hugging Face; special ids never collide with text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.tokenizer import NONE, ByteTokenizer, FolderTokenizer, read_tokenizer
from disttrain_cli.data.tokenizer import Tokenizer as TokenizerProtocol
from disttrain_cli.errors import SpecError
from tests.data.dataset import PROPERTY, make_run


def test_bytes() -> None:
    tokens = ByteTokenizer()
    assert tokens.encode("é!") == [0xC3, 0xA9, 0x21]
    special = {tokens.pad, tokens.bos, tokens.eos, tokens.image, tokens.context}
    assert special == set(range(256, 261)) and tokens.vocabulary == 261


def write_folder(folder: Path, saved: bool = False) -> Path:
    """A tokenizer of words, saved by transformers or as bare files with long forms of special
    tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(
        models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "two": 3, "words": 4}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_truncation(1)
    folder.mkdir(parents=True)
    if saved:
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(
            tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        ).save_pretrained(folder)
    else:
        words.save(str(folder / "tokenizer.json"))
        special = {
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "pad_token": None,
        }
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return folder


def check_words(tokens: TokenizerProtocol) -> None:
    assert tokens.encode("two words") == [3, 4]
    assert (tokens.bos, tokens.eos) == (1, 2)
    # the model neither reads nor draws anything
    assert (tokens.pad, tokens.image, tokens.context, tokens.vocabulary) == (2, NONE, NONE, 5)
    assert tokens.fingerprint != "bytes"


@pytest.mark.slow
def test_local_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "tok")
    check_words(read_tokenizer(make_run(tmp_path, tokenizer="tok")))


@pytest.mark.slow
def test_a_folder_that_transformers_saved(tmp_path: Path) -> None:
    write_folder(tmp_path / "tok", saved=True)
    check_words(read_tokenizer(make_run(tmp_path, tokenizer="tok")))


@pytest.mark.slow
def test_tokenizing_needs_no_torch(tmp_path: Path) -> None:
    write_folder(tmp_path / "tok")
    code = (
        "import sys; from pathlib import Path; import disttrain_cli.data.loader; "
        "from disttrain_cli.data.tokenizer import FolderTokenizer, ByteTokenizer; "
        "ByteTokenizer().encode('a'); FolderTokenizer(Path(sys.argv[1])).encode('two'); "
        "print([name for name in ('torch', 'transformers', 'scipy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tok")]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


@pytest.mark.slow
def test_missing_and_broken_folder(tmp_path: Path) -> None:
    for name in ("./nowhere", "no/such/folder", "/nowhere", "a/../b", "~/x"):
        with pytest.raises(SpecError, match="no tokenizer folder"):
            read_tokenizer(make_run(tmp_path, tokenizer=name))
    (tmp_path / "empty").mkdir()
    for content in (None, "no json", "{}"):
        if content is not None:
            (tmp_path / "empty" / "tokenizer.json").write_text(content)
        with pytest.raises(SpecError, match="Cannot read the tokenizer"):
            read_tokenizer(make_run(tmp_path, tokenizer="empty"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of Hugging Face, without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(cache: Path, name: str, *, commit: str = "a" * 40) -> Path:
    """A repository in the cache, as the hub's clients leave it; its snapshot's folder."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots").mkdir()
    return folder / "snapshots" / commit


@pytest.mark.parametrize("name", ["org/words-1.0", "words"])
def test_a_name_is_looked_up_in_the_cache(tmp_path: Path, cache: Path, name: str) -> None:
    write_folder(put(cache, name))
    check_words(read_tokenizer(make_run(tmp_path, tokenizer=name)))


@pytest.mark.slow
def test_only_the_files_that_are_read_make_the_fingerprint(tmp_path: Path, cache: Path) -> None:
    """So that machines which fetched more or less of a repository agree, and code in it does not
    matter."""
    snapshot = write_folder(put(cache, "words"))
    run = make_run(tmp_path, tokenizer="words")
    before = read_tokenizer(run).fingerprint
    (snapshot / "config.json").write_text("{}")
    (snapshot / "tokenization.py").write_text("raise SystemExit('executed')")
    assert read_tokenizer(run).fingerprint == before
    (snapshot / "special_tokens_map.json").write_text('{"eos_token": "two"}')
    assert read_tokenizer(run).fingerprint != before


def test_a_local_folder_comes_first(tmp_path: Path, cache: Path) -> None:
    write_folder(tmp_path / "words")
    put(cache, "words").mkdir()
    check_words(read_tokenizer(make_run(tmp_path, tokenizer="words")))


def test_a_name_that_is_not_here_says_what_to_do(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(SpecError, match="no tokenizer 'org/words' here") as caught:
        read_tokenizer(make_run(tmp_path, tokenizer="org/words"))
    assert (
        "HF_HUB_OFFLINE" in caught.value.why and "hf download org/words" in caught.value.next_step
    )
    assert str(tmp_path / "org" / "words") in caught.value.why


def test_a_repository_without_a_fast_tokenizer(tmp_path: Path, cache: Path) -> None:
    snapshot = put(cache, "words")
    snapshot.mkdir()
    (snapshot / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(SpecError, match=r"'words'") as caught:
        read_tokenizer(make_run(tmp_path, tokenizer="words"))
    assert "local folder with tokenizer.json" in caught.value.next_step


@given(st.lists(st.text(max_size=20), max_size=5))
@PROPERTY
def test_counts_are_the_lengths_of_what_is_encoded(words_folder: Path, texts: list[str]) -> None:
    for tokens in (ByteTokenizer(), FolderTokenizer(words_folder)):
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        assert tokens.count(texts) == [len(tokens.encode(text)) for text in texts]


@pytest.fixture(scope="module")
def words_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("words") / "tok")
