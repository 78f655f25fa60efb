"""The bundled model's recipe: invented tools and tasks, a tokenizer, a small Qwen3, and its training from scratch."""
