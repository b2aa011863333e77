"""Tokenizers with chat templates, written as folders: templates of `templates/`, worded as the
families that they resemble write conversations."""

import json
from pathlib import Path

TEMPLATES = Path(__file__).with_name("templates")
#: Special tokens of each template, its begin and end among them.
SPECIALS = {
    "vision": ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    "marked": ("<|im_start|>", "<|im_end|>"),
    "thinking": ("<|im_start|>", "<|im_end|>"),
    "headers": ("<|begin|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "inst": ("<s>", "</s>", "[INST]", "[/INST]"),
    "turns": ("<bos>", "<end_of_turn>", "<start_of_turn>", "<image_soft_token>"),
}
BEGINS = {"headers": "<|begin|>", "inst": "<s>", "turns": "<bos>"}
ENDS = {"headers": "<|eot_id|>", "inst": "</s>", "turns": "<end_of_turn>"}
CORPUS = [
    "What is in the picture? A cat, that sits on a mat.",
    "user\n\nassistant\n\n\nmodel\nsystem\n You help. Yes,\n no.\n\nThink of it, then say it.",
]


def write_folder(folder: Path, name: str, *, where: str = "jinja", metaspace: bool = False) -> Path:
    """A byte-level BPE (or a Unigram-like one with spaces as letters) with the template `name`,
    which stands in `where`: chat_template.jinja, chat_template.json, or the tokenizer's config as
    a text or as a list."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    rules = Tokenizer(models.BPE(byte_fallback=metaspace, unk_token=None))
    rules.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme="first")
        if metaspace
        else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    rules.decoder = decoders.Metaspace() if metaspace else decoders.ByteLevel()
    alphabet = [] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    rules.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=alphabet,
            special_tokens=[f"<0x{byte:02X}>" for byte in range(256)] if metaspace else [],
            show_progress=False,
        ),
    )
    rules.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS[name]])
    folder.mkdir(parents=True, exist_ok=True)
    rules.save(str(folder / "tokenizer.json"))
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": ENDS.get(name, "<|im_end|>"),
        "clean_up_tokenization_spaces": False,
    }
    if name in BEGINS:
        config["bos_token"] = BEGINS[name]
    match where:
        case "jinja":
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        case "json":
            content = json.dumps({"chat_template": template})
            (folder / "chat_template.json").write_text(content, encoding="utf-8")
        case "text":
            config["chat_template"] = template
        case "list":
            config["chat_template"] = [
                {"name": "tool_use", "template": "{{ raise_exception('of tools') }}"},
                {"name": "default", "template": template},
            ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
