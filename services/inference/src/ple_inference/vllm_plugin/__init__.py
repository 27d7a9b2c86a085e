"""The plugin that lets unmodified vLLM 0.33.0 serve the model with the daemon's table.

`plugin` is the entry point, `worker` and `runner` the classes that vLLM is told to use, `overrides/` the list
of every change to vLLM, `proof` the check that what runs is what is listed. Importing this package imports
neither torch nor vllm.
"""
