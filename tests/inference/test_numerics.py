"""Logits with rows from the daemon equal Transformers' own embedding, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from ple_inference.reference.forward import Forward, ImageInputs
from ple_inference.reference.model import ReferenceModel, load_model
from ple_inference.reference.table_embedding import TableEmbedding, decode_rows, stored_scale
from ple_inference.table_check import WrongTableError, check_table, row_type_of
from ple_inference.tiny.config import TinyOptions
from ple_rpc.client import TableClient
from ple_rpc.table.v1 import table_pb2

KINDS = [("tiny", "f32"), ("tiny", "bf16"), ("real", "f32"), ("real", "bf16")]


@dataclass
class Pair:
    """The same checkpoint twice, each read from disk: only the source of n-gram rows differs."""

    own: Any
    ours: ReferenceModel
    folder: Path
    client: TableClient


@pytest.fixture(scope="module", params=KINDS, ids=["-".join(kind) for kind in KINDS])
def pair(request: pytest.FixtureRequest, make_checkpoint: Callable, daemon_of: Callable) -> Iterator[Pair]:
    vocab, dtype = request.param
    rows = 13_200 if (vocab, dtype) == ("real", "bf16") else 1000
    folder = make_checkpoint(TinyOptions(vocab=vocab, dtype=dtype, table_rows_base=rows))
    own = transformers.Qwen4ExpForConditionalGeneration.from_pretrained(folder, dtype="auto").eval()
    ours = load_model(folder, num_threads=1)
    with TableClient(daemon_of(folder).address) as client:
        client.wait_ready(60)
        ours.table.connect(client)
        yield Pair(own, ours, folder, client)


def text_ids(model: Any, length: int = 40, batch: int = 1) -> Tensor:
    eos = model.config.text_config.eos_token_id
    ids = torch.randint(0, eos, (batch, length), generator=torch.Generator().manual_seed(length))
    ids[:, [9, 10, 30]] = eos
    return ids


def image_inputs(model: Any) -> dict[str, Tensor]:
    """A prompt with one image of 4 x 8 random patches, two rows of four tokens."""
    config = model.config
    generator = torch.Generator().manual_seed(3)
    span = [config.image_token_id] * 8
    ids = [5, 6, config.vision_start_token_id, *span, config.vision_end_token_id, 7, 8, 9]
    return {
        "input_ids": torch.tensor([ids]),
        "pixel_values": torch.randn(32, 3 * 2 * 16 * 16, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 8]]),
    }


@torch.inference_mode()
def test_text_logits(pair: Pair) -> None:
    ids = text_ids(pair.own)
    assert torch.equal(pair.ours(input_ids=ids).logits, pair.own(input_ids=ids).logits)


@torch.inference_mode()
def test_left_padded_batch(pair: Pair) -> None:
    ids = text_ids(pair.own, length=32, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    ours = pair.ours(input_ids=ids, attention_mask=mask).logits
    own = pair.own(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(ours[0], own[0])
    assert torch.equal(ours[1, 5:], own[1, 5:])


@torch.inference_mode()
def test_image_logits(pair: Pair) -> None:
    inputs = image_inputs(pair.own)
    kinds = (inputs["input_ids"] == pair.own.config.image_token_id).int()
    ours = pair.ours(**inputs, mm_token_type_ids=kinds).logits
    assert torch.equal(ours, pair.own(**inputs, mm_token_type_ids=kinds).logits)


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [(40,), (1, 1, 38), (17, 23)], ids=str)
def test_cached_decode(pair: Pair, chunks: tuple[int, ...]) -> None:
    """Prompt in chunks (one of a single token, shorter than the context), then 12 tokens one by one."""
    prompt = text_ids(pair.own)
    traces = []
    for model in (pair.ours, pair.own):
        cache, trace = DynamicCache(config=model.config.text_config), []
        pieces = list(prompt.split(list(chunks), dim=1))
        while len(trace) < len(chunks) + 12:
            ids = pieces.pop(0) if pieces else trace[-1].argmax(-1)
            trace.append(model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits)
        traces.append(trace)
    assert all(torch.equal(ours, own) for ours, own in zip(*traces, strict=True))


def engine_tokens(model: ReferenceModel, ids: list[int], images: ImageInputs | None, count: int) -> list[int]:
    """Greedy tokens by the engine's own `Forward`."""
    forward = Forward(model, ids, images, chunk_tokens=4096)
    logits = forward.prefill()
    assert logits is not None
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        tokens.append(int(forward.decode(tokens[-1]).argmax()))
    return tokens


@torch.inference_mode()
def test_engine_generates_what_transformers_does(pair: Pair) -> None:
    options: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    options |= {"temperature": None, "top_p": None, "top_k": None}
    prompt = text_ids(pair.own)
    inputs = image_inputs(pair.own)
    kinds = (inputs["input_ids"] == pair.own.config.image_token_id).int()
    # The image comes first, so that its positions would leak into the text that follows, if they could.
    images = ImageInputs(inputs["pixel_values"], inputs["image_grid_thw"])
    ours_image = engine_tokens(pair.ours, inputs["input_ids"][0].tolist(), images, 16)
    ours_text = engine_tokens(pair.ours, prompt[0].tolist(), None, 16)
    own_image = pair.own.generate(
        **inputs, attention_mask=torch.ones_like(kinds), mm_token_type_ids=kinds, **options
    )
    own_text = pair.own.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert ours_text == own_text[0, -16:].tolist()
    assert ours_image == own_image[0, -16:].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("pair", [("real", "bf16")], ids=["real-bf16"], indirect=True)
