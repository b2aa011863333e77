"""Bytes or a local folder; special ids never collide with text."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain_cli.data.tokenizer import ByteTokenizer, read_tokenizer
from disttrain_cli.errors import SpecError
from tests.data.dataset import make_run


def test_bytes() -> None:
    tokens = ByteTokenizer()
    assert tokens.encode("é!") == [0xC3, 0xA9, 0x21]
    special = {tokens.pad, tokens.bos, tokens.eos, tokens.image, tokens.context}
    assert special == set(range(256, 261)) and tokens.vocabulary == 261


def test_local_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "two": 3, "words": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>",
                            unk_token="<unk>").save_pretrained(tmp_path / "tok")
    tokens = read_tokenizer(make_run(tmp_path, tokenizer="tok"))
    assert tokens.encode("two words") == [3, 4]
    assert (tokens.bos, tokens.eos) == (1, 2)
    assert {tokens.pad, tokens.image, tokens.context} == {5, 6, 7} and tokens.vocabulary == 8
    assert tokens.fingerprint != "bytes"


def test_missing_and_broken_folder(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no tokenizer folder"):
        read_tokenizer(make_run(tmp_path, tokenizer="nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match="Cannot read the tokenizer"):
        read_tokenizer(make_run(tmp_path, tokenizer="empty"))
