"""Tower and projector of any image-text or audio-text family as one layer, as the library has them.

Their rows come from the library's `get_image_features`, `get_video_features` and
`get_audio_features`, called as the whole model calls them (`library_whole`).

The layer holds all of the model's base class but the LLM, and but the other tower. Its buffers are
computed for real though its weights are built on the meta device, and are no state: a cast to bf16
would degrade them. Those that the folder stores (Gemma 4's bounds of clipped linears) are weights
without gradients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architecture import Joined
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.checks import (
    MISTAKES,
    ModuleConfig,
    check_numbers,
    decoded,
    wrong_field,
)
from disttrain_cli.models.empty_weights import move_weights
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import (
    Batch,
    Items,
    PipelineLayer,
    TensorSpec,
    embeds_name,
    features_name,
)
from disttrain_cli.models.library_attention import for_images
from disttrain_cli.models.library_whole import DEEP, TowerCall, refused, tower_calls, whole_model
from disttrain_cli.models.parallel import split
from disttrain_cli.spec.families.folder import PublishedFolder
from disttrain_cli.spec.families.library import AUDIO_PARTS
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.library_calls import Media
from disttrain_cli.spec.library_images import (
    ABSENT,
    FLAGS,
    VALUES,
    LibraryClips,
    LibraryImages,
    LibraryItems,
    LibraryVideos,
)
from disttrain_cli.spec.library_processor import digest_of
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.model import PROJECTORS, ModuleSpec

DROPOUT = re.compile(r"drop(out|_path|_prob)")


class _NumbersOnHost(TorchFunctionMode):
    """On a device without values integers are kept on the host: classes compute shapes of them.

    Together with tensors of the device (meta or fake), they have no values.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
        if any(map(_has_no_values, tensors)):
            if function is Tensor.__getitem__ and _selects(args[1]):
                with _disable_current_modes():
                    given = (args[0], args[1].nonzero(as_tuple=True)), {}
            moved, kwargs = tree_map_only((Tensor, slice), self._moved, given)
            if given[0] and isinstance(given[0][0], Tensor) and not given[0][0].ndim:
                moved = (given[0][0], *moved[1:])  # a method of a number
            return function(*moved, **kwargs)
        if not tensors or self._device.type == "meta":
            made = function(*given[0], **given[1])
            if not isinstance(made, Tensor) or made.is_floating_point() or not _has_no_values(made):
                return made
        on_host = tree_map_only(
            torch.device | str,
            lambda one: "cpu" if str(one).partition(":")[0] == self._device.type else one,
            given,
        )
        with _disable_current_modes(), torch.device("cpu"):
            return function(*on_host[0], **on_host[1])

    def _moved(self, given: Any) -> Any:
        if isinstance(given, slice):
            return slice(*map(self._moved, (given.start, given.stop, given.step)))
        if not isinstance(given, Tensor) or _has_no_values(given):
            return given
        if not given.ndim:  # it may be a size
            with _disable_current_modes():
                return given.item()
        return torch.empty(given.shape, dtype=given.dtype, device=self._device)


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _selects(index: Any) -> bool:
    """Return True if an index is a mask whose values are known."""
    return isinstance(index, Tensor) and index.dtype == torch.bool and not _has_no_values(index)


def unfit(tower: nn.Module) -> str | None:
    """Return why a tower's function depends on more than its images; None if it does not."""
    for path, part in tower.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            return f"{path} normalises over a batch, which would depend on the layout"
        for name, value in vars(part).items():
            drops = isinstance(part, nn.Dropout) or DROPOUT.search(name)
            if drops and isinstance(value, float) and value:
                return f"{path}.{name} is {value}: this dropout would depend on the layout"
    return None


#: Names of towers in base classes; all else is a projector.
TOWERS = re.compile(r"vision|visual|image_tower|audio_tower|encoder")

_unused: dict[str, frozenset[str]] = {}


def parts_of(config: Any, base: nn.Module, llm: str, item: Item) -> list[str]:
    """Return the names of a base class's children that belong to the tower of an item."""
    names = [name for name, _ in base.named_children() if name != llm]
    heard = [name for name in names if name in AUDIO_PARTS]
    if getattr(config, "vision_config", None) is None:
        return names
    return heard if item == "audio" else [name for name in names if name not in heard]


