"""Both architectures answer vLLM's question for a model state with ours."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from ple_inference.vllm_plugin.overrides import pp_model_state

MODEL = "vllm.models.qwen4_exp.nvidia.model"
ARCHITECTURES = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")


class TriplexModelState:
    supports_prompt_embeds = False


@pytest.fixture
def models(upstream, monkeypatch):
    def theirs():
        return "upstream's"

    classes = {name: type(name, (), {"get_model_state_cls": staticmethod(theirs)}) for name in ARCHITECTURES}
    upstream(MODEL, **classes)
    ours = ModuleType("ple_inference.vllm_plugin.model_state")
    ours.TriplexModelState = TriplexModelState
    monkeypatch.setitem(sys.modules, ours.__name__, ours)
    return classes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_upstreams_resolver_gets_our_class(models, upstream, architecture):
    resolver = upstream("vllm.v1.worker.gpu.model_states", "resolve_model_state_cls")
    model, config = models[architecture](), SimpleNamespace()
    assert resolver.resolve_model_state_cls(config, model) == "upstream's"
    assert not pp_model_state.is_live()
    pp_model_state.install()
    pp_model_state.install()
    assert resolver.resolve_model_state_cls(config, model) is TriplexModelState
    assert pp_model_state.is_live()


def test_it_is_not_live_when_one_class_answers_otherwise(models):
    pp_model_state.install()
    models[ARCHITECTURES[1]].get_model_state_cls = staticmethod(lambda: None)
    assert not pp_model_state.is_live()
