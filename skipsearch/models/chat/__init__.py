"""Encode text as token ids: prompts, chat templates, and the sandbox that renders them."""
