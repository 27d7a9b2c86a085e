"""The source text of vLLM's symbols, read from its files without importing vllm or torch."""

from __future__ import annotations

import ast
import hashlib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Protocol

from ple_inference.vllm_plugin.override import OverrideError


class SourceMissing(OverrideError):
    """vLLM is not where it was looked for, or has no such file or symbol."""


class Files(Protocol):
    """Where vLLM's files lie."""

    name: str

    def read(self, path: str) -> bytes | None:
        """The content of `path`, relative to site-packages, or None when there is no such file."""


class FolderFiles:
    """An unpacked wheel, or the site-packages that vLLM is installed in."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._folder = folder

    def read(self, path: str) -> bytes | None:
        file = self._folder / path
        return file.read_bytes() if file.is_file() else None


class WheelFiles:
    """A wheel that is not unpacked."""

    def __init__(self, wheel: Path) -> None:
        self.name = wheel.name
        try:
            self._archive = zipfile.ZipFile(wheel)
        except (OSError, zipfile.BadZipFile) as error:
            raise SourceMissing(f"{wheel}: not a readable wheel ({error}): download it again") from error
        self._names = set(self._archive.namelist())

    def read(self, path: str) -> bytes | None:
        return self._archive.read(path) if path in self._names else None


class WheelSource:
    """Symbols of one vLLM: `text("vllm.config:VllmConfig.compute_hash")`."""

    def __init__(self, files: Files) -> None:
        self.name = files.name
        self._files = files
        self._modules: dict[str, tuple[list[str], ast.Module]] = {}

    @classmethod
    def installed(cls) -> WheelSource:
        """The vLLM of this environment. Raises SourceMissing when there is none."""
        try:
            vllm = distribution("vllm")
        except PackageNotFoundError:
            raise SourceMissing(
                "vllm is not installed in this environment: install ple-inference[vllm]"
            ) from None
        return cls(FolderFiles(Path(str(vllm.locate_file(""))), f"installed vllm {vllm.version}"))

    @classmethod
    def at(cls, path: Path) -> WheelSource:
        """A wheel file, or a folder that holds the package `vllm`."""
        if path.is_file():
            return cls(WheelFiles(path))
        if (path / "vllm").is_dir():
            return cls(FolderFiles(path, str(path)))
        raise SourceMissing(f"{path}: neither a wheel nor a folder with a package vllm in it")

    def text(self, symbol: str) -> str:
        """The lines of `module:qualified.name`, decorators and comments included, trailing blanks removed.

        A name that is bound several times in its scope gives all its bindings. Raises SourceMissing.
        """
        module, _, qualified_name = symbol.partition(":")
        lines, tree = self._module(module)
        scope: list[ast.stmt] = tree.body
        found: list[ast.stmt] = []
        for name in qualified_name.split("."):
            found = [node for node in _statements(scope) if name in _bound_names(node)]
            if not found:
                raise SourceMissing(f"{self.name} has no {symbol}: {name} is gone from {module}")
            scope = [child for node in found if isinstance(node, ast.ClassDef) for child in node.body]
        return "\n".join(
            line.rstrip() for node in found for line in lines[_first_line(node) - 1 : node.end_lineno]
        )

    def sha256(self, symbol: str) -> str:
        return hashlib.sha256(self.text(symbol).encode()).hexdigest()

    def _module(self, module: str) -> tuple[list[str], ast.Module]:
        if module not in self._modules:
            base = module.replace(".", "/")
            content = self._files.read(f"{base}.py")
            if content is None:
                content = self._files.read(f"{base}/__init__.py")
            if content is None:
                raise SourceMissing(
                    f"{self.name} has no module {module}: neither {base}.py nor {base}/__init__.py"
                )
            text = content.decode()
            self._modules[module] = (text.split("\n"), ast.parse(text))
        return self._modules[module]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a scope, those under its `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            handlers = [child for handler in node.handlers for child in handler.body]
            yield from _statements(node.body + handlers + node.orelse + node.finalbody)


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _first_line(node: ast.stmt) -> int:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.decorator_list:
        return node.decorator_list[0].lineno
    return node.lineno
