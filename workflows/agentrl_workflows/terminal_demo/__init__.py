"""A CPU demo: a tiny model learns to read a note in a terminal and to do what it says; the tests of each task pay it."""