class File(NamedTuple):
    """Inputs of a file, its rows, and those that are asked for.

    Of an example (`LibraryImages.example`) these are about as many.
    """

    inputs: dict[str, Tensor]
    rows: int
    wanted: int


class Tower(PipelineLayer):
    """Files → rows of embeddings for the LLM."""

    kind = "tower"
    by_rows = True
    redundant = True

    def __init__(
        self, module: str, config: Any, head: LibraryItems, calls: Mapping[str, TowerCall]
    ) -> None:
        """
        Args:
            calls: of all types of files that it reads.
        """
        from transformers import PreTrainedModel

        super().__init__()
        self.name, self.module, self.head, self.calls = f"{module}.tower", module, head, calls
        self.item: Item = head.item
        self.needs = (self.item,)
        width = config.get_text_config().hidden_size
        names = (
            embeds_name(self.item),
            *(features_name(level) for level in range(next(iter(calls.values())).levels)),
        )
        self.writes = tuple(
            TensorSpec(name, self.item, "tokens", (width,), split=True) for name in names
        )
        whole = whole_model(config)
        self.tower = whole.base
        own = parts_of(config, whole.base, whole.llm, self.item)
        for name in [name for name, _ in self.tower.named_children() if name not in own]:
            delattr(self.tower, name)
        for_images(self.tower)
        self.constants = _taken_buffers(self.tower)
        for part in self.tower.modules():
            move_weights(part)
        published = {path.partition(".")[0] for path, _ in self.tower.named_parameters()}
        self.published = {f"tower.{name}": name for name in sorted(published)}
        self.towers = tuple(
            f"tower.{name}."
            for name, part in self.tower.named_children()
            if TOWERS.search(name) and isinstance(part, PreTrainedModel)
        )
        self._placed: torch.device | None = None
        key = f"{self.item} {config.to_dict()!r}"
        if key not in _unused:
            _unused[key] = self._without_gradients()
        self.unused = _unused[key]

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return not batch.of(self.item).grids

    def owner_of(self, path: str) -> str:
        own = not self.towers or path.startswith(self.towers)
        return self.module if own or self.adapted else PROJECTORS

    def trains(self, path: str) -> bool:
        return path not in self.unused and super().trains(path)

    def _without_gradients(self) -> frozenset[str]:
        """Return the parameters that items do not reach: norms after the block that is read, …"""
        example = self.head.example(1)
        items = Items(
            [(int(example.table[0]), 1)],
            {0: [torch.from_numpy(example.values)[None].to("meta")]},
            tables={0: [example.table[None]]},
        )
        with torch.enable_grad():
            made = self.compute({}, Batch({self.item: items}))
        # read from the graph: autograd's device threads would not survive the fork of the ranks
        nodes, seen, reached = [one.grad_fn for one in made.values()], set[Any](), set[int]()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                reached.add(id(getattr(node, "variable", None)))
                nodes += [before for before, _ in node.next_functions]
        return frozenset(path for path, one in self.named_parameters() if id(one) not in reached)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        like = next(self.parameters())
        self._place(like)
        items = batch.of(self.item)
        each = zip(items.values[0], items.tables[0], items.grids, strict=True)
        files = [
            File(unpacked(self.head.inputs, values, table[0]), int(table[0, 0]), count)
            for values, table, (count, _) in each
        ]

        def key(file: tuple[int, File]) -> Any:
            number, inputs = file[0], file[1].inputs
            shapes = [(name, one.shape[1:]) for name, one in inputs.items()]
            return shapes if self._call_for(inputs).joins else number

        groups = [[one for _, one in group] for _, group in groupby(enumerate(files), key)]
        together = map(torch.cat, zip(*(self._rows(one, like) for one in groups), strict=True))
        return {
            spec.name: split(rows[self.of_group(len(rows))], self.group)
            for spec, rows in zip(self.writes, together, strict=True)
        }

    def _call_for(self, inputs: Mapping[str, Tensor]) -> TowerCall:
        return next(one for one in self.calls.values() if one.inputs[0][1] in inputs)

    def _rows(self, files: list[File], like: Tensor) -> list[Tensor]:
        """Return the rows of files of one type, and those of the tower's inner blocks."""
        call, inputs = self._call_for(files[0].inputs), _joined([one.inputs for one in files])
        given = {
            argument: inputs[name].to(like.dtype)
            if inputs[name].is_floating_point()
            else inputs[name]
            if _has_no_values(like)
            else to_device(inputs[name], like.device)
            for argument, name in call.inputs
            if name in inputs
        }
        rows = sum(one.rows for one in files)
        if rows == 1:  # classes squeeze the rows of a batch with one row away
            given = {name: torch.cat([value, value]) for name, value in given.items()}
        with _NumbersOnHost(like.device) if _has_no_values(like) else nullcontext():
            made = getattr(self.tower, call.function)(**given, **call.constants, return_dict=True)
            deep = getattr(made, DEEP) if call.levels else ()
            own = getattr(made, call.output)
            if call.padded:
                own = own[:, :rows]
            found = [flat_rows(one) for one in (own, *deep)]
            for name in call.projectors:
                found[0] = self.tower.get_submodule(name)(found[0])
        if any(len(one) != (2 if rows == 1 else rows) for one in found):
            raise SpecError(
                f"The tower of {self.head.folder} and its processor do not fit",
                f"{len(found[0])} rows of files for which the processor writes {rows} tokens",
                "Download the folder again, with its processor's files.",
            )
        if len(found[0]) == rows and all(one.rows == one.wanted for one in files):
            return found
        starts = accumulate((one.rows for one in files), initial=0)
        at = torch.cat(
            [
                start + torch.arange(one.wanted, device=like.device) % one.rows
                for start, one in zip(starts, files, strict=False)
            ]
        )
        return [one.index_select(0, at) for one in found]

    def _place(self, like: Tensor) -> None:
        """Move the buffers, which are no state of the layer, to a device; a fake one has blanks."""
        if self._placed == like.device:
            return
        for path, name, tensor in self.constants:
            self.tower.get_submodule(path).__dict__[name] = (
                torch.empty(tensor.shape, dtype=tensor.dtype, device=like.device)
                if _has_no_values(like)
                else tensor.to(like.device)
            )
        self._placed = like.device


