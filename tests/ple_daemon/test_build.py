"""`build` and `verify`: whole files or none, and damage that is named."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import eventually, names
from ple_checkpoint import Checkpoint

from ple_daemon.build import build
from ple_daemon.errors import TableRefusedError
from ple_daemon.flat_file import read_sidecar, sidecar_path
from ple_daemon.source import open_table
from ple_daemon.verify import verify, write_manifest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Checkpoint().write(tmp_path / "checkpoint")


@pytest.fixture
def flat(tmp_path: Path, checkpoint: Path) -> Path:
    path = tmp_path / "table.ple"
    assert build(checkpoint, path) is True
    return path


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
def test_flat_file_equals_its_source(dtype: str, tmp_path: Path) -> None:
    made = Checkpoint(dtype=dtype)
    build(made.write(tmp_path / "checkpoint"), tmp_path / "table.ple")
    assert (tmp_path / "table.ple").read_bytes() == made.table().tobytes()
    with open_table(tmp_path / "checkpoint") as source, open_table(tmp_path / "table.ple") as table:
        assert table.fingerprint == source.fingerprint
        assert np.array_equal(table.lookup_tokens([1, 2]), source.lookup_tokens([1, 2]))
    assert names(tmp_path) == ["checkpoint", "table.ple", "table.ple.json"]


def test_a_valid_file_is_not_written_again(flat: Path, checkpoint: Path) -> None:
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in (flat, sidecar_path(flat))]
    assert build(checkpoint, flat) is False
    assert before == [(path.stat().st_ino, path.stat().st_mtime_ns) for path in (flat, sidecar_path(flat))]
    assert build(checkpoint, flat, force=True) is True
    assert flat.stat().st_ino != before[0][0]


@pytest.mark.parametrize("damage", ["no sidecar", "other table", "short", "content"])
def test_an_invalid_file_is_written_again(damage: str, flat: Path, checkpoint: Path, tmp_path: Path) -> None:
    good = flat.read_bytes()
    if damage == "no sidecar":
        sidecar_path(flat).unlink()
    elif damage == "other table":
        build(Checkpoint(seed=9).write(tmp_path / "other"), flat)
    elif damage == "short":
        flat.write_bytes(good[:-1])
    else:
        flat.write_bytes(bytes(len(good)))
    assert build(checkpoint, flat) is True
    assert flat.read_bytes() == good


@pytest.mark.parametrize("place", ["table.ple", "table.ple.json"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_nothing_but_a_file_is_replaced(
    make: Callable[[Path], None], place: str, checkpoint: Path, tmp_path: Path
) -> None:
    make(tmp_path / place)
    before = (tmp_path / place).stat()
    with pytest.raises(TableRefusedError, match=f"{place}: is there and is no file"):
        build(checkpoint, tmp_path / "table.ple", force=True)
    assert (tmp_path / place).stat() == before
    assert names(tmp_path) == ["checkpoint", place]


def test_too_little_space_is_noticed_first(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(TableRefusedError, match="1,000 bytes free"):
        build(checkpoint, tmp_path / "table.ple")
    assert names(tmp_path) == ["checkpoint"]


def test_a_write_error_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TableRefusedError, match="cannot be written: No space left on device"):
        build(checkpoint, tmp_path / "table.ple")
    assert names(tmp_path) == ["checkpoint"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    folder = Checkpoint().write(tmp_path / "checkpoint")
    out = tmp_path / "out"
    out.mkdir()
    program = """
import sys
from ple_daemon import __main__, build
rows = build._chunks
def slow(segment, row_bytes):
    for chunk in rows(segment, row_bytes):
        yield chunk
        print("chunk", flush=True)
        sys.stdin.read()
