"""Conversations by chat template: text, tokens and what is trained, against transformers."""

from __future__ import annotations

import datetime as dates
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from disttrain_cli.data import chat_templates
from disttrain_cli.data.chat import IMAGE_ROW, Chat
from disttrain_cli.data.sources.chats import conversation
from disttrain_cli.data.sources.samples import Part, Turn
from disttrain_cli.data.tokenizer import FolderTokenizer
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.index import IMAGE
from tests.data.chat_folders import SPECIALS, write_folder

pytestmark = pytest.mark.usefixtures("loaded_here")
ENDING = {"headers": "<|eot_id|>", "inst": "</s>", "turns": "<end_of_turn>"}
IM_END = "<|im_end|>"

said = some.text(
    some.one_of(
        some.sampled_from(list("abc \n\n,.ätß世😀")),
        some.characters(codec="utf-8", exclude_categories=["Cs", "Co", "Cc"]),
    ),
    min_size=1,
    max_size=24,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each template."""
    root = tmp_path_factory.mktemp("chats")
    return {name: write_folder(root / name, name) for name in SPECIALS}


@pytest.fixture
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' templates know the day that ours know."""
    from transformers.utils import chat_template_utils

    class Standing(dates.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Standing:
            return cls(*chat_templates.NOW.timetuple()[:6])

    monkeypatch.setattr(chat_template_utils, "datetime", Standing)


def theirs(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def ours(folder: Path) -> tuple[FolderTokenizer, Chat]:
    tokens = FolderTokenizer(folder)
    assert tokens.chat is not None
    return tokens, tokens.chat


def joined(parts: list[Part], image: int) -> tuple[list[int], list[bool]]:
    """All ids with what is trained."""
    ids, trained = list[int](), list[bool]()
    for part in parts:
        own = [image] if part.kind == IMAGE else list(part.ids or ())
        ids += own
        trained += [part.trained and part.kind != IMAGE] * len(own)
    return ids, trained


def turns_of(texts: list[str], system: str | None = None) -> list[dict[str, Any]]:
    turns = [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


@pytest.mark.usefixtures("standing_clock")
@pytest.mark.parametrize("name", SPECIALS)
def test_text_and_ids_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    tokens, chat = ours(folders[name])
    reference = theirs(folders[name])

    @settings(max_examples=40, deadline=None)
    @given(some.lists(said, min_size=2, max_size=6), some.none() | said)
    def check(texts: list[str], system: str | None) -> None:
        messages = turns_of(texts, None if name == "turns" else system)
        expected = reference.apply_chat_template(messages, tokenize=False)
        assert chat._template.render([dict(one) for one in messages]) == expected
        ids, trained = joined(conversation({"messages": messages}, chat), tokens.image)
        assert ids == reference.apply_chat_template(messages)["input_ids"]
        assert any(trained)

    check()


@pytest.mark.parametrize("name", ["marked"])
def test_what_is_marked_is_trained_as_transformers_masks_it(
    folders: dict[str, Path], name: str
) -> None:
    tokens, chat = ours(folders[name])
    reference = theirs(folders[name])

    @settings(max_examples=60, deadline=None)
    @given(some.lists(said, min_size=2, max_size=6), some.none() | said)
    def check(texts: list[str], system: str | None) -> None:
        messages = turns_of(texts, system)
        expected = reference.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, trained = joined(conversation({"messages": messages}, chat), tokens.image)
        assert ids == expected["input_ids"]
        assert [int(one) for one in trained] == expected["assistant_masks"]

    check()


@pytest.mark.parametrize("name", [one for one in SPECIALS if one != "marked"])
def test_without_marks_answers_are_trained_to_the_end_of_their_turn(
    folders: dict[str, Path], name: str
) -> None:
    """Against answers that are cut out of the text by what each of them says."""
    tokens, chat = ours(folders[name])
    end = ENDING.get(name, IM_END)

    @settings(max_examples=60, deadline=None)
    @given(some.lists(said, min_size=2, max_size=6), some.none() | said)
    def check(words: list[str], system: str | None) -> None:
        # each text is told from all others by its number
        texts = [f"{number}:{text}:{number}" for number, text in enumerate(words)]
        messages = turns_of(texts, None if name == "turns" else system)
        ids, trained = joined(conversation({"messages": messages}, chat), tokens.image)
        spans = np.flatnonzero(np.diff([0, *map(int, trained), 0]))
        decoded = [
            tokens._rules.decode(ids[first:last], skip_special_tokens=False)
            for first, last in spans.reshape(-1, 2).tolist()
        ]
        expected = [f"{text}{end}" for text in texts[1::2]]
        if name == "thinking" and messages[-1]["role"] == "assistant":
            expected[-1] = "<think>\n\n</think>\n\n" + expected[-1]
        assert [one.strip() for one in decoded] == expected

    check()


def written(folder: Path, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
    tokens, chat = ours(folder)
    return joined(conversation(record, chat), tokens.image)


def decoded(folder: Path, ids: list[int]) -> str:
    return str(ours(folder)[0]._rules.decode(ids, skip_special_tokens=False))


def trained_texts(folder: Path, record: dict[str, Any]) -> list[str]:
    """Each part that is trained, as a text."""
    parts = conversation(record, ours(folder)[1])
    return [decoded(folder, list(part.ids or ())) for part in parts if part.ids and part.trained]


def test_images_stand_where_the_template_writes_their_placeholder(folders: dict[str, Path]) -> None:
    """In parts of OpenAI's form and as LLaVA's marks, several to a turn."""
    folder = folders["vision"]
    parts = [
        {"type": "image", "image": "a.jpg"},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "b.jpg"}},
        {"type": "text", "text": "What?"},
    ]
    openai = {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": "Cats."}]},
        ]
    }
    llava = {
        "image": ["a.jpg", "b.jpg"],
        "conversations": [
            {"from": "human", "value": "<image>\nand<image>\nWhat?"},
            {"from": "gpt", "value": "Cats."},
        ],
    }
    tokens, chat = ours(folder)
    assert tokens.image == tokens._rules.token_to_id("<|image_pad|>") < tokens.vocabulary
    reference = theirs(folder).apply_chat_template(openai["messages"])["input_ids"]
    for record in (openai, llava):
        assert written(folder, record)[0] == reference
        found = conversation(record, chat)
        assert [part.value for part in found if part.kind == IMAGE] == ["a.jpg", "b.jpg"]
        assert trained_texts(folder, record) == ["Cats.<|im_end|>"]


def test_a_template_of_texts_has_the_placeholder_in_the_text(folders: dict[str, Path]) -> None:
    tokens, chat = ours(folders["headers"])
    record = {
        "image": "a.jpg",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat?"},
            {"from": "gpt", "value": "<|begin|> is no image"},
        ],
    }
    parts = conversation(record, chat)
    assert [part.value for part in parts if part.kind == IMAGE] == ["a.jpg"]
    assert tokens.image == tokens.vocabulary - 2  # it has none of its own
    text = "".join(
        "<image>" if part.kind == IMAGE else decoded(folders["headers"], list(part.ids or ()))
        for part in parts
    )
    expected = chat._template.render(
        [
            {"role": "user", "content": "<image>\nWhat?"},
            {"role": "assistant", "content": "<|begin|> is no image"},
        ]
    )
    assert text == expected


@pytest.mark.parametrize("where", ["json", "text", "list"])
def test_templates_are_found_wherever_transformers_keeps_them(tmp_path: Path, where: str) -> None:
    folder = write_folder(tmp_path / where, "vision", where=where)
    jinja = write_folder(tmp_path / "jinja", "vision")
    record = {"messages": turns_of(["What?", "A cat."])}
    assert written(folder, record) == written(jinja, record)


def test_spaces_that_are_letters_are_those_of_the_whole_text(tmp_path: Path) -> None:
    """Pieces between placeholders tokenized by themselves would begin with a space."""
    folder = write_folder(tmp_path / "metaspace", "turns", metaspace=True)
    content = [
        {"type": "text", "text": "the cat"},
        {"type": "image"},
        {"type": "text", "text": "on it"},
    ]
    messages = [{"role": "user", "content": content}, *turns_of(["", " yes "])[1:]]
    ids, _ = written(folder, {"messages": messages, "images": ["a"]})
    assert ids == theirs(folder).apply_chat_template(messages)["input_ids"]


def test_thinking_that_a_template_leaves_out_of_earlier_turns_is_not_trained(
    folders: dict[str, Path],
) -> None:
    texts = ["a", "<think>\nfirst\n</think>\n\none", "b", "<think>\nsecond\n</think>\n\ntwo"]
    assert trained_texts(folders["thinking"], {"messages": turns_of(texts)}) == [
        "one<|im_end|>",
        "<think>\nsecond\n</think>\n\ntwo<|im_end|>",
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thinking_may_have_a_field_of_its_own(folders: dict[str, Path], name: str) -> None:
    messages = turns_of(["a", "one"])
    messages[1][name] = "first"
    ids, _ = written(folders["thinking"], {"messages": messages})
    assert ids == theirs(folders["thinking"]).apply_chat_template(messages)["input_ids"]
    assert trained_texts(folders["thinking"], {"messages": messages}) == [
        "<think>\nfirst\n</think>\n\none<|im_end|>"
    ]


IM = "<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n"
EMPTY = "<think>\n\n</think>\n\n"
#: Templates as families write them: turns of others, an answer, a prompt for one.
HEADERS = {
    # as Qwen3 without thinking: earlier thinking is left out, the last answer always has a block
    "empty block in the prompt": (
        IM + "{{ m.content }}" + END,
        "{% set words = m.content.split('</think>')[-1].lstrip('\n') %}"
        "{% set thought = m.reasoning_content or '' %}{% if '</think>' in m.content %}"
        "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% endif %}"
        + IM
        + "{% if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ words }}"
        + END,
        f"<|im_start|>assistant\n{EMPTY}",
    ),
    "empty block in the prompt alone": (
        IM + "{{ m.content }}" + END,
        IM + "{{ m.content }}" + END,
        f"<|im_start|>assistant\n{EMPTY}",
    ),
    # as DeepSeek R1: the prompt opens the block
    "opened block": (
        IM + "{{ m.content }}" + END,
        IM + "{{ m.content if loop.last else m.content.split('</think>')[-1] | trim }}" + END,
        "<|im_start|>assistant\n<think>\n",
    ),
    # as Vicuna's and LLaVA's
    "space behind the header": (
        "USER: {{ m.content }} ",
        "ASSISTANT:{{ ' ' + m.content | trim }}<|im_end|>",
        "ASSISTANT: ",
    ),
    "space that answers have not": (
        "USER: {{ m.content }} ",
        "ASSISTANT:{{ m.content | trim }}<|im_end|>",
        "ASSISTANT: ",
    ),
    "break that answers have not": (
        "[Q] {{ m.content }}\n",
        "[A]\n{{ m.content | trim }}<|im_end|>\n",
        "[A]\n\n",
    ),
    # as Llama 2's, whose [/INST] is no special token
    "a space alone": ("[INST] {{ m.content }} [/INST]", "{{ m.content | trim }}<|im_end|>", " "),
    "nothing": ("[INST] {{ m.content }} [/INST]", " {{ m.content | trim }}<|im_end|>", ""),
    # as Gemma's and Phi's
    "trimmed turns": (
        "<start>user\n{{ m.content | trim }}<|im_end|>\n",
        "<start>model\n{{ m.content | trim }}<|im_end|>\n",
        "<start>model\n",
    ),
}
THOUGHT = ["Q ASSISTANT: [A]", "<think>\nold\n</think>\n\nA1", "", "<think>\nnew\n</think>\n\nA2"]
#: By template what is trained of answers without thinking, and with it.
TRAINED = {
    "empty block in the prompt": (["A1", "A2"], ["A1", THOUGHT[3]]),
    "opened block": (["A1", "A2"], ["A1", "new\n</think>\n\nA2"]),
}


def write_header(folder: Path, name: str) -> Path:
    others, answer, prompt = HEADERS[name]
    write_folder(folder, "thinking")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{answer}{{% else %}}{others}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    )
    return folder


@pytest.mark.parametrize("name", HEADERS)
def test_answers_begin_behind_the_header_that_they_have(tmp_path: Path, name: str) -> None:
    folder = write_header(tmp_path / "folder", name)
    plain, thinking = TRAINED.get(name, (["A1", "A2"], [THOUGHT[1], THOUGHT[3]]))
    for texts, expected in ((["Q 1", "A1", "Q ASSISTANT: 2", "A2"], plain), (THOUGHT, thinking)):
        messages = turns_of(texts)
        ids, _ = written(folder, {"messages": messages})
        assert ids == theirs(folder).apply_chat_template(messages)["input_ids"]
        trained = trained_texts(folder, {"messages": messages})
        assert [one.strip() for one in trained] == [f"{text}<|im_end|>" for text in expected]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_of_a_field_is_trained_behind_a_prompt_that_pre_fills_none(
    tmp_path: Path, name: str
) -> None:
    folder = write_header(tmp_path / "folder", "empty block in the prompt")
    messages = turns_of(["Q", "A"])
    messages[1][name] = "new"
    ids, _ = written(folder, {"messages": messages})
    assert ids == theirs(folder).apply_chat_template(messages)["input_ids"]
    assert trained_texts(folder, {"messages": messages}) == [
        "<think>\nnew\n</think>\n\nA<|im_end|>"
    ]


def test_a_placeholder_that_the_tokenizer_splits_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "vision")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_special_tokens": True}))
    with pytest.raises(ValueError, match="the tokenizer splits"):
        written(folder, {"messages": turns_of(["<image>a", "b"]), "image": "c.jpg"})