def flat_rows(pooled: Any) -> Tensor:
    """Return the rows of all files, in order, from any of the forms that classes return."""
    rows = (
        torch.cat([flat_rows(one) for one in pooled])
        if isinstance(pooled, (list, tuple))
        else pooled
    )
    return rows.reshape(-1, rows.shape[-1])


def unpacked(names: tuple[str, ...], values: Tensor, table: Any) -> dict[str, Tensor]:
    """Return the inputs of a file from their packed form (`library_images.Packed`).

    Integers stay on the host.
    """
    numbers, at, first = np.asarray(table).tolist(), 1, 0
    flat, inputs = values.flatten(), dict[str, Tensor]()
    for name in names:
        kind, dimensions = numbers[at : at + 2]
        if kind == ABSENT:
            at += 2
            continue
        shape = numbers[at + 2 : at + 2 + dimensions]
        at, size = at + 2 + dimensions, int(np.prod(shape))
        if kind == VALUES:
            inputs[name] = flat[first : first + size].view(shape)
            first += size
        else:
            with _disable_current_modes(), torch.device("cpu"):
                given = torch.tensor(numbers[at : at + size]).view(shape)
            inputs[name] = given.bool() if kind == FLAGS else given
            at += size
    return inputs


def _joined(each: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the inputs of several files, one after the other; integers stay on the host."""
    joined = dict[str, Tensor]()
    for name, first in each[0].items():
        on_host = nullcontext() if first.is_floating_point() else _disable_current_modes()
        with on_host:
            joined[name] = torch.cat([one[name] for one in each]) if len(each) > 1 else first
    return joined


def _taken_buffers(model: nn.Module) -> list[tuple[str, str, Tensor]]:
    """Make a model's buffers plain attributes: (path of their module, name, value).

    Except real numbers that its folder stores, which are weights.
    """
    taken = []
    for path, part in model.named_modules():
        for name, tensor in list(part.named_buffers(recurse=False)):
            if name not in part._non_persistent_buffers_set and tensor.is_floating_point():
                continue
            del part._buffers[name]
            part.__dict__[name] = tensor
            taken.append((path, name, tensor))
    return taken


def read(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[Any, None]:
    """Return the configuration of a whole model, whose tower is a module.

    Raises:
        SpecError: its class does not accept it, or it cannot be trained exactly.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    if spec.config:
        raise wrong_field(name, "config", spec.config, "nothing: the folder's config.json is used")
    check_numbers(name, decoded(fields))
    kind = str(fields.get("model_type"))
    try:
        config = CONFIG_MAPPING[kind].from_dict(decoded(fields))
    except (StrictDataclassError, *MISTAKES) as error:
        raise refused(kind, " ".join(str(error).split())) from None
    if why := _unfit_whole(config):
        raise refused(kind, why)
    return config, None


def _unfit_whole(config: Any) -> str | None:
    key = repr(config.to_dict())
    if key not in _unfits:
        whole = whole_model(config)
        delattr(whole.base, whole.llm)
        _unfits[key] = unfit(whole.base)
    return _unfits[key]


_unfits: dict[str, str | None] = {}


def images_of(run: Run, module: ModuleConfig) -> LibraryImages:
    """Return the tower's requirements: images as the folder's own processor prepares them.

    Raises:
        SpecError: the family's images, or the videos that the run reads, are not trained exactly.
    """
    published = _published(run, module)
    if "max_image_pixels" in run.file.data.model_fields_set:
        raise SpecError(
            "data.max_image_pixels is not read by this model's image processor",
            "its images have the sizes that the processor's own files say",
            "Leave data.max_image_pixels out; lower the processor's own budget, if it has one.",
        )
    head = LibraryImages(
        module=module.name,
        image_token=_token(published, module, "image"),
        video=_videos(run, published, module),
        **_of_folder(published),
    )
    return _completed(head, module)


def clips_of(run: Run, module: ModuleConfig) -> LibraryClips:
    """Return an audio tower's requirements: clips as the folder's own processor prepares them.

    Raises:
        SpecError: the family's clips are not trained exactly.
    """
    published = _published(run, module)
    token = _token(published, module, "audio")
    head = LibraryClips(module=module.name, audio_token=token, **_of_folder(published))
    return _completed(head, module)


def _published(run: Run, module: ModuleConfig) -> PublishedFolder:
    published = run.published
    if published is None or published.file.parent != run.resolve(
        run.file.model.modules[module.name].folder or ""
    ):
        raise refused(module.config.model_type, "its tower is used only with model.folder")
    return published


def _token(published: PublishedFolder, module: ModuleConfig, media: Media) -> int:
    token = published.token(media)
    if token is None:
        raise refused(module.config.model_type, f"its config.json names no {media}_token_id")
    return token


def _of_folder(published: PublishedFolder) -> dict[str, Any]:
    folder = published.path
    return {"folder": str(folder), "digest": digest_of(folder)}


def _videos(run: Run, published: PublishedFolder, module: ModuleConfig) -> LibraryVideos | None:
    asked = run.file.data.video
    if asked is None:
        return None
    if asked.max_pixels is not None:
        raise SpecError(
            "data.video.max_pixels is not read by this model's video processor",
            "its frames have the sizes that the processor's own files say",
            "Leave data.video.max_pixels out; lower the processor's own budget, if it has one.",
        )
    token = _token(published, module, "video")
    return LibraryVideos(token=token, fps=asked.fps, max_frames=asked.max_frames)


def _completed(head: Any, module: ModuleConfig) -> Any:
    """Return a head with the inputs that the functions of its tower read."""
    calls = tower_calls(head, module.config).values()
    names = dict.fromkeys(name for call in calls for name in call.names)
    mrope = any(call.positions is not None for call in calls)
    return head.model_copy(update={"inputs": tuple(names), "mrope": mrope})


def makers(joined: Joined) -> list[LayerMaker]:
    """Return the factory of the one layer."""
    module, head = joined.module, joined.head
    assert isinstance(head, LibraryItems)
    section = "vision_config" if head.item == "image" else "audio_config"
    std = getattr(getattr(module.config, section, None), "initializer_range", 0.02)
    make = partial(Tower, module.name, module.config, head, tower_calls(head, module.config))
    return [LayerMaker(make, std)]
