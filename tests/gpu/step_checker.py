"""What the bisection of pipeline stages adds to a worker, by --worker-extension-cls."""

from __future__ import annotations

import os
from typing import Any

import torch
from recorder import Recorder

PLAIN_LAUNCHES = "TRIPLEX_TEST_HUMMING_PLAIN_LAUNCHES"
"""Set: Humming's kernels begin when the kernel before them has ended, as on cards before Hopper."""


class StepChecker(Recorder):
    @staticmethod
    def init_worker_extension(worker: Any) -> None:
        """vLLM calls it when the device is there and the model is not."""
        if os.environ.get(PLAIN_LAUNCHES):
            launch_plainly()

    def check_steps(self) -> None:
        """From now on wait in each step: for its token ids before the forward, for its states behind it."""
        runner = self.model_runner  # type: ignore[attr-defined]
        prepare, execute = runner.model_state.prepare_inputs, runner.execute_model
        self.steps = 0

        def prepare_and_check(batch: Any, states: Any) -> Any:
            self.steps += 1
            self._refuse_strange(batch)
            return prepare(batch, states)

        def execute_and_check(*args: Any, **kwargs: Any) -> Any:
            output = execute(*args, **kwargs)
            self._refuse_not_finite(output)
            return output

        runner.model_state.prepare_inputs, runner.execute_model = prepare_and_check, execute_and_check

    def clamp_ids(self) -> None:
        """From now on put token ids outside of the vocabulary back into it, and count them: nobody waits."""
        runner = self.model_runner  # type: ignore[attr-defined]
        prepare = runner.model_state.prepare_inputs
        self.strange = torch.zeros((), dtype=torch.int64, device=runner.device)

        def clamp_and_prepare(batch: Any, states: Any) -> Any:
            ids = batch.input_ids
            self.strange += ((ids < 0) | (ids >= runner.vocab_size)).sum()
            ids.clamp_(0, runner.vocab_size - 1)
            return prepare(batch, states)

        runner.model_state.prepare_inputs = clamp_and_prepare

    def strange_ids(self) -> int:
        return int(self.strange)

    def _refuse_strange(self, batch: Any) -> None:
        runner = self.model_runner  # type: ignore[attr-defined]
        limits = {"input_ids": runner.vocab_size, "positions": runner.max_model_len}
        for name, limit in limits.items():
            values = getattr(batch, name)[: batch.num_tokens].cpu()
            strange = values[(values < 0) | (values >= limit)]
            if len(strange):
                raise ValueError(
                    f"step {self.steps}, {name} of {batch.req_ids}: {strange.tolist()[:8]}, limit {limit}"
                )

    def _refuse_not_finite(self, output: Any) -> None:
        state = self.model_runner.execute_model_state  # type: ignore[attr-defined]
        tensors = getattr(output, "tensors", {})
        hidden = tensors.get("hidden_states", getattr(state, "hidden_states", None))
        if hidden is not None and not bool(hidden.isfinite().all()):
            rows = (~hidden.isfinite()).any(-1).nonzero().flatten().tolist()
            raise ValueError(f"step {self.steps}: hidden states of rows {rows[:8]} are not finite")


def launch_plainly() -> None:
    """Humming picks its launch by the card's own capability, whatever is reported to vLLM."""
    from humming import tune

    pick = tune._get_heuristics_config

    def pick_plainly(*args: Any, **kwargs: Any) -> Any:
        picked = pick(*args, **kwargs)
        for config in [picked] if isinstance(picked, dict) else [entry[2] for entry in picked]:
            config["use_pdl"] = False
        return picked

    tune._get_heuristics_config = pick_plainly
