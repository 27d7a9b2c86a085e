"""A checkpoint of which something is wrong, and the one line that both commands refuse it with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import released_layout

from ple_inference import __main__ as command

LAYERS, EXPERTS = 4, 3
FILE = "model.safetensors"
TEXT = released_layout.PREFIX
QKV, EXPERT = f"{TEXT}layers.3.self_attn.q_proj", f"{TEXT}layers.2.mlp.experts.1.up_proj"
Shapes = dict[str, tuple[str, list[int]]]


class Case:
    """A checkpoint of four layers with three experts each, and the one line that it is refused with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.folder, self._monkeypatch, self._capsys = folder / "model", monkeypatch, capsys
        self._looked = folder / "looked"
        smi = folder / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\ntouch {self._looked}\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))

    def write(
        self,
        form: str = "int4-mixed",
        tensors: Callable[[Shapes], object] = lambda shapes: None,
        config: Callable[[dict[str, Any]], object] = lambda config: None,
    ) -> None:
        released_layout.write(self.folder, form, LAYERS, experts=EXPERTS)
        shapes = released_layout.tensors(form, LAYERS, experts=EXPERTS)
        tensors(shapes)
        released_layout.write_headers(self.folder, shapes)
        self.change("config.json", config)

    def change(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        content = json.loads((self.folder / name).read_text())
        change(content)
        (self.folder / name).write_text(json.dumps(content))

    def refusal(self) -> str:
        """The line of both commands, with no GPU looked at."""
        lines = {self.run_refused("plan"), self.run_refused("serve", "--engine", "vllm")}
        assert len(lines) == 1, lines
        assert not self._looked.exists()
        return lines.pop()

    def succeed(self, *arguments: str) -> str:
        """What a command prints that ends well."""
        assert self._run(*arguments) == 0
        return str(self._capsys.readouterr().out)

    def run_refused(self, *arguments: str) -> str:
        """The one line of a command that fails."""
        assert self._run(*arguments) == 1
        written = self._capsys.readouterr()
        assert not written.out
        lines = [line for line in written.err.splitlines() if line.startswith("ple-inference: ")]
        assert len(lines) == 1, written.err
        return lines[0]

    def _run(self, *arguments: str) -> object:
        options = ("--model", str(self.folder), "--profile", "single-140gb")
        self._monkeypatch.setattr("sys.argv", ["ple-inference", *arguments, *options])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return ended.value.code