build._chunks = slow
sys.exit(__main__.main(["build", *sys.argv[1:]]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, folder, out / "table.ple"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == b"chunk\n"
        assert names(out) == [".table.ple.tmp"]
        process.send_signal(signal.SIGTERM)  # unwinds as Ctrl-C does
        assert process.wait(60) == 130
        assert process.stderr.read().endswith(b"ple-daemon: interrupted\n")
    assert names(out) == []


def test_a_dead_builds_leftover_is_taken_over(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / ".table.ple.tmp").write_bytes(b"left by a kill -9")
    build(checkpoint, tmp_path / "table.ple")
    assert (tmp_path / "table.ple").read_bytes() == Checkpoint().table().tobytes()
    assert names(tmp_path) == ["checkpoint", "table.ple", "table.ple.json"]


def edit_sidecar(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(flat: Path) -> None:
        fields = json.loads(sidecar_path(flat).read_text())
        change(fields)
        sidecar_path(flat).write_text(json.dumps(fields))

    return edit


BAD_FLAT = {
    "no sidecar": (lambda f: sidecar_path(f).unlink(), "its description table.ple.json is missing"),
    "not JSON": (lambda f: sidecar_path(f).write_text("x"), "not JSON"),
    "other format": (edit_sidecar(lambda s: s.update(format="2")), "format is '2'"),
    "field missing": (edit_sidecar(lambda s: s.pop("rows")), "malformed: KeyError: 'rows'"),
    "row type": (edit_sidecar(lambda s: s.update(row_type="int3")), "malformed: ValueError"),
    "truncated": (lambda f: os.truncate(f, 99), "has 99 bytes"),
    "too many rows": (edit_sidecar(lambda s: s.update(rows=10**9)), "do not add up"),
    "scale on bf16": (edit_sidecar(lambda s: s.update(scale_hex="5139")), "bf16 rows with a scale"),
    "altered multiplier": (
        edit_sidecar(lambda s: s["hash"]["multipliers"].__setitem__(0, 3)),
        "not what its",
    ),
    "altered head size": (edit_sidecar(lambda s: s["hash"]["head_sizes"].__setitem__(0, 3)), "do not fit"),
    "head missing": (edit_sidecar(lambda s: s["hash"]["head_sizes"].pop()), "do not fit together"),
    "other content": (
        lambda f: f.write_bytes(bytes(f.stat().st_size)),
        "content is not what its description",
    ),
}


@pytest.mark.parametrize(("change", "reason"), BAD_FLAT.values(), ids=BAD_FLAT)
def test_bad_flat_files_are_refused(change: Callable[[Path], None], reason: str, flat: Path) -> None:
    change(flat)
    with pytest.raises(TableRefusedError, match=reason):
        open_table(flat).close()


Damage = Callable[[Path], None]


def flip(path: Path, at: int = 5000) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(4096))


DAMAGE = [flip, shorten, lengthen]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_d14_verify_names_the_damaged_file_of_a_checkpoint(damage: Damage, checkpoint: Path) -> None:
    victim = checkpoint / "model-00002-of-00003.safetensors"
    with pytest.raises(TableRefusedError, match=r"has no ple-checksums\.json"):
        verify(checkpoint)
    write_manifest(checkpoint)
    assert verify(checkpoint) == 4
    damage(victim)
    with pytest.raises(TableRefusedError, match=r"damaged: model-00002-of-00003\.safetensors;"):
        verify(checkpoint)


@pytest.mark.parametrize("damage", [shorten, lengthen], ids=lambda damage: damage.__name__)
def test_d14_verify_names_a_flat_file_of_the_wrong_size(damage: Damage, flat: Path) -> None:
    damage(flat)
    with pytest.raises(TableRefusedError, match=rf"^{flat}: has \d+ bytes, table\.ple\.json says"):
        verify(flat)


def test_d14_verify_names_the_damaged_part_of_a_flat_file(flat: Path) -> None:
    assert verify(flat) == 5
    segments = read_sidecar(flat).segments
    flip(flat, (segments[0].rows + 5) * 20)
    with pytest.raises(TableRefusedError, match=rf"damaged in the rows from {segments[1].source};"):
        verify(flat)


def test_verify_misses_no_file(checkpoint: Path) -> None:
    manifest = write_manifest(checkpoint)
    fields = json.loads(manifest.read_text())
    del fields["sha256"]["model-00003-of-00003.safetensors"]
    manifest.write_text(json.dumps(fields))
    with pytest.raises(TableRefusedError, match=r"says nothing of model-00003-of-00003\.safetensors"):
        verify(checkpoint)


def test_commands_report_in_one_line(command: Callable, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.ple"
    assert command("build", checkpoint, out).stdout == f"{out}: written\n"
    assert "nothing written" in command("build", checkpoint, out).stdout
    assert command("verify", out).stdout == f"{out}: intact, 5 checksums match\n"
    flip(out, 70)
    bad = command("verify", out)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.splitlines()[-1].startswith(f"ple-daemon: {out}: damaged in the rows from model-0000")
    assert "Traceback" not in bad.stderr


def test_two_builds_of_one_file(checkpoint: Path, tmp_path: Path) -> None:
    program = """
import fcntl, sys
with open(sys.argv[1], "ab") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""
    private = tmp_path / ".table.ple.tmp"
    other = subprocess.Popen(
        [sys.executable, "-c", program, private], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(TableRefusedError, match="another build is writing"):
            build(checkpoint, tmp_path / "table.ple")
        assert private.exists()
        other.stdin.close()
        eventually(lambda: other.poll() is not None, "end of the other build")
    build(checkpoint, tmp_path / "table.ple")
