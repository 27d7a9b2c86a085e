"""The run directory is short wherever the checkout lies."""

from pathlib import Path

import pytest

from ple_rpc.rundir import TABLE_SOCKET_NAME, check_socket_path, run_directory


def test_it_is_short_for_a_deep_checkout(tmp_path):
    deep = tmp_path.joinpath(*["a-folder-with-a-long-name"] * 12)
    check_socket_path(run_directory({}, deep) / TABLE_SOCKET_NAME)


def test_it_differs_between_checkouts_and_not_between_runs():
    one, two = Path("/srv/one"), Path("/srv/two")
    assert run_directory({}, one) == run_directory({}, one)
    assert run_directory({}, one) != run_directory({}, two)


def test_it_lies_in_the_runtime_directory_of_the_user():
    assert run_directory({"XDG_RUNTIME_DIR": "/run/user/7"}, Path("/srv")).parent == Path("/run/user/7")


@pytest.mark.parametrize("length", [107, 108])
def test_the_limit_is_the_one_of_the_kernel(length):
    path = Path("/" + "x" * (length - 1))
    if length <= 107:
        check_socket_path(path)
    else:
        with pytest.raises(ValueError, match="choose a shorter run directory"):
            check_socket_path(path)
