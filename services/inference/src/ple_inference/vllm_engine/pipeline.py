"""Which decoder layers run on which GPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ple_inference.vllm_engine.profile import Profile
from ple_inference.vllm_engine.refused import Refused


@dataclass(frozen=True)
class Pipeline:
    """Stages in order, each with a run of layers."""

    partition: tuple[int, ...]
    ple_layer: int
    """Index of the decoder layer that has the n-gram embedding."""

    @classmethod
    def of(cls, profile: Profile, num_layers: int, ple_layer: int) -> Pipeline:
        """Raises Refused when the profile's partition is not of this model, or a stage would be empty."""
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
        return cls(partition, ple_layer)

    @property
    def stages(self) -> int:
        return len(self.partition)

    @property
    def owner(self) -> int:
        """The stage that looks rows up in the table."""
        return self.stage_of(self.ple_layer)

    def stage_of(self, layer: int) -> int:
        ends = accumulate(self.partition)
        return next((stage for stage, end in enumerate(ends) if layer < end), self.stages - 1)

    def layers_of(self, stage: int) -> range:
        first = sum(self.partition[:stage])
        return range(first, first + self.partition[stage])


def _even(num_layers: int, stages: int) -> tuple[int, ...]:
    # The first stage has the table's buffers and the vision tower besides: later ones take what is left over.
    share, left = divmod(num_layers, stages)
    return tuple(share + (stage >= stages - left) for stage in range(stages))
