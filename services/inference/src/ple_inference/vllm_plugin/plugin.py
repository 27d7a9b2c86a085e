"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

# Nothing is imported here: vLLM only logs an error of this import and goes on without the plugin, whereas an
# error of `register` ends its start.


def register() -> None:
    """Install what must be in place before vLLM has a config. May run more than once per process.

    Touches nothing of models other than Qwen4Exp. Raises OverrideError when vLLM is not the one it is for.
    """
    from ple_inference.vllm_plugin.overrides import ALL

    for override in ALL:
        if "front_end" in override.places:
            override.install_now()
