"""The HTTP server's part of schemas and modular prompts."""
