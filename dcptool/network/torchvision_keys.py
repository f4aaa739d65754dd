"""Keys of torchvision's published weights that differ from those of its networks."""

from __future__ import annotations

import re
from collections import OrderedDict

from torch import Tensor, nn

# Published before denselayer's parts were renamed.
_DENSE = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)$")
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
TRANSFORMING = ("googlenet", "inception_v3")


def translate(module: nn.Module, name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename, drop the classifiers of training, and resize position embeddings."""
    if name in TRANSFORMING:
        state = {key: value for key, value in state.items() if not key.startswith(_AUXILIARY)}
    if name.startswith("densenet"):
        state = {_DENSE.sub(r"\1\2", key): value for key, value in state.items()}
    position = "encoder.pos_embedding"
    if name.startswith("vit_") and position in state:
        from torchvision.models.vision_transformer import interpolate_embeddings

        sizes = (module.image_size, module.patch_size)
        if state[position].shape[1:2] != module.state_dict()[position].shape[1:2]:
            state = dict(interpolate_embeddings(*sizes, OrderedDict(state)))
    return state
