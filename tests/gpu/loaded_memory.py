"""What a rank is predicted to hold once its model is loaded; measured_worker.py says what it held.

python tests/gpu/loaded_memory.py            the predictions of the cases below, as JSON
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ple_inference.checkpoint import read_json
from ple_inference.table_check import row_element_bytes
from ple_inference.vllm_engine.linear_shapes import LinearShapes
from ple_inference.vllm_engine.pipeline import Pipeline
from ple_inference.vllm_engine.rank_memory import LoadOptions, as_json, rank_memories
from ple_inference.vllm_engine.rank_modules import rank_modules
from ple_inference.vllm_engine.tensors import Tensors

TOLERANCE = 0.01
MEASURED = ("allocated_bytes", "reserved_bytes", "peak_reserved_bytes", "peak_allocated_bytes")
# The checkpoints of `ple-inference tiny OUT --quant QUANT --shapes real --layers 8` on an H200.
CASES: Mapping[str, tuple[str, tuple[int, ...], int]] = {
    "int4-mixed, PP=1": ("int4-mixed", (8,), 4096),
    "int4-mixed, PP=2": ("int4-mixed", (4, 4), 1024),
    "fp8, PP=1": ("fp8", (8,), 4096),
}
SEQUENCES = 8


def predict(folder: Path, partition: Sequence[int], tokens: int, sequences: int) -> list[dict[str, Any]]:
    """For each rank, by a checkpoint's headers; vLLM is told `tokens` a step and `sequences` at once."""
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    pipeline = Pipeline(tuple(partition), text["ple_layer_ids"][0] - 1)
    modules = rank_modules(Tensors.of(folder), LinearShapes(text), pipeline)
    options = LoadOptions(
        tokens, sequences, compute_capability=9, row_element_bytes=row_element_bytes(config)
    )
    return [as_json(memory) for memory in rank_memories(modules, text, options)]


def compare(predicted: Mapping[str, Any], measured: Mapping[str, int]) -> dict[str, float]:
    """measured / predicted - 1 of each figure."""
    return {name: measured[name] / predicted[name] - 1 for name in MEASURED}


def write_headers(folder: Path, quant: str) -> None:
    """A checkpoint of which only headers are real: its tensors are holes."""
    from ple_inference.synthetic.config import model_config
    from ple_inference.synthetic.file import PiecewiseFile
    from ple_inference.synthetic.layout import files, quantization_of
    from ple_inference.synthetic.options import SyntheticOptions

    options = SyntheticOptions(quant=quant)  # type: ignore[arg-type]
    specs = [spec for group in files(options) for spec in group]
    config = model_config(options) | quantization_of(options, specs)
    (folder / "config.json").write_text(json.dumps(config))
    with PiecewiseFile(folder / "model.safetensors", specs):
        pass  # at its full length: nothing of it is written
    index = {"weight_map": {spec.name: "model.safetensors" for spec in specs}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    found = {}
    for case, (quant, partition, tokens) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_headers(Path(folder), quant)
            ranks = predict(Path(folder), partition, tokens, SEQUENCES)
        settings = {"max_num_batched_tokens": tokens, "max_num_seqs": SEQUENCES, "partition": partition}
        found[case] = {"settings": settings, "ranks": ranks}
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
