"""Image processors that cut images into tiles, with their processors and tokenizers, as
transformers saves them."""

from functools import partial
from pathlib import Path
from typing import Any

from disttrain_cli.spec.families import tilings
from disttrain_cli.spec.heads import ImageInput
from tests.data.chat_folders import CORPUS

#: Text around images, as the families' templates write it; the marks of answers are ours.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ part['text'] }}<|im_end|>{% endgeneration %}{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TILE, PATCH, MERGE = 16, 4, 2
TOKENS = (TILE // PATCH // MERGE) ** 2


def _rules(specials: tuple[str, ...], image: str, **named: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer(models.BPE(byte_fallback=False, unk_token=None))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    rules.train_from_iterator(CORPUS * 4, trainer)
    own = ("<pad>", "<s>", "<|im_start|>", "<|im_end|>", image, *specials)
    rules.add_special_tokens([AddedToken(text, special=True) for text in own])
    made = PreTrainedTokenizerFast(
        tokenizer_object=rules,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        extra_special_tokens=named,
    )
    made.chat_template = TEMPLATE.replace("IMAGE", image)
    return made


def _without_videos(processor: Any) -> Any:
    """The class of a processor without its video processor, which needs torchvision."""

    def unchecked(self: Any, name: str, given: Any) -> None:
        pass

    def attributes(cls: Any) -> list[str]:
        return ["image_processor", "tokenizer"]

    methods = {
        "check_argument_for_proper_class": unchecked,
        "get_attributes": classmethod(attributes),
    }
    return type(processor.__name__, (processor,), methods)


def internvl(**fields: Any) -> Any:
    """InternVL's processor."""
    from transformers import GotOcr2ImageProcessorPil, InternVLProcessor

    given = {"size": {"height": TILE, "width": TILE}, "max_patches": 6, **fields}
    words = _rules(
        ("<img>", "</img>", "<video>"),
        "<IMG_CONTEXT>",
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    return _without_videos(InternVLProcessor)(
        GotOcr2ImageProcessorPil(**given),
        words,
        image_seq_length=TOKENS,
        chat_template=words.chat_template,
    )


def idefics3(**fields: Any) -> Any:
    """The processor of Idefics3, whose texts and images SmolVLM's are."""
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    given = {"size": {"longest_edge": 4 * TILE}, "max_image_size": {"longest_edge": TILE}, **fields}
    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    around = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    words = _rules((*around, *places), "<image>", image_token="<image>")
    return Idefics3Processor(
        Idefics3ImageProcessorPil(**given),
        words,
        image_seq_len=TOKENS,
        chat_template=words.chat_template,
    )


SIDES = (TILE, 2 * TILE, 3 * TILE)


def llava_next(**fields: Any) -> Any:
    """LLaVA-NeXT's processor."""
    from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor

    given = {
        "size": {"shortest_edge": TILE},
        "crop_size": {"height": TILE, "width": TILE},
        "image_grid_pinpoints": [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]],
        **fields,
    }
    words = _rules((), "<image>", image_token="<image>")
    return LlavaNextProcessor(
        LlavaNextImageProcessorPil(**given),
        words,
        patch_size=PATCH * MERGE,  # there is no merge in its models
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    )


def llava_onevision(vision_aspect_ratio: str = "anyres_max_9", **fields: Any) -> Any:
    """LLaVA-OneVision's processor."""
    from transformers import LlavaOnevisionImageProcessorPil, LlavaOnevisionProcessor

    given = {
        "size": {"height": TILE, "width": TILE},
        "image_grid_pinpoints": [[height, width] for height in SIDES for width in SIDES],
        **fields,
    }
    words = _rules(("<video>",), "<image>", image_token="<image>", video_token="<video>")
    return _without_videos(LlavaOnevisionProcessor)(
        LlavaOnevisionImageProcessorPil(**given),
        words,
        num_image_tokens=TOKENS,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=vision_aspect_ratio,
        chat_template=words.chat_template,
    )


#: Of a family, its processor and how we read its numbers.
FAMILIES = {
    "internvl": (internvl, tilings.nearest_ratio),
    "idefics3": (idefics3, tilings.longest_edge),
    "llava_next": (llava_next, partial(tilings.joined, vision_aspect_ratio=None)),
    "llava_onevision": (
        llava_onevision,
        partial(tilings.joined, vision_aspect_ratio="anyres_max_9"),
    ),
}


def written(folder: Path, processor: Any) -> Path:
    """The folder that a processor saves."""
    processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    return folder


def head_of(folder: Path, family: str) -> ImageInput:
    """How an encoder of the family reads images, as the folder says."""
    from disttrain_cli.spec.families.processors import image_processor_fields

    return ImageInput(
        module="encoder",
        patch_px=PATCH,
        merge=MERGE,
        max_pixels=TILE * TILE,
        processor=FAMILIES[family][1](*image_processor_fields(folder)),
    )
