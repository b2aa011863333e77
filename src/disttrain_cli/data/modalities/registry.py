"""Registry of all modalities, those of other packages included, and of their types of files."""

from __future__ import annotations

from disttrain_cli.data.modalities.audio import Audio
from disttrain_cli.data.modalities.images import Images
from disttrain_cli.data.modalities.media import VIDEO_FILES, Media
from disttrain_cli.data.modalities.modality import Modality
from disttrain_cli.data.modalities.targets import Targets
from disttrain_cli.spec.plugins import with_plugins

MODALITIES: dict[str, Modality] = with_plugins(
    "disttrain.modalities", {"image": Images(), "audio": Audio(), "target": Targets()}
)

#: By name, in the order in which a sample's files are searched. Videos are read as images.
MEDIA: dict[str, Media] = {modality.media.name: modality.media for modality in MODALITIES.values()}
MEDIA[VIDEO_FILES.name] = VIDEO_FILES
