"""What the engine holds, and what one request needs of it, in blocks of its K/V cache."""

from dataclasses import dataclass
from typing import Any

_SPARE_BLOCKS = 2  # an estimate may be short by a block, and a block may be in transfer


@dataclass(frozen=True)
class Demand:
    """What a request will occupy: `sequences` times a prompt and the part of its answer that is reserved."""

    prompt_tokens: int
    answer_tokens: int
    sequences: int = 1


@dataclass(frozen=True)
class Capacity:
    """An engine's pool as `/v1/triplex/capacity` tells it."""

    num_blocks: int
    fixed_blocks_per_request: int
    tokens_per_block: int
    max_model_len: int
    max_num_seqs: int

    @property
    def budget_blocks(self) -> int:
        """Blocks that are given out."""
        return max(1, self.num_blocks - _SPARE_BLOCKS)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence that the engine can hold at all."""
        pool_tokens = (self.num_blocks - self.fixed_blocks_per_request) * self.tokens_per_block
        return max(0, min(self.max_model_len, pool_tokens))

    def cost_blocks(self, demand: Demand) -> int:
        """Blocks to set aside. Never more than the budget: what is too large for it runs alone."""
        # The engine stops at its window, whatever an answer may have been allowed.
        tokens = min(demand.prompt_tokens + demand.answer_tokens, self.max_model_len)
        blocks = self.fixed_blocks_per_request + -(-tokens // self.tokens_per_block)
        return min(blocks * demand.sequences, self.budget_blocks)


def parse_capacity(body: Any) -> Capacity | None:
    """Read the engine's answer; None unless every figure is there and makes sense."""
    if not isinstance(body, dict):
        return None
    figures: dict[str, Any] = {name: body.get(name) for name in Capacity.__dataclass_fields__}
    for name, value in figures.items():
        lowest = 0 if name == "fixed_blocks_per_request" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            return None
    return Capacity(**figures)
