"""`ple-inference tiny --quant`: written whole or not at all, in bounded memory, the same each time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ple_daemon.checkpoint import read_checkpoint
from ple_inference.synthetic.layout import Spec, files
from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.synthetic.writer import NoRoomError, write_checkpoint
from ple_inference.tiny.stamp import is_complete
from ple_inference.tiny.weights import row_numbers

torch.set_num_threads(1)
SMALL = {"shapes": "tiny", "layers": 4, "experts": 4, "table_rows_base": 60, "vocab": "tiny"}
COMMAND = [sys.executable, "-m", "ple_inference", "tiny"]


def options_of(**changes: object) -> SyntheticOptions:
    return SyntheticOptions(**(SMALL | changes))  # type: ignore[arg-type]


def make(out: Path, options: SyntheticOptions) -> Path:
    write_checkpoint(out, options, files(options), force=False, progress=lambda _: None)
    return out


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("quant", ["int4-mixed", "fp8", "none"])
@pytest.mark.parametrize("images", [True, False])
def test_every_tensor_is_written_as_the_layout_says(tmp_path: Path, quant: str, images: bool) -> None:
    options = options_of(quant=quant, images=images)
    folder = make(tmp_path / "out", options)
    specs = {spec.name: spec for file in files(options) for spec in file}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == specs.keys()
    assert index["metadata"]["total_size"] == sum(spec.size_bytes for spec in specs.values())
    for file in set(index["weight_map"].values()):
        with safe_open(folder / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert index["weight_map"][name] == file
                check(opened.get_tensor(name), specs.pop(name))
    assert not specs
    assert (folder / "tokenizer.json").exists() == images
    layout = read_checkpoint(folder)
    assert layout.row_type.name == ("FP8_E4M3" if quant == "fp8" else "BF16")
    assert len(layout.scale) == (2 if quant == "fp8" else 0)


def check(tensor: torch.Tensor, spec: Spec) -> None:
    """Its type and shape; something random, but for what is constant."""
    assert tensor.dtype == spec.dtype
    assert tuple(tensor.shape) == spec.shape
    if "_shape" in spec.name or "ple_embedding." in spec.name:
        return
    assert torch.isfinite(tensor.float()).all(), spec.name
    if tensor.numel() > 1000:
        values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        assert len(values.unique()) > 100, spec.name


@pytest.mark.parametrize("quant", ["int4-mixed", "fp8"])
def test_rows_of_the_table_carry_their_numbers(tmp_path: Path, quant: str) -> None:
    folder = make(tmp_path / "out", options_of(quant=quant))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    parts = []
    for shard in range(8):
        name = f"model.layers.1.ple.ple_embedding.ngram_embedding.shard_{shard}.weight"
        with safe_open(folder / index[name], "pt") as file:
            parts.append(file.get_tensor(name))
    table = torch.cat(parts)
    assert torch.equal(row_numbers(table), torch.arange(len(table)))
    assert len({bytes(row.view(torch.uint8).tolist()) for row in table}) == len(table)


def test_same_options_give_same_bytes_and_other_seeds_others(tmp_path: Path) -> None:
    a, b, c = (
        shards(make(tmp_path / name, options_of(quant="int4-mixed", seed=seed)))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert a == b
    assert all(a[name] != c[name] for name in a)


WRITES_TWICE = """
import os, resource, signal, sys
os.sched_getaffinity = lambda _: {0, 1}  # two threads on any machine
from pathlib import Path
from ple_inference.synthetic.layout import files
from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.synthetic.writer import size_bytes, write_checkpoint
options = SyntheticOptions("int4-mixed", "tiny", 4, 4, 50_000, "real")
grouped = files(options)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_checkpoint(Path(sys.argv[1], "whole"), options, grouped, force=False, progress=lambda _: None)
print(size_bytes(grouped) >> 10, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, flush=True)
left = size_bytes(grouped) // 2
def stop_halfway(written):
    global left
    left -= written
    if left < 0:
        print("halfway", flush=True)
        signal.pause()
