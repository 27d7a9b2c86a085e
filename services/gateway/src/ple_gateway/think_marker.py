"""`</think>` that an engine left in an answer that has to be JSON."""

_MARKER = "</think>"


class ThinkMarkerFilter:
    """Takes `</think>` out of a JSON text that comes in pieces, but for where it stands inside a string."""

    def __init__(self) -> None:
        self._begun = ""  # what may become the marker
        self._in_string = False
        self._escaped = False
        self.found = False

    def feed(self, text: str) -> str:
        """Return what can go on now."""
        if "<" not in text and not self._begun and '"' not in text and not self._in_string:
            return text
        return "".join(map(self._take, text))

    def finish(self) -> str:
        """Return what looked like a marker's beginning and was none."""
        rest, self._begun = self._begun, ""
        return rest

    def _take(self, char: str) -> str:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return char
        if _MARKER.startswith(self._begun + char):
            self._begun += char
            if self._begun == _MARKER:
                self._begun = ""
                self.found = True
            return ""
        begun, self._begun = self._begun, ""
        if begun:
            return begun + self._take(char)
        self._in_string = char == '"'
        return char
