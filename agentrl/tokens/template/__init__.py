"""Chat templates: their Jinja environment, the guard against control tokens, incremental rendering."""
