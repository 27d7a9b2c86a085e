"""A plain GET, whatever comes back."""

import urllib.error
import urllib.request


def http_get(url: str, key: str) -> tuple[int, str]:
    """Status and body."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
