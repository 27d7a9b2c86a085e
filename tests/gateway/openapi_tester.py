"""schemathesis, which lives in an environment of its own."""

import subprocess
from pathlib import Path

_BIN = Path(__file__).parents[2] / "var/schemathesis-venv/bin/schemathesis"
_CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "unsupported_method"
)


def run_schemathesis(url: str, folder: Path, *, phases: str, examples: int, seed: int) -> None:
    """Hold a gateway against its own OpenAPI document; AssertionError with the report when it differs."""
    assert _BIN.exists(), "no schemathesis: run `make test`, or `make var/schemathesis-venv/ready`"
    command = [
        _BIN, "run", f"{url}/openapi.json", "--checks", _CHECKS, "--phases", phases, "--seed", str(seed),
        "--max-examples", str(examples), "--generation-database", "none", "--no-color",
        "--continue-on-failure", "--request-timeout", "15",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
