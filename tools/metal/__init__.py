"""Metal on Linux: checks .metal files, and compiles them for a simulator that runs them. README.md tells how."""
