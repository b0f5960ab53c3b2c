"""What every room stands on: imports by name, files that appear whole, text of others, and waits that have an owner."""
