"""Reference settings, measured and written down."""
