"""Transformers on the same checkpoint, and once more with the rows of its table in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dequantized_model
import torch
import transformers
from answers import TOP
from generate import Found, random_prompts


def run(settings: dict[str, Any]) -> Found:
    transformers.logging.set_verbosity_error()
    model = dequantized_model.load(Path(settings["model"]), "cuda")
    weight = model.model.layers[1].ple.ple_embedding.ngram_embedding.weight
    table = weight.data.clone()
    found: Found = {}
    rows = random_prompts(settings["lengths"])
    for name, shift in (("prompt", 0), ("scrambled", 1)):
        weight.data.copy_(torch.roll(table, shift, 0))
        found[name] = [_reference_logits(model, row) for row in (rows if name == "prompt" else rows[:3])]
    return found


def _reference_logits(model: Any, row: list[int]) -> list[Found]:
    with torch.inference_mode():
        logits = model(torch.tensor([row], device="cuda"), use_cache=False).logits[0].float()
    log_probabilities = logits.log_softmax(-1)
    top = log_probabilities.topk(TOP)
    following = torch.tensor(row[1:], device="cuda")
    actual = log_probabilities[:-1].gather(1, following[:, None])[:, 0]
    return [
        {"top": ids, "top_logprobs": values, "actual": value}
        for ids, values, value in zip(
            top.indices[:-1].tolist(), top.values[:-1].tolist(), actual.tolist(), strict=True
        )
    ]
