"""Messages to token ids and back: tokenizer, chat template, delta rendering, tool-call parsers, drift guard."""
