"""Switches travel in --additional-config; a wrong one refuses the start."""

import json
import shlex

import pytest

from ple_inference.vllm_plugin.override import WORKER, Override, OverrideError, Upstream
from ple_inference.vllm_plugin.overrides import ALL
from ple_inference.vllm_plugin.switches import enabled_overrides, switch_off

NAMES = [override.name for override in ALL]


def override(name: str, *requires: str, **changes) -> Override:
    upstream = (Upstream("vllm.a:b", "0" * 64),)
    texts = dict.fromkeys(("summary", "why", "without_it", "remove_when"), "text")
    targets = {"install": "m:install", "is_live": "m:is_live"}
    fields = {"upstream": upstream, **texts, **targets, "places": WORKER, "requires": requires, **changes}
    return Override(name=name, **fields)


def disable(*names: object) -> dict[str, object]:
    return {"triplex": {"disable": list(names)}}


@pytest.mark.parametrize(
    "config", [{}, {"triplex": {}}, {"triplex": {"table": "unix:x"}}, {"other": 1}, None, object()]
)
def test_all_are_on_without_a_switch(config):
    assert enabled_overrides(config) == ALL


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(OverrideError) as caught:
        enabled_overrides(disable("pp_orphans"))
    assert (
        str(caught.value)
        == f"triplex: there is no override 'pp_orphans' to disable: known are {', '.join(NAMES)}"
    )


@pytest.mark.parametrize("names", ["pp_orphan_kv", [1], {"pp_orphan_kv": True}, None])
def test_a_malformed_switch_is_refused(names):
    with pytest.raises(OverrideError, match=r"triplex\.disable must be a list of names"):
        enabled_overrides({"triplex": {"disable": names}})


def test_triplex_must_be_an_object():
    with pytest.raises(OverrideError, match="triplex must be an object, not 'off'"):
        enabled_overrides({"triplex": "off"})


def test_what_an_enabled_override_requires_cannot_be_disabled_alone():
    with pytest.raises(OverrideError, match=r"requires pp_model_state, which is disabled: disable .*"):
        enabled_overrides(disable("pp_model_state"))
    together = ("pp_model_state", "daemon_embedding", "pp_config_gate")
    left = [override.name for override in enabled_overrides(disable(*together))]
    assert left == [override.name for override in ALL if override.name not in together]


@pytest.mark.parametrize("override", ALL, ids=lambda override: override.name)
def test_the_documented_switch_works_as_it_stands(override):
    flag, value = shlex.split(switch_off(override))
    assert flag == "--additional-config"
    assert override not in enabled_overrides(json.loads(value))


def test_switching_off_takes_along_what_requires_it():
    chain = (override("a"), override("b", "a"), override("c", "b"), override("d"))
    assert json.loads(shlex.split(switch_off(chain[0], chain))[1]) == disable("a", "b", "c")
    assert enabled_overrides(disable("a", "b", "c"), chain) == (chain[3],)


@pytest.mark.parametrize(
    "changes",
    [
        {"summary": ""},
        {"why": "two\nlines"},
        {"install": "no_colon"},
        {"is_live": "m:"},
        {"upstream": ()},
        {"places": ()},
    ],
)
def test_a_record_validates_itself(changes):
    with pytest.raises(ValueError, match="a: "):
        override("a", **changes)


def test_names_symbols_and_hashes_are_validated():
    with pytest.raises(ValueError, match="no override name"):
        override("Not-A-Name")
    with pytest.raises(ValueError, match="is not module:name"):
        Upstream("vllm.a.b", "0" * 64)
    with pytest.raises(ValueError, match="is no SHA-256"):
        Upstream("vllm.a:b", "0" * 63)
