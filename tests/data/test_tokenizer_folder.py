"""Folders whose files declare tokens and chat templates in several places: ids, special tokens and
templates are those of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.data import tokenizer_folder
from disttrain_cli.data.tokenizer import NONE, FolderTokenizer
from disttrain_cli.data.tokenizer_folder import _loaded, load, read_tokenizer_folder
from disttrain_cli.errors import SpecError
from tests.data.chat_folders import CORPUS, write_folder

pytestmark = pytest.mark.usefixtures("loaded_here")
Edit = Callable[[Path], None]
POINT = "<|point|>"
TEXTS = [
    *CORPUS,
    f"go {POINT}3 left, at {POINT}7",
    f" {POINT} {POINT}\n{POINT}<|Point|> <|point |>",
    "<|im_start|>user\n a<|im_end|>\n\n\tb  1234567 <s> </s> <|end|> <mask>",
    "ﬁ Ａ é e\u0301 世界 😀 don't I'LL",
    "def f(x):\n    return  x ** 2  # 10%",
    "",
    "   ",
]


def put(name: str, content: Any) -> Edit:
    """Write a JSON file of the folder, over what it has."""

    def edit(folder: Path) -> None:
        path = folder / name
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(before | content))

    return edit


def config(**fields: Any) -> Edit:
    return put("tokenizer_config.json", fields)


def both(*edits: Edit) -> Edit:
    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


def token(content: str, **flags: bool) -> dict[str, Any]:
    every = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **every, **flags}


def without_added(folder: Path) -> None:
    """Leave only the first added token in tokenizer.json."""
    path = folder / "tokenizer.json"
    rules = json.loads(path.read_text())
    rules["added_tokens"] = rules["added_tokens"][:1]
    path.write_text(json.dumps(rules))


LOWER = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
DECLARED: dict[str, Edit] = {
    "added_tokens.json": put("added_tokens.json", {POINT: 400}),
    "added_tokens.json, of an id that it does not get": put("added_tokens.json", {POINT: 999}),
    "added_tokens.json, special by name": both(
        put("added_tokens.json", {POINT: 400, "<|end|>": 401}), config(eos_token="<|end|>")
    ),
    "added_tokens.json beside added_tokens_decoder": both(
        put("added_tokens.json", {"<mask>": 401}),
        config(added_tokens_decoder={"400": token(POINT)}),
    ),
    "added_tokens_decoder": config(added_tokens_decoder={"400": token(POINT, special=True)}),
    "added_tokens_decoder with flags": config(
        added_tokens_decoder={
            "401": token("<mask>", lstrip=True, special=True),
            "400": token(POINT, rstrip=True, single_word=True, normalized=True),
        }
    ),
    "added_tokens_decoder in place of tokenizer.json's": both(
        without_added,
        config(
            added_tokens_decoder={
                "300": token("<|im_start|>", special=True),
                "301": token("<|im_end|>", special=True),
            }
        ),
    ),
    "extra_special_tokens, a list": config(extra_special_tokens=[POINT, "<mask>"]),
    "extra_special_tokens, names": config(extra_special_tokens={"point_token": POINT}),
    "additional_special_tokens": config(additional_special_tokens=[POINT]),
    "additional_special_tokens beside extra ones": config(
        additional_special_tokens=[POINT], extra_special_tokens=["<mask>"]
    ),
    "a token of a name": config(point_token=POINT),
    "BOS, EOS and padding that it lacks": config(bos_token="<s>", eos_token="</s>", pad_token="_"),
    "special_tokens_map.json": put(
        "special_tokens_map.json",
        {"additional_special_tokens": [POINT], "bos_token": token("<s>", lstrip=True)},
    ),
    "special_tokens_map.json beside added_tokens_decoder, which is read": both(
        put("special_tokens_map.json", {"additional_special_tokens": [POINT]}),
        config(added_tokens_decoder={"400": token("<mask>")}),
    ),
    "special tokens that are split": config(split_special_tokens=True),
    "a normalizer": put("tokenizer.json", {"normalizer": LOWER}),
    "a normalizer and a token that it changes": both(
        put("tokenizer.json", {"normalizer": LOWER}),
        config(added_tokens_decoder={"400": token(POINT, normalized=True)}),
    ),
    "a class with rules of its own": both(
        put("tokenizer.json", {"normalizer": LOWER}), config(tokenizer_class="Qwen2Tokenizer")
    ),
    "a class by the model's type": both(
        put("config.json", {"model_type": "qwen2"}), config(tokenizer_class="LlamaTokenizerFast")
    ),
    "GPT-2's class": config(tokenizer_class="GPT2Tokenizer", add_prefix_space=True),
}


@pytest.mark.parametrize("declared", DECLARED)
def test_tokens_are_those_of_transformers(tmp_path: Path, declared: str) -> None:
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "folder", "marked")
    DECLARED[declared](folder)
    reference = AutoTokenizer.from_pretrained(folder)
    tokens = FolderTokenizer(folder, reads=False, draws=False)
    assert [tokens.encode(text) for text in TEXTS] == [
        reference.encode(text, add_special_tokens=False) for text in TEXTS
    ]
    assert tokens.count(TEXTS) == [len(tokens.encode(text)) for text in TEXTS]
    assert tokens.vocabulary == max(reference.get_vocab().values()) + 1
    assert tokens.eos == reference.eos_token_id
    for name in ("bos", "pad"):
        given = getattr(reference, f"{name}_token_id")
        assert getattr(tokens, name) == (tokens.eos if given is None else given)
    assert tokens.chat is not None
    messages = [{"role": "user", "content": text} for text in TEXTS[:5]]
    assert tokens.chat._template.render(list(messages)) == reference.apply_chat_template(
        messages, tokenize=False
    )


def test_a_declared_token_is_one_token(tmp_path: Path) -> None:
    """As numbers, not by comparison: nothing else tells that the table above has declared any."""
    plain = FolderTokenizer(write_folder(tmp_path / "plain", "marked"))
    folder = write_folder(tmp_path / "folder", "marked")
    config(extra_special_tokens=[POINT])(folder)
    tokens = FolderTokenizer(folder)
    before, own = plain.encode(POINT), tokens.encode(POINT)
    assert len(before) > 4 and own == [plain.vocabulary - 2]  # two ids are reserved
    assert tokens.vocabulary == plain.vocabulary + 1 and tokens.fingerprint != plain.fingerprint


FIRST, SECOND, THIRD = (f"{{{{ '{name}' }}}}" for name in ("first", "second", "third"))


def template_files(**contents: str) -> Edit:
    """Write `{name}.jinja` files; `default` is chat_template.jinja, others additional ones."""

    def edit(folder: Path) -> None:
        for name, content in contents.items():
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            path = folder / "chat_template.jinja" if name == "default" else path
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)

    return edit


def named(**templates: str) -> Edit:
    return config(
        chat_template=[{"name": name, "template": text} for name, text in templates.items()]
    )


JINJA = template_files(default=FIRST)
LEGACY = put("chat_template.json", {"chat_template": SECOND})
OF_PROCESSOR = put("processor_config.json", {"chat_template": THIRD})
OF_TOKENIZER = config(chat_template=THIRD)
#: Files; the template of the tokenizer, and that of the processor: a word, or a reason.
PLACES: dict[str, tuple[Edit, str, str]] = {
    "jinja": (JINJA, "first", "first"),
    "chat_template.json": (LEGACY, "second", "second"),
    "chat_template.json and jinja": (both(LEGACY, JINJA), "first", "second"),
    "processor_config.json": (OF_PROCESSOR, "third", "third"),
    "processor_config.json and jinja": (both(OF_PROCESSOR, JINJA), "first", "third"),
    "processor_config.json and chat_template.json": (both(OF_PROCESSOR, LEGACY), "third", "third"),
    "tokenizer_config.json": (OF_TOKENIZER, "third", "third"),
    "tokenizer_config.json and jinja": (both(OF_TOKENIZER, JINJA), "first", "first"),
    "tokenizer_config.json and chat_template.json": (both(OF_TOKENIZER, LEGACY), "third", "second"),
    "a list": (named(tool_use=FIRST, default=SECOND), "second", "second"),
    "a list and jinja": (both(named(default=SECOND), JINJA), "first", "first"),
    "a list without default": (named(tool_use=FIRST, rag=SECOND), "no default", "no default"),
    "additional ones": (template_files(default=FIRST, tool_use=SECOND), "first", "first"),
    "additional ones alone": (template_files(tool_use=SECOND), "no default", "none is `default`"),
    "additional ones and chat_template.json": (
        both(LEGACY, template_files(tool_use=SECOND, default=FIRST)),
        "first",
        "conflicting files",
    ),
    "none": (lambda _: None, "", ""),
}


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("places", PLACES)
def test_a_template_is_taken_from_where_transformers_takes_it(
    tmp_path: Path, places: str, processor: bool
) -> None:
    folder = write_folder(tmp_path / "folder", "marked", where="nowhere")
    edit, *expected = PLACES[places]
    edit(folder)
    if " " in expected[processor]:
        with pytest.raises(ValueError, match=expected[processor]):
            read_tokenizer_folder(folder, processor)
        with pytest.raises(SpecError, match="Cannot read the tokenizer"):
            FolderTokenizer(folder, processor=processor)
    else:
        chat = FolderTokenizer(folder, processor=processor).chat
        assert (chat._template.render([]) if chat else "") == expected[processor]


@pytest.mark.slow
def test_a_process_of_its_own_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each content of the files: with the folder's tokens, without executing any of it."""
    folder = write_folder(tmp_path / "a folder", "marked")
    (folder / "transformers.py").write_text("raise SystemExit('executed')")
    config(extra_special_tokens=[POINT])(folder)
    here = read_tokenizer_folder(folder)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)
    there = read_tokenizer_folder(folder)
    assert here[1:] == there[1:] and here.rules.to_str() == there.rules.to_str()

    def refuse(*_: Any) -> str:
        raise ValueError("loaded again")

    monkeypatch.setattr(tokenizer_folder, "_loaded", refuse)
    assert read_tokenizer_folder(folder)[1:] == there[1:]
    put("added_tokens.json", {"<mask>": 401})(folder)
    with pytest.raises(ValueError, match="loaded again"):
        read_tokenizer_folder(folder)
    monkeypatch.setattr(tokenizer_folder, "_loaded", load)
    assert (now := read_tokenizer_folder(folder)).fingerprint != there.fingerprint
    for cached in (tmp_path / "cache" / "disttrain" / "tokenizers").iterdir():
        for damaged in ("", "{", "{}", "[]"):
            cached.write_text(damaged)
            assert read_tokenizer_folder(folder).fingerprint == now.fingerprint


