"""The worker proves the overrides before it makes a runner, and so before a model is built."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from ple_inference.vllm_plugin import proof
from ple_inference.vllm_plugin.override import OverrideError


@pytest.fixture
def worker(upstream, fresh_plugin, monkeypatch):
    journal = []

    class Worker:
        use_v2_model_runner = True
        vllm_config = SimpleNamespace(additional_config={})
        device = "cuda:0"

    class GPUModelRunner:
        def __init__(self, vllm_config, device):
            journal.append("runner")

    upstream("vllm.v1.worker.gpu_worker", Worker=Worker)
    upstream("vllm.v1.worker.gpu.model_runner", GPUModelRunner=GPUModelRunner)
    upstream("vllm.v1.kv_cache_interface", KVCacheConfig=object)
    state = ModuleType("ple_inference.vllm_plugin.model_state")
    state.TriplexModelState = type("TriplexModelState", (), {})
    monkeypatch.setitem(sys.modules, state.__name__, state)
    monkeypatch.setattr(proof, "install", lambda config: journal.append("install"))
    monkeypatch.setattr(proof, "prove", lambda config: journal.append("prove"))
    from ple_inference.vllm_plugin.worker import TriplexWorker

    made = TriplexWorker()
    made.journal = journal
    return made


def test_the_proof_comes_before_the_runner(worker):
    runner = worker._make_model_runner()
    assert worker.journal == ["install", "prove", "runner"]
    assert type(runner).__name__ == "TriplexModelRunner"


def test_a_failed_proof_makes_no_runner(worker, monkeypatch):
    def fail(config):
        raise OverrideError("triplex: no")

    monkeypatch.setattr(proof, "prove", fail)
    with pytest.raises(OverrideError, match="triplex: no"):
        worker._make_model_runner()
    assert "runner" not in worker.journal


def test_the_v1_runner_is_refused(worker):
    worker.use_v2_model_runner = False
    with pytest.raises(OverrideError, match="V1 model runner"):
        worker._make_model_runner()
    assert worker.journal == []
