"""The short form of `make soak-gateway`: the same cases, seeded."""

import pytest
from fuzz import CASES, Fuzzer
from gateway_process import GatewayProcess


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    gateway = GatewayProcess(tmp_path_factory.mktemp("fuzz"), image_workers=1)
    yield gateway
    gateway.stop()


@pytest.mark.parametrize("name", CASES)
def test_g10_g13_g16_g17_fuzzed_requests_give_no_5xx_and_no_hang(process, name):
    fuzzer = Fuzzer(process)
    fuzzer.run(name, examples=100, seed=20261130)
    statuses = {status for _, status in fuzzer.seen}
    assert {200, 400} <= statuses  # the cases reach both sides of the checks
    assert b"ERROR" not in process.log.read_bytes()
