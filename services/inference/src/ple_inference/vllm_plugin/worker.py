"""The worker that vLLM is told to use: --worker-cls ple_inference.vllm_plugin.worker.TriplexWorker."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from ple_inference.vllm_plugin import proof
from ple_inference.vllm_plugin.model_state import TriplexModelState
from ple_inference.vllm_plugin.override import OverrideError
from ple_inference.vllm_plugin.runner import TriplexModelRunner


class TriplexWorker(Worker):
    """vLLM's worker, whose overrides are installed and proven before the model is built."""

    @property
    def triplex_state(self) -> TriplexModelState | None:
        """The model's state once it is loaded; None when the override that makes it is switched off."""
        state = getattr(getattr(self, "model_runner", None), "model_state", None)
        return state if isinstance(state, TriplexModelState) else None

    def compile_or_warm_up_model(self) -> Any:
        with self._without_lookups():
            return super().compile_or_warm_up_model()

    def shutdown(self) -> None:
        if self.triplex_state is not None:
            self.triplex_state.close()
        super().shutdown()

    def _make_model_runner(self) -> TriplexModelRunner:
        if not self.use_v2_model_runner:
            raise OverrideError(
                "triplex: vLLM chose its V1 model runner, which the plugin does not serve: unset "
                "VLLM_USE_V2_MODEL_RUNNER, or drop the feature that vLLM's warning above names"
            )
        proof.install(self.vllm_config)
        proof.prove(self.vllm_config)
        return TriplexModelRunner(self.vllm_config, self.device)

    def _without_lookups(self) -> AbstractContextManager[None]:
        state = self.triplex_state
        return nullcontext() if state is None else state.without_lookups()
