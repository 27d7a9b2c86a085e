"""Source text is found by name, whatever kind of symbol it is, and its absence is said clearly."""

import hashlib
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from ple_inference.vllm_plugin.wheel_source import SourceMissing, WheelSource

MODULE = '''\
"""A module."""
import typing

LIMIT = 3  # bytes
TABLE: dict[str, int] = {
    "a": 1,
}

if typing.TYPE_CHECKING:
    ONLY_TYPES = 1

try:
    import fast
except ImportError:
    def slow():
        return 1

@typing.overload
def f(x: int) -> int: ...
@typing.overload
def f(x: str) -> str: ...
def f(x):
    return x


@typing.final
class Outer(object):
    # why
    size = 1

    class Inner:
        def g(self):
            return 2

    @property
    def p(self):
        return 1

    @p.setter
    def p(self, value):
        pass

    async def a(self):
        pass
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "site/vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VERSION = 1\n")
    (package / "things.py").write_text(MODULE)
    return tmp_path / "site"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LIMIT", "LIMIT = 3  # bytes"),
        ("TABLE", 'TABLE: dict[str, int] = {\n    "a": 1,\n}'),
        ("ONLY_TYPES", "    ONLY_TYPES = 1"),
        ("slow", "    def slow():\n        return 1"),
        ("Outer.size", "    size = 1"),
        ("Outer.Inner.g", "        def g(self):\n            return 2"),
        ("Outer.a", "    async def a(self):\n        pass"),
    ],
)
def test_each_kind_of_symbol_gives_its_lines(folder, name, text):
    assert WheelSource.at(folder).text(f"vllm.things:{name}") == text


def test_decorators_overloads_and_setters_belong_to_the_text(folder):
    source = WheelSource.at(folder)
    assert source.text("vllm.things:f").count("def f") == 3
    assert source.text("vllm.things:f").startswith("@typing.overload\n")
    assert source.text("vllm.things:Outer").startswith("@typing.final\nclass Outer(object):\n    # why\n")
    assert "@p.setter" in source.text("vllm.things:Outer.p")


def test_a_package_is_read_from_its_init(folder):
    assert WheelSource.at(folder).text("vllm:VERSION") == "VERSION = 1"


def test_the_hash_sees_every_change_but_trailing_blanks(folder):
    def sha256_with(old: str, new: str) -> str:
        (folder / "vllm/things.py").write_text(MODULE.replace(old, new))
        return WheelSource.at(folder).sha256("vllm.things:Outer")

    recorded = sha256_with("", "")
    assert recorded == hashlib.sha256(MODULE[MODULE.index("@typing.final") :].rstrip().encode()).hexdigest()
    assert sha256_with("size = 1", "size = 1   ") == recorded
    assert sha256_with("LIMIT = 3", "LIMIT = 4") == recorded
    for old, new in (("# why", "# because"), ("@typing.final\n", ""), ("return 2", "return 3")):
        assert sha256_with(old, new) != recorded


def test_wheel_folder_and_installation_give_the_same(folder, tmp_path):
    wheel = tmp_path / "vllm-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in folder.rglob("*.py"):
            archive.write(path, path.relative_to(folder).as_posix())
    info = folder / "vllm-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1\n")
    script = """
        import sys
        from ple_inference.vllm_plugin.wheel_source import WheelSource
        print(WheelSource.installed().sha256("vllm.things:Outer"))
        assert "vllm" not in sys.modules and "torch" not in sys.modules
    """
    installed = run_with(folder, script).stdout.strip()
    symbol = "vllm.things:Outer"
    assert installed == WheelSource.at(folder).sha256(symbol) == WheelSource.at(wheel).sha256(symbol)


def run_with(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{textwrap.dedent(script)}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )


@pytest.mark.parametrize(
    ("symbol", "says"),
    [
        ("vllm.things:gone", "has no vllm.things:gone: gone is gone from vllm.things"),
        ("vllm.things:Outer.gone", "has no vllm.things:Outer.gone"),
        ("vllm.things:LIMIT.gone", "has no vllm.things:LIMIT.gone"),
        (
            "vllm.no.such:thing",
            "has no module vllm.no.such: neither vllm/no/such.py nor vllm/no/such/__init__.py",
        ),
    ],
)
def test_what_is_gone_is_named(folder, symbol, says):
    with pytest.raises(SourceMissing, match=says.replace(".", r"\.")):
        WheelSource.at(folder).text(symbol)


def test_a_place_without_vllm_is_refused(tmp_path):
    with pytest.raises(SourceMissing, match="neither a wheel nor a folder"):
        WheelSource.at(tmp_path)
    (tmp_path / "broken.whl").write_bytes(b"PK not a zip")
    with pytest.raises(SourceMissing, match=r"broken\.whl: not a readable wheel"):
        WheelSource.at(tmp_path / "broken.whl")


def test_an_environment_without_vllm_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(SourceMissing, match="not installed in this environment: install ple-inference"):
        WheelSource.installed()
