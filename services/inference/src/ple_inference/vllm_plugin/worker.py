"""The worker that vLLM is told to use: --worker-cls ple_inference.vllm_plugin.worker.TriplexWorker."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from ple_inference.vllm_plugin import proof
from ple_inference.vllm_plugin.override import OverrideError
from ple_inference.vllm_plugin.runner import TriplexModelRunner


class TriplexWorker(Worker):
    def _make_model_runner(self) -> TriplexModelRunner:
        """Install and prove the overrides, then make the runner. The model is built later."""
        if not self.use_v2_model_runner:
            raise OverrideError(
                "triplex: vLLM chose its V1 model runner, which the plugin does not serve: unset "
                "VLLM_USE_V2_MODEL_RUNNER, or drop the feature that vLLM's warning above names"
            )
        proof.install(self.vllm_config)
        proof.prove(self.vllm_config)
        return TriplexModelRunner(self.vllm_config, self.device)
