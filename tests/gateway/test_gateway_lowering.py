"""Lowered schemas: grammar compilers take them, and what is not reported as lost still binds."""

import ast
import json
import zipfile
from pathlib import Path

import jsonschema_rs
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_cases import SCHEMAS

from ple_gateway.errors import GatewayError
from ple_gateway.schema_check import check_schema
from ple_gateway.schema_rules import SchemaLimits

LIMITS = SchemaLimits(512 * 1024, 64, 20_000, 10_000, 500, 10_000, 1_000)
TOKENS = ["<end>", *'{}[],:"abcnoftx0123456789-./@:é^$', "name", "true", "false", "null", "foo", "http"]
WHEELS = Path(__file__).parents[2] / "var/wheels"


@pytest.fixture(scope="session")
def vllm_avoids_xgrammar():
    """vLLM's own test for schemas that it takes from xgrammar, out of its wheel's source."""
    (wheel,) = WHEELS.glob("vllm-0.33.0-*.whl")
    source = zipfile.ZipFile(wheel).read("vllm/v1/structured_output/backend_xgrammar.py").decode()
    wanted = {"STRING_SUPPORTED_FORMATS", "_has_pattern_and_length_bounds", "_schema_types"}
    wanted |= {"has_xgrammar_unsupported_json_features"}
    body = [
        node
        for node in ast.parse(source).body
        if {getattr(node, "name", ""), *(getattr(t, "id", "") for t in getattr(node, "targets", ()))} & wanted
    ]
    space = {"Any": object}
    exec(compile(ast.Module(body, []), str(wheel), "exec"), space)
    return space["has_xgrammar_unsupported_json_features"]


def checked(schema):
    try:
        return check_schema(json.dumps(schema).encode(), False, LIMITS)
    except GatewayError as error:
        if error.param != "response_format":
            raise
        return None


@settings(max_examples=250, deadline=None)
@given(SCHEMAS)
def test_g16_g17_g26_what_is_sent_compiles_and_stays_with_xgrammar(vllm_avoids_xgrammar, schema):
    result = checked(schema)
    if result:
        assert not vllm_avoids_xgrammar(json.loads(result.lowered))
        xgrammar.Grammar.from_json_schema(result.lowered.decode())


@pytest.fixture(scope="session")
def compiler():
    """Compiles for a model with a few tokens, enough to write the names and values of the cases."""
    info = xgrammar.TokenizerInfo(TOKENS, vocab_size=len(TOKENS), stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def wander(compiled, choose):
    """What a model that says anything its grammar allows has said when it stops; None when it does not."""
    matcher = xgrammar.GrammarMatcher(compiled)
    bits = xgrammar.allocate_token_bitmask(1, len(TOKENS))
    said = ""
    for _ in range(60):
        matcher.fill_next_token_bitmask(bits)
        allowed = [i for i in range(len(TOKENS)) if bits[0, i // 32] >> (i % 32) & 1]
        if not allowed:
            return None
        token = 0 if 0 in allowed else choose(allowed)
        assert matcher.accept_token(token)
        if matcher.is_terminated():
            return said
        said += TOKENS[token]
    return None


@settings(max_examples=150, deadline=None)
@given(SCHEMAS, st.randoms(use_true_random=False))
def test_what_is_not_lost_binds(compiler, schema, chance):
    result = checked(schema)
    if result is None or result.lost:
        return
    compiled = compiler.compile_json_schema(result.lowered.decode(), any_whitespace=False)
    said = wander(compiled, chance.choice)
    if said is not None:
        assert jsonschema_rs.is_valid(schema, json.loads(said)), said
