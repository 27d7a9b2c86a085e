"""What keeps the daemon from serving at all. What a caller of a running daemon can meet: `ple_rpc.errors`."""


class DaemonError(Exception):
    """Root of the errors that end a command. The message is one line and says what, where and what to do."""


class TableRefusedError(DaemonError):
    """The table cannot be served, built or verified: the message names the file and the reason."""


class EndpointError(DaemonError):
    """The run directory, the socket or the HTTP address cannot be used."""
