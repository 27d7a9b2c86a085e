"""vLLM's wheel as the tests see it: its source text, copies with edits, and modules made of its own text.

vllm itself cannot be imported here. Where a test needs upstream's behaviour, the real source text of the
symbol is executed with stand-ins for what it imports.
"""

import __future__

import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from ple_inference.tiny.config import TinyOptions
from ple_inference.vllm_plugin import proof, registered_memory
from ple_inference.vllm_plugin.overrides import ALL
from ple_inference.vllm_plugin.wheel_source import WheelSource

sys.path.insert(0, str(Path(__file__).parent))  # for cuda_on_cpu

from cuda_on_cpu import Cuda, Cudart, Daemon, Event, Stream, running

CHECKOUT = Path(__file__).resolve().parents[2]
OURS = tuple(
    f"ple_inference.vllm_plugin.{name}"
    for name in (
        "runner",
        "worker",
        "daemon_embedding",
        "row_source",
        "staged_rows",
        "lent_slots",
        "table_link",
        "model_state",
    )
)


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Fetched by `make test`; its absence fails, since a contract that skips guards nothing."""
    found = list((CHECKOUT / "var/wheels").glob("vllm-0.33.0-*.whl"))
    if len(found) != 1:
        pytest.fail(
            "var/wheels holds no wheel of vLLM 0.33.0: run `make test`, or the make target of that wheel"
        )
    return found[0]


@pytest.fixture(scope="session")
def vllm_source(wheel: Path) -> WheelSource:
    return WheelSource.at(wheel)


@pytest.fixture(scope="session")
def relied_files(wheel: Path) -> dict[str, bytes]:
    """The files of the wheel that records name, and its metadata: path -> content."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        bases = {
            up.symbol.partition(":")[0].replace(".", "/") for override in ALL for up in override.upstream
        }
        paths = {f"{base}.py" if f"{base}.py" in names else f"{base}/__init__.py" for base in bases}
        paths |= {"vllm/__init__.py", "vllm-0.33.0.dist-info/METADATA"}
        return {path: archive.read(path) for path in paths}


@pytest.fixture
def make_wheel(
    relied_files: dict[str, bytes], tmp_path: Path
) -> Callable[[Mapping[str, bytes | None]], Path]:
    """Writes a wheel of the relied files with `edits`: path -> new content, or None to leave it out."""

    def make(edits: Mapping[str, bytes | None] = {}) -> Path:
        path = tmp_path / f"vllm-0.33.0-edited{len(list(tmp_path.glob('*.whl')))}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in {**relied_files, **edits}.items():
                if content is not None:
                    archive.writestr(name, content)
        return path

    return make


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch, vllm_source: WheelSource) -> Callable[..., ModuleType]:
    """Puts a module of vLLM into sys.modules: the real text of `symbols`, `stand_ins` for what that uses."""

    def make(name: str, *symbols: str, **stand_ins: object) -> ModuleType:
        module = _module(name, monkeypatch)
        module.__dict__.update(stand_ins)
        for symbol in symbols:
            text = vllm_source.text(f"{name}:{symbol}")
            flags = __future__.annotations.compiler_flag
            exec(compile(text, f"{name}:{symbol}", "exec", flags=flags), module.__dict__)
        return module

    return make


def _module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__path__ = []
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(_module(parent, monkeypatch), leaf, module)
    return module


@pytest.fixture
def installed_vllm(monkeypatch: pytest.MonkeyPatch, vllm_source: WheelSource) -> None:
    """As if the wheel were installed, for what reads source text."""
    monkeypatch.setattr(proof, "_installed", lambda: vllm_source)


@pytest.fixture
def fresh_plugin() -> Iterator[None]:
    """Our modules that import vllm are imported anew against a test's stand-ins, and forgotten after it."""

    def forget() -> None:
        for name in OURS:
            sys.modules.pop(name, None)
            vars(sys.modules["ple_inference.vllm_plugin"]).pop(name.rpartition(".")[2], None)

    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[[TinyOptions], Path]) -> Path:
    return make_checkpoint(TinyOptions(vocab="tiny", dtype="bf16", table_rows_base=2000))


@pytest.fixture(scope="module")
def steady(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for all tests that leave it alone."""
    with running(checkpoint, tmp_path_factory.mktemp("r")) as daemon:
        yield daemon


@pytest.fixture
def mortal(checkpoint: Path, tmp_path: Path) -> Iterator[Daemon]:
    with running(checkpoint, tmp_path / "r") as daemon:
        yield daemon


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    monkeypatch.setattr(Stream, "made", [])
    monkeypatch.setattr(Event, "touched_by", set())
    yield Cuda(monkeypatch)
    for stream in Stream.made:
        stream.close()


@pytest.fixture
def cudart(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(registered_memory, "_cudart", lambda: fake)
    return fake
