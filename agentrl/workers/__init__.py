"""Worker processes for code that must not run in this process: graders, and tools that no thread can hold."""
