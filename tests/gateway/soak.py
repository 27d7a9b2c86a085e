"""The gateway's soak: requests that nobody should send, for as long as you like.

    python tests/gateway/soak.py [--seed N] [--minutes M]      (make soak-gateway)

Every answer must come in time, in the shape of OpenAI and without a 5xx, and memory must stay bounded. A
run with the same seed sends the same requests in the same order. A failure prints the smallest that shows it.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from fuzz import CASES, Fuzzer
from gateway_process import GatewayProcess
from openapi_tester import run_schemathesis

_EXAMPLES = 200
_GATEWAY_MIB = 700
_WORKER_MIB = 1100


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz a gateway that runs in a process of its own.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--minutes", type=float, default=5)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        gateway = GatewayProcess(Path(folder))
        try:
            phases = "examples,coverage,fuzzing"
            run_schemathesis(gateway.url, Path(folder), phases=phases, examples=60, seed=options.seed)
            print("schemathesis finds nothing", flush=True)
            return _soak(gateway, options.seed, options.minutes * 60)
        finally:
            gateway.stop()


def _soak(gateway: GatewayProcess, seed: int, duration_s: float) -> int:
    fuzzer = Fuzzer(gateway)
    began_s = time.monotonic()
    rounds = 0
    while time.monotonic() - began_s < duration_s:
        for name in CASES:
            fuzzer.run(name, _EXAMPLES, seed + rounds)
        rounds += 1
        peak = gateway.peak_mib()
        print(
            f"{time.monotonic() - began_s:6.0f} s  round {rounds}  {sum(fuzzer.seen.values())} requests  "
            f"slowest {fuzzer.slowest_s:.2f} s  peak MiB gateway {peak['gateway']}, worker {peak['worker']}",
            flush=True,
        )
        assert peak["gateway"] < _GATEWAY_MIB, peak
        assert peak["worker"] < _WORKER_MIB, peak
    for name in CASES:
        counts = {status: count for (case, status), count in sorted(fuzzer.seen.items()) if case == name}
        print(f"  {name:10s} {counts}")
    assert b" ERROR " not in gateway.log.read_bytes(), "the gateway logged a fault"
    print(f"no 5xx, no hang: {sum(fuzzer.seen.values())} requests, seed {seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
