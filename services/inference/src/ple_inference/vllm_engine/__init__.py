"""Starts vLLM as the inference engine: profiles, checks before the start, what it will take, HTTP additions.

Nothing here runs in vLLM's engine or workers (that is `vllm_plugin`); `middleware` runs in its API server.
Only `kv_plan` imports vllm.
"""
