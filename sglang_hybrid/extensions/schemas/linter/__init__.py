"""What keeps prompts from being cached."""