def test_images_that_a_processor_would_rewrite_are_refused(tmp_path: Path) -> None:
    """As Gemma 3's `<start_of_image>`, in whose place its processor writes more."""
    folder = write_folder(tmp_path / "odd", "turns")
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<image_soft_token>", "<start_of_image>"))
    with pytest.raises(ValueError, match="in another form than <image_soft_token>"):
        written(folder, {"messages": turns_of(["<image>a", "b"]), "image": "c.jpg"})
    assert trained_texts(folder, {"messages": turns_of(["a", "b"])}) == ["b<end_of_turn>"]


def test_words_of_the_system_that_a_template_moves_change_no_answer(
    folders: dict[str, Path],
) -> None:
    record = {"messages": turns_of(["a", "one", "b", "two"], "Be brief.")}
    ids, _ = written(folders["inst"], record)
    text = decoded(folders["inst"], ids)
    assert text.index("one") < text.index("Be brief.") < text.index("two")
    assert [one.strip() for one in trained_texts(folders["inst"], record)] == ["one</s>", "two</s>"]


@pytest.mark.parametrize(
    ("name", "record", "reason"),
    [
        ("turns", {"messages": turns_of(["a", "b"], "c")}, "a system turn is not supported"),
        ("inst", {"messages": turns_of(["a", "b"])[1:]}, "user and assistant must take turns"),
        ("vision", {"messages": turns_of(["<|image_pad|>", "b"])}, "the placeholder of an image"),
        (
            "turns",
            {"messages": turns_of(["a", "<image_soft_token>"])},
            "the placeholder of an image",
        ),
        (
            "vision",
            {"messages": turns_of(["<image>", "b"])},
            "1 occurrences of <image> for 0 images",
        ),
        (
            "vision",
            {"messages": turns_of(["a", "b"]), "image": "c"},
            "0 occurrences of <image> for 1 im",
        ),
        ("vision", {"messages": turns_of(["a", "b"]), "tools": [{}]}, "`tools`: tool calls"),
        (
            "vision",
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "are not read",
        ),
        ("vision", {"messages": [{"role": "tool", "content": "a"}]}, "is of 'tool'"),
        (
            "vision",
            {"messages": [*turns_of(["a"]), {"role": "assistant", "content": "b", "weight": 0.5}]},
            "has the weight 0.5; supported are 0 and 1",
        ),
        (
            "marked",
            {
                "messages": [
                    *turns_of(["a"]),
                    {"role": "assistant", "content": None, "tool_calls": [{}]},
                ]
            },
            "are not read",
        ),
        ("vision", {"conversations": [{"from": "function", "value": "a"}]}, "is of 'function'"),
        (
            "vision",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "the type 'input_audio', which is not supported",
        ),
        (
            "vision",
            {"messages": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]},
            "videos are not read without data.video in the run file",
        ),
    ],
)
def test_what_a_template_does_not_take_is_refused_by_name(
    folders: dict[str, Path], name: str, record: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        written(folders[name], record)


@pytest.mark.parametrize("begins", ["", "{{ bos_token }}"])
def test_a_processor_adds_special_tokens_unless_the_template_begins_with_bos(
    tmp_path: Path, begins: str
) -> None:
    """As LLaVA's: its template writes no BOS, its tokenizer's post-processor does."""
    from tokenizers import Tokenizer, processors
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    folder = write_folder(tmp_path / "llava", "inst")
    template = begins + (
        "{% for m in messages %}{{ m.role | upper + ': ' }}"
        "{% for part in m.content %}{{ part.text + ' ' }}{% endfor %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    rules = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rules.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", rules.token_to_id("<s>"))]
    )
    rules.save(str(folder / "tokenizer.json"))
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("user", "What?"), ("assistant", "A cat."))
    ]
    tokenizer = theirs(folder)
    tokenizer.image_token = "</s>"
    processor = LlavaProcessor(CLIPImageProcessorPil(), tokenizer, chat_template=template)
    tokens = FolderTokenizer(folder, rules.token_to_id("</s>"), processor=True)
    assert tokens.chat is not None
    ids, trained = joined(conversation({"messages": messages}, tokens.chat), tokens.image)
    assert ids == processor.apply_chat_template(messages, tokenize=True)[0]
    assert ids[0] == rules.token_to_id("<s>") and not trained[0] and any(trained)
    assert ids.count(ids[0]) == 1


