"""One start of vLLM: what it is put together from, and the exec that it ends in."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ple_inference.checkpoint import Checkpoint, read_checkpoint
from ple_inference.settings import Settings, split_address
from ple_inference.table_check import row_element_bytes
from ple_inference.vllm_engine.linear_shapes import LinearShapes
from ple_inference.vllm_engine.model_config import check_config
from ple_inference.vllm_engine.pipeline import Pipeline
from ple_inference.vllm_engine.profile import Profile, profile_named
from ple_inference.vllm_engine.profile_arguments import take_in
from ple_inference.vllm_engine.quantization_config import QuantizationConfig
from ple_inference.vllm_engine.rank_memory import LoadOptions
from ple_inference.vllm_engine.rank_modules import Module, rank_modules
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.stored_checkpoint import check_stored
from ple_inference.vllm_engine.tensors import Tensors
from ple_inference.vllm_engine.vllm_arguments import TableAccess, vllm_arguments, vllm_environment

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """A checkpoint, a profile that fits it, and the arguments that follow from both."""

    settings: Settings
    checkpoint: Checkpoint
    tensors: Tensors
    profile: Profile
    pipeline: Pipeline
    table: TableAccess
    arguments: tuple[str, ...]
    """Of the executable `vllm`."""
    environment: Mapping[str, str]
    """What is set beside the launcher's own environment."""

    @property
    def has_images(self) -> bool:
        """Whether vLLM makes the vision tower."""
        return self.profile.max_images > 0 and "vision_config" in self.checkpoint.config

    @property
    def load_options(self) -> LoadOptions:
        return LoadOptions.of(
            self.profile,
            row_element_bytes=row_element_bytes(self.checkpoint.config),
            experts_in_place="expert_repack" not in self.table.disabled,
        )

    def rank_modules(self) -> list[list[Module]]:
        """What vLLM makes of the tensors, on each stage."""
        placed = "placement" not in self.table.disabled
        shapes = LinearShapes(self.checkpoint.text)
        return rank_modules(self.tensors, shapes, self.pipeline, placed=placed, vision=self.has_images)


def compose(settings: Settings, run_directory: Path, disabled: Sequence[str], extra: Sequence[str]) -> Launch:
    """Put a start together without looking at this machine. Raises Refused, CheckpointError."""
    checkpoint = read_checkpoint(settings.model, text_only=True)
    check_config(checkpoint)
    quantization = QuantizationConfig(checkpoint.config)
    profile = _profile(settings, checkpoint.max_positions)
    profile, rest = take_in(profile, extra)
    _check_length(profile.max_model_len, checkpoint.max_positions)
    (ple_layer,) = checkpoint.text["ple_layer_ids"]
    pipeline = Pipeline.of(profile, checkpoint.text["layer_types"], ple_layer - 1)
    tensors = Tensors.of(settings.model)
    check_stored(checkpoint, tensors, quantization)
    _, port = split_address(settings.http_address)
    table = TableAccess(
        settings.table_address,
        run_directory / f"inference-{port}.wait",
        settings.lookup_deadline_s,
        tuple(disabled),
    )
    return Launch(
        settings,
        checkpoint,
        tensors,
        profile,
        pipeline,
        table,
        vllm_arguments(settings, profile, table, rest),
        vllm_environment(pipeline),
    )


def _profile(settings: Settings, max_positions: int) -> Profile:
    profile = profile_named(settings.profile)
    return profile.adapted(
        stages=settings.pipeline_stages,
        max_num_seqs=settings.max_num_seqs if "max_num_seqs" in settings.model_fields_set else 0,
        max_model_len=settings.max_model_len or min(profile.max_model_len, max_positions),
    )


def _check_length(max_model_len: int, max_positions: int) -> None:
    if max_model_len > max_positions:
        raise Refused(
            f"max_model_len is {max_model_len}, the checkpoint allows {max_positions}; ask for less"
        )


def executable(environ: Mapping[str, str]) -> str | None:
    """The `vllm` of this environment, else of PATH."""
    beside = Path(sys.executable).parent / "vllm"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("vllm", path=environ.get("PATH"))


def become_vllm(launch: Launch, environ: Mapping[str, str]) -> None:
    """Replace this process by vLLM: its signals, output and exit status are ours, and nothing can outlive us.

    Raises Refused; does not return otherwise.
    """
    path = executable(environ)
    if path is None:
        raise Refused("no vllm in this environment or on PATH; install ple-inference[vllm]")
    _make_room(launch.table.wait_file)
    _log.info("starting %s", path)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(path, [path, *launch.arguments], {**environ, **launch.environment})  # noqa: S606
    except OSError as error:
        raise Refused(f"cannot start {path}: {error.strerror}") from error


def _make_room(wait_file: Path) -> None:
    """A folder for the worker's file, without that of a former start: it is not about this one."""
    try:
        wait_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        wait_file.unlink(missing_ok=True)
    except OSError as error:
        raise Refused(
            f"cannot use the run directory {wait_file.parent}: {error.strerror}; set XDG_RUNTIME_DIR to a "
            "folder of yours"
        ) from error
