"""The health check of each container: print what http://127.0.0.1:PORT/readyz says; fail unless it serves."""

import http.client
import sys

TIMEOUT_S = 5.0


def main() -> int:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        print(response.read().decode(errors="replace"))
        return 0 if response.status == 200 else 1
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
