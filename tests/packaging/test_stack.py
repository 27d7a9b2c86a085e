"""`make up` tells mistakes in files and addresses in one line. No container engine is asked."""

import os
import socket
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest

STACK = Path(__file__).resolve().parents[2] / "deploy/stack.py"


@pytest.fixture
def stack(tmp_path: Path) -> SimpleNamespace:
    names: dict[str, Any] = run_path(str(STACK))
    module = SimpleNamespace(**names)
    module.keys = tmp_path / "secrets/api_keys"
    module.check_keys.__globals__["KEYS"] = module.keys
    return module


def refusal(stack: SimpleNamespace, check: Any, *arguments: Any) -> str:
    with pytest.raises(stack.StackError) as refused:
        check(*arguments)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


def test_a_key_is_made_once(stack: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    stack.check_keys(stack.keys)
    made = stack.keys.read_text()
    assert "shown this once: sk-" in capsys.readouterr().out
    stack.check_keys(stack.keys)
    # Another `make up`, which had seen no file.
    assert "File exists" in refusal(stack, stack.make_key)
    assert stack.keys.read_text() == made
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda keys: keys.mkdir(), "is a folder: remove it"),
        (lambda keys: keys.write_text(" \r\n"), "holds no key: remove it, then a key is made"),
        (lambda keys: keys.write_bytes(b"\xff\xfe\0k"), "cannot be read: 'utf-8'"),
        (os.mkfifo, "no file "),
        (lambda keys: keys.symlink_to(keys), "cannot make "),
        (lambda keys: keys.symlink_to("absent"), "cannot make "),
        (lambda keys: (keys.parent.rmdir(), keys.parent.write_text("")), "cannot make "),
    ],
    ids=["folder", "empty", "bytes", "fifo", "loop", "dangling", "no_folder"],
)
def test_keys_that_cannot_be_used(stack: SimpleNamespace, make: Any, said: str) -> None:
    stack.keys.parent.mkdir()
    make(stack.keys)
    assert said in refusal(stack, stack.check_keys, stack.keys)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda keys: None, "no file "),
        (lambda keys: keys.write_text(" \r\n"), "holds no key: "),
        (lambda keys: keys.mkdir(), "is a folder: "),
    ],
    ids=["absent", "empty", "folder"],
)
def test_a_file_of_keys_that_the_user_names_is_not_made(
    stack: SimpleNamespace, tmp_path: Path, make: Any, said: str
) -> None:
    """Nor is its removal advised: no key would be made in its place."""
    make(tmp_path / "mine")
    line = refusal(stack, stack.check_keys, tmp_path / "mine")
    assert said in line
    assert "TRIPLEX_API_KEYS_FILE must name a file with API keys, one a line, which `ple-gateway key`" in line
    assert not stack.keys.exists()


@pytest.mark.parametrize("port", [{}, {"host_ip": "127.0.0.1", "published": "18000-18002"}])
def test_an_address_without_one_port(stack: SimpleNamespace, port: dict[str, str]) -> None:
    config = {"services": {"gateway": {"ports": [port]}}}
    assert "it must be HOST:PORT" in refusal(stack, stack.check_port, [], config)


def test_a_port_without_a_host_is_looked_at(stack: SimpleNamespace) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = str(taken.getsockname()[1])
        config = {"services": {"gateway": {"ports": [{"published": port}]}}}
        stack.check_port.__globals__["is_running"] = lambda words, service: False
        assert f"0.0.0.0:{port} cannot be listened on" in refusal(stack, stack.check_port, [], config)
    stack.check_port([], config)
