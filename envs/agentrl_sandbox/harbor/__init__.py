"""Task folders of Harbor."""
