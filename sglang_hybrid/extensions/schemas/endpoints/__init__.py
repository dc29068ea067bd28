"""What the HTTP server does for schemas and modular prompts."""
