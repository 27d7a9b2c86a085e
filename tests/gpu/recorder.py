"""What the GPU tests add to a worker, by --worker-extension-cls."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import one_card
import real_checkpoint
import torch
from torch import Tensor

if one_card.is_shared():
    one_card.share()  # vLLM imports its workers' extension before it makes the device


class PinnedTable:
    """The stock way, for comparison: the table in pinned memory, rows copied by vLLM's own kernel."""

    def __init__(self, table: Tensor) -> None:
        from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

        self._table = table.pin_memory()
        self._view = get_accelerator_view_from_cpu_tensor(self._table)

    def deliver(self, ids: Tensor, rows: Tensor) -> None:
        from vllm.models.qwen4_exp.common import ngram_embedding
        from vllm.triton_utils import triton

        row_bytes = self._table.shape[1]
        ngram_embedding._lookup_ple_embedding_from_pinned_kernel[(ids.numel(),)](
            self._view,
            ids.view(-1),
            rows,
            row_bytes,
            0,
            len(self._table),
            BLOCK_D=triton.next_power_of_2(row_bytes),
        )

    def close(self) -> None: ...


class NoHints:
    def admit(self, request_id: str, tokens: list[int], computed: int) -> None: ...

    def drop(self, request_id: str) -> None: ...


class Recorder:
    """Methods for `collective_rpc`. A rank without the table answers None."""

    def owns_table(self) -> bool:
        return self._link() is not None

    def check_rows(self, checkpoint: str) -> None:
        """From now on compare every delivered row with the checkpoint's, on its way into the forward."""
        link = self._link()
        if link is None:
            return
        table = real_checkpoint.read_table(Path(checkpoint))
        deliver = link.rows.deliver
        self.checked_rows, self.wrong_rows, self.deliveries = 0, 0, 0

        def deliver_and_check(ids: Tensor, rows: Tensor) -> None:
            deliver(ids, rows)
            self._rows_there().wait()
            expected = table[ids.view(-1).cpu()]
            delivered = rows.cpu().view(-1, table.shape[1])
            self.checked_rows += len(expected)
            self.wrong_rows += int((delivered != expected).any(1).sum())
            self.deliveries += 1

        link.rows.deliver = deliver_and_check

    def rows_checked(self) -> dict[str, int] | None:
        if self._link() is None:
            return None
        return {"rows": self.checked_rows, "wrong": self.wrong_rows, "deliveries": self.deliveries}

    def use_source(self, name: str, checkpoint: str) -> None:
        link = self._link()
        if link is None:
            return
        if not hasattr(self, "sources"):
            self.sources: dict[str, Any] = {"daemon": link.rows}
        if name not in self.sources:
            self.sources[name] = PinnedTable(real_checkpoint.read_table(Path(checkpoint)))
        link.rows = self.sources[name]

    def time_delivery(self, tokens: int, rounds: int) -> dict[str, float] | None:
        """Medians in us of a delivery on an idle stream: for the step's thread, and until rows are there."""
        link, state = self._link(), self._state()
        if link is None:
            return None
        out = state._ngram.ngram_embedding.row_bytes[:tokens]
        parts: dict[str, list[float]] = {"call": [], "rows_there": [], "lookup": []}
        for _ in range(rounds):
            ids = torch.randint(0, link.client.description.used_rows, (tokens, 16), device=out.device)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            link.rows.deliver(ids, out)
            returned = time.perf_counter()
            self._rows_there().wait()
            torch.cuda.current_stream().synchronize()
            parts["call"].append((returned - begin) * 1e6)
            parts["rows_there"].append((time.perf_counter() - begin) * 1e6)
            parts["lookup"].append(link.rows.last_lookup_s * 1e6)
        return {name: statistics.median(times) for name, times in parts.items()}

    def send_hints(self, on: bool) -> None:
        """Whether the daemon hears of prompts when they are admitted."""
        state = self._state()
        if state is None or self._link() is None:
            return
        if not hasattr(self, "hints"):
            self.hints = state._hints
        state._hints = self.hints if on else NoHints()

    def block_size(self) -> int:
        """Tokens of the largest block that this rank's cache is cut into."""
        groups = self.model_runner.kv_cache_config.kv_cache_groups  # type: ignore[attr-defined]
        return max(group.kv_cache_spec.block_size for group in groups)

    def table_stats(self) -> dict[str, Any] | None:
        link = self._link()
        return (
            None
            if link is None
            else {
                **vars(link.client.stats),
                "shared": link.client.region is not None,
                "deliveries": getattr(link.rows, "deliveries", None),
            }
        )

    def memory(self) -> dict[str, float]:
        status = Path("/proc/self/status").read_text()
        return {
            key: int(status.split(f"{key}:")[1].split()[0]) / 2**20
            for key in ("VmRSS", "RssAnon", "RssShmem")
        }

    def _rows_there(self) -> Any:
        return self._state()._ngram.ngram_embedding.rows_there

    def _state(self) -> Any:
        return self.triplex_state  # type: ignore[attr-defined]

    def _link(self) -> Any:
        state = self._state()
        return None if state is None else state._link