def test_long_greedy_text_does_not_loop(pair: Pair) -> None:
    """What the tests of restarts need: 200 tokens, 50 of them distinct, none that ends the answer."""
    tokens = engine_tokens(pair.ours, text_ids(pair.ours)[0].tolist(), None, 200)
    assert len(set(tokens)) >= 150
    assert max(tokens) < pair.ours.config.text_config.eos_token_id


@torch.inference_mode()
@pytest.mark.parametrize("pair", [("tiny", "f32")], ids=["tiny-f32"], indirect=True)
def test_chunked_prefill_agrees(pair: Pair) -> None:
    """Exactly equal it cannot be: sums are taken in another order. In bf16 rounding would hide the rest."""
    prompt = text_ids(pair.own, length=150)[0].tolist()
    whole = Forward(pair.ours, prompt, None, chunk_tokens=150).prefill()
    pieces = Forward(pair.ours, prompt, None, chunk_tokens=64)
    assert pieces.prefill() is None
    assert pieces.prefill() is None
    last = pieces.prefill()
    assert whole is not None
    assert last is not None
    torch.testing.assert_close(last, whole, rtol=0, atol=1e-3)
    assert int(last.argmax()) == int(whole.argmax())


@torch.inference_mode()
def test_the_table_matters(pair: Pair) -> None:
    ids = text_ids(pair.own)
    logits = pair.own(input_ids=ids).logits
    (layer,) = [layer for layer in pair.own.model.language_model.layers if layer.ple is not None]
    table = layer.ple.ple_embedding.ngram_embedding.weight
    kept = table.data
    try:
        for scrambled in (-kept, kept.roll(1, 0)):
            table.data = scrambled
            other = pair.own(input_ids=ids).logits
            assert not torch.equal(other, logits)
            assert (other.argmax(-1) != logits.argmax(-1)).float().mean() > 0.5
    finally:
        table.data = kept


def test_no_part_of_the_table_is_in_the_process(pair: Pair) -> None:
    rows = pair.client.description.rows
    assert not list(pair.ours.table.parameters())
    assert not list(pair.ours.table.buffers())
    tensors = [*pair.ours.parameters(), *pair.ours.buffers()]
    vocab = pair.ours.config.text_config.vocab_size
    assert all(rows not in tensor.shape for tensor in tensors if tensor.shape[0] != vocab)
    assert not any(tensor.is_meta for tensor in tensors)


def test_model_loads_where_the_tables_tensors_are_gone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Files of table shards replaced by files without tensors: nothing ever asks for them."""
    from safetensors.torch import save_file

    for path in tiny_checkpoint.iterdir():
        number = path.name.removeprefix("model-")[:5]
        if number.isdecimal() and int(number) > 3:
            save_file({}, tmp_path / path.name, metadata={"format": "pt"})
        else:
            (tmp_path / path.name).symlink_to(path)
    assert load_model(tmp_path, 1).dtype == torch.bfloat16


def describe(row_type: table_pb2.RowType.ValueType, scale: float = 0.0) -> table_pb2.TableDescription:
    bits = torch.tensor([scale], dtype=torch.bfloat16).view(torch.uint16).item()
    return table_pb2.TableDescription(row_type=row_type, row_elements=4, scale_bits=bits, scale_bytes=2)


def test_fp8_rows_are_scaled_after_the_cast() -> None:
    stored = torch.tensor([[1.0, -0.5, 448.0, 0.0625]]).to(torch.float8_e4m3fn)
    table = describe(table_pb2.ROW_TYPE_FP8_E4M3, scale=0.000199317932)
    for out in (torch.bfloat16, torch.float32):
        rows = decode_rows(stored.view(torch.uint8).numpy().tobytes(), table, out)
        scale = torch.tensor(0.000199317932, dtype=torch.bfloat16)
        assert torch.equal(rows, stored.to(out) * scale.to(out))
    assert stored_scale(table).item() == pytest.approx(0.000199317932, rel=1e-6)


def test_bf16_rows_widen_exactly() -> None:
    stored = torch.tensor([[1.5, -2.0, 0.1, 3e-5]], dtype=torch.bfloat16)
    raw = stored.view(torch.uint8).numpy().tobytes()
    assert torch.equal(decode_rows(raw, describe(table_pb2.ROW_TYPE_BF16), torch.float32), stored.float())


def test_another_table_is_refused_in_one_line(pair: Pair) -> None:
    import json

    config = json.loads((pair.folder / "config.json").read_text())
    constants, row_type = pair.ours.table.constants, row_type_of(config)
    check_table(pair.client.description, constants, row_type)
    for change in ("row_elements", "rows"):
        other = table_pb2.TableDescription.FromString(pair.client.description.SerializeToString())
        setattr(other, change, 1)
        with pytest.raises(WrongTableError, match=r"does not fit the model: [^\n]*$"):
            check_table(other, constants, row_type)
    other = table_pb2.TableDescription.FromString(pair.client.description.SerializeToString())
    other.hash.multipliers[0] += 2
    with pytest.raises(WrongTableError, match="multipliers"):
        check_table(other, constants, row_type)


def test_an_unconnected_embedding_never_makes_rows_up(pair: Pair) -> None:
    lonely = TableEmbedding(pair.ours.table.constants, 1, torch.float32)
    with pytest.raises(RuntimeError, match="not connected"):
        lonely(torch.tensor([[1, 2]]), None)
