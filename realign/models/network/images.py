"""Images in packed sequences: the embeddings and the rotary positions of image tokens (Qwen2-VL, Qwen2.5-VL).

An image of t x h x w merged patches has as many image tokens in the text. Each token gets the features of a merged
patch instead of its embedding, and a position with three axes. All other parts of the model see packed rows, as for
text. Image tokens after those of all images, such as sampled ones, are text.

Shapes: P patches, d values of a patch, I images, F features (merged patches) of all images. T packed tokens, R rows of
a pass, L tokens of a sequence, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from realign.api.lengths import IntArray
from realign.api.sample import GRIDS, PIXELS, TOKENS, SequenceSample
from realign.errors import DataError
from realign.models.network.attention import AttentionContext, use_attention
from realign.models.network.heads import IMAGE_FAMILIES, read_body
from realign.models.network.kernels import CONTEXT
from realign.models.network.passes import Layout

NO_IMAGES = (
    "this model does not read images. Use a causal language model of one of the families "
    f"{', '.join(sorted(IMAGE_FAMILIES))} without value_head, with trains=all, in one process."
)

CURE = "Use the image processor of the model."


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """Token ids of a prompt, or of a prompt with a part of its response, and the images of the prompt."""

    ids: Tensor
    pixels_Pd: Tensor
    grids_I3: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> ImagePrompt:
        """Return the same prompt on a device."""
        return ImagePrompt(self.ids.to(device), self.pixels_Pd.to(device), self.grids_I3.to(device))


PromptInput: TypeAlias = Tensor | ImagePrompt
"""Token ids of a prompt, with its images if it has any."""


def ids_of(prompt: PromptInput) -> Tensor:
    """Return the token ids of a prompt."""
    return prompt if isinstance(prompt, Tensor) else prompt.ids


def append_tokens(prompt: PromptInput, ids: Tensor) -> PromptInput:
    """Return a prompt with further tokens."""
    longer = torch.cat([ids_of(prompt), ids])
    return longer if isinstance(prompt, Tensor) else replace(prompt, ids=longer)


def prompts_with_images(data: SequenceSample, key: str) -> list[PromptInput]:
    """Return the prompts `key` of a batch with one prompt per id, each with its images if it has any."""
    prompts: list[PromptInput] = list(data.sequences(key))
    if PIXELS not in data:
        return prompts
    images = zip(prompts, data.sequences(PIXELS), data.sequences(GRIDS), strict=True)
    return [ImagePrompt(ids_of(ids), pixels, grids) if len(grids) else ids for ids, pixels, grids in images]


class Placed(NamedTuple):
    """The image tokens of a sequence."""

    positions_3L: IntArray
    """Rotary positions along time, height and width."""
    features_L: IntArray
    """Index of the feature of each image token among those of the prompt; -1 for text."""
    next: int
    """Position of the token that follows."""


def place(ids_L: IntArray, grids_I3: IntArray, token: int, merge: int) -> Placed:
    """Find the tokens of the images of a sequence, and the positions of all tokens.

    Args:
        ids_L: token ids.
        grids_I3: patches of the images of the prompt; the sequence contains the first of these images.
        token: id of image tokens.
        merge: number of patches per token along height and along width.

    Raises:
        ValueError: an image has fewer or more consecutive image tokens than merged patches.
    """
    positions_3L = np.empty((3, len(ids_L)), dtype=np.int64)
    features_L = np.full(len(ids_L), -1, dtype=np.int64)
    read = position = n_features = 0
    for t, h, w in (grids_I3 // [1, merge, merge]).tolist():
        image_tokens = np.flatnonzero(ids_L[read:] == token)
        if not len(image_tokens):
            break  # an earlier turn of a conversation ends before the later images of its prompt
        begin = read + int(image_tokens[0])
        end = begin + t * h * w
        if end > len(ids_L) or (ids_L[begin:end] != token).any():
            raise ValueError(f"an image of {t} x {h} x {w} merged patches needs {end - begin} consecutive image tokens")
        positions_3L[:, read:begin] = position + np.arange(begin - read)
        position += begin - read
        positions_3L[:, begin:end] = position + np.indices((t, h, w)).reshape(3, -1)
        features_L[begin:end] = n_features + np.arange(end - begin)
        # an image advances the position by its longer side only, as in transformers; `t` is 1
        position, n_features, read = position + max(h, w), n_features + end - begin, end
    # otherwise an image with more tokens than patches would pass, with the surplus read as text
    if n_features and read < len(ids_L) and ids_L[read] == token:
        raise ValueError(f"images of {n_features} merged patches are followed by another image token")
    positions_3L[:, read:] = position + np.arange(len(ids_L) - read)
    return Placed(positions_3L, features_L, position + len(ids_L) - read)


class ImageInputs:
    """Computes the inputs of the layers of a model for packed text with images."""

    def __init__(self, module: Any) -> None:
        """Prepare a model of `IMAGE_FAMILIES`. Its vision layers attend with the attention of torch."""
        self._body = read_body(module)
        self._token = int(module.config.image_token_id)
        vision = module.config.vision_config
        self._merge = int(vision.spatial_merge_size)
        self._values = int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
        # vision layers attend within images, of which `realign_context` knows nothing
        use_attention(self._body.visual, "sdpa")

    def rows(self, data: SequenceSample, layout: Layout) -> dict[str, Tensor]:
        """Return the inputs `inputs_embeds` and `position_ids` of a pass over the rows of a layout.

        Raises:
            DataError: images do not fit their tokens or the model. The message contains the id.
        """
        lengths, ids_T, grids = data.lengths[TOKENS], data[TOKENS], self._per_prompt(data)
        offset_P = np.cumsum([0, *(self._count(grids_I3) for grids_I3 in grids)])
        placed = []
        for prompt, ids_L in zip(lengths.prompt_of_sequence.tolist(), _split(ids_T, lengths.flat), strict=True):
            try:
                tokens = place(ids_L, grids[prompt], self._token, self._merge)
            except ValueError as error:
                raise DataError(f"id {data.ids[prompt]!r}: {error}. {CURE}") from error
            placed.append(_shift(tokens, int(offset_P[prompt])))
        rows = slice(None) if layout.token_R is None else layout.token_R.to(ids_T.device)
        return self._inputs(ids_T, placed, data[PIXELS], data[GRIDS], rows)

    def prefill(self, prompts: Sequence[PromptInput], context: AttentionContext) -> tuple[Tensor, list[int]]:
        """Run the layers on packed prompts.

        Args:
            prompts: the prompts, of which at least one has images.
            context: attention within each prompt.

        Returns:
            The last hidden states [T, H], and the position that follows each prompt.

        Raises:
            DataError: the patches do not fit the model.
        """
        with_images = [p for p in prompts if isinstance(p, ImagePrompt)]
        pixels_Pd = torch.cat([prompt.pixels_Pd for prompt in with_images])
        grids_I3 = torch.cat([prompt.grids_I3 for prompt in with_images])
        placed, seen = [], 0
        for prompt in prompts:
            own = _on_host(prompt.grids_I3) if isinstance(prompt, ImagePrompt) else np.zeros((0, 3), dtype=np.int64)
            placed.append(_shift(place(_on_host(ids_of(prompt)), own, self._token, self._merge), seen))
            seen += self._count(own)
        ids_T = torch.cat([ids_of(prompt) for prompt in prompts])
        inputs = self._inputs(ids_T, placed, pixels_Pd, grids_I3)
        hidden: Tensor = self._body(**inputs, **{CONTEXT: context}, use_cache=False).last_hidden_state
        return hidden[0], [tokens.next for tokens in placed]

    def check(self, prompt: ImagePrompt) -> None:
        """Check that a prompt contains the tokens of all its images.

        Raises:
            ValueError: it does not.
        """
        grids_I3 = _on_host(prompt.grids_I3)
        placed = place(_on_host(prompt.ids), grids_I3, self._token, self._merge)
        if (tokens := int((placed.features_L >= 0).sum())) != (expected := self._count(grids_I3)):
            raise ValueError(f"the prompt has {tokens} image tokens, but its images have {expected} merged patches")

    def _per_prompt(self, data: SequenceSample) -> list[IntArray]:
        """Return the grids of each prompt.

        Raises:
            ValueError: a prompt does not have exactly one sequence of grids.
        """
        if (counts := data.lengths[GRIDS].counts).size and (counts != 1).any():
            raise ValueError(f"key {GRIDS!r} must have one sequence per prompt, with the images of all its sequences")
        return list(_split(data[GRIDS], data.lengths[GRIDS].flat))

    def _count(self, grids_I3: IntArray) -> int:
        """Return the number of features of images."""
        return int(grids_I3.prod(1).sum()) // self._merge**2

    def _inputs(
        self,
        ids_T: Tensor,
        placed: Sequence[Placed],
        pixels_Pd: Tensor,
        grids_I3: Tensor,
        rows: slice | Tensor = slice(None),
    ) -> dict[str, Tensor]:
        positions_3T = torch.from_numpy(np.concatenate([tokens.positions_3L for tokens in placed], 1)).to(ids_T.device)
        features_T = torch.from_numpy(np.concatenate([tokens.features_L for tokens in placed])).to(ids_T.device)
        features_R = features_T[rows]
        embeds_RH = self._body.get_input_embeddings()(ids_T[rows])
        image_R = (features_R >= 0).nonzero()[:, 0]
        if len(image_R):
            if pixels_Pd.shape[1] != self._values:
                raise DataError(f"patches have {pixels_Pd.shape[1]} values, but the model needs {self._values}. {CURE}")
            features_FH = torch.cat(self._body.get_image_features(pixels_Pd, grids_I3).pooler_output)
            image_NH = features_FH.index_select(0, features_R[image_R]).to(embeds_RH.dtype)
            embeds_RH = embeds_RH.index_copy(0, image_R, image_NH)
        return {"inputs_embeds": embeds_RH[None], "position_ids": positions_3T[:, rows][:, None]}


def _shift(placed: Placed, offset: int) -> Placed:
    """Return the features as indices among those of several prompts."""
    return placed._replace(features_L=np.where(placed.features_L < 0, -1, placed.features_L + offset))


def _on_host(x: Tensor) -> IntArray:
    array: IntArray = x.cpu().numpy()
    return array


def _split(x: Tensor, lengths: IntArray) -> Iterator[IntArray]:
    """Yield the packed sequences of a tensor, on the host."""
    yield from np.split(_on_host(x), np.cumsum(lengths)[:-1]) if len(lengths) else ()
