"""Refuses a checkpoint by its headers: what is missing, is there twice, or is not what the config says."""

from __future__ import annotations

from ple_inference.checkpoint import Checkpoint
from ple_inference.vllm_engine.quantization_config import QuantizationConfig
from ple_inference.vllm_engine.small_shapes import decoder_shapes
from ple_inference.vllm_engine.stored_names import (
    check_small,
    check_vision,
    decoder_names,
    refuse_other_layers,
    refuse_strangers,
)
from ple_inference.vllm_engine.stored_table import check_table
from ple_inference.vllm_engine.stored_weights import StoredWeights
from ple_inference.vllm_engine.tensors import Tensors


def check_stored(checkpoint: Checkpoint, tensors: Tensors, quantization: QuantizationConfig) -> None:
    """`checkpoint`: with a config that `check_config` let pass. Raises Refused."""
    config, text = checkpoint.config, checkpoint.text
    check_table(tensors, config)
    names = decoder_names(tensors, text_only="text_config" not in config)
    refuse_other_layers(names, text)
    weights = StoredWeights(tensors, names, text, quantization)
    weights.check()
    small = decoder_shapes(text)
    check_small(tensors, names, small)
    known = {*weights.placed(), *small}
    refuse_strangers((name for short, name in names.items() if short not in known), tensors)
    check_vision(tensors, config)
