"""A worker goes on only when what is on is installed, live, and written for this vLLM."""

import json
import logging
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

from ple_inference.vllm_plugin import proof
from ple_inference.vllm_plugin.override import EVERYWHERE, WORKER, Override, OverrideError, Upstream
from ple_inference.vllm_plugin.switches import enabled_overrides
from ple_inference.vllm_plugin.wheel_source import WheelSource

SYMBOL = "vllm.v1.worker.utils:allocate_kv_cache"


class Target(ModuleType):
    """A module that records in which order it is installed, and may fail to be live."""

    def __init__(self, name: str, journal: list[str]) -> None:
        super().__init__(name)
        self.journal = journal
        self.live = True

    def install(self) -> None:
        self.journal.append(f"install {self.__name__}")

    def is_live(self) -> bool:
        self.journal.append(f"is_live {self.__name__}")
        return self.live


@pytest.fixture
def targets(monkeypatch, vllm_source, installed_vllm):
    """Two overrides instead of ours: `first` everywhere, `second` in workers."""
    journal: list[str] = []
    made = {name: Target(name, journal) for name in ("first", "second")}
    recorded = vllm_source.sha256(SYMBOL)
    overrides = tuple(
        Override(
            name=name,
            **dict.fromkeys(("summary", "why", "without_it", "remove_when"), "text"),
            upstream=(Upstream(SYMBOL, recorded),),
            install=f"{name}:install",
            is_live=f"{name}:is_live",
            places=EVERYWHERE if name == "first" else WORKER,
        )
        for name in made
    )
    for name, target in made.items():
        monkeypatch.setitem(sys.modules, name, target)
    monkeypatch.setattr(proof, "ALL", overrides)
    monkeypatch.setattr(proof, "enabled_overrides", partial(enabled_overrides, overrides=overrides))
    return SimpleNamespace(journal=journal, overrides=overrides, **made)


def config(*disabled: str) -> SimpleNamespace:
    return SimpleNamespace(additional_config={"triplex": {"disable": list(disabled)}})


def test_overrides_are_installed_in_order_and_one_line_is_logged(targets, caplog):
    with caplog.at_level(logging.INFO, "vllm.triplex"):
        proof.install(config())
        proof.prove(config())
    assert targets.journal == ["install first", "install second", "is_live first", "is_live second"]
    assert [record.getMessage() for record in caplog.records] == ["overrides live=first,second disabled=none"]


def test_a_disabled_override_is_neither_installed_nor_asked(targets, caplog):
    targets.second.live = False
    with caplog.at_level(logging.INFO, "vllm.triplex"):
        proof.install(config("second"))
        proof.prove(config("second"))
    assert targets.journal == ["install first", "is_live first"]
    assert [record.getMessage() for record in caplog.records] == ["overrides live=first disabled=second"]


def test_an_override_that_is_not_live_ends_the_start(targets):
    targets.second.live = False
    with pytest.raises(OverrideError, match=r"^triplex: second was installed and is not live: .*disable"):
        proof.prove(config())


@pytest.mark.parametrize("step", [proof.install, proof.prove])
def test_changed_source_ends_the_start(step, targets, make_wheel, relied_files, monkeypatch):
    path = "vllm/v1/worker/utils.py"
    edited = relied_files[path].replace(b"buf_size = raw_size\n", b"buf_size = raw_size + 1\n")
    assert edited != relied_files[path]
    source = WheelSource.at(make_wheel({path: edited}))
    monkeypatch.setattr(proof, "_installed", lambda: source)
    with pytest.raises(OverrideError) as caught:
        step(config())
    message = str(caught.value)
    for part in (
        "triplex: first: ",
        SYMBOL,
        targets.overrides[0].upstream[0].sha256,
        source.sha256(SYMBOL),
        "install vllm==0.33.0, unmodified",
        "--additional-config",
    ):
        assert part in message
    assert targets.journal == []


def test_the_report_is_json_and_asks_only_what_lives_here(targets, vllm_source):
    report = proof.report({"triplex": {"disable": []}})
    assert json.loads(json.dumps(report)) == report
    assert [(entry["name"], entry["enabled"], entry["live"]) for entry in report] == [
        ("first", True, True),
        ("second", True, None),
    ]
    assert targets.journal == ["is_live first"]
    (symbol,) = report[0]["upstream"]
    assert symbol == {
        "symbol": SYMBOL,
        "role": "relies_on",
        "sha256": vllm_source.sha256(SYMBOL),
        "found_sha256": vllm_source.sha256(SYMBOL),
        "matches": True,
    }


def test_the_report_shows_what_is_off_or_gone(targets, make_wheel):
    source = WheelSource.at(make_wheel({"vllm/v1/worker/utils.py": None}))
    first, second = proof.report({"triplex": {"disable": ["first"]}}, source)
    assert (first["enabled"], first["live"], second["enabled"]) == (False, None, True)
    assert first["upstream"][0]["found_sha256"] is None
    assert first["upstream"][0]["matches"] is False
