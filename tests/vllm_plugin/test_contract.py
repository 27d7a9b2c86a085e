"""The records say what vLLM 0.33.0 is. These tests read its wheel and never skip.

Guarded: the source text of each symbol that an override replaces or relies on, and that the list is complete.
Not guarded: code that those symbols call and no record names.
"""

import ast
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

import ple_inference.vllm_plugin as plugin
from ple_inference.vllm_plugin import catalogue, overrides
from ple_inference.vllm_plugin.override import Override, OverrideError
from ple_inference.vllm_plugin.overrides import ALL
from ple_inference.vllm_plugin.proof import prove_sources
from ple_inference.vllm_plugin.wheel_source import WheelSource

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = Path(plugin.__file__).parent
SYMBOLS = [(override.name, upstream) for override in ALL for upstream in override.upstream]


@pytest.mark.parametrize(("name", "upstream"), SYMBOLS, ids=[f"{n}-{u.symbol}" for n, u in SYMBOLS])
def test_a_symbol_is_what_its_record_says(vllm_source, name, upstream):
    found = vllm_source.sha256(upstream.symbol)
    assert found == upstream.sha256, f"{name}: read {upstream.symbol} again, then record {found}"


@pytest.mark.parametrize(("name", "upstream"), SYMBOLS, ids=[f"{n}-{u.symbol}" for n, u in SYMBOLS])
def test_one_changed_line_in_a_symbol_is_found_and_named(
    make_wheel, relied_files, vllm_source, name, upstream
):
    path, content = file_of(relied_files, upstream.symbol)
    text = vllm_source.text(upstream.symbol)
    edited = content.decode().replace(text, f"{text}  # edited")  # two classes may share it
    assert edited != content.decode()
    source = WheelSource.at(make_wheel({path: edited.encode()}))
    (override,) = (override for override in ALL if override.name == name)
    alone = dataclasses.replace(override, upstream=(upstream,))  # to parse one file and not all of them
    with pytest.raises(OverrideError) as caught:
        prove_sources([alone], source)
    message = str(caught.value)
    assert message.startswith(f"triplex: {name}: {upstream.symbol}")
    assert re.search(rf"expected {upstream.sha256}, found {source.sha256(upstream.symbol)}", message)
    assert "\n" not in message


def file_of(files: dict[str, bytes], symbol: str) -> tuple[str, bytes]:
    base = symbol.partition(":")[0].replace(".", "/")
    path = f"{base}.py" if f"{base}.py" in files else f"{base}/__init__.py"
    return path, files[path]


def test_a_removed_symbol_is_named(make_wheel, relied_files):
    path, content = file_of(relied_files, "vllm.v1.worker.utils:allocate_kv_cache")
    renamed = content.replace(b"def allocate_kv_cache(", b"def make_kv_cache(")
    source = WheelSource.at(make_wheel({path: renamed}))
    with pytest.raises(
        OverrideError, match=r"pp_orphan_kv: .*has no vllm\.v1\.worker\.utils:allocate_kv_cache"
    ):
        prove_sources(ALL, source)


def test_a_removed_file_is_named(make_wheel):
    source = WheelSource.at(make_wheel({"vllm/models/qwen4_exp/nvidia/model_state.py": None}))
    with pytest.raises(
        OverrideError, match=r"pp_model_state: .*no module vllm\.models\.qwen4_exp\.nvidia\.model_state"
    ):
        prove_sources(ALL, source)


def test_the_unedited_copy_passes(make_wheel):
    prove_sources(ALL, WheelSource.at(make_wheel()))


def test_every_file_is_listed_and_every_record_has_its_file():
    files = {path.stem for path in (FOLDER / "overrides").glob("*.py")} - {"__init__"}
    assert {override.name for override in ALL} == files
    assert len(ALL) == len(files)
    for override in ALL:
        assert getattr(overrides, override.name).OVERRIDE is override


def test_no_two_records_replace_one_symbol():
    replaced = [upstream.symbol for _, upstream in SYMBOLS if upstream.role == "replaces"]
    assert len(replaced) == len(set(replaced))


def test_what_is_required_is_another_override():
    names = [override.name for override in ALL]
    for override in ALL:
        assert set(override.requires) <= set(names) - {override.name}


@pytest.mark.parametrize("override", ALL, ids=lambda override: override.name)
def test_install_and_is_live_exist(override: Override):
    """Read, not imported: what they import is not here."""
    for target in (override.install, override.is_live):
        module, _, name = target.partition(":")
        relative = module.removeprefix("ple_inference.vllm_plugin.").replace(".", "/")
        tree = ast.parse((FOLDER / f"{relative}.py").read_text())
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions
        assert not functions[name].args.args, f"{target} is called without arguments"


def test_the_page_is_what_the_records_give():
    page = (CHECKOUT / "docs/overrides.md").read_text()
    assert page == catalogue.markdown(ALL), "run `make overrides-doc` and commit docs/overrides.md"


def test_the_wheel_is_the_pinned_release_and_excludes_the_reference_engine(relied_files):
    """Two extras that cannot share an environment: each pins another torch."""
    metadata = relied_files["vllm-0.33.0.dist-info/METADATA"].decode()
    project = tomllib.loads((CHECKOUT / "services/inference/pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["vllm"] == ["vllm==0.33.0"]
    assert "\nVersion: 0.33.0\n" in metadata
    (wanted,) = re.findall(r"^Requires-Dist: torch==([\d.]+)", metadata, re.MULTILINE)
    (pinned,) = (pin.removeprefix("torch==") for pin in extras["reference"] if pin.startswith("torch=="))
    assert wanted != pinned


@pytest.mark.parametrize(
    ("symbol", "words"),
    [
        ("vllm.v1.engine.async_llm:AsyncLLM.errored", "engine_dead"),
        ("vllm.v1.engine.async_llm:AsyncLLM.__init__", "self.output_processor = OutputProcessor("),
        ("vllm.v1.engine.output_processor:OutputProcessor.get_num_unfinished_requests", "request_states"),
        ("vllm.v1.engine.core_client:MPClient._apply_ready_response", "cache_config.num_gpu_blocks = "),
        ("vllm.v1.engine.core_client:MPClient._apply_ready_response", "cache_config.block_size = "),
        ("vllm.entrypoints.launchers.api_server.app_state:init_app_state", "state.engine_client = "),
        ("vllm.entrypoints.launchers.api_server.app_state:init_app_state", "state.vllm_config = "),
        ("vllm.entrypoints.launchers.api_server.app_state:init_app_state", "state.args = "),
    ],
)
def test_what_our_routes_read_in_the_api_server_is_there(vllm_source, symbol, words):
    """No record names these, since no override changes them: `middleware.py` and `capacity.py` read them."""
    assert words in vllm_source.text(symbol)
