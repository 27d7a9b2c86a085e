"""The config check, run from upstream's own text: without the stages, with all its other refusals."""

import logging
import operator
import textwrap
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace

import pytest

from ple_inference.vllm_plugin import plugin, proof
from ple_inference.vllm_plugin.override import OverrideError
from ple_inference.vllm_plugin.overrides import ALL, pp_config_gate
from ple_inference.vllm_plugin.wheel_source import WheelSource

CONFIG = "vllm.model_executor.models.config"
CLASSES = (
    "VerifyAndUpdateConfig",
    "Qwen3_5ForConditionalGenerationConfig",
    "_strip_qwen4_exp_mrope",
    "Qwen4ExpForConditionalGenerationConfig",
    "Qwen4ExpForCausalLMConfig",
    "Qwen4ExpMTPConfig",
)
OTHER = SimpleNamespace(verify_and_update_config=None)


@pytest.fixture
def config_map(upstream, installed_vllm):
    upstream("vllm.platforms", current_platform=SimpleNamespace(is_cuda_alike=lambda: True))
    module = upstream(CONFIG, *CLASSES, logger=logging.getLogger("upstream"))
    module.MODELS_CONFIG_MAP = {
        "LlamaModel": OTHER,
        "Qwen4ExpForCausalLM": module.Qwen4ExpForCausalLMConfig,
        "Qwen4ExpForConditionalGeneration": module.Qwen4ExpForConditionalGenerationConfig,
        "Qwen4ExpMTP": module.Qwen4ExpMTPConfig,
    }
    return module.MODELS_CONFIG_MAP


def vllm_config(changes: Mapping[str, object] = MappingProxyType({}), *, stages: int = 2) -> SimpleNamespace:
    """What the checks look at, served by TriplexWorker. `changes`: dotted name -> value."""
    text = SimpleNamespace(
        hc_count=4,
        ple_layer_ids=[2],
        indexer_n_heads=4,
        mamba_ssm_dtype="float32",
        rope_parameters={"mrope_section": [1], "rope_theta": 1},
    )
    parallel = SimpleNamespace(
        pipeline_parallel_size=stages,
        tensor_parallel_size=1,
        data_parallel_size=1,
        enable_dbo=False,
        ubatch_size=0,
        use_sequence_parallel_moe=False,
        worker_cls="ple_inference.vllm_plugin.worker.TriplexWorker",
    )
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(
            hf_text_config=text, hf_config=SimpleNamespace(), multimodal_config=None
        ),
        cache_config=SimpleNamespace(mamba_ssm_cache_dtype="auto"),
        speculative_config=None,
        additional_config={},
    )
    for name, value in changes.items():
        place, _, field = name.rpartition(".")
        setattr(operator.attrgetter(place)(config) if place else config, field, value)
    return config


def disable(*names: str) -> dict[str, object]:
    return {"additional_config": {"triplex": {"disable": list(names)}}}


@pytest.mark.parametrize("architecture", pp_config_gate.ARCHITECTURES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_pass_and_upstreams_effects_stay(config_map, architecture, stages):
    plugin.register()
    config = vllm_config(stages=stages)
    config_map[architecture].verify_and_update_config(config)
    assert config.parallel_config.pipeline_parallel_size == stages
    assert config.cache_config.mamba_ssm_cache_dtype == "float32"
    stripped = architecture != "Qwen4ExpForConditionalGeneration"
    assert ("mrope_section" not in config.model_config.hf_text_config.rope_parameters) is stripped


@pytest.mark.parametrize("architecture", pp_config_gate.ARCHITECTURES)
def test_upstream_alone_refuses_two_stages(config_map, architecture):
    """What the override is for: when this fails, it can go."""
    with pytest.raises(NotImplementedError, match="requires pipeline_parallel_size=1"):
        config_map[architecture].verify_and_update_config(vllm_config())


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model_config.hf_text_config.hc_count": 1}, ValueError, "hc_count > 1"),
        ({"parallel_config.enable_dbo": True}, NotImplementedError, "dual-batch overlap"),
        ({"parallel_config.ubatch_size": 2}, NotImplementedError, "microbatching"),
        (
            {"speculative_config": SimpleNamespace(method="eagle3")},
            NotImplementedError,
            "speculative decoding",
        ),
    ],
)
def test_upstreams_other_refusals_stay_and_the_stages_are_put_back(config_map, changes, error, says):
    plugin.register()
    config = vllm_config(changes)
    with pytest.raises(error, match=says):
        config_map["Qwen4ExpForCausalLM"].verify_and_update_config(config)
    assert config.parallel_config.pipeline_parallel_size == 2


