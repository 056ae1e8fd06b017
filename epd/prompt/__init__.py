"""Text to token ids and back: chat template, tokenizer, incremental detokenizer."""
