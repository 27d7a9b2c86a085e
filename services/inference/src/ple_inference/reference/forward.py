"""Runs the model for one sequence: prompt in pieces, then token by token through its own cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ple_inference.reference.model import ReferenceModel


@dataclass(frozen=True)
class ImageInputs:
    """Images of one prompt: pixel_values [patches, 1536] f32, grid_thw [images, 3] int64."""

    pixel_values: Tensor
    grid_thw: Tensor


class Forward:
    """One sequence's state in the model. Used by one thread."""

    def __init__(
        self, model: ReferenceModel, prompt: list[int], images: ImageInputs | None, chunk_tokens: int
    ) -> None:
        self._model, self._prompt, self._images = model, prompt, images
        # An image's embeddings are made in one piece with its placeholders.
        self._chunk_tokens = len(prompt) if images else chunk_tokens
        text_config: Any = model.config.text_config
        self._cache: Any = DynamicCache(config=text_config)
        self._computed = 0
        self._positions, self._delta = self._prompt_positions()

    @torch.inference_mode()
    def prefill(self) -> Tensor | None:
        """Compute the next piece of the prompt; logits [vocab] of its last token once all is computed."""
        end = min(self._computed + self._chunk_tokens, len(self._prompt))
        logits = self._step(self._prompt[self._computed : end], self._positions[..., self._computed : end])
        return logits if end == len(self._prompt) else None

    @torch.inference_mode()
    def decode(self, token: int) -> Tensor:
        """Compute one token more; logits [vocab] after it."""
        place = torch.full((4, 1, 1), self._computed)
        place[1:] += self._delta
        return self._step([token], place)

    def _step(self, tokens: list[int], positions: Tensor) -> Tensor:
        media: dict[str, Any] = {}
        if self._images is not None and self._computed == 0:
            media = {
                "pixel_values": self._images.pixel_values,
                "image_grid_thw": self._images.grid_thw,
            }
        result = self._model(
            input_ids=torch.tensor([tokens]),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **media,
        )
        self._computed += len(tokens)
        logits: Tensor = result.logits[0, -1]
        return logits

    def _prompt_positions(self) -> tuple[Tensor, int]:
        """[4, 1, tokens]: the plain position, then time, height, width; and how far decoding is off it.

        The model would keep the offset of the last image prompt for whatever it computes next, so that
        sequences would disturb each other; each keeps its own here.
        """
        plain = torch.arange(len(self._prompt))
        if self._images is None:
            return plain.view(1, 1, -1).expand(4, 1, -1), 0
        ids = torch.tensor([self._prompt])
        kinds = (ids == self._model.config.image_token_id).int()
        rotary, delta = self._model.model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=self._images.grid_thw
        )
        return torch.cat([plain.view(1, 1, -1), rotary]), int(delta)
