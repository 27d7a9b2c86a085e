"""Why vLLM is not started."""


class Refused(Exception):
    """What was asked for cannot be served; one line: what, where, what to do, with sizes."""