write_checkpoint(Path(sys.argv[1], "killed"), options, grouped, force=False, progress=stop_halfway)
"""


def test_memory_does_not_grow_and_what_is_killed_does_not_look_finished(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES_TWICE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            written_kib, grown_kib = map(int, process.stdout.readline().split())
            assert process.stdout.readline() == "halfway\n"
        finally:
            process.kill()
    assert written_kib > 300 << 10
    assert grown_kib < 240 << 10
    assert is_complete(tmp_path / "whole", SyntheticOptions("int4-mixed", "tiny", 4, 4, 50_000, "real"))
    (unfinished,) = (path for path in tmp_path.iterdir() if path.name != "whole")
    assert unfinished.name.startswith(".killed-")
    names = {path.name for path in unfinished.iterdir()}
    assert any(name.endswith(".safetensors") for name in names)
    assert not names & {"config.json", "model.safetensors.index.json", "triplex-tiny.json"}


def test_an_interrupt_leaves_nothing_at_all(tmp_path: Path) -> None:
    options = options_of(quant="int4-mixed")
    left = [3]

    def interrupt(_: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "out", options, files(options), force=False, progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_a_terminated_command_leaves_nothing_at_all(tmp_path: Path) -> None:
    command = [*COMMAND, str(tmp_path / "out"), "--quant", "fp8", "--vocab", "tiny"]
    with subprocess.Popen([*command, "--table-rows-base", "2000000"]) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob(".out-*/*.safetensors")):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.terminate()
            assert process.wait(30) == 128 + signal.SIGINT
        finally:
            process.kill()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_swept_and_a_living_ones_stays(tmp_path: Path) -> None:
    """By the next command into the same parent, whatever it makes; another's hidden folder is not touched."""
    other = tmp_path / ".cache-12345678"
    other.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / ".link-12345678.unfinished").symlink_to(target)
    options = options_of(quant="fp8")
    left: set[str] = set()

    def meanwhile(_: int) -> None:
        """Of a writer that lives: kill another, and have a third one sweep."""
        if left:
            return
        own = hidden()
        left.update(own)
        left.update(kill_halfway(tmp_path / "killed"))
        assert len(own) == 1
        command = [*COMMAND, str(tmp_path / "third"), "--vocab", "tiny", "--table-rows-base", "60"]
        for said in ("wrote", "is already complete"):
            done = subprocess.run(command, capture_output=True, text=True, timeout=100)
            assert (done.returncode, done.stderr) == (0, "")
            assert said in done.stdout
            assert hidden() == own

    def hidden() -> set[str]:
        return {path.name for path in tmp_path.glob(".*.unfinished") if not path.is_symlink()}

    write_checkpoint(tmp_path / "out", options, files(options), force=False, progress=meanwhile)
    assert len(left) == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        *("out", "third", "target"),
        *(".cache-12345678", ".link-12345678.unfinished"),
    }


def kill_halfway(out: Path) -> set[str]:
    """Names of what a command leaves that is killed while it writes."""
    command = [*COMMAND, str(out), "--quant", "fp8", "--vocab", "tiny", "--table-rows-base", "2000000"]
    with subprocess.Popen(command) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(out.parent.glob(f".{out.name}-*/*.safetensors")):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.kill()
    found = {path.name for path in out.parent.glob(f".{out.name}-*")}
    assert len(found) == 1
    return found


def test_a_slower_writer_takes_nothing_from_a_faster_one(tmp_path: Path) -> None:
    slow, fast = options_of(seed=1), options_of(seed=2)
    out = tmp_path / "out"

    def overtake(_: int) -> None:
        if not out.exists():
            make(out, fast)

    with pytest.raises(OSError, match="not empty"):
        write_checkpoint(out, slow, files(slow), force=False, progress=overtake)
    assert is_complete(out, fast)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_link_points_to_is_written(tmp_path: Path) -> None:
    """On its disk; the link stays."""
    for target in (tmp_path / "absent", tmp_path / "empty"):
        link = tmp_path / f"link-{target.name}"
        link.symlink_to(target)
        if target.name == "empty":
            target.mkdir()
        command = [*COMMAND, str(link), "--quant", "fp8", "--vocab", "tiny", "--table-rows-base", "60"]
        for said in (f"wrote {target}", f"{target} is already complete"):
            done = subprocess.run(command, capture_output=True, text=True, timeout=100)
            assert (done.returncode, done.stderr) == (0, "")
            assert said in done.stdout
        assert link.is_symlink()
        assert (target / "config.json").exists()


def test_a_disk_that_is_too_small_is_refused_first(tmp_path: Path) -> None:
    options = SyntheticOptions(layers=96, experts=4096)
    out = tmp_path / "new" / "out"
    with pytest.raises(
        NoRoomError, match=rf"{out} takes \d{{4}}.\d GiB and {tmp_path} has .* GiB free; choose"
    ):
        write_checkpoint(out, options, files(options), force=False, progress=lambda _: None)
    assert not list(tmp_path.iterdir())


def test_command_refuses_options_that_do_not_go_together(tmp_path: Path) -> None:
    for arguments, message in (
        (["--quant", "fp8", "--dtype", "f32"], "--dtype f32 goes with neither --quant nor --shapes real"),
        *(
            (
                ["--scale-dtype", "fp16", *quant],
                "--scale-dtype fp16 goes with --quant int4-mixed: others have no such scales",
            )
            for quant in ([], ["--quant", "none"], ["--quant", "fp8"])
        ),
        (["--images"], "--images and --experts go with --quant or --shapes real"),
        (["--shapes", "real", "--layers", "7"], "--layers is 7; it must be a multiple of 4, at most 96"),
    ):
        command = [*COMMAND, str(tmp_path / "out"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stderr) == (1, f"ple-inference: {message}\n")
    assert not list(tmp_path.iterdir())
