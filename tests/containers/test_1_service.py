"""What a client outside of the containers gets, and what each container may do."""

import base64
import io
import json

import openai
import pytest
from PIL import Image

MODEL = "triplex-tiny"
HELLO = [{"role": "user", "content": "Hello! Tell me about n-grams."}]
SYS_PTRACE = 1 << 19
SERVICES = ("daemon", "inference", "gateway")


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


def test_stream(client):
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_image(client):
    picture = io.BytesIO()
    Image.linear_gradient("L").resize((320, 256)).convert("RGB").save(picture, "PNG")
    url = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=4, temperature=0
    )
    # A token of the prompt for each 1,024 px.
    assert answer.usage.prompt_tokens >= 80


def test_json_schema(client):
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "ok": {"type": "boolean"}},
        "required": ["colour", "ok"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=100,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": schema},
        },
    )
    found = json.loads(answer.choices[0].message.content)
    assert found["colour"] in {"red", "green"}
    assert isinstance(found["ok"], bool)


def test_a_stranger_is_refused(deployment):
    with (
        openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="sk-wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)


@pytest.mark.parametrize(
    ("service", "user", "group", "bounding"),
    [
        ("daemon", 10001, 10000, SYS_PTRACE),
        ("inference", 10002, 10000, 0),
        ("gateway", 10003, 10003, 0),
    ],
)
def test_users_and_capabilities(deployment, service, user, group, bounding):
    """The bounding set tells what was granted: the effective one of a plain user is empty in any case."""
    lines = deployment.inside(service, "cat", "/proc/1/status").splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    assert int(status["CapBnd"][0], 16) == bounding
    assert int(status["CapEff"][0], 16) == 0
    assert status["Uid"] == [str(user)] * 4
    assert status["Gid"] == [str(group)] * 4
    assert status["NoNewPrivs"] == ["1"]
    # 2 is a filter: the engine's default seccomp profile is in force.
    assert status["Seccomp"] == ["2"]


@pytest.mark.parametrize("service", SERVICES)
def test_roots_are_read_only_and_have_no_compiler(deployment, service):
    said = deployment.inside(
        service, "sh", "-c",
        "touch /opt/x 2>&1; touch /opt/triplex/lib/x 2>&1; command -v gcc cc ld pip || echo none",
    )  # fmt: skip
    assert said.count("Read-only file system") == 2
    assert said.endswith("none\n")


def test_the_daemon_advises_with_its_capability(deployment):
    assert deployment.health_inside("daemon")["advice"] == "process_madvise"
    assert "advice chosen advice=process_madvise" in deployment.logs("daemon")


def test_rows_travel_through_shared_memory(deployment):
    """Two users with one group, and the daemon told of that group."""
    assert "region attached" in deployment.logs("daemon")
    assert "region refused" not in deployment.logs("daemon")


def test_shared_memory_needs_little_of_dev_shm(deployment):
    """c03: engines elsewhere die of a bus error below 1 GB; what a killed process leaves there is nothing."""
    for service in ("daemon", "inference", "gateway"):
        assert deployment.inspect(service)["HostConfig"]["ShmSize"] == 64 << 20
        assert deployment.inside(service, "ls", "/dev/shm") == ""


def test_the_daemon_is_told_what_is_cached(deployment):
    """Only the owner of the table's files is."""
    assert "resident share unknown" not in deployment.logs("daemon")


def test_only_the_gateway_shares_a_network_with_the_engine(deployment):
    networks = {s: set(deployment.inspect(s)["NetworkSettings"]["Networks"]) for s in SERVICES}
    assert networks["inference"] == {"triplex-test_engine"}
    assert networks["daemon"] == {"triplex-test_table"}
    assert networks["gateway"] == {"triplex-test_engine", "triplex-test_table", "triplex-test_edge"}


def test_only_the_gateway_has_a_port(deployment):
    ports = {s: deployment.inspect(s)["HostConfig"]["PortBindings"] for s in SERVICES}
    assert not ports["daemon"]
    assert not ports["inference"]
    (bound,) = ports["gateway"]["8000/tcp"]
    assert f"{bound['HostIp']}:{bound['HostPort']}" == deployment.address


def test_no_name_was_looked_for_in_vain(deployment):
    """At the first start the gateway asks for services that have no address yet."""
    assert "never retrieved" not in deployment.logs("gateway")
