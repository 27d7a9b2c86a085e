"""Packing against a bit-by-bit specification, and which tensor is packed how."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ple_inference.quantized.dequantize import dequantize, dequantize_blocks, dequantize_rows
from ple_inference.quantized.packing import pack, unpack
from ple_inference.quantized.scheme import CLASSES, Scheme, quantization_config, scheme_of

torch.set_num_threads(1)
BITS = st.sampled_from([4, 6, 8])


def random_integers(rows: int, columns: int, bits: int, seed: int) -> torch.Tensor:
    half = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-half, half, (rows, columns), generator=generator, dtype=torch.int8)


def bit_by_bit(q: torch.Tensor, bits: int) -> list[list[int]]:
    """The specification: one bit after the other into unsigned words."""
    found = []
    for row in q.tolist():
        words = [0] * (-(-len(row) * bits // 32))
        for column, value in enumerate(row):
            for bit in range(bits):
                place = column * bits + bit
                words[place // 32] |= ((value + (1 << (bits - 1))) >> bit & 1) << (place % 32)
        found.append(words)
    return found


@given(st.integers(1, 4), st.integers(1, 80), BITS, st.integers(0, 2**31))
def test_packed_words_are_the_specification_and_unpack_to_the_same(
    rows: int, columns: int, bits: int, seed: int
) -> None:
    q = random_integers(rows, columns, bits, seed)
    packed = pack(q, bits)
    assert packed.numpy().view(np.uint32).tolist() == bit_by_bit(q, bits)
    assert torch.equal(unpack(packed, bits, columns), q)


def test_known_words() -> None:
    assert pack(random_integers(3, 640, 6, 1), 6).shape == (3, 120)
    q = random_integers(3, 640, 8, 2)
    assert torch.equal(pack(q, 8).view(torch.uint8).to(torch.int16), q.to(torch.int16) + 128)
    assert pack(torch.tensor([[-8, 7, 0]]), 4).tolist() == [[0x8F0]]


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="from -9 to 7 do not fit 4 bits"):
        pack(torch.tensor([[-9, 7]]), 4)
    with pytest.raises(ValueError, match="5 bits"):
        pack(torch.tensor([[1]]), 5)
    with pytest.raises(ValueError, match="take 120 int32 words a row, not 128"):
        unpack(torch.zeros(2, 128, dtype=torch.int32), 6, 640)
    with pytest.raises(ValueError, match="weight_scale is"):
        dequantize(torch.zeros(2, 16, dtype=torch.int32), torch.ones(2, 2), Scheme(4, 128), (2, 128))
    with pytest.raises(ValueError, match="weight_packed is"):
        dequantize(torch.zeros(2, 16, dtype=torch.int32), torch.ones(2, 1), Scheme(6, 128), (2, 128))


@given(st.integers(1, 5), st.integers(1, 200), BITS, st.sampled_from([64, 128]), st.integers(0, 2**31))
def test_a_weight_is_its_integer_times_the_scale_of_its_group(
    rows: int, columns: int, bits: int, group_size: int, seed: int
) -> None:
    scheme = Scheme(bits, group_size)
    q = random_integers(rows, columns, bits, seed)
    scale = (torch.rand(scheme.scale_shape(rows, columns)) + 0.5).to(torch.float16)
    found = dequantize(pack(q, bits), scale, scheme, (rows, columns))
    for row in range(rows):
        for column in range(columns):
            assert found[row, column] == float(q[row, column]) * scale[row, column // group_size].float()


def test_blocks_and_rows_of_fp8() -> None:
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 2.0], [4.0, 0.25]], dtype=torch.bfloat16)
    found = dequantize_blocks(weight, scale)
    for row, column in ((0, 0), (127, 127), (127, 128), (128, 0), (199, 129)):
        assert found[row, column] == weight[row, column].float() * scale[row // 128, column // 128].float()
    with pytest.raises(ValueError, match="weight_scale_inv"):
        dequantize_blocks(weight, scale[:1])
    rows = dequantize_rows(weight, torch.tensor([0x3951], dtype=torch.int16).view(torch.bfloat16))
    assert torch.equal(rows, weight.to(torch.bfloat16) * 0.000199317932)
    with pytest.raises(ValueError, match="e4m3 and 1"):
        dequantize_rows(weight, scale)


EXPECTED = {
    "layers.0.mlp.experts.511.down_proj": (4, 128),
    "layers.0.linear_attn.in_proj_z": (6, 64),
    "layers.3.self_attn.o_proj": (6, 64),
    "layers.0.mlp.shared_expert.up_proj": (6, 64),
    "layers.7.mlp_hyper_connection.input_mix_weight_down": (8, 64),
    "hyper_connection_mixer.input_mix_weight_up": (8, 64),
    "embed_tokens": (8, 128),
    "layers.1.ple.value_proj": (8, 128),
    "layers.3.self_attn.indexer.index_qk_proj": (8, 128),
    "layers.0.mlp.gate": None,
    "layers.0.mlp.shared_expert_gate": None,
    "layers.0.linear_attn.in_proj_b": None,
    "layers.0.attn_hyper_connection.block_inject_weight": None,
    "layers.0.attn_hyper_connection.hc_norm": None,
    "layers.1.ple.ple_embedding.ngram_embedding.shard_3": None,
}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_each_module_has_the_scheme_of_its_class(prefix: str) -> None:
    for name, expected in EXPECTED.items():
        found = scheme_of(f"{prefix}{name}.weight")
        assert found == scheme_of(prefix + name)
        assert (found and (found.bits, found.group_size)) == expected, name
    assert scheme_of("lm_head.weight") == Scheme(8, 128)
    assert scheme_of("mtp.layers.0.self_attn.q_proj.weight") is None
    assert scheme_of("model.visual.blocks.0.attn.qkv.weight") is None


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_the_config_says_the_same_of_every_module(prefix: str) -> None:
    config = quantization_config(8, prefix)
    groups = list(config["config_groups"].values())
    assert len(groups) == len(CLASSES)
    for name, expected in EXPECTED.items():
        hits = [
            (group["weights"]["num_bits"], group["weights"]["group_size"])
            for group in groups
            if re.match(group["targets"][0].removeprefix("re:"), prefix + name)
        ]
        assert hits == ([expected] if expected else []), name
        assert not (expected and prefix + name in config["ignore"])
    assert f"{prefix}layers.0.linear_attn.in_proj_b" in config["ignore"]
    assert f"{prefix}layers.3.linear_attn.in_proj_b" not in config["ignore"]
