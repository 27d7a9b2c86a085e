"""`python -m ple_gateway.schema_worker`: checks large schemas, and answers against them.

A job is a `SchemaJob` as JSON; an answer's kind is `checked`, `refused` or `fault`, the last two with a text.
"""

import argparse
from dataclasses import dataclass

import msgspec

from ple_gateway.errors import GatewayError
from ple_gateway.schema_check import check_schema, fault_of_answer
from ple_gateway.schema_rules import SchemaLimits
from ple_gateway.workers import confine, serve_jobs


@dataclass(frozen=True)
class SchemaJob:
    """A schema to check, or, with `answer`, a text to hold against a schema that was."""

    schema: bytes
    strict: bool
    limits: SchemaLimits
    answer: str | None = None


def work(_kind: str, data: bytes) -> tuple[str, bytes]:
    """Do one job."""
    job = msgspec.json.decode(data, type=SchemaJob)
    if job.answer is not None:
        return "fault", (fault_of_answer(job.answer, job.schema) or "").encode()
    try:
        return "checked", msgspec.json.encode(check_schema(job.schema, job.strict, job.limits))
    except GatewayError as error:
        return "refused", error.message.encode()


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser()
    for name in ("memory-bytes", "timeout-s"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    confine(options.memory_bytes)
    serve_jobs(work, options.timeout_s)


if __name__ == "__main__":
    main()
