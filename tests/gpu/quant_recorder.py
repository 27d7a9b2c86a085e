"""What the scenarios of quantized checkpoints add to a worker, by --worker-extension-cls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import measured_worker
from recorder import Recorder


class QuantRecorder(Recorder):
    @staticmethod
    def init_worker_extension(worker: Any) -> None:
        """vLLM calls it when the device is there and the model is not."""
        measured_worker.measure(worker)

    def memory_when_loaded(self) -> dict[str, int]:
        """Of the allocator when the model was loaded, and of what its parameters take now."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        stored = (parameter.untyped_storage() for parameter in model.parameters() if parameter.is_cuda)
        sizes = {storage.data_ptr(): storage.nbytes() for storage in stored}
        return {**self.loaded_memory, "weights_bytes": sum(sizes.values())}  # type: ignore[attr-defined]

    def kernels(self) -> dict[str, int]:
        """How many layers of this rank each kernel computes."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        return dict(Counter(name for module in model.modules() if (name := _kernel(module))))


def _kernel(module: Any) -> str:
    scheme, method = getattr(module, "scheme", None), getattr(module, "quant_method", None)
    if scheme is not None:
        return f"int{scheme.num_bits} {type(scheme.kernel).__name__}"
    backend = getattr(method, "wna16_backend", None) or getattr(method, "fp8_backend", None)
    return (
        f"experts {backend.name}" if backend is not None else "" if method is None else type(method).__name__
    )