@pytest.mark.parametrize("name", ["vision", "marked"])
@pytest.mark.parametrize("flag", [{"weight": 0}, {"loss": False}, {"train": False}])
def test_answers_of_weight_0_are_not_trained(
    folders: dict[str, Path], name: str, flag: dict[str, Any]
) -> None:
    messages = turns_of(["what", "that", "why", "so"])
    whole = written(folders[name], {"messages": messages})
    last = written(folders[name], {"messages": [messages[0], messages[1] | flag, *messages[2:]]})
    assert last[0] == whole[0]
    none = [one | flag for one in messages]
    with pytest.raises(ValueError, match="no token of it is trained"):
        written(folders[name], {"messages": none})
    first = whole[1].index(True)
    end = first + whole[1][first:].index(False)
    assert last[1] == [False] * end + whole[1][end:] and any(last[1])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[-1].content }}", "of turn 2"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "of turn 4"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "of turn 2"),
        (
            "{% for m in messages %}{{ m.content if loop.index0 % 2 }}{% endfor %}",
            "starts with the answer",
        ),
        ("{{ nothing.at_all.there }}", "'nothing' is undefined"),
        ("{{ messages.clear() }}", "unsafe|not safely callable"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_templates_whose_answers_are_not_found_are_refused(
    tmp_path: Path, template: str, reason: str
) -> None:
    folder = write_folder(tmp_path / "odd", "vision")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=reason):
        written(folder, {"messages": turns_of(["what", "that", "why", "so"])})


def test_a_template_that_is_none_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "broken", "vision")
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(SpecError, match="Cannot read the chat template"):
        written(folder, {"messages": turns_of(["a", "b"])})


def test_a_prompt_ends_where_the_answer_begins(folders: dict[str, Path]) -> None:
    _, chat = ours(folders["vision"])
    ids, trained = chat.written([Turn("user", ["<image>", "What?"], [])], prompt=True)
    whole = written(
        folders["vision"], {"messages": turns_of(["<image>What?", "Yes"]), "image": "a"}
    )
    first = whole[1].index(True)
    placeholder = ours(folders["vision"])[0].image
    assert [placeholder if one == IMAGE_ROW else one for one in ids.tolist()] == whole[0][:first]
    assert not trained.any()
