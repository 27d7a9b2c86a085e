"""Deadlines and bounds of a client."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ClientOptions:
    """Deadlines and bounds, each longer than the ones inside it."""

    lookup_deadline_s: float = 60.0
    """How long a lookup goes on, restarts of the daemon included, before TableUnavailable."""
    hang_check_s: float = 1.0
    """A lookup that takes longer goes on, for twice the time, once Describe shows a living peer;
    a peer that does not answer Describe either is taken for hung and the connection is made anew."""
    call_deadline_s: float = 2.0
    """Describe, opening a session, Prefetch, CancelPrefetch, Stats."""
    backoff_min_s: float = 0.02
    backoff_max_s: float = 0.5
    prefetch_queue_limit: int = 64
    client_name: str = "client"
    """Shown in the daemon's log."""
    slots: int = 4
    """Slots of the shared-memory region, 0 for none: lookups that may be under way at once through it."""
    max_rows_per_slot: int = 8_192
    """Rows of one lookup through shared memory; longer ones are cut. Each slot has memory for so many."""

    def __post_init__(self) -> None:
        if not 0 < self.hang_check_s < self.lookup_deadline_s:
            raise ValueError(
                f"hang_check_s {self.hang_check_s} must lie between 0 and "
                f"lookup_deadline_s {self.lookup_deadline_s}"
            )
        if not 0 < self.backoff_min_s <= self.backoff_max_s:
            raise ValueError("backoff_min_s must be positive and at most backoff_max_s")
        if (self.slots and self.slots < 4) or self.max_rows_per_slot < 1:
            raise ValueError("slots must be 0 or at least 4, and max_rows_per_slot at least 1")
