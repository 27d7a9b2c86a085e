"""The whitespace of a JSON text that arrives in pieces: a model that wanders off writes blanks for ever."""

import re

MAX_BLANKS = 64  # in a row, outside strings; an indented line is shorter

_OUTSIDE = re.compile(r'[^"]*')
_INSIDE = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_LONG_RUN = re.compile(rf"[ \t\r\n]{{{MAX_BLANKS + 1}}}")
_BLANKS = " \t\r\n"


class BlankWatch:
    """Follows one JSON text. Strings may hold any number of blanks."""

    def __init__(self) -> None:
        self._in_string = False
        self._escaped = False  # the piece before ended in a backslash
        self._run = ""  # the blanks at the end of what came so far

    def runs_away(self, piece: str) -> bool:
        """Take the next piece; whether more than MAX_BLANKS structural blanks stand in a row."""
        position = 0
        while position < len(piece):
            if self._in_string:
                position = self._skip_string(piece, position)
                continue
            outside = _OUTSIDE.match(piece, position)
            assert outside is not None
            text = self._run + outside[0]
            if _LONG_RUN.search(text):
                return True
            self._run = text[len(text.rstrip(_BLANKS)) :]
            position = outside.end()
            if position < len(piece):
                self._in_string, self._run = True, ""
                position += 1
        return False

    def _skip_string(self, piece: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        inside = _INSIDE.match(piece, position)
        assert inside is not None
        end = inside.end()
        if end == len(piece):
            return end
        self._escaped = piece[end] == "\\"  # the last character, else it would have matched
        self._in_string = self._escaped
        return end + 1
