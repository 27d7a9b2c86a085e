"""The three services as the supervisor sees them: a name, an address, a health endpoint."""

import http.client
import json
import re
import socket
from dataclasses import dataclass

ADDRESSES = {
    "gateway": "127.0.0.1:8000",
    "inference": "127.0.0.1:8100",
    "daemon": "127.0.0.1:8200",
}

MAKE_VARIABLES = {"gateway": "ADDRESS", "inference": "INFERENCE_ADDRESS", "daemon": "DAEMON_ADDRESS"}


_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class Health:
    """One answer of `/readyz`."""

    ready: bool
    state: str
    reasons: tuple[str, ...]

    @property
    def kind(self) -> tuple[str, tuple[str, ...]]:
        """State and reasons without their numbers: counters of one trouble run on while it lasts."""
        return self.state, tuple(_NUMBER.sub("#", reason) for reason in self.reasons)


UNREACHABLE = Health(ready=False, state="unreachable", reasons=())


@dataclass(frozen=True)
class Service:
    name: str
    address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def check_address(self) -> None:
        """Refuse an address that is no address, or that another process listens on. Raises ValueError."""
        host, colon, port = self.address.rpartition(":")
        if not colon or not port.isdigit():
            raise ValueError(f"{self.name}: {self.address!r} is no HOST:PORT")
        try:
            with socket.create_server((host, int(port))):
                pass
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"{self.name}: {self.address} is taken or cannot be bound ({error}): "
                f"choose another with --{self.name}-address (make: {MAKE_VARIABLES[self.name]}=HOST:PORT)"
            ) from error

    def health(self, timeout_s: float = 1.0) -> Health:
        """Ask `/readyz`; a service that does not answer in time is unreachable, not an error."""
        connection = http.client.HTTPConnection(self.address, timeout=timeout_s)
        try:
            connection.request("GET", "/readyz")
            response = connection.getresponse()
            body = json.loads(response.read())
            reasons = tuple(str(reason) for reason in body.get("reasons", ()))
            return Health(response.status == 200, str(body.get("state", "unknown")), reasons)
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            return UNREACHABLE
        finally:
            connection.close()
