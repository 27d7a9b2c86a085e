"""The gateway's own OpenAPI document: complete, and true of what it answers."""

import pytest
from gateway_process import GatewayProcess
from openapi_tester import run_schemathesis


def test_every_route_is_described(gateway):
    document = gateway.request("GET", "/openapi.json").json
    served = {
        (route.path.replace("{model:path}", "{model}"), method.lower())
        for route in gateway.server.config.app.routes
        for method in route.methods - {"HEAD"}
    }
    described = {
        (path, method)
        for path, item in document["paths"].items()
        for method in item
        if method in {"get", "post", "put", "delete", "patch"}
    }
    assert described == served


def test_the_document_needs_a_key_where_keys_are_set(start_gateway):
    gateway = start_gateway(api_keys="k")
    assert gateway.request("GET", "/openapi.json").status == 401
    assert gateway.request("GET", "/openapi.json", headers={"authorization": "Bearer k"}).status == 200


@pytest.fixture
def process(tmp_path):
    gateway = GatewayProcess(tmp_path, image_workers=1)
    yield gateway
    gateway.stop()


def test_schemathesis_finds_no_5xx_and_no_untruth(process, tmp_path):
    run_schemathesis(process.url, tmp_path, phases="fuzzing", examples=15, seed=20261130)
    assert b" ERROR " not in process.log.read_bytes()
