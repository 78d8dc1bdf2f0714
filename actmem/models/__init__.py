"""Hugging Face Qwen3 models: building and loading them, finding their decoder layers."""
