"""Stop strings that may begin in one token and end in another."""

from __future__ import annotations

from collections.abc import Iterable


def unfinished_marker_length(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `markers`."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


class StopStrings:
    """Passes text on, except what may turn out to be part of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Text that can be shown, and whether a stop string came (nothing of it is shown).

        `armed` is false while a request must not end yet.
        """
        text = self._held + text
        self._held = ""
        if not armed:
            return text, False
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            return text[: min(places)], True
        length = unfinished_marker_length(text, self._stops)
        self._held = text[len(text) - length :]
        return text[: len(text) - length], False

    def flush(self) -> str:
        """What was held back, once the sequence ended for another reason."""
        held, self._held = self._held, ""
        return held
