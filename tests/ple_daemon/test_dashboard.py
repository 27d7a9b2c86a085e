"""The dashboard shows metrics that exist, and each metric of the daemon is on it or is left out knowingly."""

import json
import re
from pathlib import Path

import pytest
from conftest import Daemon

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
# Shown nowhere: rows_advised follows rows; the infos are text; _created are times of start.
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
NOT_SHOWN = {
    "ple_daemon_rows_advised_total", "ple_daemon_info", "ple_daemon_drive_info",
    "ple_daemon_sessions", "ple_daemon_shm_regions", "ple_daemon_shm_region_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads((FOLDER / "ple-daemon.json").read_text())


def series(text: str) -> set[str]:
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line and not line.startswith("#")}


def test_every_metric_on_the_dashboard_exists(daemon: Daemon, dashboard: dict) -> None:
    from ple_rpc.client import ClientOptions, TableClient

    for slots in (0, 4):  # series with labels exist after their first use
        with TableClient(f"unix:{daemon.socket}", ClientOptions(slots=slots)) as client:
            client.lookup([1])
            client.lookup(range(100))
    exist = series(daemon.get("/metrics")[1])
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"ple_daemon_\w+", target["expr"])
    }
    assert shown <= exist
    parts = "_count", "_sum", "_created"
    ours = {name for name in exist if name.startswith("ple_") and not name.endswith(parts)}
    assert ours <= shown | NOT_SHOWN


def test_the_dashboard_is_what_grafana_takes(dashboard: dict) -> None:
    assert dashboard["schemaVersion"] >= 39
    assert dashboard["uid"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == SOURCE
            assert target["expr"].count("(") == target["expr"].count(")")


def test_the_scrape_example_names_the_defaults() -> None:
    from ple_daemon.settings import Settings

    text = (FOLDER / "prometheus.yaml").read_text()
    assert str(Settings.model_fields["http_address"].default) in text
    assert "metrics_path: /metrics" in text
