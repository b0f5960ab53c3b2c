"""Commands that make this machine a host of other runs."""
