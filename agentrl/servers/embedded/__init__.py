"""The embedded torch engine; import its modules by name, so that nothing loads torch by accident."""
