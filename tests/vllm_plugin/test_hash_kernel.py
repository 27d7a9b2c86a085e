"""vLLM's own n-gram kernel, in Triton's interpreter, gives the golden rows: what the daemon is asked for."""

import os
import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden" / "ngram_ids.json"
PLE_OPS = "vllm.models.qwen4_exp.common.ops.ple"

# Triton reads a kernel's text from its file, and decides at import whether it interprets.
HEAD = """
import hashlib, json, sys
import torch
import triton
import triton.language as tl

class current_platform:
    is_arch_support_pdl = staticmethod(lambda: False)

"""
TAIL = """

golden = json.load(open(sys.argv[1]))
tensor = lambda values, dtype=torch.int64: torch.tensor(values, dtype=dtype)
checked = 0
every = [case for case in golden["cases"] + golden["long_cases"] if "tokens" in case]
for name, eos in sorted({(case["spec"], case["eos"]) for case in every}):
    spec = golden["specs"][name]
    cases = [case for case in every if (case["spec"], case["eos"]) == (name, eos)]
    for batch in [[case] for case in cases] + [cases]:  # each alone, and all in one ragged step
        starts = [0]
        for case in batch:
            starts.append(starts[-1] + len(case["tokens"]))
        constants = spec["constants"]
        found = ple_ngram_ids(
            tensor([token for case in batch for token in case["tokens"]], torch.int32),
            tensor(starts, torch.int32), tensor([case["context"] for case in batch], torch.int32),
            tensor(constants["multipliers"]), tensor(constants["primes"]), tensor(constants["offsets"]),
            eos, spec["config"]["heads_per_ngram"],
            output=torch.full((starts[-1], len(constants["primes"])), -1),
        )
        for case, first, last in zip(batch, starts, starts[1:]):
            rows = found[first:last]
            if "rows" in case:
                assert rows.tolist() == case["rows"], (case["name"], len(batch))
            else:
                digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
                assert digest == case["rows_sha256"], (case["name"], len(batch))
            checked += last - first
print(checked)
"""


def test_it_gives_the_golden_rows(vllm_source, tmp_path: Path) -> None:
    symbols = ("_ple_ngram_ids_kernel", "_ple_ngram_ids", "ple_ngram_ids")
    text = "\n\n".join(vllm_source.text(f"{PLE_OPS}:{symbol}") for symbol in symbols)
    script = tmp_path / "interpreted.py"
    script.write_text(HEAD + text + TAIL)
    done = subprocess.run(
        [sys.executable, script, GOLDEN],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 800
