"""Bytes or a local folder; special ids never collide with text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain_cli.data.tokenizer import ByteTokenizer, read_tokenizer
from disttrain_cli.data.tokenizer import Tokenizer as TokenizerProtocol
from disttrain_cli.errors import SpecError
from tests.data.dataset import make_run


def test_bytes() -> None:
    tokens = ByteTokenizer()
    assert tokens.encode("é!") == [0xC3, 0xA9, 0x21]
    special = {tokens.pad, tokens.bos, tokens.eos, tokens.image, tokens.context}
    assert special == set(range(256, 261)) and tokens.vocabulary == 261


def write_folder(folder: Path, saved: bool = False) -> Path:
    """A tokenizer of words, saved by transformers or as bare files with long forms of special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "two": 3, "words": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_truncation(1)
    folder.mkdir()
    if saved:
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>",
                                unk_token="<unk>").save_pretrained(folder)
    else:
        words.save(str(folder / "tokenizer.json"))
        special = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return folder


def check_words(tokens: TokenizerProtocol) -> None:
    assert tokens.encode("two words") == [3, 4]
    assert (tokens.bos, tokens.eos) == (1, 2)
    assert {tokens.pad, tokens.image, tokens.context} == {5, 6, 7} and tokens.vocabulary == 8
    assert tokens.fingerprint != "bytes"


def test_local_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "tok")
    check_words(read_tokenizer(make_run(tmp_path, tokenizer="tok")))


@pytest.mark.slow
def test_a_folder_that_transformers_saved(tmp_path: Path) -> None:
    write_folder(tmp_path / "tok", saved=True)
    check_words(read_tokenizer(make_run(tmp_path, tokenizer="tok")))


def test_tokenizing_needs_no_torch(tmp_path: Path) -> None:
    write_folder(tmp_path / "tok")
    code = ("import sys; from pathlib import Path; import disttrain_cli.data.loader; "
            "from disttrain_cli.data.tokenizer import FolderTokenizer, ByteTokenizer; "
            "ByteTokenizer().encode('a'); FolderTokenizer(Path(sys.argv[1])).encode('two'); "
            "print([name for name in ('torch', 'transformers', 'scipy') if name in sys.modules])")
    command = [sys.executable, "-c", code, str(tmp_path / "tok")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_missing_and_broken_folder(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no tokenizer folder"):
        read_tokenizer(make_run(tmp_path, tokenizer="nowhere"))
    (tmp_path / "empty").mkdir()
    for content in (None, "no json", "{}"):
        if content is not None:
            (tmp_path / "empty" / "tokenizer.json").write_text(content)
        with pytest.raises(SpecError, match="Cannot read the tokenizer"):
            read_tokenizer(make_run(tmp_path, tokenizer="empty"))
