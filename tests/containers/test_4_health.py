"""Starting, ready and degraded are told apart, from inside of the containers and from outside.

Stopping is seen where an engine is restarted: test_2_restarts.py.
"""

import os
import subprocess
from pathlib import Path

from deployment import PROJECT, container_name
from waiting import wait_for

SERVICES = ("daemon", "inference", "gateway")


def test_starting(deployment):
    """What each said of itself at the first start, and what the gateway said of the other two."""
    said = deployment.said_at_start
    for service in SERVICES:
        assert "starting" in said[service], service
    assert "starting" in said["table"]
    assert "loading" in said["engine"]


def test_ready_from_inside_and_outside(deployment):
    deployment.wait_serving()
    for service in SERVICES:
        health = deployment.health_inside(service)
        assert health["serves"], service
        # A drive that was slow for once degrades; a fallback in use is a reason that does not.
        assert health["state"] in {"ready", "degraded"}, health
        wait_for(
            lambda s=service: deployment.inspect(s)["State"]["Health"]["Status"] == "healthy",
            f"{service} that the engine finds healthy",
        )
    health = deployment.health_outside()
    assert health["serves"]
    assert set(health["dependencies"]) == {"engine", "table"}


def test_degraded_with_the_reason(deployment):
    """Somebody writes to a file of the table."""
    deployment.wait_serving()
    volume = f"{PROJECT}_model"
    place = subprocess.check_output(
        ["docker", "volume", "inspect", "-f", "{{.Mountpoint}}", volume], text=True
    )
    for shard in Path(place.strip()).rglob("*.safetensors"):
        os.utime(shard)
    wait_for(lambda: "changed" in str(deployment.readyz("daemon").get("reasons")), "a change that is seen")
    health = deployment.health_inside("daemon")
    assert health["state"] == "degraded"
    assert health["serves"], "the health check of the container is about answering"
    wait_for(
        lambda: deployment.health_outside()["dependencies"]["table"] == "degraded", "the gateway's word of it"
    )
    outside = deployment.health_outside()
    assert any(reason.startswith("table: ") and "changed" in reason for reason in outside["reasons"])
    subprocess.run(["docker", "restart", container_name("daemon")], check=True, capture_output=True)
    deployment.wait_serving()
    assert "changed" not in str(deployment.readyz("daemon")["reasons"])
