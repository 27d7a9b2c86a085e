"""Which decoder layers run on which GPU."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ple_inference.vllm_engine.linear_shapes import RECURRENT
from ple_inference.vllm_engine.profile import Profile
from ple_inference.vllm_engine.refused import Refused


@dataclass(frozen=True)
class Pipeline:
    """Stages in order, each with a run of layers."""

    partition: tuple[int, ...]
    ple_layer: int
    """Index of the decoder layer that has the n-gram embedding."""

    @classmethod
    def of(cls, profile: Profile, layer_types: Sequence[str], ple_layer: int) -> Pipeline:
        """Raises Refused when the profile's partition is not of this model, or cannot be served."""
        num_layers = len(layer_types)
        if profile.stages > num_layers:
            raise Refused(
                f"{profile.stages} pipeline stages for {num_layers} layers; give --pp a smaller number"
            )
        partition = profile.partition or _even(num_layers, profile.stages)
        if sum(partition) != num_layers:
            shares = ",".join(map(str, partition))
            raise Refused(
                f"profile {profile.name} splits {sum(partition)} layers ({shares}), there are {num_layers}; "
                "choose another profile or another --pp"
            )
        pipeline = cls(partition, ple_layer)
        pipeline.refuse_stages_without_attention(layer_types)
        return pipeline

    def refuse_stages_without_attention(self, layer_types: Sequence[str]) -> None:
        """Raises Refused for a stage of linear attention alone, beside others.

        Its worker could lay K/V out in ways that the workers of sparse attention cannot, and vLLM ends with
        "Workers disagree on supported KV cache layouts" once all have loaded.
        """
        for stage in range(self.stages if self.stages > 1 else 0):
            layers = self.layers_of(stage)
            if all(layer_types[layer] == RECURRENT for layer in layers):
                shares = ",".join(map(str, self.partition))
                raise Refused(
                    f"the partition {shares} leaves stage {stage} (layers {layers[0]} to {layers[-1]}) no "
                    "full-attention layer, which vLLM cannot serve; choose another profile or a smaller --pp"
                )

    @property
    def stages(self) -> int:
        return len(self.partition)

    @property
    def owner(self) -> int:
        """The stage that looks rows up in the table."""
        return self.stage_of(self.ple_layer)

    def stage_of(self, layer: int) -> int:
        return min(bisect_right(self._ends, layer), self.stages - 1)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """The first layer behind each stage."""
        return tuple(accumulate(self.partition))

    def layers_of(self, stage: int) -> range:
        first = sum(self.partition[:stage])
        return range(first, first + self.partition[stage])


def _even(num_layers: int, stages: int) -> tuple[int, ...]:
    # The first stage has the table's buffers and the vision tower besides: later ones take what is left over.
    share, left = divmod(num_layers, stages)
    return tuple(share + (stage >= stages - left) for stage in range(stages))
