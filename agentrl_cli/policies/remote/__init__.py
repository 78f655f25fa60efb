"""Policies that sample on a server: vLLM, SGLang, and anything that speaks OpenAI's completions."""