def test_the_one_check_that_one_stage_hides_needs_tensor_parallelism(vllm_source):
    """MoE sequence parallelism wants PP=1. It implies TP > 1, which is refused before."""
    namespace: dict[str, property] = {}
    text = vllm_source.text("vllm.config.parallel:ParallelConfig.use_sequence_parallel_moe")
    exec(textwrap.dedent(text), namespace)
    is_used = namespace["use_sequence_parallel_moe"].fget
    parallel = SimpleNamespace(
        all2all_backend="deepep_v2", enable_expert_parallel=True, tensor_parallel_size=2, data_parallel_size=2
    )
    assert is_used(parallel)
    parallel.tensor_parallel_size = 1
    assert not is_used(parallel)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel_config.tensor_parallel_size": 2}, r"tensor parallelism .*tensor_parallel_size=2"),
        ({"parallel_config.data_parallel_size": 4}, r"data parallelism .*data_parallel_size=4"),
        ({"model_config.hf_text_config.ple_layer_ids": [2, 5]}, r"2 PLE layers \(ple_layer_ids=\[2, 5\]\)"),
        ({"model_config.hf_text_config.ple_embedding_dtype": "nvfp4"}, "NVFP4 table"),
    ],
)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("switches", [{}, disable("pp_config_gate")])
def test_what_is_not_served_is_refused_in_one_line(config_map, changes, says, stages, switches):
    plugin.register()
    with pytest.raises(OverrideError, match=f"^triplex: .*{says}") as caught:
        config_map["Qwen4ExpForCausalLM"].verify_and_update_config(
            vllm_config({**changes, **switches}, stages=stages)
        )
    assert "\n" not in str(caught.value)


def test_switched_off_it_leaves_upstreams_refusal(config_map):
    plugin.register()
    check = config_map["Qwen4ExpForCausalLM"].verify_and_update_config
    with pytest.raises(NotImplementedError, match="requires pipeline_parallel_size=1"):
        check(vllm_config(disable("pp_config_gate")))
    check(vllm_config(disable("pp_config_gate"), stages=1))


def test_an_unknown_switch_is_refused_before_weights_load(config_map):
    plugin.register()
    with pytest.raises(OverrideError, match="no override 'nothing'"):
        config_map["Qwen4ExpForCausalLM"].verify_and_update_config(vllm_config(disable("nothing"), stages=1))


def test_without_our_worker_upstream_decides(config_map):
    plugin.register()
    check = config_map["Qwen4ExpForCausalLM"].verify_and_update_config
    stock = {"parallel_config.worker_cls": "auto"}
    check(vllm_config(stock, stages=1))
    check(vllm_config({**stock, "parallel_config.tensor_parallel_size": 2}, stages=1))
    with pytest.raises(NotImplementedError, match="requires pipeline_parallel_size=1"):
        check(vllm_config(stock))
    with pytest.raises(OverrideError, match="need --worker-cls ple_inference"):
        check(vllm_config({**stock, **disable()}, stages=1))


def test_another_vllm_is_refused_before_weights_load(config_map, make_wheel, relied_files, monkeypatch):
    path = "vllm/v1/worker/utils.py"
    edited = relied_files[path].replace(b"def allocate_kv_cache(\n", b"def allocate_kv_cache(  # edited\n")
    source = WheelSource.at(make_wheel({path: edited}))
    monkeypatch.setattr(proof, "_installed", lambda: source)
    plugin.register()
    check = config_map["Qwen4ExpForCausalLM"].verify_and_update_config
    with pytest.raises(OverrideError, match=r"pp_orphan_kv: vllm\.v1\.worker\.utils:allocate_kv_cache"):
        check(vllm_config(stages=1))
    check(vllm_config({"parallel_config.worker_cls": "auto"}, stages=1))


def test_registering_twice_wraps_once_and_touches_no_other_model(config_map):
    plugin.register()
    first = dict(config_map)
    plugin.register()
    assert config_map == first
    assert config_map["LlamaModel"] is OTHER
    assert pp_config_gate.is_live()


def test_it_is_not_live_once_somebody_replaced_an_entry(config_map):
    assert not pp_config_gate.is_live()
    plugin.register()
    config_map["Qwen4ExpMTP"] = config_map["Qwen4ExpMTP"].__mro__[2]
    assert not pp_config_gate.is_live()


def test_a_vllm_without_the_entries_is_refused(config_map):
    del config_map["Qwen4ExpMTP"]
    with pytest.raises(OverrideError, match="checks no Qwen4ExpMTP in MODELS_CONFIG_MAP"):
        plugin.register()


def test_the_worker_class_is_named_as_vllm_resolves_it():
    """vLLM splits at the last dot."""
    module, _, name = pp_config_gate.WORKER_CLASS.rpartition(".")
    assert module == ALL[0].install.rpartition(".overrides.")[0] + ".worker"
    assert name == "TriplexWorker"
