"""Hugging Face Qwen3 models: presets, building and loading them, finding their decoder layers."""