def test_a_folder_that_needs_its_own_code_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "marked")
    config(tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})(folder)
    (folder / "own.py").write_text("raise SystemExit('executed')")
    with pytest.raises(SpecError, match="Cannot read the tokenizer") as caught:
        FolderTokenizer(folder)
    assert "custom code" in caught.value.why


@pytest.mark.parametrize(
    ("reads", "draws", "reserved"), [(False, False, 0), (True, False, 1), (True, True, 2)]
)
def test_ids_are_reserved_for_what_the_model_has(
    tmp_path: Path, reads: bool, draws: bool, reserved: int
) -> None:
    """Not for BOS and padding, for which EOS serves."""
    folder = write_folder(tmp_path / "folder", "marked")
    size = read_tokenizer_folder(folder).rules.get_vocab_size()
    tokens = FolderTokenizer(folder, reads=reads, draws=draws)
    assert tokens.vocabulary == size + reserved
    assert tokens.token(tokens.eos) == "<|im_end|>"
    assert tokens.bos == tokens.pad == tokens.eos
    assert (tokens.image, tokens.context) == (size if reads else NONE, size + 1 if draws else NONE)


def test_without_eos_a_sample_ends_as_answers_do(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "marked")
    config(eos_token=None)(folder)
    tokens = FolderTokenizer(folder, reads=False, draws=False)
    assert tokens.token(tokens.eos) == "<|im_end|>"
    (folder / "chat_template.jinja").unlink()
    tokens = FolderTokenizer(folder, reads=False, draws=False)
    assert tokens.token(tokens.eos) is None and tokens.eos == tokens.vocabulary - 1


def test_a_machine_too_busy_to_load_a_tokenizer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_folder, "LONGEST_S", 0)
    with pytest.raises(ValueError, match=r"within 0 s; load of this machine: [\d.]+ on \d+ cores"):
        _loaded(tmp_path, False)  # not the fixture's
